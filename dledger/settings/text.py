"""How a broker's settings are written: RocketMQ's keys that are no settings here, and values.

Keys that change nothing are accepted with one warning, so that an operator's file starts
unchanged. Those that ask for something this broker does not do, where silence would be a danger,
are refused unless their value asks for nothing: protection, or another kind of group.

Values that text spells in a way of its own are members, hours, delays, shares and exporters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Final

from msgspec import Struct

from dledger.remoting.addresses import join_address
from dledger.settings.schema import split_list

OWN_KEYS: Final = frozenset(
    {
        "brokerIP1",
        "listenPort",
        "bindAddress",
        "fastListenPort",
        "storePathRootDir",
        "dLegerSelfId",
        "brokerId",
        "broker.advertised_port",
        "raft.listen_port",
        "raft.tls_cert_file",
        "raft.tls_key_file",
        "client.credentials_file",
        "server.acl_file",
    }
)
"""Keys whose values are meant to differ between the brokers of a group."""

# ---------------------------------------------------------------------------------- keys


REASONS: Final[Mapping[str, str]] = {
    "leaders are elected; `dledger raft transfer-leader` moves the leadership": "preferredLeaderId",
    "the log lies in `commitlog` below the data folder": "storePathCommitLog",
    "replication runs between the peers of the Raft group": """
        haListenPort haSendHeartbeatInterval haHousekeepingInterval
        haTransferBatchSize haSlaveFallbehindMax haMaxGapNotInSync haMaxTimeSlaveNotCatchup
        haFlowControlEnable maxHaTransferByteInSecond slaveTimeout
        totalReplicas enableAutoInSyncReplicas
        inSyncReplicasMaxGap offsetCheckInSlave refreshMasterHeartbeatInterval
        syncBrokerMetadataPeriod syncFromLastFile enableSlaveActingMaster
        enableRemoteEscape brokerHeartbeatInterval brokerNotActiveTimeoutMillis
        skipPreOnline compatibleWithOldNameSrv recheckInterval enableSplitRegistration
        splitRegistrationSize syncControllerMetadataPeriod controllerAddr
        fetchControllerAddrByDnsLookup controllerHeartBeatTimeoutMills
        checkSyncStateSetPeriod brokerElectionPriority useStaticSet duplicationEnable
        fetchNamesrvAddrByAddressServer fetchNameSrvAddrByDnsLookup rmqAddressServerSubGroup
        storeEpochFilePath replicasPerDiskPartition enableBatchPush
        isEnableBatchPush
        haSendHeartbeatIntervalMillis sendHeartbeatTimeoutMillis
        syncMasterFlushOffsetWhenStartup maxSlaveResendLength syncBrokerMemberGroupPeriod
        maxHeartBeatLeak maxPendingRequestsNum
    """,
    "files go when no replica needs them, without a pace of their own": """
        deleteCommitLogFilesInterval
        deleteConsumeQueueFilesInterval destroyMapedFileIntervalForcibly
        destroyConsumeQueueIntervalForcibly redeleteHangedFileInterval deleteFileBatchMax
        maxBatchDeleteFilesNum
    """,
    "the key file must not be encrypted": "tls.server.keyPassword tls.client.keyPassword",
    "clients are asked for a certificate when `tls.server.trustCertPath` is set": """
        tls.server.need.client.auth tls.server.authClient
    """,
    "there are no thread pools to size": """
        sendMessageThreadPoolNums pullMessageThreadPoolNums litePullMessageThreadPoolNums
        ackMessageThreadPoolNums processReplyMessageThreadPoolNums
        queryMessageThreadPoolNums adminBrokerThreadPoolNums clientManageThreadPoolNums
        consumerManageThreadPoolNums heartbeatThreadPoolNums endTransactionThreadPoolNums
        loadBalanceProcessorThreadPoolNums recoverThreadPoolNums
        processReplyMessageThreadPoolQueueCapacity sendThreadPoolQueueCapacity
        putThreadPoolQueueCapacity pullThreadPoolQueueCapacity
        litePullThreadPoolQueueCapacity ackThreadPoolQueueCapacity
        replyThreadPoolQueueCapacity queryThreadPoolQueueCapacity
        clientManagerThreadPoolQueueCapacity consumerManagerThreadPoolQueueCapacity
        heartbeatThreadPoolQueueCapacity endTransactionPoolQueueCapacity
        adminBrokerThreadPoolQueueCapacity loadBalanceThreadPoolQueueCapacity
        recoverThreadPoolQueueCapacity serverWorkerThreads serverCallbackExecutorThreads
        serverSelectorThreads serverOnewaySemaphoreValue serverAsyncSemaphoreValue
        serverNettyWorkerGroupEnable serverPooledByteBufAllocatorEnable
        serverShutdownWaitTime serverSocketSndBufSize serverSocketRcvBufSize
        serverSocketBacklog writeBufferLowWaterMark useEpollNativeSelector
        enableShutdownGracefully clientWorkerThreads clientCallbackExecutorThreads
        clientOnewaySemaphoreValue clientAsyncSemaphoreValue channelNotActiveInterval
        clientChannelMaxIdleTimeSeconds clientSocketSndBufSize clientSocketRcvBufSize
        clientPooledByteBufAllocatorEnable clientCloseSocketIfTimeout
        disableCallbackExecutor disableNettyWorkerGroup useReentrantLockWhenPutMessage
        useABSLock enableLockGranularity
        putMessageFutureThreadPoolNums asyncSendEnable
    """,
    "the log flushes, maps and recovers in its own way": """
        flushCommitLogLeastPages flushCommitLogThoroughInterval commitCommitLogLeastPages
        commitCommitLogThoroughInterval commitIntervalCommitLog flushCommitLogTimed
        flushIntervalConsumeQueue flushConsumeQueueLeastPages
        flushConsumeQueueThoroughInterval flushLeastPagesWhenWarmMapedFile
        flushLeastPagesWhenWarmMappedFile warmMapedFileEnable warmMappedFileEnable
        transientStorePoolEnable transientStorePoolSize fastFailIfNoBufferInStorePool
        isEnableScheduleAsyncDeliver enableScheduleAsyncDeliver osPageCacheBusyTimeOutMills
        checkCRCOnRecover diskFallRecorded putMsgIndexHightWater putMessageTimeout
        storePathDLedgerCommitLog storePathConsumeQueue storePathIndex storeCheckpoint
        abortFile maxHashSlotNum maxIndexNum messageIndexEnable messageIndexSafe
        enableConsumeQueueExt
        mappedFileSizeConsumeQueueExt bitMapLengthConsumeQueueExt
        enableBuildConsumeQueueConcurrently batchDispatchRequestThreadPoolNums
        enableMultiDispatch enableLmq maxLmqConsumeQueueNum mappedFileSizeTimerLog
        timerPrecisionMs timerFlushIntervalMs timerGetMessageThreadNum
        timerPutMessageThreadNum timerEnableDisruptor timerEnableCheckMetrics
        timerInterceptDelayLevel timerWarmEnable
        timerStopEnqueue timerStopDequeue timerCheckMetricsWhen timerSkipUnknownError
        timerMetricSmallThreshold timerProgressLogIntervalMs disappearTimeAfterStart
        readUnCommitted forceVerifyPropCRC
        enabledAppendPropCRC totalReplicasForTimer maxFilterMessageSize maxConsumeQueueScan
        sampleCountThreshold coldDataFlowControlEnable coldDataScanEnable
        dataReadAheadEnable autoMessageVersionOnTopicLen defaultQueryMaxNum
        writeWithoutMmap enableMsgEncodeBuffer flushDelayOffsetInterval
        flushConsumerOffsetHistoryInterval fetchNamesrvAddrInterval debugLockEnable
        storeType tieredStoreFilePath tieredBackendServiceProvider
        mappedFileSizeBatchConsumeQueue enableRocksDBStore transferMsgByHeap maxMsgsNumBatch
        topicQueueLockNum useScheduleMessageWriteThread extraMessageDelay
        encodeContextWithConsumeQueue
        storePathEpochFile storePathBrokerIdentity
        compactionMappedFileSize compactionCqMappedFileSize compactionScheduleInternal
        maxOffsetMapSize compactionThreadNum enableCompaction mapperFileSizeBatchConsumeQueue
        maxRecoveryCommitlogFiles enableScheduleMessageStats scheduleAsyncDeliverMaxPendingLimit
        scheduleAsyncDeliverMaxResendNum2Blocked dispatchCqThreads dispatchCqCacheNum
        enableAsyncReput recheckReputOffsetFromCq travelCqFileNumWhenGetMessage
        correctLogicMinOffsetSleepInterval correctLogicMinOffsetForceInterval
        mappedFileSwapEnable commitLogForceSwapMapInterval commitLogSwapMapInterval
        commitLogSwapMapReserveFileNum logicQueueForceSwapMapInterval logicQueueSwapMapInterval
        cleanSwapedMapInterval logicQueueSwapMapReserveFileNum searchBcqByCacheEnable
        dispatchFromSenderThread wakeCommitWhenPutMessage wakeFlushWhenPutMessage
        enableCleanExpiredOffset maxAsyncPutMessageRequests pullBatchMaxMessageCount
        logicalDiskSpaceCleanForciblyThreshold maxChecksumRange timerColdDataCheckIntervalMs
        sampleSteps accessMessageInMemoryHotRatio cleanRocksDBDirtyCQIntervalMin
        statRocksDBCQIntervalSec memTableFlushIntervalMs realTimePersistRocksDBConfig
        enableRocksDBLog putConsumeQueueDataByFileChannel rocksdbCQDoubleWriteEnable
        bottomMostCompressionTypeForConsumeQueueStore rocksdbCompressionType
        rocksdbFlushWalFrequency rocksdbWalFileRollingThreshold transferMetadataJsonToRocksdb
        recoverConcurrently timerCongestNumEachSlot
    """,
    "an expression is looked up by its text; there are no bit maps of consumers": """
        enableCalcFilterBitMap expectConsumerNumUseFilter maxErrorRateOfBloomFilter
        filterDataCleanTimeSpan
    """,
    "metrics are a page for Prometheus, with labels of its own and a limit of series": """
        metricsGrpcExporterTarget metricsGrpcExporterHeader
        metricsGrpcExporterTimeOutInMills metricGrpcExporterTimeOutInMills
        metricGrpcExporterIntervalInMills metricLoggingExporterIntervalInMills
        metricsLabel metricsInDelta metricsOtelCardinalityLimit
    """,
    "this broker does without it": """
        rocketmqHome brokerIP2 brokerConfigPath brokerTopicEnable
        clusterTopicEnable autoDeleteUnusedStats
        accountStatsEnable accountStatsPrintZeroValues regionId filterServerNums
        startAcceptSendRequestTimeStamp traceOn highSpeedMode commercialEnable
        commercialTimerCount commercialTransCount commercialBigCount commercialBaseCount
        consumerFallbehindThreshold
        waitTimeMillsInSendQueue
        waitTimeMillsInPullQueue waitTimeMillsInLitePullQueue waitTimeMillsInAckQueue
        waitTimeMillsInHeartbeatQueue waitTimeMillsInTransactionQueue
        waitTimeMillsInAdminBrokerQueue transactionMetricFlushInterval
        transactionOpMsgMaxSize transactionOpBatchInterval
        authenticationProvider authorizationProvider
        enableDetailStat compressedRegister forceRegister registerBroker
        defaultMessageRequestMode defaultPopShareQueueNum popPollingSize popPollingMapSize
        maxPopPollingSize reviveQueueNum reviveInterval reviveMaxSlow reviveScanTime
        enablePopLog enablePopBufferMerge popCkStayBufferTime popCkStayBufferTimeOut
        popCkMaxBufferSize popCkOffsetMaxQueueSize enableSkipLongAwaitingAck
        serverLoadBalancerEnable realTimeNotifyConsumerChange litePullMessageEnable
        enableBroadcastOffsetStore transferMsgByHeapEnable
        validateSystemTopicWhenUpdateTopic isolateLogEnable estimateAccumulation
        brokerStartTimestamp useServerSideResetOffset consumerOffsetUpdateVersionStep
        delayOffsetUpdateVersionStep lockInStrictMode enableRegisterDuringStart
        inBrokerContainer isInBrokerContainer namespace allowTopicNameContainsUnderline
        tls.test.mode.enable maxReconnectIntervalTimeSeconds
        enableReconnectForGoAway enableTransparentRetry
        tls.client.authServer
        commercialSizePerMsg enableNetWorkFlowControl
        broadcastOffsetExpireSecond broadcastOffsetExpireMaxSecond reviveAckWaitMs
        enablePopBatchAck popFromRetryProbability enableNotifyAfterPopOrderLockRelease
        initPopOffsetByCheckMsgInMem retrieveMessageFromPopRetryTopicV1 enableRetryTopicV2
        popResponseReturnActualRetryTopic loadBalancePollNameServerInterval
        cleanOfflineBrokerInterval forwardTimeout useStaticSubscription
        coldCtrStrategyEnable usePIDColdCtrStrategy
        cgColdReadThreshold globalColdReadThreshold popConsumerFSServiceInit
        popConsumerKVServiceLog popConsumerKVServiceInit popConsumerKVServiceEnable
        popReviveMaxReturnSizePerRead popReviveMaxAttemptTimes popInflightMessageThreshold
        enablePopMessageThreshold popFastReviveEnable recallMessageEnable enableRegisterProducer
        enableCreateSysGroup topicConfigFetchSize
    """,
}
"""Why keys change nothing → the keys."""

CLIENT_AUTH_KEYS: Final = frozenset({"tls.server.need.client.auth", "tls.server.authClient"})
"""Want a certificate of every client: refused where no authority is named to check it with."""

IGNORED_KEYS: Final[Mapping[str, str]] = {
    key: reason for reason, keys in REASONS.items() for key in keys.split()
}
"""RocketMQ key to the reason why it changes nothing."""

NOTHING: Final = frozenset({"", "false"})
"""Values that ask for nothing."""

ON: Final = frozenset({"true"})


@dataclass(frozen=True, slots=True)
class RefusedKey:
    """A key that is refused."""

    reason: str
    harmless: frozenset[str] = NOTHING

    def refuses(self, raw: str) -> bool:
        """Whether *raw* asks for what is not there."""
        return raw.strip().lower() not in self.harmless


REFUSED: Final[Mapping[str, RefusedKey]] = {
    "authenticationEnabled": RefusedKey(
        "use aclEnable: it checks users of ACL 2.0, too; server.acl_file has the first one"
    ),
    "authorizationEnabled": RefusedKey(
        "use aclEnable: it checks policies of ACL 2.0, too; server.acl_file has the first user"
    ),
    "migrateAuthFromV1Enabled": RefusedKey(
        "nothing is migrated: plain_acl.yml works as server.acl_file"
    ),
    "innerClientAuthenticationCredentials": RefusedKey(
        "a secret does not stand in a setting; use client.credentials_file"
    ),
    "initAuthenticationUser": RefusedKey(
        "a secret does not stand in a setting; use server.acl_file"
    ),
    "configBlackList": RefusedKey(
        "no list keeps clients from a setting; accounts decide about changes (aclEnable)",
        NOTHING | {"configblacklist", "configblacklist;brokerconfigpath"},
    ),
    "tls.ciphers": RefusedKey("OpenSSL's own choice of ciphers is used; take the line out"),
    "tls.protocols": RefusedKey(
        "TLS 1.2 and 1.3 are spoken, whatever is listed; take the line out"
    ),
    "tls.config.file": RefusedKey(
        "no second file is read; put its lines into this one",
        NOTHING | {"/etc/rocketmq/tls.properties"},
    ),
    "rejectPullConsumerEnable": RefusedKey(
        "pull consumers are not distinguished; accounts decide about reading (aclEnable)"
    ),
    "disableConsumeIfConsumerReadSlowly": RefusedKey(
        "a group that is far behind is not stopped; take the line out and watch its lag"
    ),
    "notifyConsumerIdsChangedEnable": RefusedKey(
        "consumers always hear at once that their group has changed; take the line out", ON | {""}
    ),
    "brokerFastFailureEnable": RefusedKey(
        "a broker that cannot keep up always answers so, and stores nothing of what it refuses;"
        " take the line out",
        ON | {""},
    ),
    "maxTopicLength": RefusedKey(
        "names of topics have 127 characters at most; take the line out", frozenset({"", "127"})
    ),
    "allAckInSyncStateSet": RefusedKey(
        "an acknowledgement means a majority, and no setting makes it mean all; take the line out"
    ),
    "asyncLearner": RefusedKey(
        "a member that has no vote is added while the group runs: dledger raft add"
    ),
    "readOnlyCommitLogStorePaths": RefusedKey(
        "the whole log lies below store.path_root_dir; nothing in those folders would be found"
    ),
    "messageStorePlugIn": RefusedKey("no plug-in is loaded; take the line out", frozenset({""})),
    "socksProxyConfig": RefusedKey(
        "connections are made directly; take the line out", NOTHING | {"{}"}
    ),
}

IN_SYNC_KEYS: Final = frozenset({"inSyncReplicas", "minInSyncReplicas"})
"""How many replicas have a message when it is acknowledged. More than a majority is refused."""

MASTER_AND_SLAVE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "brokerId": frozenset({"", "0"}),
    "haMasterAddress": NOTHING,
    "haMasterAddressList": NOTHING,
    "enableControllerMode": NOTHING,
}
"""Keys of a broker that copies another one, or may, and the values that do not say so. Two such
brokers would be two groups under one name, so they are refused without the list of members."""


def members_wanted(source: str, key: str, raw: object, *, group: str, peer_port: int) -> str:
    """Return why a broker that calls itself a slave does not start alone, and what to write."""
    return (
        f"{source}: {key} = {raw}: this broker would be a group of its own, beside its master's and"
        " under the same name: messages acknowledged here would never be there. Roles are elected"
        " among the members of one group: write, the same for each of them,"
        f" enableDLegerCommitLog=true, dLegerGroup={group},"
        f" dLegerPeers=n0-HOST0:{peer_port};n1-HOST1:{peer_port};n2-HOST2:{peer_port}, and for each"
        " its own dLegerSelfId (n0, n1, n2); see docs/operate/from-master-slave.md"
    )


# ---------------------------------------------------------------------------------- values


_DELAY: Final = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PEER: Final = re.compile(r"([A-Za-z0-9_.]+)-(\[[0-9A-Fa-f:.]+\]|[^:\s]+):([0-9]{1,5})")
_HOUR: Final = re.compile("[01]?[0-9]|2[0-3]")
_FRACTION: Final = re.compile(r"0?\.[0-9]+|1\.0+")


class Peer(Struct, frozen=True):
    """One member of a broker group: its id and where its peers reach it."""

    id: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port`` of the peer connection."""
        return join_address(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.id}-{self.address}"


