"""One queue watched while a run goes on: what its rows prove, and no more of it than is needed.

An offset is closed once it was there before the earliest call still open: a read that misses it
from now on is stale. Closed offsets keep one upper and one lower bound, the others their facts:
what is kept is what is in flight, not the past.

What it reports is true where clients send each value once; what it may miss, the check of the whole
run finds. The rule for times is the kernel's, over ranks instead of offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np

from dledger.jepsen_like.checkers.kernel.chunks import Ask, clashes_of
from dledger.jepsen_like.checkers.kernel.facts import NOT_YET, REPORTED_MAX
from dledger.jepsen_like.checkers.queue_log import (
    Bound,
    aborted_read,
    contradiction,
    time_violation,
    two_places,
    two_values,
)
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome

VALUES_KEPT: Final = 4096
"""Settled offsets whose values are still known; a consumer further behind is judged later."""
UNKNOWN_KEPT: Final = 4096
"""Sends without an answer, and failed ones, that are waited for; the oldest are given up."""

NO_LOW: Final = Bound(NOT_YET)
NO_HIGH: Final = Bound(NEVER)


class QueueWatch(msgspec.Struct):
    """See the module. It is plain data: an engine may keep it as bytes.

    Attributes:
        front: Offsets below are closed.
        low: Greatest lower bound of a closed offset.
        high: Upper bound of the last closed offset.
        lows, highs: Bounds of the other offsets.
        values: Value of each offset that is remembered, and the operation that showed it.
        places: Offset of each of those values.
        unknown: Sends without an answer by value: call, operation.
        failed: Failed sends by value.
    """

    subject: str = ""
    front: int = 0
    low: Bound = NO_LOW
    high: Bound = NO_HIGH
    lows: dict[int, Bound] = {}
    highs: dict[int, Bound] = {}
    values: dict[int, tuple[int, int]] = {}
    places: dict[int, int] = {}
    unknown: dict[int, tuple[int, int]] = {}
    failed: dict[int, int] = {}
    reported: dict[str, list[tuple[int, ...]]] = {}
    rows: int = 0

    @property
    def in_flight(self) -> int:
        """How many offsets are not closed."""
        return len(self.lows.keys() | self.highs.keys())

    @property
    def pending(self) -> int:
        """Sends with an unknown outcome."""
        return len(self.unknown)

    @property
    def size(self) -> int:
        """How many things are remembered."""
        kept: tuple[Mapping[int, object], ...] = (
            self.lows, self.highs, self.values, self.places, self.unknown, self.failed
        )  # fmt: skip
        return sum(len(its) for its in kept)

    def take(self, rows: Iterable[Operation], horizon_ns: int) -> list[Violation]:
        """Take rows that have ended; return what is wrong by now and was not reported before.

        Args:
            rows: In any order; a row that still is open must not be among them.
            horizon_ns: No row to come was called, or returns, before.
        """
        found: list[Violation] = []
        for op in rows:
            self.rows += 1
            if op.f == F.SEND:
                found += self._send(op)
            elif op.f in (F.PULL, F.MAX_OFFSET) and op.outcome == Outcome.OK:
                found += self._read(op)
        found += self._clashes()
        self._close(horizon_ns)
        return [violation for violation in found if self._is_new(violation)]

    # -- rows ------------------------------------------------------------------------------

    def _send(self, op: Operation) -> list[Violation]:
        if op.outcome == Outcome.OK and op.off >= 0:
            self._low(Bound(op.call_ns, op.off, op.op_id, is_send=True))
            self._high(Bound(op.ret_ns, op.off, op.op_id, is_send=True))
            return self._value(op.off, op.value, op.op_id)
        if op.outcome == Outcome.FAIL:
            self.failed[op.value] = op.op_id
            if op.value in self.places:
                return [self._aborted(op.value, self.places[op.value])]
            _trim(self.failed, UNKNOWN_KEPT)
            return []
        self.unknown[op.value] = (op.call_ns, op.op_id)
        if op.value in self.places:
            self._bind(op.value, self.places[op.value])
        _trim(self.unknown, UNKNOWN_KEPT)
        return []

    def _read(self, op: Operation) -> list[Violation]:
        count = op.cnt if op.f == F.PULL else 0
        last = op.off + count
        if op.level == Level.LINEARIZABLE and _contradicts_itself(op, count):
            bounds = (op.off, last, op.max_off)
            return [contradiction(self.subject, bounds, op.op_id, op.ret_ns, op.min_off)]
        found: list[Violation] = []
        for off, value in enumerate(op.values, op.off):
            found += self._value(off, value, op.op_id)
            if value in self.unknown:
                self._bind(value, off)
            if value in self.failed:
                found.append(self._aborted(value, off))
        if op.level == Level.LINEARIZABLE:
            if count > 0:
                self._high(Bound(op.ret_ns, last - 1, op.op_id))
            if op.max_off > 0:
                self._high(Bound(op.ret_ns, op.max_off - 1, op.op_id))
            if op.max_off >= 0:
                self._low(Bound(op.call_ns, op.max_off, op.op_id))
        return found

    def _value(self, off: int, value: int, op_id: int) -> list[Violation]:
        known, who = self.values.get(off, (value, op_id))
        place = self.places.get(value, off)
        found: list[Violation] = []
        if known != value:
            found.append(two_values(self.subject, off, (known, value), (who, op_id)))
        if place != off:
            who = self.values[place][1]
            found.append(two_places(self.subject, value, (place, off), (who, op_id)))
        if off >= self.front - VALUES_KEPT and not found:
            self.values.setdefault(off, (value, op_id))
            self.places.setdefault(value, off)
        return found

    def _bind(self, value: int, off: int) -> None:
        call_ns, op_id = self.unknown[value]
        self._low(Bound(call_ns, off, op_id, is_send=True))

    def _aborted(self, value: int, off: int) -> Violation:
        who = (self.failed[value], self.values[off][1]) if off in self.values else ()
        return aborted_read(self.subject, off, value, who)

    def _low(self, bound: Bound) -> None:
        if bound.ns > self.lows.get(bound.off, NO_LOW).ns:
            self.lows[bound.off] = bound

    def _high(self, bound: Bound) -> None:
        if bound.ns < self.highs.get(bound.off, NO_HIGH).ns:
            self.highs[bound.off] = bound

    # -- times -----------------------------------------------------------------------------

    def _clashes(self) -> list[Violation]:
        """Return bounds that contradict each other, one for each upper bound."""
        lows = self._with(self.low, self.lows, NO_LOW)
        highs = self._with(self.high, self.highs, NO_HIGH)
        offs = sorted(lows.keys() | highs.keys())
        lo = np.array([lows.get(off, NO_LOW).ns for off in offs], dtype=np.int64)
        hi = np.array([highs.get(off, NO_HIGH).ns for off in offs], dtype=np.int64)
        return [
            time_violation(self.subject, lows[offs[clash.low]], highs[offs[clash.high]])
            for clash in clashes_of(lo, hi, 0, Ask())
        ]

    @staticmethod
    def _with(closed: Bound, bounds: dict[int, Bound], none: Bound) -> dict[int, Bound]:
        """Return the bounds by offset, that of the closed offsets among them."""
        if closed == none:
            return bounds
        known = bounds.get(closed.off, none)
        is_closer = known != none and (known.ns > closed.ns) == (none.ns < 0)
        return {**bounds, closed.off: known if is_closer else closed}

    def _close(self, horizon_ns: int) -> None:
        """Forget what no row can contradict any more without contradicting what is kept."""
        closed = [bound for bound in self.highs.values() if bound.ns < horizon_ns]
        last = max(closed, key=lambda bound: bound.off, default=NO_HIGH)
        if last.off >= self.front:
            self.front, self.high = last.off + 1, last
        for off in [off for off in self.lows if off < self.front]:
            low = self.lows.pop(off)
            self.low = low if low.ns > self.low.ns else self.low
        for off in [off for off in self.highs if off < self.front]:
            del self.highs[off]
        for off in [off for off in self.values if off < self.front - VALUES_KEPT]:
            value, _ = self.values.pop(off)
            self.places.pop(value, None)

    def _is_new(self, violation: Violation) -> bool:
        """Whether the pair is new, and of its kind not too many are reported."""
        reported = self.reported.setdefault(violation.name, [])
        if len(reported) >= REPORTED_MAX or violation.operations in reported:
            return False
        reported.append(violation.operations)
        return True


def _contradicts_itself(op: Operation, count: int) -> bool:
    """Whether a read contradicts itself, by the kernel's rule."""
    if op.max_off < NOTHING or NOTHING < op.max_off < op.min_off:
        return True
    if count:
        return op.off < 0 or NOTHING < op.max_off < op.off + count
    return op.off != NOTHING and op.min_off <= op.off < op.max_off


def _trim(kept: dict[int, tuple[int, int]] | dict[int, int], count: int) -> None:
    while len(kept) > count:
        del kept[next(iter(kept))]
