"""RocketMQ keys that a ``broker.conf`` may carry and that change nothing here.

Each is accepted with one warning, so that an operator's file starts unchanged and nobody believes
that a knob turns something.
"""

from __future__ import annotations

REASONS: dict[str, str] = {
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
    "an expression is looked up by its text; there are no bit maps of who wants what": """
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

CLIENT_AUTH_KEYS = frozenset({"tls.server.need.client.auth", "tls.server.authClient"})
"""Want a certificate of every client: refused where no authority is named to check it with."""

IGNORED_KEYS: dict[str, str] = {
    key: reason for reason, keys in REASONS.items() for key in keys.split()
}
"""RocketMQ key to the reason why it changes nothing."""
