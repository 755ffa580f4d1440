"""RocketMQ keys that a ``broker.conf`` may carry and that change nothing here.

Each is accepted with one warning, so that an operator's file starts unchanged and nobody believes
that a knob turns something.
"""

from __future__ import annotations

REASONS: dict[str, str] = {
    "the log lies in `commitlog` below the data folder": "storePathCommitLog",
    "replication runs between the peers of the Raft group": """
        brokerId haListenPort haMasterAddress haSendHeartbeatInterval haHousekeepingInterval
        haTransferBatchSize haSlaveFallbehindMax haMaxGapNotInSync haMaxTimeSlaveNotCatchup
        haFlowControlEnable maxHaTransferByteInSecond slaveTimeout inSyncReplicas
        minInSyncReplicas totalReplicas allAckInSyncStateSet enableAutoInSyncReplicas
        inSyncReplicasMaxGap offsetCheckInSlave refreshMasterHeartbeatInterval
        syncBrokerMetadataPeriod syncFromLastFile asyncLearner enableSlaveActingMaster
        enableRemoteEscape brokerHeartbeatInterval brokerNotActiveTimeoutMillis
        skipPreOnline compatibleWithOldNameSrv recheckInterval enableSplitRegistration
        splitRegistrationSize syncControllerMetadataPeriod controllerAddr
        fetchControllerAddrByDnsLookup enableControllerMode controllerHeartBeatTimeoutMills
        checkSyncStateSetPeriod brokerElectionPriority useStaticSet duplicationEnable
        fetchNamesrvAddrByAddressServer fetchNameSrvAddrByDnsLookup rmqAddressServerSubGroup
        storeEpochFilePath haMasterAddressList replicasPerDiskPartition enableBatchPush
        isEnableBatchPush preferredLeaderId
    """,
    "retention follows `delete_when`, `file_reserved_time` and `keep_bytes` alone": """
        diskMaxUsedSpaceRatio diskSpaceWarningLevelRatio diskSpaceCleanForciblyRatio
        cleanFileForciblyEnable deleteCommitLogFilesInterval
        deleteConsumeQueueFilesInterval destroyMapedFileIntervalForcibly
        destroyConsumeQueueIntervalForcibly redeleteHangedFileInterval deleteFileBatchMax
        maxBatchDeleteFilesNum
    """,
    "the key file must not be encrypted": "tls.server.keyPassword tls.client.keyPassword",
    "clients are asked for a certificate when `tls.server.trustCertPath` is set": """
        tls.server.need.client.auth
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
        timerPrecisionMs timerRollWindowSlot timerFlushIntervalMs timerGetMessageThreadNum
        timerPutMessageThreadNum timerEnableDisruptor timerEnableCheckMetrics
        timerInterceptDelayLevel timerMaxDelaySec timerWheelEnable timerWarmEnable
        timerStopEnqueue timerStopDequeue timerCheckMetricsWhen timerSkipUnknownError
        timerMetricSmallThreshold timerProgressLogIntervalMs disappearTimeAfterStart
        accessMessageInMemoryMaxRatio readUnCommitted forceVerifyPropCRC
        enabledAppendPropCRC totalReplicasForTimer maxFilterMessageSize maxConsumeQueueScan
        sampleCountThreshold coldDataFlowControlEnable coldDataScanEnable
        dataReadAheadEnable autoMessageVersionOnTopicLen maxTopicLength defaultQueryMaxNum
        writeWithoutMmap enableMsgEncodeBuffer flushDelayOffsetInterval
        flushConsumerOffsetHistoryInterval fetchNamesrvAddrInterval debugLockEnable
        storeType tieredStoreFilePath tieredBackendServiceProvider
        mappedFileSizeBatchConsumeQueue enableRocksDBStore transferMsgByHeap maxMsgsNumBatch
        topicQueueLockNum useScheduleMessageWriteThread extraMessageDelay
        encodeContextWithConsumeQueue
    """,
    "this broker does without it": """
        rocketmqHome brokerIP2 brokerConfigPath messageStorePlugIn brokerTopicEnable
        clusterTopicEnable traceTopicEnable msgTraceTopicName autoDeleteUnusedStats
        accountStatsEnable accountStatsPrintZeroValues regionId filterServerNums
        startAcceptSendRequestTimeStamp traceOn highSpeedMode commercialEnable
        commercialTimerCount commercialTransCount commercialBigCount commercialBaseCount
        notifyConsumerIdsChangedEnable consumerFallbehindThreshold
        disableConsumeIfConsumerReadSlowly brokerFastFailureEnable waitTimeMillsInSendQueue
        waitTimeMillsInPullQueue waitTimeMillsInLitePullQueue waitTimeMillsInAckQueue
        waitTimeMillsInHeartbeatQueue waitTimeMillsInTransactionQueue
        waitTimeMillsInAdminBrokerQueue rejectTransactionMessage transactionTimeOut
        transactionCheckMax transactionCheckInterval transactionMetricFlushInterval
        transactionOpMsgMaxSize transactionOpBatchInterval aclEnable authenticationEnabled
        authenticationProvider authorizationEnabled authorizationProvider
        initAuthenticationUser innerClientAuthenticationCredentials migrateAuthFromV1Enabled
        storeReplyMessageEnable enableDetailStat enablePropertyFilter enableCalcFilterBitMap
        expectConsumerNumUseFilter maxErrorRateOfBloomFilter filterDataCleanTimeSpan
        filterSupportRetry compressedRegister forceRegister registerBroker
        defaultMessageRequestMode defaultPopShareQueueNum popPollingSize popPollingMapSize
        maxPopPollingSize reviveQueueNum reviveInterval reviveMaxSlow reviveScanTime
        enablePopLog enablePopBufferMerge popCkStayBufferTime popCkStayBufferTimeOut
        popCkMaxBufferSize popCkOffsetMaxQueueSize enableSkipLongAwaitingAck
        serverLoadBalancerEnable realTimeNotifyConsumerChange litePullMessageEnable
        enableBroadcastOffsetStore transferMsgByHeapEnable
        validateSystemTopicWhenUpdateTopic isolateLogEnable metricsExporterType
        metricsGrpcExporterTarget metricsGrpcExporterHeader
        metricsGrpcExporterTimeOutInMills metricGrpcExporterIntervalInMills
        metricLoggingExporterIntervalInMills metricsPromExporterPort metricsPromExporterHost
        metricsLabel metricsInDelta estimateAccumulation brokerStartTimestamp
        useServerSideResetOffset consumerOffsetUpdateVersionStep
        delayOffsetUpdateVersionStep lockInStrictMode enableRegisterDuringStart
        inBrokerContainer isInBrokerContainer namespace allowTopicNameContainsUnderline
        fastListenPort tls.test.mode.enable tls.config.file tls.server.authClient
        tls.client.authServer tls.ciphers tls.protocols
    """,
}

IGNORED_KEYS: dict[str, str] = {
    key: reason for reason, keys in REASONS.items() for key in keys.split()
}
"""RocketMQ key to the reason why it changes nothing."""
