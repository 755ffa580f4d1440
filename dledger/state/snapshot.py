"""The tables as one checksummed piece of canonical CBOR, and back.

Layout: ``magic 8 bytes · format u32 · crc32(body) u32 · body length u64 · body``, big-endian.
Built-in topics and groups are not in it: they come from the group's settings.

A *cut* holds copies of the rows that changed. It shares nothing with the tables that apply could
change, so it may go to a worker thread. Cuts that follow each other without a gap make up the
whole state: see `Image`.

Spec: docs/internals/state.md, section 3.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, fields
from typing import Any, Final

import cbor2
import msgspec
from typing_extensions import Buffer

from dledger.commitlog.errors import CorruptStoreError, ForeignStoreError
from dledger.state.producer_sessions import ProducerSessions
from dledger.state.table import MAP, EncodedTable, TableCut, head, plain
from dledger.state.tables import Counters, StateTables

SNAPSHOT_MAGIC = b"DLSTATE\n"
SNAPSHOT_FORMAT: Final = 1
_HEADER = struct.Struct(">8sIIQ")

COUNTERS: Final = "counters"
"""Name of what is no table."""

LOG_NUMBERS: Final = 1 << 62
"""Below it are indexes, positions, terms and times of entries: the log has 63 bits for each."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of all tables as they were at one index."""

    applied_index: int
    counters: dict[str, Any]
    tables: list[TableCut]


def take_cut(tables: StateTables) -> Cut:
    """Copy what changed since the cut before, and begin to mark again."""
    return _cut(tables, [table.take_changes() for table in tables.tables])


def cut_everything(tables: StateTables) -> Cut:
    """Copy all rows, and begin to mark again."""
    for table in tables.tables:
        table.changed = {}
    return _cut(tables, [table.cut(table) for table in tables.tables])


def snapshot(tables: StateTables) -> bytes:
    """Return *tables* as bytes, without hints; nothing is marked."""
    image = Image()
    rows = [table.cut(table) for table in tables.tables if not table.form.is_hint]
    image.take(_cut(tables, rows))
    return image.snapshot()


def _cut(tables: StateTables, rows: list[TableCut]) -> Cut:
    counters = {each.name: plain(getattr(tables, each.name)) for each in fields(Counters)}
    return Cut(tables.applied_index, counters, rows)


class Image:
    """The tables in their encoded form, made of cuts. Not thread-safe: one worker at a time."""

    def __init__(self) -> None:
        self.applied_index = 0
        self._counters: dict[str, Any] = {}
        self._tables: dict[str, EncodedTable] = {}

    def take(self, cut: Cut) -> None:
        """Go on to the index of *cut*, which follows the one before without a gap."""
        self.applied_index = cut.applied_index
        self._counters = cut.counters
        for rows in cut.tables:
            name = rows.form.name
            if name not in self._tables:
                self._tables[name] = EncodedTable(rows.form)
            self._tables[name].take(rows)

    def snapshot(self) -> bytes:
        """Return the tables as they were at `applied_index`; equal tables give equal bytes."""
        parts = {COUNTERS: cbor2.dumps(self._counters, canonical=True)}
        parts |= {name: table.joined() for name, table in self._tables.items()}
        pieces = [head(MAP, len(parts))]
        for name in sorted(parts, key=cbor2.dumps):
            pieces += (cbor2.dumps(name), parts[name])
        return framed(b"".join(pieces))


def framed(body: bytes) -> bytes:
    """Return an encoded body with its head."""
    return _HEADER.pack(SNAPSHOT_MAGIC, SNAPSHOT_FORMAT, zlib.crc32(body), len(body)) + body


def load(data: Buffer, like: StateTables | None = None) -> StateTables:
    """Return the tables in *data*, which may come from anywhere.

    Args:
        like: Tables with the same built-in topics and groups, and as many sessions of producers.

    Raises:
        CorruptStoreError: It is damaged, or of a shape or a place in the log that cannot be.
        ForeignStoreError: It is of another format.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise CorruptStoreError(f"state snapshot of {len(view)} bytes is too short")
    magic, version, crc, length = _HEADER.unpack_from(view)
    if magic != SNAPSHOT_MAGIC:
        raise CorruptStoreError("not a state snapshot")
    if version != SNAPSHOT_FORMAT:
        raise ForeignStoreError(
            f"a state snapshot of format {version}; this program knows {SNAPSHOT_FORMAT}"
        )
    body = view[_HEADER.size :]
    if len(body) != length or zlib.crc32(body) != crc:
        raise CorruptStoreError("state snapshot does not match its checksum")
    like = StateTables() if like is None else like
    tables = StateTables(
        builtin_topics=like.builtin_topics,
        builtin_groups=like.builtin_groups,
        producers=ProducerSessions(like.producers.sessions_max),
    )
    try:
        _fill(tables, cbor2.loads(bytes(body)))
    except CorruptStoreError:
        raise
    except Exception as error:
        # A checksum shows that it is whole, not its maker: it may be of any shape.
        raise CorruptStoreError(f"a state snapshot of another shape: {error!r}") from error
    return tables


def _fill(tables: StateTables, value: dict[str, Any]) -> None:
    counters = value.pop(COUNTERS)
    read = msgspec.convert(counters, Counters)
    if {each.name for each in fields(read)} != counters.keys():
        raise CorruptStoreError("a state snapshot with other counters than this program knows")
    for each in fields(read):
        setattr(tables, each.name, getattr(read, each.name))
    for table in tables.tables:
        if table.form.name in value or not table.form.is_hint:
            table.load(value.pop(table.form.name))
    if value:
        raise CorruptStoreError(f"a state snapshot with unknown tables: {sorted(value)}")
    tables.index()
    floor = tables.floor
    numbers = (
        tables.applied_index,
        tables.members_index,
        floor.first_index,
        floor.position,
        floor.prev_term,
        floor.prev_store_time_ms,
    )
    if not all(0 <= number < LOG_NUMBERS for number in numbers):
        raise CorruptStoreError("a state snapshot of a place that no log comes to")
    if not 1 <= floor.first_index <= tables.applied_index + 1:
        raise CorruptStoreError(
            f"a state snapshot of entry {tables.applied_index} whose log begins with entry "
            f"{floor.first_index} at {floor.position}"
        )
