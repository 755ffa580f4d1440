"""The rows of the tables that changed, and the tables in their encoded form, made of them.

A cut shares nothing with the tables that apply could change, so it may go to a worker thread. Cuts
that follow each other without a gap make up the whole state. `Image` encodes each row when it has
changed, and a snapshot is the rows joined; equal tables give equal bytes. Not thread-safe: one
worker at a time.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import cbor2
import numpy as np

from dledger.state.accounts import AccountConfig
from dledger.state.pending_timers import RECALLED_KEPT
from dledger.state.pop import PopKey, PopRowCopy
from dledger.state.queue_lock import LockKey, QueueLock
from dledger.state.snapshot import framed, scalars
from dledger.state.tables import Marks, StateTables
from dledger.state.topics import SubscriptionGroupConfig, TopicConfig
from dledger.state.transactions import (
    DECISIONS_KEPT,
    OpenHalf,
    TransactionDecision,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Changed rows by key; None, or no queues, for a row that was removed."""

    applied_index: int
    scalars: dict[str, Any]
    topics: list[tuple[str, TopicConfig | None]]
    groups: list[tuple[str, SubscriptionGroupConfig | None]]
    offsets: list[tuple[tuple[str, str], dict[int, int] | None]]
    queues: list[tuple[str, dict[int, list[int]], dict[int, int]]]
    """Topic, bounds and first positions by queue."""
    locks: list[tuple[LockKey, QueueLock | None]]
    halves: list[tuple[int, OpenHalf | None]]
    decided: list[tuple[int, TransactionDecision | None]]
    timer_pieces: list[tuple[int, bytes | None]]
    recalled: list[int]
    producers: list[tuple[bytes, list[Any] | None]]
    pops: list[tuple[PopKey, PopRowCopy | None]]
    accounts: list[tuple[str, AccountConfig | None]]

    def __len__(self) -> int:
        """Return how many rows there are, all queues of a topic being one."""
        return (
            len(self.topics)
            + len(self.groups)
            + len(self.offsets)
            + len(self.queues)
            + len(self.locks)
            + len(self.halves)
            + len(self.decided)
            + len(self.timer_pieces)
            + len(self.recalled)
            + len(self.producers)
            + len(self.pops)
            + len(self.accounts)
        )


def take_cut(tables: StateTables) -> Cut:
    """Copy what changed since the cut before, and begin to mark again."""
    marks, tables.marks = tables.marks, Marks()
    return _cut(tables, marks, tables.producers.take_touched())


def cut_everything(tables: StateTables) -> Cut:
    """Copy all rows, and begin to mark again."""
    tables.marks = Marks()
    tables.producers.take_touched()
    return _whole(tables)


def snapshot(tables: StateTables) -> bytes:
    """Return *tables* as bytes, without hints; nothing is marked."""
    image = Image()
    image.take(_whole(tables))
    return image.snapshot(hints=False)


def _whole(tables: StateTables) -> Cut:
    everything = Marks(
        topics=set(tables.topics),
        groups=set(tables.subscription_groups),
        offsets=set(tables.consumer_offsets),
        queues=set(tables.queues_of),
        locks=set(tables.queue_locks),
        halves=dict.fromkeys(tables.transactions.open),
        decided=list(tables.transactions.decided),
        timer_pieces=set(tables.timers.pieces()),
        recalled=tables.timers.recalled(),
        pops=set(tables.pops),
        accounts=set(tables.accounts),
    )
    return _cut(tables, everything, tables.producers.ids())


def _cut(tables: StateTables, marks: Marks, producers: Iterable[bytes]) -> Cut:
    offsets, queues = tables.consumer_offsets, tables.queues_of
    transactions = tables.transactions
    return Cut(
        applied_index=tables.applied_index,
        scalars=scalars(tables),
        topics=[(name, tables.topics.get(name)) for name in marks.topics],
        groups=[(name, tables.subscription_groups.get(name)) for name in marks.groups],
        offsets=[
            (pair, dict(offsets[pair]) if pair in offsets else None) for pair in marks.offsets
        ],
        queues=[
            (
                topic,
                {
                    queue_id: [bounds.min_offset, bounds.max_offset]
                    for queue_id, bounds in queues.get(topic, {}).items()
                },
                {
                    queue_id: bounds.first_position
                    for queue_id, bounds in queues.get(topic, {}).items()
                },
            )
            for topic in marks.queues
        ],
        locks=[(key, tables.queue_locks.get(key)) for key in marks.locks],
        halves=[(half, transactions.open.get(half)) for half in marks.halves],
        decided=[(half, transactions.decided.get(half)) for half in marks.decided],
        timer_pieces=[(number, tables.timers.piece(number)) for number in marks.timer_pieces],
        recalled=marks.recalled,
        producers=[(name, tables.producers.row(name)) for name in producers],
        pops=[
            (key, tables.pops[key].copied() if key in tables.pops else None) for key in marks.pops
        ],
        accounts=[(name, tables.accounts.get(name)) for name in marks.accounts],
    )


