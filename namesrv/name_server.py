"""What one NameServer knows: routes, their encoded answers, settings, and key-values on disk.

No I/O but the key-value file, JSON in RocketMQ's form, replaced as a whole before the table
changes. An answer about a route is encoded once per topic and dialect and kept until the route
changes. Topics that are not registered are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from dledger.commitlog.errors import ConfigError
from dledger.commitlog.seams import Disk
from dledger.namesrv.config import SCHEMA, NamesrvConfig
from dledger.namesrv.errors import KvConfigFullError, SettingLockedError
from dledger.namesrv.route_table import RouteInfoManager
from dledger.raft.identity import GroupSecret
from dledger.remoting.properties import format_properties
from dledger.remoting.protocol.bodies import TopicRouteData
from dledger.remoting.protocol.command import STANDARD_JSON_VERSION
from dledger.remoting.protocol.fastjson import Dialect

# ---------------------------------------------------------------------------------- key-values


ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
"""Namespace of ordered topics: topic → ``broker:queues;broker:queues``."""

MAX_KV_CONFIG_BYTES: Final = 4 * 1024 * 1024
"""Largest file. Every change rewrites and flushes all of it while routes wait."""


class _KvConfigFile(msgspec.Struct, forbid_unknown_fields=False):
    config_table: dict[str, dict[str, str]] = msgspec.field(name="configTable")


_decoder = msgspec.json.Decoder(_KvConfigFile)


def encode_kv_config(tables: Mapping[str, Mapping[str, str]]) -> bytes:
    """Return the file's content: sorted, indented, so that people can read and compare it."""
    content = {"configTable": {name: dict(table) for name, table in tables.items()}}
    return msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=2) + b"\n"


def decode_kv_config(content: bytes) -> dict[str, dict[str, str]]:
    """Return namespace → key → value from a file's content.

    Raises ConfigError: not JSON, or JSON of another shape.
    """
    try:
        return _decoder.decode(content).config_table
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a key-value configuration: {error}") from error


class KvConfigManager:
    """Namespaces of keys and values, durable as soon as a change returns.

    Invariant: what `get` answers is what the file has.
    Spec: docs/internals/protocol/semantics.md, section 11.
    """

    def __init__(self, disk: Disk, path: str, tables: dict[str, dict[str, str]]) -> None:
        self._disk = disk
        self._path = path
        self._tables = tables

    @classmethod
    def load(cls, disk: Disk, path: str) -> KvConfigManager:
        """Return the table that the file holds; an empty one when there is no file yet.

        Raises ConfigError: the file is damaged. It is left as it is, and a NameServer must not
        start with an empty table in its place: ordered topics would lose their order.
        """
        try:
            content = disk.read(path)
        except FileNotFoundError:
            return cls(disk, path, {})
        try:
            return cls(disk, path, decode_kv_config(content))
        except ConfigError as error:
            raise ConfigError(f"{path} is damaged ({error}); repair or remove it") from error

    def get(self, namespace: str, key: str) -> str | None:
        """Return a value, or None."""
        return self._tables.get(namespace, {}).get(key)

    def table(self, namespace: str) -> Mapping[str, str] | None:
        """Return all keys and values of a namespace, or None when nothing was ever put there."""
        return self._tables.get(namespace)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value, durably.

        Raises:
            KvConfigFullError: Over `MAX_KV_CONFIG_BYTES`; the old value stays.
            DiskFullError: No space; the old value stays, in memory and in the file.
        """
        if self.get(namespace, key) == value:
            return
        self._store({**self._tables, namespace: {**self._tables.get(namespace, {}), key: value}})

    def delete(self, namespace: str, key: str) -> None:
        """Remove a value, durably. Missing is fine.

        Raises DiskFullError: no space; the value stays, in memory and in the file.
        """
        table = self._tables.get(namespace)
        if table is None or key not in table:
            return
        kept = {name: value for name, value in table.items() if name != key}
        tables = {name: table for name, table in self._tables.items() if name != namespace}
        self._store({**tables, namespace: kept} if kept else tables)

    def _store(self, tables: dict[str, dict[str, str]]) -> None:
        content = encode_kv_config(tables)
        if len(content) > MAX_KV_CONFIG_BYTES:
            raise KvConfigFullError(
                f"key-value configuration would take {len(content)} bytes, "
                f"the limit is {MAX_KV_CONFIG_BYTES}; remove keys first"
            )
        self._disk.replace(self._path, content)
        self._tables = tables


# -------------------------------------------------------------------- all that one NameServer knows


def route_dialect(version: int, *, accept_standard_json_only: bool) -> Dialect:
    """Return the dialect a client can read, by its version and its request."""
    if accept_standard_json_only or version >= STANDARD_JSON_VERSION:
        return Dialect.STANDARD
    return Dialect.FASTJSON


class RouteCache:
    """Encoded routes; *build*: returns a topic's route now, or None."""

    def __init__(self, build: Callable[[str], TopicRouteData | None]) -> None:
        self._build = build
        self._bodies: dict[Dialect, dict[str, bytes]] = {dialect: {} for dialect in Dialect}

    def body(self, topic: str, dialect: Dialect) -> bytes | None:
        """Return the encoded route of *topic*, or None when no broker serves it."""
        bodies = self._bodies[dialect]
        body = bodies.get(topic)
        if body is None:
            route = self._build(topic)
            if route is None:
                return None
            body = bodies[topic] = route.encode(dialect)
        return body

    def invalidate(self, topics: Iterable[str]) -> None:
        """Forget topics whose route may have changed."""
        topics = list(topics)
        for bodies in self._bodies.values():
            for topic in topics:
                bodies.pop(topic, None)

    def clear(self) -> None:
        """Forget everything."""
        for bodies in self._bodies.values():
            bodies.clear()

    def __len__(self) -> int:
        return sum(len(bodies) for bodies in self._bodies.values())


