"""The tables in their encoded form, row by row, kept up to date by cuts.

A snapshot of a whole group may be many megabytes. Encoding it at each checkpoint costs what there
is; here each row is encoded when it has changed, and a snapshot is the rows joined. The bytes are
those of `dledger.state.snapshot.snapshot` with its hints.

Not thread-safe: one worker at a time.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any, Final

import cbor2
import numpy as np

from dledger.state.cut import Cut
from dledger.state.pending_timers import RECALLED_KEPT
from dledger.state.snapshot import framed
from dledger.state.transactions import DECISIONS_KEPT

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
        self._locks: dict[tuple[str, str], dict[int, list[Any]]] = {}
        self._lock_tree = _EncodedTree()
        self._halves: dict[int, bytes] = {}
        self._decided: OrderedDict[int, int] = OrderedDict()
        self._timer_pieces: dict[int, bytes] = {}
        self._recalled: dict[int, None] = {}
        self._producers: OrderedDict[bytes, bytes] = OrderedDict()

    def take(self, cut: Cut) -> None:
        """Go on to the index of *cut*, which follows the one before without a gap."""
        self.applied_index = cut.applied_index
        self._scalars = cut.scalars
        for name, topic in cut.topics:
            self._topics.put(name, None if topic is None else _dumps(topic.to_state()))
        for name, group in cut.groups:
            self._groups.put(name, None if group is None else _dumps(group.to_state()))
        for topic_name, queues, positions in cut.queues:
            self._queues.put(topic_name, _dumps(queues) if queues else None)
            self._positions.put(topic_name, _dumps(positions) if positions else None)
        for (group_name, topic_name), offsets in cut.offsets:
            self._offsets.put(group_name, topic_name, None if offsets is None else _dumps(offsets))
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

    def snapshot(self) -> bytes:
        """Return the tables as they were at `applied_index`, as `snapshot` would."""
        body = _EncodedMap()
        for name, value in self._scalars.items():
            body.put(name, _dumps(value))
        body.put("topics", self._topics.joined())
        body.put("subscription_groups", self._groups.joined())
        body.put("consumer_offsets", self._offsets.joined())
        body.put("queues", self._queues.joined())
        body.put("queue_positions", self._positions.joined())
        body.put("queue_locks", self._lock_tree.joined())
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