_HALF: Final = struct.Struct(">5q")
_ARRAY: Final = 4
_MAP: Final = 5


class Image:
    """Everything in the cuts so far."""

    def __init__(self) -> None:
        self.applied_index = 0
        self._scalars: dict[str, Any] = {}
        self._topics = _EncodedMap()
        self._groups = _EncodedMap()
        self._queues = _EncodedMap()
        self._positions = _EncodedMap()
        self._offsets = _EncodedTree()
        self._pops: dict[tuple[str, str], dict[int, list[Any]]] = {}
        self._pop_tree = _EncodedTree()
        self._locks: dict[tuple[str, str], dict[int, list[Any]]] = {}
        self._lock_tree = _EncodedTree()
        self._halves: dict[int, bytes] = {}
        self._decided: OrderedDict[int, int] = OrderedDict()
        self._timer_pieces: dict[int, bytes] = {}
        self._recalled: dict[int, None] = {}
        self._producers: OrderedDict[bytes, bytes] = OrderedDict()
        self._accounts = _EncodedMap()

    def take(self, cut: Cut) -> None:
        """Go on to the index of *cut*, which follows the one before without a gap."""
        self.applied_index = cut.applied_index
        self._scalars = cut.scalars
        self._take_pops(cut)
        for name, topic in cut.topics:
            self._topics.put(name, None if topic is None else _dumps(topic.to_state()))
        for name, group in cut.groups:
            self._groups.put(name, None if group is None else _dumps(group.to_state()))
        for topic_name, queues, positions in cut.queues:
            self._queues.put(topic_name, _dumps(queues) if queues else None)
            self._positions.put(topic_name, _dumps(positions) if positions else None)
        for (group_name, topic_name), offsets in cut.offsets:
            self._offsets.put(group_name, topic_name, None if offsets is None else _dumps(offsets))
        for access_key, account in cut.accounts:
            self._accounts.put(access_key, None if account is None else _dumps(account.to_state()))
        self._take_locks(cut)
        self._take_services(cut)

    def _take_locks(self, cut: Cut) -> None:
        changed = set()
        for (group, topic, queue_id), lock in cut.locks:
            queues = self._locks.setdefault((group, topic), {})
            if lock is None:
                queues.pop(queue_id, None)
            else:
                queues[queue_id] = [lock.client_id, lock.token]
            changed.add((group, topic))
        for pair in changed:
            queues = self._locks[pair]
            self._lock_tree.put(*pair, _dumps(queues) if queues else None)
            if not queues:
                del self._locks[pair]

    def _take_pops(self, cut: Cut) -> None:
        changed = set()
        for (group, topic, queue_id), row in cut.pops:
            queues = self._pops.setdefault((group, topic), {})
            if row is None:
                queues.pop(queue_id, None)
            else:
                queues[queue_id] = row.to_state()
            changed.add((group, topic))
        for pair in changed:
            queues = self._pops[pair]
            self._pop_tree.put(*pair, _dumps(queues) if queues else None)
            if not queues:
                del self._pops[pair]

    def _take_services(self, cut: Cut) -> None:
        for half_offset, half in cut.halves:
            if half is None:
                self._halves.pop(half_offset, None)
            else:
                self._halves[half_offset] = _HALF.pack(half_offset, *half)
        for half_offset, decision in cut.decided:
            if decision is not None:
                self._decided[half_offset] = int(decision)
        while len(self._decided) > DECISIONS_KEPT:
            self._decided.popitem(last=False)
        for number, piece in cut.timer_pieces:
            if piece is None:
                self._timer_pieces.pop(number, None)
            else:
                self._timer_pieces[number] = piece
        self._recalled.update(dict.fromkeys(cut.recalled))
        while len(self._recalled) > RECALLED_KEPT:
            del self._recalled[next(iter(self._recalled))]
        for producer_id, row in cut.producers:
            # What was used last stands last, as in the table.
            self._producers.pop(producer_id, None)
            if row is not None:
                self._producers[producer_id] = _dumps(row)

    def snapshot(self, *, hints: bool = True) -> bytes:
        """Return the tables as they were at `applied_index`; equal tables give equal bytes.

        *hints*: also what only saves work, and may differ between equal tables.
        """
        body = _EncodedMap()
        for name, value in self._scalars.items():
            body.put(name, _dumps(value))
        body.put("topics", self._topics.joined())
        body.put("subscription_groups", self._groups.joined())
        body.put("consumer_offsets", self._offsets.joined())
        body.put("queues", self._queues.joined())
        if hints:
            body.put("queue_positions", self._positions.joined())
        body.put("queue_locks", self._lock_tree.joined())
        body.put("pops", self._pop_tree.joined())
        body.put("timers", _dumps({"pieces": self._timer_pieces, "recalled": list(self._recalled)}))
        body.put(
            "transactions",
            _dumps(
                {
                    "open": b"".join(self._halves.values()),
                    "decided": np.array(list(self._decided), ">i8").tobytes(),
                    "decisions": bytes(self._decided.values()),
                }
            ),
        )
        rows = self._producers
        body.put("producers", _head(_ARRAY, len(rows)) + b"".join(rows.values()))
        body.put("accounts", self._accounts.joined())
        return framed(body.joined())


