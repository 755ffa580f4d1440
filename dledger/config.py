"""The configuration of one broker: defaults, files, environment and command line, in this order.

A later source wins, and every value remembers where it came from. Nothing is started with a
setting that nobody knows or that cannot be: one `ConfigError` names the file, the line and the key
of every such setting.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ParamSpec

import msgspec

from commitlog.errors import ConfigError
from dledger.raft.bounds import is_host, is_name
from dledger.settings_ignored import CLIENT_AUTH_KEYS, IGNORED_KEYS
from dledger.settings_refused import (
    IN_SYNC_KEYS,
    MASTER_AND_SLAVE_KEYS,
    REFUSED,
    members_wanted,
)
from dledger.settings_tables import (
    DEFAULT_METRICS_PORT,
    DEFAULT_PEER_PORT,
    KIB,
    ROCKETMQ_KEYS,
    SETTINGS,
    TABLES,
    BrokerTable,
    ClientTable,
    MetricsTable,
    Peer,
    RaftTable,
    ServerTable,
    StoreTable,
)
from dledger.settings_values import (
    exporter_type,
    parse_delay_levels,
    parse_value,
    show_value,
)
from remoting.access.local_admin import is_loopback
from remoting.java_properties import comment_hint, inline_comment, parse_properties
from remoting.toml_lines import toml_lines

P = ParamSpec("P")

__all__ = ["BrokerConfig", "ConfigFile", "Peer", "load_config", "parse_delay_levels"]

DEFAULT_SOURCE = "default"
ENVIRONMENT_SOURCE = "environment NAMESRV_ADDR"
COMMAND_LINE_SOURCE = "command line"

_NAME = re.compile(r"[%|a-zA-Z0-9_.-]+")

GROUP_SIZE_MAX = 5
"""A majority of more costs more flushes than it saves nodes."""

FAST_PORT_DISTANCE = 2
"""RocketMQ's clients find the VIP channel so far below the port they were told."""

