"""What the faults that a history records allow: when clients must be answered, what may be lost.

A fault troubles clients from its begin until a bound after its end: a number of elections for each
kind, and the time of one attempt. A history without the mark that all members served again has no
such record, and nothing is demanded of it.

Groups that acknowledge before a majority has it (``ASYNC_MASTER``) keep a weaker law
(`with_late_effect`): what was acknowledged and had a fault in its window counts as unknown. The
window reaches back as far, as another member may have stood for election in a fault's last moment.
What is lost with no fault near it, is out of order, or was never sent, breaks the law as always.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from msgspec.structs import replace

from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Event,
    F,
    History,
    Operation,
    Outcome,
)

HEALED: Final = "healed"
"""Kind of the event with which all faults end."""
SERVED: Final = "served"
"""Kind of the event with which all members serve again, after that."""
ROLE: Final = "role"
"""Kind of an event that is a change of role, and no fault."""

ELECTION_NS: Final = 6_000_000_000
"""Longest election timeout of a plan that has the defaults."""
ATTEMPT_NS: Final = 10_000_000_000
"""A client gives up an operation, and asks for the route again, within this."""

ELECTIONS: Final = 3
"""Longest election timeouts within which clients are answered again after most kinds of faults."""
ELECTIONS_AFTER: Final[Mapping[str, int]] = {
    # No member is harmed.
    "client_kill": 1,
    "mid_send_kill": 1,
    "mid_batch_kill": 1,
    "zombie_client": 1,
    "reset": 1,
    "clock_drift": 1,
    "name_thief": 1,
    "peer_stranger": 1,
    "connections": 1,
    "proxy_kill": 1,
    "proxy_pause": 1,
    # A member has to fetch what it lost, or a list of members has to be agreed on.
    "wipe": 5,
    "bit_rot": 5,
    "torn_tail": 5,
    "bad_sector": 5,
    "lying_flush": 5,
    "power_cut_all": 5,
    "rolling_restart": 5,
    "member_add": 5,
    "member_remove": 5,
    "member_replace": 5,
    "change_without_minority": 5,
}
"""The same after kinds that take less time or more."""

STALL_NS: Final = 250_000_000
"""A send that lasts longer while there is no fault shows a machine that is busy or stands still."""

Span = tuple[int, int]
"""From when to when, in ns of the history's clock."""


def recovers_within_ns(kind: str, election_ns: int = ELECTION_NS) -> int:
    """Return how long after the end of a fault clients may still be without an answer."""
    return ELECTIONS_AFTER.get(kind, ELECTIONS) * election_ns + ATTEMPT_NS


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """What a history records of faults.

    *troubles*: when faults acted or were recovered from; sorted, apart from each other.
    """

    troubles: tuple[Span, ...]

    def quiet(self, begin_ns: int, end_ns: int) -> list[Span]:
        """Return when nothing troubled the cluster between two instants, in order."""
        found: list[Span] = []
        for begin, end in self.troubles:
            if begin > begin_ns:
                found.append((begin_ns, min(begin, end_ns)))
            begin_ns = max(begin_ns, end)
        found.append((begin_ns, end_ns))
        return [(begin, end) for begin, end in found if begin < end]

    def quiet_ns(self, begin_ns: int, end_ns: int) -> int:
        """Return how much of the time between two instants was quiet."""
        return sum(end - begin for begin, end in self.quiet(begin_ns, end_ns))


def with_stalls(record: FaultRecord, sends: Any) -> FaultRecord:
    """Return *record* with the times of slow sends, in which no answer in seconds is demanded."""
    call, ret = (sends.column(name).to_numpy() for name in ("call_ns", "ret_ns"))
    is_slow = (sends.column("outcome").to_numpy() == Outcome.OK) & (ret - call > STALL_NS)
    slow = zip(call[is_slow].tolist(), ret[is_slow].tolist(), strict=True)
    return FaultRecord(tuple(_joined([*record.troubles, *slow])))


def record_of(events: Iterable[Event], election_ns: int = ELECTION_NS) -> FaultRecord | None:
    """Return what *events* record; None: the run did not mark when its members served again.

    A step that was skipped may have begun, and counts as a fault.
    """
    every = list(events)
    served_ns = max((event.at_ns for event in every if event.kind == SERVED), default=None)
    if served_ns is None:
        return None
    well_ns = served_ns + election_ns
    spans: list[Span] = []
    for event in every:
        if event.kind in (ROLE, SERVED):
            continue
        end_ns = max(event.at_ns, event.end_ns) + recovers_within_ns(event.kind, election_ns)
        if event.at_ns <= served_ns:
            end_ns = well_ns if event.kind == HEALED else min(end_ns, well_ns)
        spans.append((event.at_ns, end_ns))
    return FaultRecord(tuple(_joined(spans)))


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


WRITES: Final = frozenset({F.SEND, F.COMMIT, F.STEP, F.PERISHABLE})
"""What such a group acknowledges early, of all that is judged so: sends, offsets, steps,
messages with a time to live."""

NO_FAULTS: Final = frozenset({"healed"})
"""Kinds of events that end faults."""


def with_late_effect(history: History, window_ns: int) -> History:
    """Return *history* as it is to be judged where others have a write up to *window_ns* late.

    The rows of *history* stay as they are.
    """
    faults = Faults(history.events)
    operations = [_judged(op, window_ns, faults) for op in history.operations]
    return replace(history, operations=operations)


class Faults:
    """When there were faults."""

    def __init__(self, events: Iterable[Event]) -> None:
        spans = sorted((e.at_ns, e.end_ns) for e in events if e.kind not in NO_FAULTS)
        self._begins = [begin for begin, _ in spans]
        self._latest_ends = list(accumulate((end for _, end in spans), max))

    def meet(self, begin_ns: int, end_ns: int) -> bool:
        """Whether there was one at some time from *begin_ns* to *end_ns*."""
        before = bisect_right(self._begins, end_ns)
        return before > 0 and self._latest_ends[before - 1] >= begin_ns


def _judged(op: Operation, window_ns: int, faults: Faults) -> Operation:
    if op.f not in WRITES or op.outcome != Outcome.OK:
        return op
    if not faults.meet(op.call_ns - window_ns, op.ret_ns + window_ns):
        return op
    off = NOTHING if op.f in (F.SEND, F.PERISHABLE) else op.off
    return replace(op, outcome=int(Outcome.INFO), ret_ns=NEVER, off=off)
