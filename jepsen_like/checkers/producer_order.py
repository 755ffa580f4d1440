"""An idempotent producer's messages stand in each queue in the order in which it sent them.

Also those whose outcome it never learnt: once a later send is stored, an earlier one that is still
on its way is refused. Only for histories in which a producer begins one send after the other under
values of its own that grow: the upper bits of a value name the producer. Delayed messages, which
come when they are due, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from dledger.jepsen_like.checkers.kernel.facts import I64
from dledger.jepsen_like.checkers.verdict import REPORTED_MAX, Verdict, Violation, judge
from dledger.jepsen_like.history.columns import OBS, chosen, operations_of
from dledger.jepsen_like.history.operation import CLIENT_BITS, NEVER, NOTHING, Outcome

NAME: Final = "producer_order"

OVERTAKEN: Final = "a later send overtook an earlier one"

_NUMBERS: Final = ("op_id", "outcome", "queue", "off", "value", "due_ns")
Seen = Mapping[tuple[str, int, int], int]
"""Topic, queue and value: the lowest offset at which it was seen."""


class Lines:
    """Sends that are not delayed; *rows*: a table of sends."""

    def __init__(self, rows: Any) -> None:
        self._rows = chosen(rows, rows.column("due_ns").to_numpy() == NOTHING)
        self._columns = {name: self._rows.column(name).to_numpy() for name in _NUMBERS}
        acked = (self._columns["outcome"] == Outcome.OK) & (self._columns["off"] != NOTHING)
        self._place = np.where(acked, self._columns["off"], NEVER)

    def open_values(self) -> tuple[int, ...]:
        """Return the values of sends without an acknowledged place."""
        return tuple(np.unique(self._columns["value"][self._place == NEVER]).tolist())

    def check(self, looks: Any) -> Verdict:
        """Return the verdict; `looks`: rows of `obs` with the values of `open_values`."""
        self._find(_seen(looks))
        queues = self._queue_ranks()
        value, op_id = self._columns["value"], self._columns["op_id"]
        place = _lowest(queues, value, self._place)
        stored = np.flatnonzero(place != NEVER)
        stored = stored[np.lexsort((op_id[stored], value[stored], queues[stored]))]
        producer = value[stored] >> CLIENT_BITS
        changes = (np.diff(queues[stored]) != 0) | (np.diff(producer) != 0)
        found: list[Violation] = []
        for line in np.split(stored, np.flatnonzero(changes) + 1) if len(stored) else ():
            left = REPORTED_MAX - len(found)
            pairs = _overtaken(place[line])[:left] if left else ()
            found += [self._violation(line[highest], line[at], place) for highest, at in pairs]
        counts = {"producers": len(np.unique(producer)), "stored": len(stored)}
        return judge(NAME, found, counts, looked_at=len(stored))

    def _find(self, seen: Seen) -> None:
        topics = self._rows.column("topic").combine_chunks()
        words, codes = topics.dictionary.to_pylist(), topics.indices.to_numpy()
        queue, value = self._columns["queue"], self._columns["value"]
        for at in np.flatnonzero(self._place == NEVER).tolist():
            key = (words[codes[at]], int(queue[at]), int(value[at]))
            self._place[at] = seen.get(key, NEVER)

    def _queue_ranks(self) -> I64:
        """Return for each row the rank of its queue, by topic and number."""
        topics = self._rows.column("topic").combine_chunks()
        words = topics.dictionary.to_pylist()
        rank = np.zeros(len(words) + 1, dtype=np.int64)
        rank[np.array(sorted(range(len(words)), key=words.__getitem__), np.int64)] = range(
            len(words)
        )
        queue = self._columns["queue"].astype(np.int64)
        keys: I64 = rank[topics.indices.to_numpy()] * (1 << 32) + queue
        return keys

    def _violation(self, highest: int, at: int, place: I64) -> Violation:
        """Return that *at* stands before *highest*, which was sent before it."""
        rows = [chosen(self._rows, np.array([row])) for row in (highest, at)]
        (first, op) = (operations_of(row, OBS.empty_table())[0] for row in rows)
        return Violation(
            OVERTAKEN,
            op.place,
            f"producer {op.value >> CLIENT_BITS} sent value {first.value} before value {op.value}, "
            f"and they stand at {place[highest]} and {place[at]}",
            (first.op_id, op.op_id),
            at_ns=op.call_ns,
        )


def _seen(looks: Any) -> dict[tuple[str, int, int], int]:
    seen: dict[tuple[str, int, int], int] = {}
    columns = (looks.column(name).to_pylist() for name in ("topic", "queue", "value", "off"))
    for topic, queue, value, off in zip(*columns, strict=True):
        key = (topic, queue, value)
        seen[key] = min(off, seen.get(key, NEVER))
    return seen


def _lowest(queues: I64, value: I64, place: I64) -> I64:
    """Return for each row the lowest place of its value in its queue."""
    if not len(place):
        return place
    order = np.lexsort((value, queues))
    is_first = (np.diff(value[order]) != 0) | (np.diff(queues[order]) != 0)
    begins = np.flatnonzero(np.concatenate(([True], is_first)))
    lengths = np.diff(np.append(begins, len(order)))
    lowest = np.empty_like(place)
    lowest[order] = np.repeat(np.minimum.reduceat(place[order], begins), lengths)
    return lowest


def _overtaken(place: I64) -> list[tuple[int, int]]:
    """Return the rows of a line that stand before an earlier one, each after the furthest."""
    furthest = np.maximum.accumulate(place)
    at = np.flatnonzero(place[1:] <= furthest[:-1]) + 1
    is_new = np.concatenate(([True], place[1:] > furthest[:-1]))
    holder = np.maximum.accumulate(np.where(is_new, np.arange(len(place)), 0))
    return [(int(holder[row - 1]), int(row)) for row in at]
