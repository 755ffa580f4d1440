"""Multiset algebra over everything sent and everything there: the cheap first look at a run.

lost = acknowledged and not there; unexpected = there and never attempted; duplicated = there more
often than it was sent; recovered = there although the acknowledgement never came. A committed half
message was sent by its commit. Queues that the broker writes by itself are left out. What is held
at its own offset is only counted, in `kernel.home`; values of the rest are compared across queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np

from jepsen_like.checkers.kernel.facts import I64, Flags
from jepsen_like.checkers.kernel.home import MUST_BE_THERE, Home
from jepsen_like.checkers.kernel.source import Queue
from jepsen_like.checkers.transactions import SYSTEM_TOPICS
from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import Operation, Outcome

NAME: Final = "total_queue"

LOST: Final = "acknowledged message lost"
UNEXPECTED: Final = "message never sent"
DUPLICATED: Final = "message stored twice"
FAILED_BUT_THERE: Final = "failed message stored"
REPORTED_MAX: Final = 8


class Algebra(msgspec.Struct):
    """The sums over all queues, and the values to name."""

    counts: dict[str, int]
    named: dict[str, tuple[int, ...]]
    how_many: dict[str, int]


def add_up(homes: Iterable[tuple[Queue, Home]]) -> Algebra:
    """Return the algebra over all queues that clients write to."""
    every = [(queue, home) for queue, home in homes if queue[0] not in SYSTEM_TOPICS]

    def joined(name: str, kind: type = np.int64) -> I64:
        return np.concatenate(
            [np.zeros(0, kind), *(np.frombuffer(getattr(h, name), kind) for _, h in every)]
        ).astype(np.int64)

    away, strange, echo = joined("away"), joined("strange"), joined("echo")
    spare, outcome = joined("spare"), joined("spare_outcome", np.int8)
    strangers, times = np.unique(strange, return_counts=True)
    required = spare[outcome == MUST_BE_THERE]
    lost = np.setdiff1d(np.concatenate((away, required)), strangers)
    sent_away = np.intersect1d(strangers, np.concatenate((away, echo)))
    unexpected = np.setdiff1d(np.setdiff1d(strangers, spare), sent_away)
    live = np.sort(spare[outcome != Outcome.FAIL])
    attempts = np.searchsorted(live, strangers, "right") - np.searchsorted(live, strangers)
    is_double: Flags = (times > 1) | np.isin(strangers, echo)
    doubled = strangers[is_double & (times > attempts)]
    failed = np.setdiff1d(np.intersect1d(strangers, spare[outcome == Outcome.FAIL]), live)
    unknown = np.unique(spare[outcome == Outcome.INFO])
    recovered = len(np.intersect1d(unknown, strangers))
    spare_ok = int(np.count_nonzero(outcome == Outcome.OK))
    sent = sum(home.sent for _, home in every)
    counts = {
        "attempted": sent + len(spare),
        "acknowledged": sent + spare_ok + len(required),
        "removed": sum(home.removed for _, home in every) + spare_ok,
        "unknown": len(unknown),
        "recovered": recovered,
        "vanished": len(unknown) - recovered,
        "there": sum(home.there for _, home in every),
    }
    kinds = {
        LOST: lost,
        UNEXPECTED: unexpected,
        DUPLICATED: doubled,
        FAILED_BUT_THERE: failed,
    }
    named = {name: tuple(values[:REPORTED_MAX].tolist()) for name, values in kinds.items()}
    return Algebra(counts, named, {name: len(values) for name, values in kinds.items()})


_SAYS: Final = {
    LOST: "was acknowledged and is not there",
    UNEXPECTED: "is there and was never sent",
    DUPLICATED: "is there more than once",
    FAILED_BUT_THERE: "is there, but its send certainly failed",
}


def total_verdict(algebra: Algebra, sends: Mapping[int, Operation], chosen: str) -> Verdict:
    """Return the verdict.

    Args:
        algebra: See `add_up`.
        sends: The send of each named value, where there is one.
        chosen: The replica whose messages counted.
    """
    found = [
        Violation(
            name,
            chosen if value not in sends else f"{sends[value].topic}/{sends[value].queue}",
            f"value {value} {_SAYS[name]} ({algebra.how_many[name]} like it)",
            () if value not in sends else (sends[value].op_id,),
            at_ns=0 if value not in sends else sends[value].call_ns,
        )
        for name, values in algebra.named.items()
        for value in values
    ]
    return judge(NAME, found, algebra.counts, looked_at=algebra.counts["acknowledged"])