class _EncodedMap:
    """A canonical CBOR map of text to values that are encoded already."""

    __slots__ = ("_is_sorted", "_joined", "_keys", "_values")

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        # In canonical order, by length and then by bytes: the head of a key begins with its length.
        # Behind them those that are new; some may have been removed.
        self._keys: list[bytes] = []
        self._is_sorted = True
        self._joined: bytes | None = None

    def __len__(self) -> int:
        return len(self._values)

    def put(self, name: str, value: bytes | None) -> None:
        """Set a value; None removes it."""
        key = _dumps(name)
        self._joined = None
        if value is None:
            if self._values.pop(key, None) is not None:
                self._is_sorted = False
            return
        if key not in self._values:
            self._keys.append(key)
            self._is_sorted = False
        self._values[key] = value

    def joined(self) -> bytes:
        if self._joined is None:
            values = self._values
            if not self._is_sorted:
                # Keys that were removed go, and those that came again stand once. What is sorted
                # stays so: a sort from nothing keeps the interpreter from the event loop.
                self._keys = [key for key in dict.fromkeys(self._keys) if key in values]
                self._keys.sort()
                self._is_sorted = True
            parts = [_head(_MAP, len(values))]
            for key in self._keys:
                parts.append(key)
                parts.append(values[key])
            self._joined = b"".join(parts)
        return self._joined


class _EncodedTree:
    """A map of text to maps of text; a branch without leaves is removed."""

    __slots__ = ("_branches", "_changed", "_map")

    def __init__(self) -> None:
        self._branches: dict[str, _EncodedMap] = {}
        self._changed: set[str] = set()
        self._map = _EncodedMap()

    def put(self, branch: str, leaf: str, value: bytes | None) -> None:
        """Set a value; None removes it."""
        leaves = self._branches.get(branch)
        if leaves is None:
            leaves = self._branches[branch] = _EncodedMap()
        leaves.put(leaf, value)
        self._changed.add(branch)

    def joined(self) -> bytes:
        for branch in self._changed:
            leaves = self._branches[branch]
            self._map.put(branch, leaves.joined() if len(leaves) else None)
            if not len(leaves):
                del self._branches[branch]
        self._changed.clear()
        return self._map.joined()


def _dumps(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _head(major: int, count: int) -> bytes:
    """Return the head of an array or a map with *count* items."""
    if count < 24:
        return bytes([major << 5 | count])
    size = 1 if count < 1 << 8 else 2 if count < 1 << 16 else 4
    return bytes([major << 5 | {1: 24, 2: 25, 4: 26}[size]]) + count.to_bytes(size, "big")
