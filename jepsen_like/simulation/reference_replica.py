"""A replica that never restarts: what each replica derives is compared with what it derives.

It is fed every committed entry once, in order, from whichever replica applies it first, and keeps
all in memory: no snapshot, no file, no replay, no entry applied twice. Its consume queues and keys
are decoded record by record.

===================  =======================================================================
applied              an applied entry is whole and follows the one before
tables               `Checks.compare_state` compares the tables of all replicas with its tables
consume queues       unit by unit, when a process has started and at the end of a run
keys                 each key is found where its record stands, and nothing else is found
times                each search by time finds the offset that its message has
===================  =======================================================================

Tables are compared as plain values (`digests_by_field`). A snapshot is what the product chooses to
keep; a field that it forgets is missing on both sides of a comparison of snapshots. So this walk
asks each object for its own fields: those of a dataclass that count in comparisons, and those of a
`msgspec.Struct`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np

from dledger.commitlog.derive import derive_plain
from dledger.commitlog.entry import EntryHeader, parse_header, verify_frame
from dledger.commitlog.errors import CorruptEntryError, MQError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_index import FOREVER
from dledger.commitlog.properties import (
    KEY_SEPARATOR,
    PROPERTY_KEYS,
    PROPERTY_UNIQ_KEY,
    get_property,
)
from dledger.commitlog.queue_unit import UNIT_DTYPE
from dledger.commitlog.record import SYS_FLAG_ROLLBACK, SYS_FLAG_TRANSACTION_MASK, decode_record
from dledger.group import Group
from dledger.group_api import search_offset
from dledger.jepsen_like.simulation.node import BrokerNode, CheckedWorld
from dledger.settings.text import delays_of_levels
from dledger.state.apply import apply_entry, raise_min_offsets
from dledger.state.producer_sessions import ProducerSessions
from dledger.state.table import Table
from dledger.state.tables import QueueBounds, QueueKey, StateTables

UNIT_BYTES: Final = UNIT_DTYPE.itemsize

LAST_UNITS: Final = 64
"""Units of a queue that are compared when a process starts: what a crash harms is at the end."""

SEARCHES_MAX: Final = 8
"""Newest messages of a queue whose store times are searched for."""

FOUND_MAX: Final = 64
"""A query for a key returns no more positions."""


class ReferenceReplica:
    """What one broker group has applied.

    Attributes:
        tables: After the newest entry that was fed; None before the first broker has started.
        compare: Called with a name, an index and the tables there.
        keys: Topic and key to the positions of their records, oldest first.
    """

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self.tables: StateTables | None = None
        self.keys: dict[tuple[str, str], list[int]] = {}
        self.compare: Callable[[str, int, StateTables], None] = lambda *_: None
        self._hashes: dict[int, set[int]] = {}
        self._units: dict[QueueKey, bytearray] = {}
        self._times: dict[QueueKey, list[int]] = {}
        self._has_deleted = False
        self._delays: Any = {}

    @property
    def applied_index(self) -> int:
        """The newest entry that was fed."""
        return 0 if self.tables is None else self.tables.applied_index

    def watch(self, node: BrokerNode, group: Group) -> None:
        """Take what a process applied when it started, and compare the ends of its queues."""
        if self.tables is None:
            state, settings = group.state, group.store.settings
            self._delays = delays_of_levels(settings.delay_levels_ms)
            self.tables = StateTables(
                builtin_topics=state.builtin_topics,
                builtin_groups=state.builtin_groups,
                producers=ProducerSessions(state.producers.sessions_max),
            )
        self.feed(node, group)
        if not node.has_rotten_queues:
            self.compare_queues(node, group, last=LAST_UNITS)

    def feed(self, node: BrokerNode, group: Group) -> None:
        """Apply what *group* has applied and the reference has not."""
        tables, log = self.tables, group.store.log
        assert tables is not None
        end = min(group.state.applied_index, group.store.derived_index)
        while tables.applied_index < end:
            index = tables.applied_index + 1
            if index < log.first_index or index in log.damaged:
                return  # another replica has it
            try:
                frame = bytes(log.frame(index))
                header = parse_header(frame)
                verify_frame(frame, header, tables.applied_chain)
            except CorruptEntryError as error:
                if node.is_trusted:
                    self._world.violate("applied", f"{node.name} applied a bad entry: {error}")
                return
            except (MQError, OSError):
                return
            self._apply(tables, frame, header)
            if index % self._world.settings.compare_state_every == 0:
                self.compare("the reference", index, tables)

    def _apply(self, tables: StateTables, frame: bytes, header: EntryHeader) -> None:
        derived = derive_plain(frame, header, delay_ms=self._delays)
        applied = apply_entry(tables, frame, header, derived)
        for item in applied.units:
            units = self._units.setdefault((item.topic, item.queue_id), bytearray())
            if len(units) != item.first * UNIT_BYTES:
                self._world.violate(
                    "derived", f"{item.topic} {item.queue_id} goes on at {item.first} with a gap"
                )
            units += item.units.tobytes()
            times = self._times.setdefault((item.topic, item.queue_id), [])
            times += [header.store_time_ms] * len(item.units)
        for topic in applied.deleted_topics:
            self._has_deleted = True
            for key in [key for key in self._units if key[0] == topic]:
                del self._units[key], self._times[key]
        if applied.floor_moved:
            raise_min_offsets(tables, self._first_kept)
        for start in derived.starts.tolist():
            self._take_keys(memoryview(frame)[start:])

    def _first_kept(self, topic: str, queue_id: int, bounds: QueueBounds) -> tuple[int, int]:
        assert self.tables is not None
        positions = self.units(topic, queue_id)["phy_offset"]
        first = int(np.searchsorted(positions, self.tables.floor.position))
        first = min(max(first, bounds.min_offset), bounds.max_offset)
        return first, int(positions[first]) if first < len(positions) else 0

    def _take_keys(self, data: memoryview) -> None:
        record = decode_record(data, check_crc=False)
        if record.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_ROLLBACK:
            return
        unique = get_property(record.properties, PROPERTY_UNIQ_KEY.encode())
        several = get_property(record.properties, PROPERTY_KEYS.encode()) or b""
        found = [] if unique is None else [unique.decode("utf-8", "replace")]
        found += [key for key in several.decode("utf-8", "replace").split(KEY_SEPARATOR) if key]
        for key in found:
            name = (record.topic, key)
            self.keys.setdefault(name, []).append(record.phy_offset)
            self._hashes.setdefault(record.phy_offset, set()).add(index_key_hash(*name))

    def units(self, topic: str, queue_id: int) -> Any:
        """Return the units of a queue from offset 0 on."""
        return np.frombuffer(self._units.get((topic, queue_id), b""), UNIT_DTYPE)

    # -- comparisons -----------------------------------------------------------------------

    def compare_queues(self, node: BrokerNode, group: Group, *, last: int | None = None) -> None:
        """Compare the consume queues of a replica, unit by unit."""
        store, state = group.store, group.state
        behind = state.applied_index != self.applied_index
        if store.refilling or (behind and self._has_deleted) or self.applied_index == 0:
            return
        for (topic, queue_id), bounds in state.queues.items():
            first = bounds.min_offset
            if last is not None:
                first = max(first, bounds.max_offset - last)
            if first >= bounds.max_offset:
                continue
            try:
                units = group.queues.queue(topic, queue_id).read(first, bounds.max_offset - first)
            except (MQError, OSError) as error:
                self._differs(node, f"{topic} {queue_id} cannot be read from {first} on: {error}")
                continue
            wanted = self._units.get((topic, queue_id), b"")
            wanted = bytes(wanted[first * UNIT_BYTES : bounds.max_offset * UNIT_BYTES])
            if units.tobytes() != wanted:
                self._differs(node, f"{topic} {queue_id} has other units from {first} on")

    def compare_keys(self, node: BrokerNode, group: Group) -> None:
        """Look for every key in a replica's key index; nothing is asked while keys are missing."""
        index, floor = group.key_index, group.state.floor.position
        if index.is_behind or group.store.refilling or group.store.log.damaged.indexes:
            return
        for (topic, key), positions in self.keys.items():
            kept = {at for at in positions[-FOUND_MAX:] if at >= floor}
            if not kept:
                continue
            found = set(index.query(topic, key, FOUND_MAX, 0, FOREVER))
            if index.is_behind:
                return  # the query itself has met a bad sector
            if len(found) < FOUND_MAX and not found >= kept:
                self._differs(node, f"key {key} of {topic} is not found at {sorted(kept - found)}")
            key_hash = index_key_hash(topic, key)
            wrong = [at for at in found if at >= floor and key_hash not in self._hashes.get(at, ())]
            if wrong:
                self._differs(node, f"key {key} of {topic} is found at {wrong}")
        self._world.sometimes["keys_compared"] += 1

    def compare_times(self, node: BrokerNode, group: Group) -> None:
        """Search the queues of a replica by time, at and around the newest store times."""
        if group.store.refilling or group.state.applied_index != self.applied_index:
            return
        for (topic, queue_id), bounds in group.state.queues.items():
            if bounds.min_offset >= bounds.max_offset:
                continue  # of an empty queue the answer is 0
            times = self._times.get((topic, queue_id), [])
            for at in {time + by for time in times[-SEARCHES_MAX:] for by in (-1, 0, 1)}:
                for upper, found in (
                    (False, bisect_left(times, at)),
                    (True, bisect_right(times, at) - 1),
                ):
                    wanted = min(max(found, bounds.min_offset), bounds.max_offset)
                    try:
                        offset = search_offset(group, topic, queue_id, at, upper=upper)
                    except (MQError, OSError) as error:
                        self._differs(node, f"{topic} {queue_id} is not searched at {at}: {error}")
                        continue
                    if offset != wanted:
                        self._differs(node, f"{topic} {queue_id} at {at}: {offset}, not {wanted}")

    def _differs(self, node: BrokerNode, text: str) -> None:
        self._world.violate("derived", f"{node.name}: {text}")