MAX_DELAY_LEVELS: Final = 64
"""Each level is a queue of its own and a delivery loop on the leader."""


@cache
def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delay of each level in milliseconds; the first one is level 1.

    Raises ValueError: not a list like ``1s 5s 1m 2h``, or longer than 64.
    """
    delays: list[int] = []
    for part in text.split():
        match = _DELAY.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a delay such as 10s, 5m, 2h or 1d")
        delays.append(int(match[1]) * _UNIT_MS[match[2]])
    if not 1 <= len(delays) <= MAX_DELAY_LEVELS:
        raise ValueError(f"expected 1 to {MAX_DELAY_LEVELS} delays, got {len(delays)}")
    return tuple(delays)


def delays_of_levels(levels_ms: Sequence[int]) -> dict[int, int]:
    """Return the delay of every level there can be; one not configured any more waits longest."""
    longest = max(levels_ms, default=0)
    delays = dict.fromkeys(range(1, MAX_DELAY_LEVELS + 1), longest) if levels_ms else {}
    delays.update(enumerate(levels_ms, start=1))
    return delays


def parse_peers(value: object) -> tuple[Peer, ...]:
    """Return the members of a group from ``n0-host:port;n1-host:port``, a list or a table.

    Raises ValueError: one of them has another shape; names it.
    """
    if isinstance(value, Mapping):
        parts: Sequence[object] = [f"{peer}-{address}" for peer, address in value.items()]
    else:
        parts = split_list(value)
    peers: list[Peer] = []
    for part in parts:
        match = _PEER.fullmatch(str(part).strip())
        if match is None or not 0 < int(match[3]) < 65_536:
            raise ValueError(f"{part!r} is not a peer such as n0-127.0.0.1:20911")
        peers.append(Peer(match[1], match[2].strip("[]"), int(match[3])))
    return tuple(peers)


def parse_hours(value: object) -> tuple[int, ...]:
    """Return hours of the day from ``04`` or ``04;16``, a number or a list.

    Raises ValueError: one of them is not from 0 to 23.
    """
    parts: Sequence[object] = [value] if isinstance(value, int) else split_list(value)
    hours: list[int] = []
    for part in parts:
        text = str(part).strip()
        if _HOUR.fullmatch(text) is None:
            raise ValueError(f"{text!r} is not an hour from 00 to 23")
        hours.append(int(text))
    if not hours:
        raise ValueError("expected at least one hour")
    return tuple(hours)


def show_hours(hours: tuple[int, ...]) -> str:
    """Return hours of the day as `parse_hours` reads them."""
    return ";".join(f"{hour:02}" for hour in hours)


def delay_text(value: object) -> str:
    """Return a list of delays with single blanks. Raises ValueError: as `parse_delay_levels`."""
    text = str(value)
    parse_delay_levels(text)
    return " ".join(text.split())


def percent(value: object) -> object:
    """Return whole percents: RocketMQ's system properties are fractions, its settings percents."""
    text = str(value).strip()
    if _FRACTION.fullmatch(text):
        return round(float(text) * 100)
    return value if isinstance(value, int) else text


EXPORTER_TYPES = ("DISABLE", "OTLP_GRPC", "PROM", "LOG")
"""RocketMQ's, by their numbers: its files have either."""


def parse_exporter(value: object) -> str:
    """Return RocketMQ's name of an exporter of metrics from its name or number."""
    text = str(value).strip().upper()
    return {str(number): name for number, name in enumerate(EXPORTER_TYPES)}.get(text, text)


# ------------------------------------------------------------------------------- numbers of members


LEADER_ID: Final = 0

_DIGITS: Final = frozenset("0123456789")


def number_in(member: str) -> int | None:
    """Return the digits of a member's id as a number; None when it has none."""
    digits = "".join(char for char in member if char in _DIGITS)
    return int(digits) if digits else None


def member_numbers(members: Iterable[str]) -> dict[str, int]:
    """Return the number of each member: that in its id, else the next ones behind these, by name.

    A follower registers under its number + 1.
    """
    found = {member: number_in(member) for member in sorted(members)}
    last = max((number for number in found.values() if number is not None), default=-1)
    following = count(last + 1)
    return {
        member: next(following) if number is None else number for member, number in found.items()
    }
