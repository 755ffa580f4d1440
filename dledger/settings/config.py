"""The configuration of one broker: defaults, files, environment and command line, in this order.

A later source wins, and every value keeps its source. Nothing is started with a setting that is
unknown or cannot be: one `ConfigError` names the file, the line and the key of every such setting.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from dledger.commitlog.errors import ConfigError
from dledger.commitlog.seams import Disk
from dledger.commitlog.segment import read_format
from dledger.commitlog.store_paths import StorePaths
from dledger.raft.wire import is_host, is_name
from dledger.remoting.addresses import is_loopback, join_address, split_address
from dledger.remoting.properties import comment_hint
from dledger.remoting.protocol.frame import MAX_FRAME_BYTES
from dledger.settings.schema import (
    DEFAULT_SOURCE,
    Config,
    ConfigFile,
    Place,
    Schema,
    SettingsReader,
    refuse,
)
from dledger.settings.tables import (
    DEFAULT_METRICS_PORT,
    DEFAULT_PEER_PORT,
    KIB,
    BrokerTable,
    ClientTable,
    MetricsTable,
    RaftTable,
    ServerTable,
    StoreTable,
)
from dledger.settings.text import (
    CLIENT_AUTH_KEYS,
    IGNORED_KEYS,
    IN_SYNC_KEYS,
    MASTER_AND_SLAVE_KEYS,
    REFUSED,
    Peer,
    member_numbers,
    members_wanted,
    parse_exporter,
)

ENVIRONMENT_SOURCE: Final = "environment NAMESRV_ADDR"

_NUMBER: Final = re.compile("[0-9]{1,9}")
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_.-]+")

GROUP_SIZE_MAX: Final = 5
"""A majority of more costs more flushes than it saves nodes."""

FAST_PORT_DISTANCE: Final = 2
"""RocketMQ's clients find the VIP channel so far below the port they know."""

SEGMENT_SIZE: Final = "store.mapped_file_size_commit_log"

RECORD_OVERHEAD_BYTES: Final = 40 * KIB
"""Headers and up to 32 KiB of properties around the largest body."""


def stored_sizes(disk: Disk, root: str) -> dict[str, int]:
    """Return the settings that the store in *root* was made with; none where there is no store.

    Raises CorruptStoreError, ForeignStoreError: as opening the store does.
    """
    paths = StorePaths(root)
    if not disk.exists(paths.format):
        return {}
    return {SEGMENT_SIZE: read_format(disk, paths).segment_bytes}


def with_stored_sizes(config: BrokerConfig, disk: Disk) -> BrokerConfig:
    """Return *config* with what its store was made with where that is not set.

    Raises CorruptStoreError, ForeignStoreError: as opening the store does.
    """
    if config.sources.get(SEGMENT_SIZE, DEFAULT_SOURCE) != DEFAULT_SOURCE:
        return config
    return config.with_values(stored_sizes(disk, config.store.path_root_dir), "the store")


@dataclass(frozen=True, slots=True)
class BrokerConfig(Config):
    """All settings of a broker, checked against each other."""

    ignored: ClassVar[Mapping[str, str]] = IGNORED_KEYS

    broker: BrokerTable = field(default_factory=BrokerTable)
    server: ServerTable = field(default_factory=ServerTable)
    client: ClientTable = field(default_factory=ClientTable)
    store: StoreTable = field(default_factory=StoreTable)
    raft: RaftTable = field(default_factory=RaftTable)
    metrics: MetricsTable = field(default_factory=MetricsTable)

    @property
    def self_peer(self) -> Peer:
        """This node among the members."""
        return next(peer for peer in self.raft.peers if peer.id == self.raft.self_id)

    @property
    def self_number(self) -> int:
        """Number of this node; a follower registers under this number + 1, the leader as 0."""
        return self.member_numbers[self.raft.self_id]

    @property
    def member_numbers(self) -> dict[str, int]:
        """Number of each member that the file names."""
        return member_numbers(peer.id for peer in self.raft.peers)

    @property
    def advertised_address(self) -> str:
        """``host:port`` for clients. With port 0 the bound port takes its place."""
        return join_address(self.broker.broker_ip1, self.advertised_port)

    @property
    def advertised_port(self) -> int:
        """Port for clients, as they know it."""
        return self.broker.advertised_port or self.server.listen_port

    @property
    def fast_listen_port(self) -> int:
        """Port of the VIP channel; 0: none."""
        port = self.server.fast_listen_port
        return port if port >= 0 else max(self.server.listen_port - FAST_PORT_DISTANCE, 0)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port that answer ``GET /metrics``; None: there is no page."""
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
    def sync_replication(self) -> bool:
        """An acknowledgement means a majority."""
        return self.broker.broker_role == "SYNC_MASTER"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each setting that contradicts others, and why."""
        yield from _conflicts(self)


