"""One queue watched while a run goes on: what its rows prove, and no more of it than is needed.

An offset is closed once it was there before the earliest call still open: whoever misses it from
now on reads something stale, whatever else is known. So of closed offsets one upper bound and one
lower bound stay, and of the others their facts: what is kept is what is in flight, not the past.

What it says is always true. What it may miss, the check of the whole run finds: values told again
after they were forgotten, values nobody sent, first offsets that go back, transactions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from jepsen_like.checkers import queue_log
from jepsen_like.checkers.verdict import Violation
from jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome
from spark_jobs.checks.queue_facts import NOT_YET

VALUES_KEPT: Final = 4096
"""Settled offsets whose values are still known; a consumer further behind is judged later."""
UNKNOWN_KEPT: Final = 4096
"""Sends without an answer, and failed ones, that are waited for; the oldest are given up."""

_NAMES: Final = {
    (True, True): queue_log.SEND_INVERTED,
    (False, True): queue_log.STALE_READ,
    (False, False): queue_log.NON_MONOTONIC,
    (True, False): queue_log.FROM_THE_FUTURE,
}


class Bound(msgspec.Struct, array_like=True, frozen=True):
    """A time, the offset it is about, who proved it."""

    ns: int
    off: int = NOTHING
    op_id: int = NOTHING
    is_send: bool = False


NO_LOW: Final = Bound(NOT_YET)
NO_HIGH: Final = Bound(NEVER)


class QueueWatch(msgspec.Struct):
    """See the module. It is plain data: an engine may keep it as bytes.

    Attributes:
        front: Offsets below are closed.
        low: Greatest lower bound of a closed offset.
        high: Upper bound of the last closed offset.
        lows, highs: Bounds of the other offsets.
        values: Value of each offset that is remembered, and who told it.
        places: Offset of each of those values.
        unknown: Sends without an answer by value: call, operation.
        failed: Failed sends by value.
        told: Witnesses of what was reported.
        rows: Operations taken.
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
    told: dict[str, list[tuple[int, ...]]] = {}
    rows: int = 0

    @property
    def in_flight(self) -> int:
        """How many offsets are not closed."""
        return len(self.lows.keys() | self.highs.keys())

    @property
    def pending(self) -> int:
        """Sends of which nobody knows whether they happened."""
        return len(self.unknown)

    @property
    def size(self) -> int:
        """How many things are remembered."""
        kept: tuple[Mapping[int, object], ...] = (
            self.lows, self.highs, self.values, self.places, self.unknown, self.failed
        )  # fmt: skip
        return sum(len(its) for its in kept)

    def take(self, rows: Iterable[Operation], horizon_ns: int) -> list[Violation]:
        """Take rows that have ended, and return what is wrong by now and was not told before.

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
        wrong = count > 0 and (op.off < 0 or (op.max_off != NOTHING and last > op.max_off))
        if wrong or op.max_off < NOTHING:
            text = f"found offsets {op.off} … {last - 1} and says the queue ends at {op.max_off}"
            name = queue_log.SELF_CONTRADICTION
            return [Violation(name, self.subject, text, (op.op_id,), at_ns=op.ret_ns)]
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
            text = f"offset {off} holds value {known} and value {value}"
            name = queue_log.INCONSISTENT_OFFSETS
            found.append(Violation(name, self.subject, text, (who, op_id)))
        if place != off:
            text = f"value {value} is at offset {place} and at offset {off}"
            who = self.values[place][1]
            found.append(Violation(queue_log.DUPLICATE, self.subject, text, (who, op_id)))
        if off >= self.front - VALUES_KEPT and not found:
            self.values.setdefault(off, (value, op_id))
            self.places.setdefault(value, off)
        return found

    def _bind(self, value: int, off: int) -> None:
        call_ns, op_id = self.unknown[value]
        self._low(Bound(call_ns, off, op_id, is_send=True))

    def _aborted(self, value: int, off: int) -> Violation:
        text = f"offset {off} holds value {value}, whose send certainly failed"
        who = (self.failed[value], self.values[off][1]) if off in self.values else ()
        return Violation(queue_log.ABORTED_READ, self.subject, text, who)

    def _low(self, bound: Bound) -> None:
        if bound.ns > self.lows.get(bound.off, NO_LOW).ns:
            self.lows[bound.off] = bound

    def _high(self, bound: Bound) -> None:
        if bound.ns < self.highs.get(bound.off, NO_HIGH).ns:
            self.highs[bound.off] = bound

    # -- times -----------------------------------------------------------------------------

    def _clashes(self) -> list[Violation]:
        """Return bounds that contradict each other, one for each upper bound."""
        offs = sorted(self.lows.keys() | self.highs.keys())
        highs: list[Bound] = []
        high = NO_HIGH
        for off in reversed(offs):
            if off < self.front and self.high.ns <= high.ns and self.high.off >= off:
                high = self.high
            its = self.highs.get(off, NO_HIGH)
            high = its if its.ns <= high.ns else high
            highs.append(high)
        found: list[Violation] = []
        low, done = NO_LOW, NOTHING
        for off, high in zip(offs, reversed(highs), strict=True):
            if self.low.off <= off and self.low.ns > low.ns:
                low = self.low
            its = self.lows.get(off, NO_LOW)
            low = its if its.ns > low.ns else low
            if low.ns > high.ns and off > done:
                found.append(self._named(low, high))
                done = high.off
        return found

    def _named(self, low: Bound, high: Bound) -> Violation:
        missed = "the send of" if low.is_send else "a read missed"
        was_called = " was called" if low.is_send else ""
        there = "the send of" if high.is_send else "a read had found"
        returned = " had returned" if high.is_send else ""
        late_us = (low.ns - high.ns) / 1000
        text = (
            f"{missed} offset {low.off}{was_called} {late_us:,.1f} µs after {there} offset "
            f"{high.off}{returned}"
        )
        name = _NAMES[low.is_send, high.is_send]
        return Violation(name, self.subject, text, (low.op_id, high.op_id), at_ns=low.ns)

    def _close(self, horizon_ns: int) -> None:
        """Forget what nobody can contradict any more without contradicting what is kept."""
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
        """Tell each pair once, and of each kind a few."""
        told = self.told.setdefault(violation.name, [])
        if len(told) >= queue_log.REPORTED_MAX or violation.operations in told:
            return False
        told.append(violation.operations)
        return True


def _trim(kept: dict[int, tuple[int, int]] | dict[int, int], count: int) -> None:
    while len(kept) > count:
        del kept[next(iter(kept))]
