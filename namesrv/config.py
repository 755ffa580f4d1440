"""Settings of a NameServer: defaults, files in TOML or RocketMQ's properties, the command line.

A later source wins over an earlier one, and every value keeps its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from dledger.settings.schema import Config, setting

TlsModeName = Literal["disabled", "permissive", "enforcing"]

_DAY_MS: Final = 24 * 60 * 60 * 1000


@dataclass(kw_only=True, slots=True)
class ServerTable:
    """``[server]``: the port that brokers and clients talk to, and its limits."""

    listen_host: str = setting("127.0.0.1", "Address to listen on.", "bindAddress", min_length=1)
    listen_port: int = setting(
        9876, "Port to listen on; 0 takes a free one.", "listenPort", within=(0, 65535)
    )
    idle_timeout_s: int = setting(
        120,
        "A connection silent for this long is closed.",
        "serverChannelMaxIdleTimeSeconds",
        within=(1, 86_400),
    )
    max_connections: int = setting(
        10_000,
        "Open connections; for one more the idlest gives way, and where none is idle it is"
        " closed itself; at most half of the hard limit of open files.",
        "maxConnections",
        within=(1, 1_000_000),
    )
    reserved_connections: int = setting(
        64,
        "Of these, places that only brokers and administration may take when the others"
        " are in use; at most a quarter of them.",
        "reservedConnections",
        within=(0, 1_000_000),
    )
    memory_budget_bytes: int = setting(
        0,
        "Requests in work and unsent answers of all connections; beyond it requests are"
        " refused as busy, and the one with most unread is closed; 0: a quarter of the memory"
        " the process may use.",
        "memoryBudgetBytes",
        within=(0, 1 << 50),
    )
    max_unfinished_bytes: int = setting(
        22 << 20,
        "Frames of all connections of which a part has come; beyond it a large frame is read on"
        " later, and one that stalls is closed; at least 21.4 MiB, so that a frame of 16 MiB fits.",
        "maxUnfinishedBytes",
        within=(1 << 20, 1 << 40),
    )
    tls_mode: TlsModeName = setting("disabled", "TLS on the listener.", "tls.server.mode")
    tls_cert_file: str = setting("", "PEM certificate chain.", "tls.server.certPath")
    tls_key_file: str = setting("", "PEM private key.", "tls.server.keyPath")
    tls_ca_file: str = setting(
        "", "PEM authorities a client's certificate must have.", "tls.server.trustCertPath"
    )
    acl_enable: bool = setting(
        False,
        "Every request must be signed by an account of acl_file that may do what it asks.",
        "aclEnable",
    )
    acl_file: str = setting("", "Accounts, in TOML or as RocketMQ's plain_acl.yml.", "aclFile")
    open_admin: bool = setting(
        False,
        "Without acl_enable: take requests that change routes or settings from every"
        " machine, not from this one alone.",
        "openAdmin",
    )
    metrics_listen_port: int = setting(
        0,
        "Port that answers GET /metrics for Prometheus; 0: none; one that is taken is left"
        " out with a warning.",
        "metricsListenPort",
        within=(0, 65535),
    )
    metrics_listen_host: str = setting(
        "127.0.0.1",
        "Address to bind for it; there are no accounts and no TLS.",
        "metricsListenHost",
        min_length=1,
    )


@dataclass(kw_only=True, slots=True)
class NamesrvTable:
    """``[namesrv]``: routes, and the key-value configuration."""

    kv_config_path: str = setting(
        "~/namesrv/kvConfig.json",
        "File of the key-value configuration.",
        "kvConfigPath",
        min_length=1,
    )
    order_message_enable: bool = setting(
        False,
        "Put the ordered-topic configuration into route answers.",
        "orderMessageEnable",
        live="the next route",
    )
    return_order_topic_config_to_broker: bool = setting(
        True,
        "Answer a registration with the ordered-topic configuration.",
        "returnOrderTopicConfigToBroker",
        live="the next registration",
    )
    group_secret_file: str = setting(
        "",
        "The `raft.secret_file` of all broker groups; others register nothing. Empty: all do.",
        "groupSecretFile",
    )
    open_topics: bool = setting(
        False,
        "As in RocketMQ, any broker may serve a topic that another group serves.",
        "openTopics",
        live="the next registration",
    )
    support_acting_master: bool = setting(
        False,
        "Let the lowest follower stand in the route as id 0, read-only, when there is no leader.",
        "supportActingMaster",
        live="the next route",
    )
    delete_topic_with_broker_registration: bool = setting(
        False,
        "A topic missing from a changed registration is removed from the route.",
        "deleteTopicWithBrokerRegistration",
        live="the next registration",
    )
    enable_all_topic_list: bool = setting(
        True,
        "Answer requests for the list of all topics.",
        "enableAllTopicList",
        live="the next list of topics",
    )
    need_wait_for_service: bool = setting(
        False,
        "Answer no route until brokers had time to register after a start.",
        "needWaitForService",
    )
    wait_seconds_for_service: int = setting(
        45, "How long that is, seconds.", "waitSecondsForService", within=(0, 3600)
    )
    broker_expiry_ms: int = setting(
        120_000,
        "A broker silent for this long is removed, unless it named its own time.",
        "brokerChannelExpiredTime",
        within=(100, _DAY_MS),
    )
    first_scan_delay_ms: int = setting(
        5_000,
        "Time from the start to the first scan for silent brokers.",
        "firstScanDelayMs",
        within=(10, _DAY_MS),
    )
    scan_interval_ms: int = setting(
        10_000,
        "Time between two scans for silent brokers.",
        "scanNotActiveBrokerInterval",
        within=(10, _DAY_MS),
    )


_IGNORED: Final = """
    rocketmqHome configStorePath configStorePathName productEnvName clusterTest
    clientRequestThreadPoolNums defaultThreadPoolNums clientRequestThreadPoolQueueCapacity
    defaultThreadPoolQueueCapacity unRegisterBrokerQueueCapacity enableTopicList
    notifyMinBrokerIdChanged enableControllerInNamesrv configBlackList serverWorkerThreads
    serverCallbackExecutorThreads serverSelectorThreads serverOnewaySemaphoreValue
    serverAsyncSemaphoreValue serverSocketSndBufSize serverSocketRcvBufSize
    writeBufferHighWaterMark writeBufferLowWaterMark serverSocketBacklog
    serverNettyWorkerGroupEnable serverPooledByteBufAllocatorEnable useEpollNativeSelector
    enableShutdownGracefully shutdownWaitTimeSeconds clientWorkerThreads
    clientCallbackExecutorThreads clientOnewaySemaphoreValue clientAsyncSemaphoreValue
    connectTimeoutMillis channelNotActiveInterval clientChannelMaxIdleTimeSeconds
    clientSocketSndBufSize clientSocketRcvBufSize clientPooledByteBufAllocatorEnable
    clientCloseSocketIfTimeout useTLS socksProxyConfig disableCallbackExecutor
    disableNettyWorkerGroup maxReconnectIntervalTimeSeconds enableReconnectForGoAway
    enableTransparentRetry
"""

IGNORED_KEYS: Final[Mapping[str, str]] = dict.fromkeys(
    _IGNORED.split(), "a NameServer does without it"
)
"""Keys of RocketMQ's files that change nothing here → why; accepted with a warning."""


@dataclass(frozen=True, slots=True)
class NamesrvConfig(Config):
    """All settings of a NameServer."""

    ignored: ClassVar[Mapping[str, str]] = IGNORED_KEYS
    home_path: ClassVar[str] = "namesrv.kv_config_path"

    server: ServerTable = field(default_factory=ServerTable)
    namesrv: NamesrvTable = field(default_factory=NamesrvTable)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each setting that contradicts others, and why."""
        server = self.server
        if server.tls_mode != "disabled" and not (server.tls_cert_file and server.tls_key_file):
            yield "server.tls_mode", "needs server.tls_cert_file and server.tls_key_file"
        if server.acl_enable and not server.acl_file:
            yield "server.acl_enable", "needs server.acl_file, the accounts"


SCHEMA: Final = NamesrvConfig.schema()