SCHEMA: Final = BrokerConfig.schema()
SETTINGS: Final = SCHEMA.settings
"""Path ``table.name`` → setting, in the order of the tables."""

ROCKETMQ_KEYS: Final = SCHEMA.keys
"""RocketMQ key → path."""


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
        environment: Only ``NAMESRV_ADDR`` is read.
        options: ``table.name`` to text or value, from the command line.
        home: What ``~`` at the begin of a path stands for; empty leaves it.
    Raises:
        ConfigError: Unknown settings, bad values, or settings that contradict each other. One line
            for each, which names the source, the line of a file, and the key.
    """
    reader = _BrokerReader(SCHEMA, ignored=IGNORED_KEYS)
    reader.read_files(files)
    namesrv_addr = (environment or {}).get("NAMESRV_ADDR", "").strip()
    if namesrv_addr:
        place = Place(ENVIRONMENT_SOURCE)
        reader.collect(reader.set, "broker.namesrv_addr", namesrv_addr, place, "NAMESRV_ADDR")
    reader.read_options(options or {})
    refuse(reader.mistakes)
    _complete(reader, home)
    reader.check_others()
    _warn(reader)
    return BrokerConfig.of(reader, "".join(f"; {comment}" for comment in reader.comments))


class _BrokerReader(SettingsReader):
    """Also reads keys and values of RocketMQ that are no settings; some count when all are read.

    Attributes:
        others: Place, key and value of what depends on other settings.
        slave: Place, key and value that make this broker a slave, or a group with one.
    """

    other_keys = (
        REFUSED.keys()
        | MASTER_AND_SLAVE_KEYS.keys()
        | CLIENT_AUTH_KEYS
        | IN_SYNC_KEYS
        | {"storePathCommitLog"}
    )

    def __init__(self, schema: Schema, *, ignored: Mapping[str, str]) -> None:
        super().__init__(schema, ignored=ignored)
        self.others: list[tuple[Place, str, str]] = []
        self.slave: tuple[Place, str, object] | None = None

    def substitute(self, path: str, place: Place, key: str, raw: object) -> object:
        """Take a slave as a member, and exporters that are not built as none."""
        if path == "broker.broker_role" and raw == "SLAVE":
            self.warn(f"{place.source}: {key} = SLAVE is taken as SYNC_MASTER: roles are elected")
            self.slave = (place, key, raw)
            return "SYNC_MASTER"
        if path == "metrics.exporter_type" and parse_exporter(raw) in ("OTLP_GRPC", "LOG"):
            self.warn(
                f"{place.source}: {key} = {raw} is taken as DISABLE: only PROM is built, nothing is"
                " exported"
            )
            return "DISABLE"
        return raw

    def take(self, place: Place, key: str, raw: str) -> None:
        """Refuse what cannot be, and keep what depends on other settings for `check_others`."""
        if key in REFUSED:
            if REFUSED[key].refuses(raw):
                raise ConfigError(f"{place}: {key}: {REFUSED[key].reason}{comment_hint(raw)}")
            return
        is_number = _NUMBER.fullmatch(raw.strip()) is not None
        if not is_number and (key in IN_SYNC_KEYS or (key == "brokerId" and raw.strip())):
            raise ConfigError(f"{place}: {key} = {raw!r}: expected a number{comment_hint(raw)}")
        if key in CLIENT_AUTH_KEYS:
            self.ignore(place.source, key)
        elif key in MASTER_AND_SLAVE_KEYS:
            if raw.strip().lower() not in MASTER_AND_SLAVE_KEYS[key]:
                self.slave = (place, key, raw)
                self.warn(
                    f"{place.source}: {key} is accepted and changes nothing: roles are elected"
                )
            return
        self.others.append((place, key, raw))

    def check_others(self) -> None:
        """Decide on keys that depend on the settings, and on the members.

        Refused are a slave without members, acknowledgements by more than a majority, and to want
        certificates of clients without the authorities to check them with.
        """
        size = len({peer.id for peer in self.values["raft.peers"]})
        majority = size // 2 + 1
        if self.slave is not None and size == 1:
            place, key, value = self.slave
            group = self.values["broker.broker_name"]
            self.mistakes.append(
                members_wanted(str(place), key, value, group=group, peer_port=DEFAULT_PEER_PORT)
            )
        own_log = posixpath.join(self.values["store.path_root_dir"], "commitlog")
        for place, key, raw in self.others:
            if key in CLIENT_AUTH_KEYS:
                is_wanted = raw.strip().lower() in ("require", "true")
                if is_wanted and not self.values["server.tls_ca_file"]:
                    self.mistakes.append(
                        f"{place}: {key}: needs tls.server.trustCertPath, the authorities"
                    )
            elif key not in IN_SYNC_KEYS:
                if posixpath.normpath(raw) != own_log:
                    self.ignore(place.source, key)
            elif int(raw) > majority:
                self.mistakes.append(
                    f"{place}: {key} = {int(raw)}: an acknowledgement means {majority} of the"
                    f" {size} members of this group, a majority, and no setting makes it mean more"
                )
            elif int(raw) > 1:
                self.warn(
                    f"{place.source}: {key} is accepted and changes nothing: an acknowledgement"
                    f" means {majority} of the {size} members of this group"
                )


def _complete(reader: SettingsReader, home: str) -> None:
    """Fill in what follows from other settings."""
    values = reader.values
    if not values["raft.group"]:
        if values["broker.broker_name"]:
            reader.derive("raft.group", values["broker.broker_name"], "broker.broker_name")
        else:
            values["raft.group"] = "DEFAULT_BROKER"
    if not values["broker.broker_name"]:
        reader.derive("broker.broker_name", values["raft.group"], "raft.group")
    _complete_peers(reader)
    own = next((p for p in values["raft.peers"] if p.id == values["raft.self_id"]), None)
    _complete_hosts(reader, own.host if own else "")
    reader.expand_home("store.path_root_dir", home)
    values["store.path_root_dir"] = posixpath.normpath(values["store.path_root_dir"])


def _complete_peers(reader: SettingsReader) -> None:
    values = reader.values
    host = values["broker.broker_ip1"] or values["server.listen_host"] or "127.0.0.1"
    alone = Peer(values["raft.self_id"], host, DEFAULT_PEER_PORT)
    if not values["raft.peers"]:
        reader.derive("raft.peers", (alone,), "raft.self_id")
    elif not values["raft.enable_dledger_commit_log"] and len(values["raft.peers"]) > 1:
        own = [p for p in values["raft.peers"] if p.id == values["raft.self_id"]]
        reader.derive("raft.peers", tuple(own or [alone]), "raft.enable_dledger_commit_log")


def _complete_hosts(reader: SettingsReader, own_host: str) -> None:
    values = reader.values
    if not values["server.listen_host"]:
        outside = values["broker.broker_ip1"] or own_host
        origin = "broker.broker_ip1" if values["broker.broker_ip1"] else "raft.peers"
        if not outside or is_loopback(outside):
            bound = outside if ":" in outside else "127.0.0.1"
            reader.derive("server.listen_host", bound, "raft.peers")
        else:
            reader.derive("server.listen_host", "::" if ":" in outside else "0.0.0.0", origin)
    if not values["broker.broker_ip1"]:
        bound = values["server.listen_host"]
        if bound in ("0.0.0.0", "::"):
            reader.derive("broker.broker_ip1", own_host, "raft.peers")
        else:
            reader.derive("broker.broker_ip1", bound, "server.listen_host")


def _warn(reader: SettingsReader) -> None:
    """Warn of settings that protect less than others would."""
    values = reader.values
    size = len({peer.id for peer in values["raft.peers"]})
    if size in (2, 4):
        reader.warn(
            f"raft.peers: a group of {size} survives no more failures than one of {size - 1}"
        )
    if values["store.flush_disk_type"] == "ASYNC_FLUSH":
        reader.warn(
            "store.flush_disk_type = ASYNC_FLUSH: a power cut may lose acknowledged messages"
        )
    if values["broker.broker_role"] == "ASYNC_MASTER":
        reader.warn("broker.broker_role = ASYNC_MASTER: a fail-over may lose acknowledged messages")
    addresses = values["broker.namesrv_addr"]
    far = [addr for addr in addresses if not is_loopback(split_address(addr)[0])]
    if len(values["raft.peers"]) == 1 and far:
        reader.warn(
            f"raft.peers: a group of one, which registers at {far[0]}: what it acknowledges is on"
            " this machine alone. Name the other members in raft.peers (dLegerPeers) if there are"
            " any; do not start two such brokers under one brokerName"
        )
    for comment in reader.comments:
        reader.warn(comment)


def _conflicts(config: BrokerConfig) -> Iterator[tuple[str, str]]:
    raft, store, server = config.raft, config.store, config.server
    most_read = max(store.max_transfer_bytes_in_memory, store.max_transfer_bytes_in_disk)
    frame_bytes = min(server.max_frame_bytes, MAX_FRAME_BYTES)
    yield from _member_conflicts(config)
    if raft.heartbeat_interval_ms * 3 > raft.election_timeout_ms:
        yield (
            "raft.heartbeat_interval_ms",
            f"at most a third of raft.election_timeout_ms = {raft.election_timeout_ms}",
        )
    if store.max_message_size + RECORD_OVERHEAD_BYTES > raft.max_entry_bytes:
        yield (
            "store.max_message_size",
            f"an entry of raft.max_entry_bytes = {raft.max_entry_bytes} must hold the largest"
            f" message and {RECORD_OVERHEAD_BYTES} bytes more",
        )
    elif most_read + store.max_message_size + RECORD_OVERHEAD_BYTES > frame_bytes:
        yield (
            "store.max_transfer_bytes_in_memory",
            f"an answer may hold {most_read} bytes and one message of store.max_message_size ="
            f" {store.max_message_size}; brokers and clients take frames of {frame_bytes} bytes",
        )
    if raft.max_entry_bytes > raft.max_pending_bytes:
        yield ("raft.max_pending_bytes", "less than one entry of raft.max_entry_bytes")
    for path in ("broker.cluster_name", "broker.broker_name", "raft.group"):
        # A name that was taken from another setting is shown there.
        if not config.sources[path].startswith("from ") and not _NAME.fullmatch(config.get(path)):
            yield (path, "letters, digits, %, |, -, _ and . only")
    if server.tls_mode != "disabled" and not (server.tls_cert_file and server.tls_key_file):
        yield ("server.tls_mode", "needs server.tls_cert_file and server.tls_key_file")
    if server.acl_enable and not server.acl_file:
        yield ("server.acl_enable", "needs server.acl_file, the accounts")
    if not config.broker.leader_address:
        for name in ("leader_address_listen", "leader_hook"):
            if getattr(config.broker, name):
                yield (f"broker.{name}", "needs broker.leader_address")
    tls = (raft.tls_cert_file, raft.tls_key_file, raft.tls_ca_file)
    if any(tls) and not all(tls):
        yield ("raft.tls_cert_file", "raft.tls_cert_file, tls_key_file and tls_ca_file go together")


def _member_conflicts(config: BrokerConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the list of members, or with this node's place in it."""
    peers, self_id = config.raft.peers, config.raft.self_id
    ids = [peer.id for peer in peers]
    if len(set(ids)) != len(ids):
        yield ("raft.peers", "an id stands there twice")
    if len({(peer.host, peer.port) for peer in peers}) != len(ids):
        yield ("raft.peers", "an address stands there twice")
    if len(ids) > GROUP_SIZE_MAX:
        yield ("raft.peers", f"a group has at most {GROUP_SIZE_MAX} members")
    if self_id not in ids:
        yield ("raft.self_id", f"not one of the peers {', '.join(ids)}")
    own_hosts = {peer.host for peer in peers if peer.id == self_id}
    if any(p.host in own_hosts and p.port == config.server.listen_port for p in peers):
        yield ("server.listen_port", "a port of this host in raft.peers")
    for peer in peers:
        if not (is_name(peer.id) and is_host(peer.host)):
            yield ("raft.peers", f"{peer} is no address that a member can be found at")
    far = [peer for peer in peers if not is_loopback(peer.host)]
    if len(peers) > 1 and far and not config.has_guarded_peers:
        yield (
            "raft.peers",
            f"any process that reaches {far[0].address} could pass for a member, read all messages"
            " and forge some: set raft.secret_file (raftSecretFile) to a file that all members"
            " share, which `dledger raft secret FILE` makes, or raft.tls_cert_file",
        )
