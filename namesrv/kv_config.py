"""The key-value configuration: the only thing a NameServer keeps over a restart.

One JSON file in RocketMQ's form, ``{"configTable": {namespace: {key: value}}}``, replaced as a
whole. The file is written before the table changes, so what a client reads is always on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from commitlog.errors import ConfigError
from commitlog.seams import Disk
from namesrv.errors import KvConfigFullError

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

    Raises:
        ConfigError: Not JSON, or JSON of another shape.
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

        Raises:
            ConfigError: The file is damaged. It is left as it is, and a NameServer must not start
                with an empty table in its place: ordered topics would lose their order.
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

        Raises:
            DiskFullError: No space; the value stays, in memory and in the file.
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