RECORD_OVERHEAD_BYTES = 40 * KIB
"""Headers and up to 32 KiB of properties around the largest body."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file as it was read: its name decides how it is understood."""

    path: str
    text: str

    @property
    def is_toml(self) -> bool:
        """True for TOML, false for RocketMQ's ``broker.conf``."""
        return self.path.lower().endswith(".toml")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a setting stands: ``file:line``, or the source alone where lines mean nothing."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """All settings of a broker, checked against each other.

    ``sources`` has the origin of every path; ``warnings`` is what the operator should be told
    once: keys that change nothing, a group of even size.
    """

    broker: BrokerTable = field(default_factory=BrokerTable)
    server: ServerTable = field(default_factory=ServerTable)
    client: ClientTable = field(default_factory=ClientTable)
    store: StoreTable = field(default_factory=StoreTable)
    raft: RaftTable = field(default_factory=RaftTable)
    metrics: MetricsTable = field(default_factory=MetricsTable)
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def get(self, path: str) -> Any:
        """Return the value of ``table.name``."""
        table, _, name = path.partition(".")
        return getattr(getattr(self, table), name)

    def settings(self) -> list[tuple[str, str, str]]:
        """Return ``(path, value, source)`` of every setting."""
        return [
            (path, show_value(path, self.get(path)), self.sources.get(path, DEFAULT_SOURCE))
            for path in SETTINGS
        ]

    def changed_settings(self) -> list[tuple[str, str, str]]:
        """Return ``(path, value, source)`` of every setting that has not its default value."""
        return [
            found for found in self.settings() if self.get(found[0]) != SETTINGS[found[0]].default
        ]

    def with_values(self, values: Mapping[str, Any], source: str) -> BrokerConfig:
        """Return the configuration with other values, checked as a whole.

        Args:
            values: ``table.name`` to value.
        Raises:
            ConfigError: They contradict the others, or each other.
        """
        tables: dict[str, dict[str, Any]] = {}
        for path, value in values.items():
            table, _, name = path.partition(".")
            tables.setdefault(table, {})[name] = value
        changed = {
            table: msgspec.structs.replace(getattr(self, table), **fields)
            for table, fields in tables.items()
        }
        sources = {**self.sources, **dict.fromkeys(values, source)}
        config: BrokerConfig = replace(self, sources=sources, **changed)
        _refuse(_contradictions(config, {}))
        return config

    @property
    def self_peer(self) -> Peer:
        """This node among the members."""
        return next(peer for peer in self.raft.peers if peer.id == self.raft.self_id)

    @property
    def self_number(self) -> int:
        """Number of this node: the digits of its id, else its place among the members from 0.

        A follower registers under this number + 1, the leader as 0.
        """
        digits = "".join(char for char in self.raft.self_id if char.isdecimal())
        if digits:
            return int(digits)
        return sorted(peer.id for peer in self.raft.peers).index(self.raft.self_id)

    @property
    def advertised_address(self) -> str:
        """``host:port`` that clients are told. With port 0 the bound port takes its place."""
        return f"{self.broker.broker_ip1}:{self.advertised_port}"

    @property
    def advertised_port(self) -> int:
        """Port that clients are told."""
        return self.broker.advertised_port or self.server.listen_port

    @property
    def fast_listen_port(self) -> int:
        """Port of the VIP channel; 0: none."""
        port = self.server.fast_listen_port
        return port if port >= 0 else max(self.server.listen_port - FAST_PORT_DISTANCE, 0)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port that answer ``GET /metrics``; None: nobody does."""
        metrics = self.metrics
        port = metrics.listen_port or (
            DEFAULT_METRICS_PORT if metrics.exporter_type == "PROM" else 0
        )
        if not port or metrics.exporter_type == "DISABLE":
            return None
        return metrics.listen_host or "127.0.0.1", port

    @property
    def has_guarded_peers(self) -> bool:
        """Whether a peer must prove that it belongs to the group."""
        return bool(self.raft.secret_file or self.raft.tls_cert_file)

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of level 1, 2, …"""
        return parse_delay_levels(self.store.message_delay_level)

    @property
    def sync_flush(self) -> bool:
        """Nothing is promised before it is on disk."""
        return self.store.flush_disk_type == "SYNC_FLUSH"

    @property
    def sync_replication(self) -> bool:
        """An acknowledgement means a majority."""
        return self.broker.broker_role == "SYNC_MASTER"


def load_config(
    files: Iterable[ConfigFile] = (),
    *,
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
    home: str = "",
) -> BrokerConfig:
    """Return the settings that defaults, files, environment and options amount to.

    Args:
        files: In the order of their weight; all TOML files weigh less than any ``broker.conf``.
        environment: Only ``NAMESRV_ADDR`` is looked at.
        options: ``table.name`` to text or value, from the command line.
        home: What ``~`` at the begin of a path stands for; empty leaves it.
    Raises:
        ConfigError: Unknown settings, bad values, or settings that contradict each other. One
            line for each, which names the source, the line of a file, and the key. What contradicts
            each other is looked for when all values can be read.
    """
    gathered = _Gathered()
    for file in sorted(files, key=lambda file: not file.is_toml):
        if file.is_toml:
            gathered.add_toml(file)
        else:
            gathered.add_properties(file)
    namesrv_addr = (environment or {}).get("NAMESRV_ADDR", "").strip()
    if namesrv_addr:
        place = _Place(ENVIRONMENT_SOURCE)
        gathered.take(gathered.set, "broker.namesrv_addr", namesrv_addr, place, "NAMESRV_ADDR")
    for path, raw in (options or {}).items():
        gathered.take(gathered.set_option, path, raw)
    _refuse(gathered.mistakes)
    gathered.complete(home)
    config = gathered.config()
    hints = "".join(f"; {comment}" for comment in gathered.comments)
    contradictions = (f"{found}{hints}" for found in _contradictions(config, gathered.places))
    _refuse([*gathered.mistakes, *contradictions])
    return config


def _refuse(mistakes: Iterable[str]) -> None:
    found = list(mistakes)
    if found:
        raise ConfigError(*found)


class _Gathered:
    """Values, sources and warnings while the sources are read one after the other."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {path: entry.default for path, entry in SETTINGS.items()}
        self.sources: dict[str, str] = dict.fromkeys(SETTINGS, DEFAULT_SOURCE)
        self.places: dict[str, _Place] = {}
        """Where the settings stand that were given."""
        self.mistakes: list[str] = []
        """What cannot be taken, one line for each setting."""
        self.warnings: dict[str, None] = {}
        self.commit_log_path: tuple[tuple[str, str], str] | None = None
        """Where and what, if a file says it: only worth a warning when it is another place."""
        self.client_auth: tuple[_Place, str] | None = None
        """Place and key that want a certificate of every client."""
        self.slave: tuple[_Place, str, str] | None = None
        """Place, key and value that make this broker a slave, or a group with one."""
        self.in_sync: list[tuple[_Place, str, int]] = []
        """Place, key and number of replicas that must have a message."""
        self.comments: dict[str, None] = {}
        """Values that end with what looks like a comment."""

    def take(self, method: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call *method* for one setting; remember what is wrong with it and go on."""
        try:
            method(*args, **kwargs)
        except ConfigError as error:
            self.mistakes.append(str(error))

    def set(self, path: str, raw: object, place: _Place, key: str) -> None:
        source = place.source
        if path == "broker.broker_role" and raw == "SLAVE":
            self.warn(f"{source}: {key} = SLAVE is taken as SYNC_MASTER: roles are elected")
            self.slave = (place, key, "SLAVE")
            raw = "SYNC_MASTER"
        if path == "metrics.exporter_type" and exporter_type(raw) in ("OTLP_GRPC", "LOG"):
            self.warn(
                f"{source}: {key} = {raw} is taken as DISABLE: only PROM is built, nothing is"
                " exported"
            )
            raw = "DISABLE"
        try:
            self.values[path] = parse_value(SETTINGS[path], raw)
        except ValueError as error:
            hint = comment_hint(raw) if isinstance(raw, str) else ""
            raise ConfigError(f"{place}: {key} = {raw!r}: {error}{hint}") from None
        self.sources[path] = source
        self.places[path] = place

    def set_option(self, path: str, raw: object) -> None:
        place = _Place(COMMAND_LINE_SOURCE)
        if path not in SETTINGS:
            raise _unknown(place, path, SETTINGS)
        self.set(path, raw, place, path)

    def warn(self, text: str) -> None:
        self.warnings[text] = None

    def ignore(self, file: str, key: str) -> None:
        self.warn(f"{file}: {key} is accepted and changes nothing: {IGNORED_KEYS[key]}")

    def note_client_auth(self, place: _Place, key: str, raw: str) -> None:
        self.ignore(place.source, key)
        if raw.strip().lower() in ("require", "true"):
            self.client_auth = (place, key)

    def refuse_unless_off(self, place: _Place, key: str, raw: str) -> None:
        if REFUSED[key].refuses(raw):
            raise ConfigError(f"{place}: {key}: {REFUSED[key].reason}{comment_hint(raw)}")

    def note_role(self, place: _Place, key: str, raw: str) -> None:
        """Take a key of a master or a slave; whether it is refused depends on the members."""
        if key == "brokerId" and not raw.strip().isdecimal() and raw.strip():
            raise ConfigError(f"{place}: {key} = {raw!r}: expected a number{comment_hint(raw)}")
        if raw.strip().lower() in MASTER_AND_SLAVE_KEYS[key]:
            return
        self.slave = (place, key, raw)
        self.warn(f"{place.source}: {key} is accepted and changes nothing: roles are elected")

    def note_in_sync(self, place: _Place, key: str, raw: str) -> None:
        if not raw.strip().isdecimal():
            raise ConfigError(f"{place}: {key} = {raw!r}: expected a number{comment_hint(raw)}")
        self.in_sync.append((place, key, int(raw)))

    def add_toml(self, file: ConfigFile) -> None:
        try:
            document = tomllib.loads(file.text)
        except tomllib.TOMLDecodeError as error:
            self.mistakes.append(f"{file.path}: not TOML: {error}")
            return
        lines = toml_lines(file.text)
        for table, content in document.items():
            place = _Place(file.path, lines.get((table, ""), lines.get(("", table), 0)))
            if table not in TABLES:
                unknown = _unknown(place, f"[{table}]", [f"[{name}]" for name in TABLES])
                self.mistakes.append(str(unknown))
            elif not isinstance(content, dict):
                self.mistakes.append(f"{place}: {table}: expected a table [{table}]")
            else:
                for name, raw in content.items():
                    place = _Place(file.path, lines.get((table, name), 0))
                    self.take(self.add_toml_key, place, table, name, raw)

    def add_toml_key(self, place: _Place, table: str, name: str, raw: object) -> None:
        key = f"{table}.{name}"
        if key in SETTINGS:
            self.set(key, raw, place, key)
        elif ROCKETMQ_KEYS.get(name, "").startswith(f"{table}."):
            self.set(ROCKETMQ_KEYS[name], raw, place, key)
        else:
            raise _unknown(place, key, SETTINGS)

    def add_properties(self, file: ConfigFile) -> None:
        try:
            lines = parse_properties(file.text)
        except ConfigError as error:
            self.mistakes.append(f"{file.path}: {error}")
            return
        for number, key, raw in lines:
            self.take(self.add_property, _Place(file.path, number), key, raw)

    def add_property(self, place: _Place, key: str, raw: str) -> None:
        if inline_comment(raw):
            self.comments[f"{place.source}: {key} = {raw!r}{comment_hint(raw)}"] = None
        if key in ROCKETMQ_KEYS:
            self.set(ROCKETMQ_KEYS[key], raw, place, key)
        elif key == "storePathCommitLog":
            self.commit_log_path = ((place.source, key), raw)
        elif key in CLIENT_AUTH_KEYS:
            self.note_client_auth(place, key, raw)
        elif key in REFUSED:
            self.refuse_unless_off(place, key, raw)
        elif key in MASTER_AND_SLAVE_KEYS:
            self.note_role(place, key, raw)
        elif key in IN_SYNC_KEYS:
            self.note_in_sync(place, key, raw)
        elif key in IGNORED_KEYS:
            self.ignore(place.source, key)
        else:
            known = [*ROCKETMQ_KEYS, *IGNORED_KEYS, *REFUSED, *MASTER_AND_SLAVE_KEYS]
            raise _unknown(place, key, [*known, *IN_SYNC_KEYS])

    def derive(self, path: str, value: object, origin: str) -> None:
        self.values[path] = value
        self.sources[path] = f"from {origin}"

    def complete(self, home: str) -> None:
        """Fill in what follows from other settings."""
        values = self.values
        if not values["raft.group"]:
            if values["broker.broker_name"]:
                self.derive("raft.group", values["broker.broker_name"], "broker.broker_name")
            else:
                values["raft.group"] = "DEFAULT_BROKER"
        if not values["broker.broker_name"]:
            self.derive("broker.broker_name", values["raft.group"], "raft.group")
        self._complete_peers()
        own = next((p for p in values["raft.peers"] if p.id == values["raft.self_id"]), None)
        self._complete_hosts(own.host if own else "")
        if home:
            root = values["store.path_root_dir"]
            if root == "~" or root.startswith("~/"):
                values["store.path_root_dir"] = home + root[1:]
        values["store.path_root_dir"] = posixpath.normpath(values["store.path_root_dir"])
        expected = posixpath.join(values["store.path_root_dir"], "commitlog")
        if self.commit_log_path and posixpath.normpath(self.commit_log_path[1]) != expected:
            self.ignore(*self.commit_log_path[0])

    def _complete_peers(self) -> None:
        values = self.values
        host = values["broker.broker_ip1"] or values["server.listen_host"] or "127.0.0.1"
        alone = Peer(values["raft.self_id"], host, DEFAULT_PEER_PORT)
        if not values["raft.peers"]:
            self.derive("raft.peers", (alone,), "raft.self_id")
        elif not values["raft.enable_dledger_commit_log"] and len(values["raft.peers"]) > 1:
            own = [p for p in values["raft.peers"] if p.id == values["raft.self_id"]]
            self.derive("raft.peers", tuple(own or [alone]), "raft.enable_dledger_commit_log")

    def _complete_hosts(self, own_host: str) -> None:
        values = self.values
        if not values["server.listen_host"]:
            outside = values["broker.broker_ip1"] or own_host
            if _is_loopback(outside):
                self.derive("server.listen_host", "127.0.0.1", "raft.peers")
            else:
                origin = "broker.broker_ip1" if values["broker.broker_ip1"] else "raft.peers"
                self.derive("server.listen_host", "0.0.0.0", origin)
        if not values["broker.broker_ip1"]:
            bound = values["server.listen_host"]
            if bound in ("0.0.0.0", "::"):
                self.derive("broker.broker_ip1", own_host, "raft.peers")
            else:
                self.derive("broker.broker_ip1", bound, "server.listen_host")

    def config(self) -> BrokerConfig:
        """Return the settings; what is wrong with several of them together goes to `mistakes`."""
        if self.client_auth is not None and not self.values["server.tls_ca_file"]:
            place, key = self.client_auth
            self.mistakes.append(f"{place}: {key}: needs tls.server.trustCertPath, the authorities")
        members = {p.id for p in self.values["raft.peers"]}
        self._refuse_other_kinds_of_group(len(members))
        if len(members) in (2, 4):
            self.warn(
                f"raft.peers: a group of {len(members)} survives no more failures than one of"
                f" {len(members) - 1}"
            )
        if self.values["store.flush_disk_type"] == "ASYNC_FLUSH":
            self.warn(
                "store.flush_disk_type = ASYNC_FLUSH: a power cut may lose acknowledged messages"
            )
        if self.values["broker.broker_role"] == "ASYNC_MASTER":
            self.warn(
                "broker.broker_role = ASYNC_MASTER: a fail-over may lose acknowledged messages"
            )
        self._warn_of_one_alone()
        for comment in self.comments:
            self.warn(comment)
        tables: dict[str, Any] = {
            name: struct(
                **{
                    entry.name: self.values[entry.path]
                    for entry in SETTINGS.values()
                    if entry.table == name
                }
            )
            for name, struct in TABLES.items()
        }
        return BrokerConfig(**tables, sources=self.sources, warnings=tuple(self.warnings))

    def _refuse_other_kinds_of_group(self, size: int) -> None:
        if self.slave is not None and size == 1:
            place, key, raw = self.slave
            group = self.values["broker.broker_name"]
            self.mistakes.append(
                members_wanted(str(place), key, raw, group=group, peer_port=DEFAULT_PEER_PORT)
            )
        majority = size // 2 + 1
        for place, key, number in self.in_sync:
            if number > majority:
                self.mistakes.append(
                    f"{place}: {key} = {number}: an acknowledgement means {majority} of the {size}"
                    " members of this group, a majority, and no setting makes it mean more"
                )
            elif number > 1:
                self.warn(
                    f"{place.source}: {key} is accepted and changes nothing: an acknowledgement"
                    f" means {majority} of the {size} members of this group"
                )

    def _warn_of_one_alone(self) -> None:
        values = self.values
        addresses = values["broker.namesrv_addr"]
        far = [addr for addr in addresses if not _is_loopback(addr.rpartition(":")[0])]
        if len(values["raft.peers"]) > 1 or not far:
            return
        self.warn(
            f"raft.peers: a group of one, which registers at {far[0]}: what it acknowledges is on"
            " this machine alone. Name the other members in raft.peers (dLegerPeers) if there are"
            " any; do not start two such brokers under one brokerName"
        )


def _is_loopback(host: str) -> bool:
    return host in ("", "localhost") or is_loopback(host)


def _unknown(place: _Place, key: str, known: Iterable[str]) -> ConfigError:
    near = get_close_matches(key, list(known), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return ConfigError(f"{place}: unknown setting {key}{hint}")


def _contradictions(config: BrokerConfig, places: Mapping[str, _Place]) -> Iterator[str]:
    """Yield settings that contradict each other; each line names the one to change."""

    def wrong(path: str, why: str) -> str:
        place = places.get(path) or config.sources[path]
        return f"{place}: {path} = {show_value(path, config.get(path))}: {why}"

    raft, store, server = config.raft, config.store, config.server
    yield from _member_contradictions(config, wrong)
    if raft.heartbeat_interval_ms * 3 > raft.election_timeout_ms:
        yield wrong(
            "raft.heartbeat_interval_ms",
            f"at most a third of raft.election_timeout_ms = {raft.election_timeout_ms}",
        )
    if store.max_message_size + RECORD_OVERHEAD_BYTES > raft.max_entry_bytes:
        yield wrong(
            "store.max_message_size",
            f"an entry of raft.max_entry_bytes = {raft.max_entry_bytes} must hold the largest"
            f" message and {RECORD_OVERHEAD_BYTES} bytes more",
        )
    if raft.max_entry_bytes > raft.max_pending_bytes:
        yield wrong("raft.max_pending_bytes", "less than one entry of raft.max_entry_bytes")
    for path in ("broker.cluster_name", "broker.broker_name", "raft.group"):
        # A name that was taken from another setting is shown there.
        if not config.sources[path].startswith("from ") and not _NAME.fullmatch(config.get(path)):
            yield wrong(path, "letters, digits, %, |, -, _ and . only")
    if server.tls_mode != "disabled" and not (server.tls_cert_file and server.tls_key_file):
        yield wrong("server.tls_mode", "needs server.tls_cert_file and server.tls_key_file")
    if server.acl_enable and not server.acl_file:
        yield wrong("server.acl_enable", "needs server.acl_file, the accounts")
    tls = (raft.tls_cert_file, raft.tls_key_file, raft.tls_ca_file)
    if any(tls) and not all(tls):
        yield wrong(
            "raft.tls_cert_file", "raft.tls_cert_file, tls_key_file and tls_ca_file go together"
        )


def _member_contradictions(config: BrokerConfig, wrong: Callable[[str, str], str]) -> Iterator[str]:
    """Yield what is wrong with the list of members, or with this node's place in it."""
    peers, self_id = config.raft.peers, config.raft.self_id
    ids = [peer.id for peer in peers]
    if len(set(ids)) != len(ids):
        yield wrong("raft.peers", "an id stands there twice")
    if len({(peer.host, peer.port) for peer in peers}) != len(ids):
        yield wrong("raft.peers", "an address stands there twice")
    if len(ids) > GROUP_SIZE_MAX:
        yield wrong("raft.peers", f"a group has at most {GROUP_SIZE_MAX} members")
    if self_id not in ids:
        yield wrong("raft.self_id", f"not one of the peers {', '.join(ids)}")
    own_hosts = {peer.host for peer in peers if peer.id == self_id}
    if any(p.host in own_hosts and p.port == config.server.listen_port for p in peers):
        yield wrong("server.listen_port", "a port of this host in raft.peers")
    for peer in peers:
        if not (is_name(peer.id) and is_host(peer.host)):
            yield wrong("raft.peers", f"{peer} is no address that a member can be found at")
    far = [peer for peer in peers if not _is_loopback(peer.host)]
    if len(peers) > 1 and far and not config.has_guarded_peers:
        yield wrong(
            "raft.peers",
            f"whoever reaches {far[0].address} could pass for a member, read all messages and forge"
            " some: set raft.secret_file (raftSecretFile) to a file that all members share, which"
            " `dledger raft secret FILE` makes, or raft.tls_cert_file",
        )