LOCKED_KEYS: Final = frozenset(
    {"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"}
)
"""Keys that a client may not even try to change: they name files of this machine."""

PROTECTING_KEYS: Final = frozenset({"useTLS"})
"""Keys that would protect something and cannot here: refused, not just ignored."""

SOURCE: Final = "changed while it runs"


class NameServer:
    """The tables of a NameServer and what holds between them.

    Raises ConfigError: the key-value file is damaged, or the secret of the groups not to be read.
    """

    def __init__(self, config: NamesrvConfig, disk: Disk) -> None:
        self.config = config.copied()  # of this run: settings may change while it lasts
        settings = self.config.namesrv
        self.kv_config = KvConfigManager.load(disk, settings.kv_config_path)
        self.route_cache = RouteCache(self._build_route)
        self.routes = RouteInfoManager(settings, on_route_change=self.route_cache.invalidate)
        if settings.group_secret_file:
            try:
                self.routes.secret = GroupSecret(disk.read(settings.group_secret_file).strip())
            except OSError as error:
                raise ConfigError(f"namesrv.group_secret_file: {error}") from None

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Set a value, durably, and forget the route answer it stands in.

        Raises:
            KvConfigFullError: The table is full; the old value stays.
            DiskFullError: No space; the old value stays.
        """
        self.kv_config.put(namespace, key, value)
        self._kv_changed(namespace, key)

    def delete_kv(self, namespace: str, key: str) -> None:
        """Remove a value, durably, and forget the route answer it stood in.

        Raises DiskFullError: no space; the value stays.
        """
        self.kv_config.delete(namespace, key)
        self._kv_changed(namespace, key)

    def settings_text(self) -> str:
        """Return all settings under RocketMQ's names, as properties."""
        return format_properties(
            {key: self.config.shown(path) for key, path in SCHEMA.keys.items()}
        )

    def update_settings(self, changes: Mapping[str, str]) -> list[str]:
        """Change settings, RocketMQ's key → value, until the next start; all of them or none.

        Returns a sentence for each key that is accepted and changes nothing, as in a file.

        Raises:
            SettingLockedError: A key that no client may change.
            ConfigError: An unknown key, one that would have to protect something and cannot here,
                a bad value, or a setting that needs a restart.
        """
        values, notes = self.config.changes(
            changes, path_of=_path_of, daemon="NameServer", never=LOCKED_KEYS | PROTECTING_KEYS
        )
        self.config.with_values(values, SOURCE)
        self.config.change(values, SOURCE)
        self.route_cache.clear()
        return notes

    def _build_route(self, topic: str) -> TopicRouteData | None:
        route = self.routes.route(topic)
        if route is not None and self.config.namesrv.order_message_enable:
            route.order_topic_conf = self.kv_config.get(ORDER_TOPIC_CONFIG, topic)
        return route

    def _kv_changed(self, namespace: str, key: str) -> None:
        if namespace == ORDER_TOPIC_CONFIG:
            self.route_cache.invalidate((key,))


def _path_of(key: str) -> str:
    """Return the path of a setting from RocketMQ's key.

    Raises:
        SettingLockedError: No client may change it.
        ConfigError: There is no such setting, or it cannot protect anything here.
    """
    if key in LOCKED_KEYS:
        raise SettingLockedError(f"Can not update config in black list: {key}")
    if key in PROTECTING_KEYS:
        raise ConfigError(f"{key} has no meaning here")
    if key not in SCHEMA.keys:
        raise ConfigError(f"unknown setting {key}")
    return SCHEMA.keys[key]
