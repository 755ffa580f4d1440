"""Settings of a NameServer: defaults, files in TOML or RocketMQ's properties, the command line.

A later source wins over an earlier one, and every value keeps its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Struct

from dledger.remoting.settings import Config, ConfigFile, Schema, SettingsReader, refuse, setting

TlsModeName = Literal["disabled", "permissive", "enforcing"]

_DAY_MS: Final = 24 * 60 * 60 * 1000


class ServerTable(Struct, frozen=True, kw_only=True):
    """``[server]``: the port that brokers and clients talk to, and its limits."""

    listen_host: Annotated[str, setting("Address to listen on.", "bindAddress", min_length=1)] = (
        "127.0.0.1"
    )
    listen_port: Annotated[
        int, setting("Port to listen on; 0 takes a free one.", "listenPort", ge=0, le=65535)
    ] = 9876
    idle_timeout_s: Annotated[
        int,
        setting(
            "A connection silent for this long is closed.",
            "serverChannelMaxIdleTimeSeconds",
            ge=1,
            le=86_400,
        ),
    ] = 120
    max_connections: Annotated[
        int,
        setting(
            "Open connections; for one more the idlest gives way, and where none is idle it is"
            " closed itself; at most half of the hard limit of open files.",
            "maxConnections",
            ge=1,
            le=1_000_000,
        ),
    ] = 10_000
    reserved_connections: Annotated[
        int,
        setting(
            "Of these, places that only brokers and administration may take when the others"
            " are in use; at most a quarter of them.",
            "reservedConnections",
            ge=0,
            le=1_000_000,
        ),
    ] = 64
    memory_budget_bytes: Annotated[
        int,
        setting(
            "Requests in work and unsent answers of all connections; beyond it requests are"
            " refused as busy, and the one with most unread is closed; 0: a quarter of the memory"
            " the process may use.",
            "memoryBudgetBytes",
            ge=0,
            le=1 << 50,
        ),
    ] = 0
    max_unfinished_bytes: Annotated[
        int,
        setting(
            "Frames of all connections of which a part has come; beyond it a large frame is"
            " read on later, and one that stalls is closed; at least 21.4 MiB, so that a frame"
            " of 16 MiB fits.",
            "maxUnfinishedBytes",
            ge=1 << 20,
            le=1 << 40,
        ),
    ] = 22 << 20
    tls_mode: Annotated[TlsModeName, setting("TLS on the listener.", "tls.server.mode")] = (
        "disabled"
    )
    tls_cert_file: Annotated[str, setting("PEM certificate chain.", "tls.server.certPath")] = ""
    tls_key_file: Annotated[str, setting("PEM private key.", "tls.server.keyPath")] = ""
    tls_ca_file: Annotated[
        str,
        setting(
            "PEM authorities a client's certificate must have.",
            "tls.server.trustCertPath",
        ),
    ] = ""
    acl_enable: Annotated[
        bool,
        setting(
            "Every request must be signed by an account of acl_file that may do what it asks.",
            "aclEnable",
        ),
    ] = False
    acl_file: Annotated[
        str, setting("Accounts, in TOML or as RocketMQ's plain_acl.yml.", "aclFile")
    ] = ""
    open_admin: Annotated[
        bool,
        setting(
            "Without acl_enable: take requests that change routes or settings from every"
            " machine, not from this one alone.",
            "openAdmin",
        ),
    ] = False
    metrics_listen_port: Annotated[
        int,
        setting(
            "Port that answers GET /metrics for Prometheus; 0: none; one that is taken is left"
            " out with a warning.",
            "metricsListenPort",
            ge=0,
            le=65535,
        ),
    ] = 0
    metrics_listen_host: Annotated[
        str,
        setting(
            "Address to bind for it; there are no accounts and no TLS.",
            "metricsListenHost",
            min_length=1,
        ),
    ] = "127.0.0.1"


class NamesrvTable(Struct, frozen=True, kw_only=True):
    """``[namesrv]``: routes, and the key-value configuration."""

    kv_config_path: Annotated[
        str, setting("File of the key-value configuration.", "kvConfigPath", min_length=1)
    ] = "~/namesrv/kvConfig.json"
    order_message_enable: Annotated[
        bool,
        setting(
            "Put the ordered-topic configuration into route answers.",
            "orderMessageEnable",
            is_live=True,
        ),
    ] = False
    return_order_topic_config_to_broker: Annotated[
        bool,
        setting(
            "Answer a registration with the ordered-topic configuration.",
            "returnOrderTopicConfigToBroker",
            is_live=True,
        ),
    ] = True
    support_acting_master: Annotated[
        bool,
        setting(
            "Let the lowest follower stand in the route as id 0, read-only, when there is no"
            " leader.",
            "supportActingMaster",
            is_live=True,
        ),
    ] = False
    delete_topic_with_broker_registration: Annotated[
        bool,
        setting(
            "A topic missing from a changed registration is removed from the route.",
            "deleteTopicWithBrokerRegistration",
            is_live=True,
        ),
    ] = False
    enable_all_topic_list: Annotated[
        bool,
        setting(
            "Answer requests for the list of all topics.",
            "enableAllTopicList",
            is_live=True,
        ),
    ] = True
    need_wait_for_service: Annotated[
        bool,
        setting(
            "Answer no route until brokers had time to register after a start.",
            "needWaitForService",
        ),
    ] = False
    wait_seconds_for_service: Annotated[
        int, setting("How long that is, seconds.", "waitSecondsForService", ge=0, le=3600)
    ] = 45
    broker_expiry_ms: Annotated[
        int,
        setting(
            "A broker silent for this long is removed, unless it named its own time.",
            "brokerChannelExpiredTime",
            ge=100,
            le=_DAY_MS,
        ),
    ] = 120_000
    first_scan_delay_ms: Annotated[
        int,
        setting(
            "Time from the start to the first scan for silent brokers.",
            "firstScanDelayMs",
            ge=10,
            le=_DAY_MS,
        ),
    ] = 5_000
    scan_interval_ms: Annotated[
        int,
        setting(
            "Time between two scans for silent brokers.",
            "scanNotActiveBrokerInterval",
            ge=10,
            le=_DAY_MS,
        ),
    ] = 10_000


SCHEMA: Final = Schema({"server": ServerTable, "namesrv": NamesrvTable})

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

    schema: ClassVar[Schema] = SCHEMA

    server: ServerTable = field(default_factory=ServerTable)
    namesrv: NamesrvTable = field(default_factory=NamesrvTable)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each setting that contradicts others, and why."""
        server = self.server
        if server.tls_mode != "disabled" and not (server.tls_cert_file and server.tls_key_file):
            yield "server.tls_mode", "needs server.tls_cert_file and server.tls_key_file"
        if server.acl_enable and not server.acl_file:
            yield "server.acl_enable", "needs server.acl_file, the accounts"


def load_config(
    files: Iterable[ConfigFile] = (),
    *,
    options: Mapping[str, object] | None = None,
    home: str = "",
) -> NamesrvConfig:
    """Return the settings that defaults, files and options amount to.

    Args:
        files: In the order of their weight; all TOML files weigh less than the others.
        options: ``table.name`` to text or value, from the command line.
        home: What ``~`` at the begin of a path stands for; empty leaves it.
    Raises:
        ConfigError: Unknown settings, bad values, or settings that contradict each other: one line
            for each, which names the source, the line of a file, and the key.
    """
    reader = SettingsReader(SCHEMA, ignored=IGNORED_KEYS)
    reader.read_files(files)
    reader.read_options(options or {})
    refuse(reader.mistakes)
    reader.expand_home("namesrv.kv_config_path", home)
    config = NamesrvConfig(
        **reader.tables(),  # type: ignore[arg-type]  # each is of its own type
        sources=reader.sources,
        warnings=reader.warnings,
    )
    refuse(config.contradictions(reader.places))
    return config