FROM_SETTINGS: Final = frozenset({"builtin_topics", "builtin_groups"})
"""Fields that no entry changes."""

_LEAVES: Final = (int, str, bytes, float, type(None))


def digests_by_field(tables: StateTables) -> dict[str, bytes]:
    """Return a digest of each field of *tables*; equal tables have equal digests.

    Raises TypeError: a field holds something that this walk does not know.
    """
    return {
        field.name: blake2b(repr(plain(getattr(tables, field.name))).encode()).digest()[:16]
        for field in fields(tables)
        if field.compare and field.name not in FROM_SETTINGS
    }


def plain(value: Any) -> Any:
    """Return *value* as tuples of leaves whose `repr` is equal where the values are equal.

    Raises TypeError: it holds something that this walk does not know.
    """
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, Table) and value.form.in_order:
        return tuple((plain(key), plain(item)) for key, item in value.items())
    if isinstance(value, Mapping):
        return tuple(sorted(((plain(key), plain(item)) for key, item in value.items()), key=repr))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((plain(item) for item in value), key=repr))
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    return (type(value).__name__, tuple(_fields_of(value)))


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.compare]
    elif isinstance(value, msgspec.Struct):
        names = list(value.__struct_fields__)
    else:
        raise TypeError(f"no rule for the fields of a {type(value).__name__}")
    return [(name, plain(getattr(value, name))) for name in names]
