"""Settings of a NameServer: defaults, a file in TOML or RocketMQ's properties, the command line.

A later source wins over an earlier one, and every value knows where it came from.
"""

from __future__ import annotations

import os.path
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from commitlog.errors import ConfigError
from remoting.java_properties import comment_hint, parse_properties
from remoting.seams import TlsMode
from remoting.toml_lines import toml_lines

Table = Literal["server", "namesrv"]


def _setting(
    default: Any,
    table: Table,
    rocketmq_key: str,
    meaning: str,
    *,
    live: bool = False,
    smallest: int | None = None,
    largest: int | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    return field(
        default=default,
        metadata={
            "table": table,
            "rocketmq_key": rocketmq_key,
            "meaning": meaning,
            "live": live,
            "smallest": smallest,
            "largest": largest,
            "choices": choices,
        },
    )


_DAY_MS: Final = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class NamesrvConfig:
    """Everything a NameServer can be told. RocketMQ's name of each stands beside it."""

    listen_host: str = _setting("127.0.0.1", "server", "bindAddress", "address to listen on")
    listen_port: int = _setting(
        9876,
        "server",
        "listenPort",
        "port to listen on; 0 takes a free one",
        smallest=0,
        largest=65535,
    )
    idle_timeout_s: int = _setting(
        120,
        "server",
        "serverChannelMaxIdleTimeSeconds",
        "a connection silent for this long is closed",
        smallest=1,
        largest=86_400,
    )
    max_connections: int = _setting(
        10_000,
        "server",
        "maxConnections",
        "open connections; for one more the idlest gives way, and where none is idle it is closed"
        " itself; at most half of the hard limit of open files",
        smallest=1,
        largest=1_000_000,
    )
    reserved_connections: int = _setting(
        64,
        "server",
        "reservedConnections",
        "of these, places that only brokers and administration may take when the others are in"
        " use; at most a quarter of them",
        smallest=0,
        largest=1_000_000,
    )
    memory_budget_bytes: int = _setting(
        0,
        "server",
        "memoryBudgetBytes",
        "requests in work and unsent answers of all connections; beyond it requests are refused as"
        " busy, and who leaves most unread is closed; 0: a quarter of the memory the process may"
        " use",
        smallest=0,
        largest=1 << 50,
    )
    max_unfinished_bytes: int = _setting(
        22 << 20,
        "server",
        "maxUnfinishedBytes",
        "frames of all connections of which a part has come; beyond it a large frame is read on"
        " later, and one that stalls is closed; at least 21.4 MiB, so that a frame of 16 MiB fits",
        smallest=1 << 20,
        largest=1 << 40,
    )
    tls_mode: TlsMode = _setting(  # noqa: RUF009  # a Literal is as immutable as str
        "disabled",
        "server",
        "tls.server.mode",
        "TLS on the listener",
        choices=("disabled", "permissive", "enforcing"),
    )
    tls_cert_file: str = _setting("", "server", "tls.server.certPath", "PEM certificate chain")
    tls_key_file: str = _setting("", "server", "tls.server.keyPath", "PEM private key")
    tls_ca_file: str = _setting(
        "", "server", "tls.server.trustCertPath", "PEM authorities a client's certificate must have"
    )
    acl_enable: bool = _setting(
        False,
        "server",
        "aclEnable",
        "every request must be signed by an account of acl_file that may do what it asks",
    )
    acl_file: str = _setting(
        "", "server", "aclFile", "accounts, in TOML or as RocketMQ's plain_acl.yml"
    )
    open_admin: bool = _setting(
        False,
        "server",
        "openAdmin",
        "without acl_enable: take requests that change routes or settings from every machine, not"
        " from this one alone",
    )
    metrics_listen_port: int = _setting(
        0,
        "server",
        "metricsListenPort",
        "port that answers GET /metrics for Prometheus; 0: none; one that is taken is left out with"
        " a warning",
        smallest=0,
        largest=65535,
    )
    metrics_listen_host: str = _setting(
        "127.0.0.1",
        "server",
        "metricsListenHost",
        "address to bind for it; there are no accounts and no TLS",
    )
    kv_config_path: str = _setting(
        "~/namesrv/kvConfig.json", "namesrv", "kvConfigPath", "file of the key-value configuration"
    )
    order_message_enable: bool = _setting(
        False,
        "namesrv",
        "orderMessageEnable",
        "put the ordered-topic configuration into route answers",
        live=True,
    )
    return_order_topic_config_to_broker: bool = _setting(
        True,
        "namesrv",
        "returnOrderTopicConfigToBroker",
        "answer a registration with the ordered-topic configuration",
        live=True,
    )
    support_acting_master: bool = _setting(
        False,
        "namesrv",
        "supportActingMaster",
        "let the lowest follower stand in the route as id 0, read-only, when there is no leader",
        live=True,
    )
    delete_topic_with_broker_registration: bool = _setting(
        False,
        "namesrv",
        "deleteTopicWithBrokerRegistration",
        "a topic missing from a changed registration is removed from the route",
        live=True,
    )
    enable_all_topic_list: bool = _setting(
        True,
        "namesrv",
        "enableAllTopicList",
        "answer requests for the list of all topics",
        live=True,
    )
    need_wait_for_service: bool = _setting(
        False,
        "namesrv",
        "needWaitForService",
        "answer no route until brokers had time to register after a start",
    )
    wait_seconds_for_service: int = _setting(
        45,
        "namesrv",
        "waitSecondsForService",
        "how long that is, seconds",
        smallest=0,
        largest=3600,
    )
    broker_expiry_ms: int = _setting(
        120_000,
        "namesrv",
        "brokerChannelExpiredTime",
        "a broker silent for this long is removed, unless it named its own time",
        smallest=100,
        largest=_DAY_MS,
    )
    first_scan_delay_ms: int = _setting(
        5_000,
        "namesrv",
        "firstScanDelayMs",
        "time from the start to the first look for silent brokers",
        smallest=10,
        largest=_DAY_MS,
    )
    scan_interval_ms: int = _setting(
        10_000,
        "namesrv",
        "scanNotActiveBrokerInterval",
        "time between two looks for silent brokers",
        smallest=10,
        largest=_DAY_MS,
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how each kind of file spells it and which values it takes."""

    name: str
    table: Table
    rocketmq_key: str
    meaning: str
    kind: Literal["str", "int", "bool"]
    live: bool
    smallest: int | None
    largest: int | None
    choices: tuple[str, ...]

    def check(self, value: object, shown: str) -> object:
        """Return *value* if this setting can have it.

        Args:
            shown: The setting as the source spells it, for the error.
        Raises:
            ConfigError: Wrong type, out of range, or not one of the choices.
        """
        if type(value).__name__ != self.kind:
            raise ConfigError(f"{shown} = {value!r}: {_KIND_NAMES[self.kind]} is needed")
        if self.smallest is not None and self.largest is not None:
            assert isinstance(value, int)
            if not self.smallest <= value <= self.largest:
                raise ConfigError(
                    f"{shown} = {value}: must be between {self.smallest} and {self.largest}"
                )
        if self.choices and value not in self.choices:
            raise ConfigError(f"{shown} = {value!r}: must be one of {', '.join(self.choices)}")
        if isinstance(value, str) and not value and self.name in _NEVER_EMPTY:
            raise ConfigError(f"{shown} must not be empty")
        return value

    def parse(self, text: str, shown: str) -> object:
        """Return the value that *text* from a properties file spells.

        Raises:
            ConfigError: As `check`.
        """
        if self.kind == "str":
            return self.check(text, shown)
        if self.kind == "bool":
            if text.lower() not in ("true", "false"):
                raise ConfigError(f"{shown} = {text!r}: true or false is needed")
            return text.lower() == "true"
        try:
            return self.check(int(text), shown)
        except ValueError:
            raise ConfigError(f"{shown} = {text!r}: {_KIND_NAMES['int']} is needed") from None


_KIND_NAMES: Final = {"str": "text", "int": "a whole number", "bool": "true or false"}
_NEVER_EMPTY: Final = frozenset({"listen_host", "kv_config_path", "metrics_listen_host"})

_KINDS: Final[Mapping[type, Literal["str", "int", "bool"]]] = {
    str: "str",
    int: "int",
    bool: "bool",
}

SETTINGS: Final[Mapping[str, Setting]] = {
    item.name: Setting(
        name=item.name,
        kind=_KINDS[type(item.default)],
        **item.metadata,
    )
    for item in fields(NamesrvConfig)
}

BY_ROCKETMQ_KEY: Final[Mapping[str, Setting]] = {
    setting.rocketmq_key: setting for setting in SETTINGS.values()
}

IGNORED_ROCKETMQ_KEYS: Final = frozenset(
    {
        "rocketmqHome",
        "configStorePath",
        "configStorePathName",
        "productEnvName",
        "clusterTest",
        "clientRequestThreadPoolNums",
        "defaultThreadPoolNums",
        "clientRequestThreadPoolQueueCapacity",
        "defaultThreadPoolQueueCapacity",
        "unRegisterBrokerQueueCapacity",
        "enableTopicList",
        "notifyMinBrokerIdChanged",
        "enableControllerInNamesrv",
        "configBlackList",
        "serverWorkerThreads",
        "serverCallbackExecutorThreads",
        "serverSelectorThreads",
        "serverOnewaySemaphoreValue",
        "serverAsyncSemaphoreValue",
        "serverSocketSndBufSize",
        "serverSocketRcvBufSize",
        "writeBufferHighWaterMark",
        "writeBufferLowWaterMark",
        "serverSocketBacklog",
        "serverNettyWorkerGroupEnable",
        "serverPooledByteBufAllocatorEnable",
        "useEpollNativeSelector",
        "enableShutdownGracefully",
        "shutdownWaitTimeSeconds",
        "clientWorkerThreads",
        "clientCallbackExecutorThreads",
        "clientOnewaySemaphoreValue",
        "clientAsyncSemaphoreValue",
        "connectTimeoutMillis",
        "channelNotActiveInterval",
        "clientChannelMaxIdleTimeSeconds",
        "clientSocketSndBufSize",
        "clientSocketRcvBufSize",
        "clientPooledByteBufAllocatorEnable",
        "clientCloseSocketIfTimeout",
        "useTLS",
        "socksProxyConfig",
        "disableCallbackExecutor",
        "disableNettyWorkerGroup",
        "maxReconnectIntervalTimeSeconds",
        "enableReconnectForGoAway",
        "enableTransparentRetry",
    }
)
"""Keys a RocketMQ file may hold that have no meaning here; accepted with a warning."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration, where each value came from, and what to tell the operator."""

    config: NamesrvConfig
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def settings(self) -> list[tuple[str, str, str]]:
        """Return name, value and source of every setting."""
        return [
            (name, _toml_text(getattr(self.config, name)), self.sources[name]) for name in SETTINGS
        ]

    def changed_settings(self) -> list[tuple[str, str, str]]:
        """Return name, value and source of every setting that has not its default value."""
        default = NamesrvConfig()
        return [
            found
            for found in self.settings()
            if getattr(self.config, found[0]) != getattr(default, found[0])
        ]

    def lines(self) -> list[str]:
        """Return one line per setting, ``name = value  # source``, as ``-p`` prints them."""
        rows = [(f"{name} = {value}", source) for name, value, source in self.settings()]
        width = max(len(left) for left, _ in rows)
        return [f"{left:<{width}}  # {source}" for left, source in rows]


def read_file_values(path: str, content: bytes) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return setting name → value from a file, and warnings about keys it need not hold.

    Args:
        path: Its name; ``.toml`` is read as TOML, anything else as RocketMQ's properties.
    Raises:
        ConfigError: One line for each unknown key and bad value; it names the file and the line.
    """
    try:
        text = content.decode()
        read = _toml_values(text) if path.endswith(".toml") else _properties_values(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if read.mistakes:
        places = (f"{path}:{line}: " if line else f"{path}: " for line, _ in read.mistakes)
        raise ConfigError(
            *(place + why for place, (_, why) in zip(places, read.mistakes, strict=True))
        )
    return read.values, tuple(read.warnings)


@dataclass(slots=True)
class _Read:
    """What a file says."""

    values: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    mistakes: list[tuple[int, str]] = field(default_factory=list)
    """Line (0: not known) and what is wrong there."""


def resolve_config(
    *,
    path: str | None = None,
    content: bytes = b"",
    command_line: Mapping[str, object] | None = None,
) -> ResolvedConfig:
    """Return the configuration that the sources add up to.

    Args:
        path: Configuration file, with its *content*.
        command_line: Setting name → value; None values are options that were not given.
    Raises:
        ConfigError: One line naming the setting and its source.
    """
    values: dict[str, object] = {}
    sources = dict.fromkeys(SETTINGS, "default")
    warnings: tuple[str, ...] = ()
    if path is not None:
        values, warnings = read_file_values(path, content)
        sources.update(dict.fromkeys(values, path))
    for name, value in (command_line or {}).items():
        if value is not None:
            values[name] = SETTINGS[name].check(value, f"--{name.replace('_', '-')}")
            sources[name] = "command line"
    config = replace(NamesrvConfig(), **values)  # type: ignore[arg-type]
    config = replace(config, kv_config_path=os.path.expanduser(config.kv_config_path))
    if config.tls_mode != "disabled" and not (config.tls_cert_file and config.tls_key_file):
        raise ConfigError(
            f"tls_mode = '{config.tls_mode}' needs tls_cert_file and tls_key_file "
            f"({sources['tls_mode']})"
        )
    if config.acl_enable and not config.acl_file:
        raise ConfigError(f"acl_enable needs acl_file, the accounts ({sources['acl_enable']})")
    return ResolvedConfig(config, sources, warnings)


def _toml_values(text: str) -> _Read:
    read = _Read()
    document, lines = tomllib.loads(text), toml_lines(text)
    for table, content in document.items():
        if table not in ("server", "namesrv") or not isinstance(content, dict):
            line = lines.get((table, ""), lines.get(("", table), 0))
            why = f"unknown setting '{table}'; tables are [server] and [namesrv]"
            read.mistakes.append((line, why))
            continue
        for name, value in content.items():
            setting = SETTINGS.get(name)
            try:
                if setting is None or setting.table != table:
                    raise ConfigError(f"unknown setting '{name}' in [{table}]")
                read.values[name] = setting.check(value, f"[{table}] {name}")
            except ConfigError as error:
                read.mistakes.append((lines.get((table, name), 0), str(error)))
    return read


def _properties_values(text: str) -> _Read:
    read = _Read()
    for line, key, text_value in parse_properties(text):
        if key in IGNORED_ROCKETMQ_KEYS:
            read.warnings.append(f"{key} has no meaning here and is ignored")
        elif (known := BY_ROCKETMQ_KEY.get(key)) is not None:
            try:
                read.values[known.name] = known.parse(text_value, key)
            except ConfigError as error:
                read.mistakes.append((line, f"{error}{comment_hint(text_value)}"))
        elif not key:
            read.mistakes.append((line, f"a key is needed before the value '{text_value}'"))
        else:
            read.mistakes.append((line, f"unknown setting '{key}'"))
    return read


def _toml_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
