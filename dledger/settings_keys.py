"""RocketMQ's keys that are no settings here: a ``broker.conf`` may hold them all the same.

Those that change nothing are accepted with one warning, so that an operator's file starts
unchanged. Those that ask for something this broker does not do, where silence would be a danger,
are refused unless their value asks for nothing: protection, or another kind of group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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
        abortFile messageIndexEnable messageIndexSafe enableConsumeQueueExt
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
    """A key that is refused.

    Attributes:
        reason: What to do instead.
        harmless: Values in small letters that ask for nothing.
    """

    reason: str
    harmless: frozenset[str] = NOTHING

    def refuses(self, raw: str) -> bool:
        """Whether *raw* asks for what is not there."""
        return raw.strip().lower() not in self.harmless


REFUSED: Final[Mapping[str, RefusedKey]] = {
    "authenticationEnabled": RefusedKey(
        "users of ACL 2.0 are not built; use aclEnable and server.acl_file"
    ),
    "authorizationEnabled": RefusedKey(
        "policies of ACL 2.0 are not built; use aclEnable and server.acl_file"
    ),
    "migrateAuthFromV1Enabled": RefusedKey(
        "ACL 2.0 is not built; plain_acl.yml works as server.acl_file"
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

REFUSED_KEYS: Final[Mapping[str, str]] = {key: entry.reason for key, entry in REFUSED.items()}
"""RocketMQ key to what to do instead."""

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


def members_wanted(source: str, key: str, raw: str, *, group: str, peer_port: int) -> str:
    """Return why a broker that calls itself a slave does not start alone, and what to write."""
    return (
        f"{source}: {key} = {raw}: this broker would be a group of its own, beside its master's and"
        " under the same name: messages acknowledged here would never be there. Roles are elected"
        " among the members of one group: write, the same for each of them,"
        f" enableDLegerCommitLog=true, dLegerGroup={group},"
        f" dLegerPeers=n0-HOST0:{peer_port};n1-HOST1:{peer_port};n2-HOST2:{peer_port}, and for each"
        " its own dLegerSelfId (n0, n1, n2); see docs/operate/from-master-slave.md"
    )
