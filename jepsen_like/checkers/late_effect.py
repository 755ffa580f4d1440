"""The weaker law of groups that acknowledge before a majority has what they acknowledge. Pure.

With ``ASYNC_MASTER`` a leader answers when it alone has flushed: followers have a write up to a
window later, and where a fault falls between the two it may be lost. So a history is judged by the
whole law, with what was acknowledged and had a fault in its window taken for unknown: it may be
there, or never have been. The window reaches back as far, as another member may have stood for
election in the last moment of a fault. What is lost with no fault near it, what is out of order,
and what was never sent, breaks the law as it always does; so does a read that misses what was
acknowledged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from msgspec.structs import replace

from jepsen_like.history.operation import NEVER, NOTHING, Event, F, History, Operation, Outcome

WRITES: Final = frozenset({F.SEND, F.COMMIT})
"""What such a group acknowledges early, of all that is judged so: sends and committed offsets."""

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
    off = NOTHING if op.f == F.SEND else op.off
    return replace(op, outcome=int(Outcome.INFO), ret_ns=NEVER, off=off)
