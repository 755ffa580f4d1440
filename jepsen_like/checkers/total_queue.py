"""Multiset algebra over everything sent and everything there: the cheap first look at a run.

lost = acknowledged and not there; unexpected = in a queue to which it was never sent; duplicated =
there more often than it was sent; recovered = there although the acknowledgement never came. A half
message was sent by its commit. Queues that the broker writes by itself are left out. What is held
at its own offset is only counted, in `kernel.home`; values of the rest are compared across queues,
but for what was sent without an offset: that is in its own queue or nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np

from dledger.jepsen_like.checkers.kernel.facts import I64, Flags
from dledger.jepsen_like.checkers.kernel.home import MUST_BE_THERE, Home
from dledger.jepsen_like.checkers.kernel.source import Queue
from dledger.jepsen_like.checkers.transactions import SYSTEM_TOPICS
from dledger.jepsen_like.checkers.verdict import REPORTED_MAX, Verdict, Violation, judge
from dledger.jepsen_like.history.operation import Operation, Outcome

NAME: Final = "total_queue"

LOST: Final = "acknowledged message lost"
UNEXPECTED: Final = "message never sent"
DUPLICATED: Final = "message stored twice"
FAILED_BUT_THERE: Final = "failed message stored"

KNOWN: Final = (Outcome.FAIL, Outcome.INFO, Outcome.OK)
"""Outcomes, by how much they say of where a message is."""


class Algebra(msgspec.Struct):
    """The sums over all queues, and the values to name."""

    counts: dict[str, int]
    named: dict[str, tuple[int, ...]]
    how_many: dict[str, int]


def add_up(homes: Iterable[tuple[Queue, Home]]) -> Algebra:
    """Return the algebra over all queues that clients write to."""
    every = [(queue, home) for queue, home in homes if queue[0] not in SYSTEM_TOPICS]

    def joined(name: str) -> I64:
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *(_column(home, name) for _, home in every)])

    away, strange, echo = joined("away"), joined("strange"), joined("echo")
    spare, outcome = joined("spare"), joined("spare_outcome")
    strangers, times = np.unique(strange, return_counts=True)
    required = spare[outcome == MUST_BE_THERE]
    lost = np.setdiff1d(np.concatenate((away, required)), strangers)
    sent_away = np.intersect1d(strangers, np.concatenate((away, echo)))
    unsent, refused = [strange[:0]], [strange[:0]]
    for _, home in every:
        its, tried, ended = (_column(home, name) for name in ("strange", "spare", "spare_outcome"))
        unsent.append(np.setdiff1d(its, tried))
        its = np.intersect1d(its, tried[ended == Outcome.FAIL])
        refused.append(np.setdiff1d(its, tried[ended != Outcome.FAIL]))
    unexpected = np.setdiff1d(np.concatenate(unsent), sent_away)
    live = np.sort(spare[outcome != Outcome.FAIL])
    attempts = np.searchsorted(live, strangers, "right") - np.searchsorted(live, strangers)
    is_double: Flags = (times > 1) | np.isin(strangers, echo)
    doubled = strangers[is_double & (times > attempts)]
    failed = np.setdiff1d(np.concatenate(refused), echo)
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
    kinds = {LOST: lost, UNEXPECTED: unexpected, DUPLICATED: doubled, FAILED_BUT_THERE: failed}
    named = {name: tuple(values[:REPORTED_MAX].tolist()) for name, values in kinds.items()}
    return Algebra(counts, named, {name: len(values) for name, values in kinds.items()})


def _column(home: Home, name: str) -> I64:
    kind = np.int8 if name == "spare_outcome" else np.int64
    return np.frombuffer(getattr(home, name), kind).astype(np.int64, copy=False)


_DETAILS: Final = {
    LOST: "was acknowledged and is not there",
    UNEXPECTED: "is there and was never sent",
    DUPLICATED: "is there more than once",
    FAILED_BUT_THERE: "is there, but its send certainly failed",
}


def detail_of(name: str, *, is_sent: bool) -> str:
    """Return what is reported of a value: an unexpected one may have been sent to another queue."""
    if name == UNEXPECTED and is_sent:
        return "is in a queue that it was not sent to"
    return _DETAILS[name]


def total_verdict(algebra: Algebra, sends: Mapping[int, Operation], chosen: str) -> Verdict:
    """Return the verdict; *sends* has the send of each named value, where there is one."""
    found = [
        Violation(
            name,
            chosen if value not in sends else f"{sends[value].topic}/{sends[value].queue}",
            f"value {value} {detail_of(name, is_sent=value in sends)}"
            f" ({algebra.how_many[name]} like it)",
            () if value not in sends else (sends[value].op_id,),
            at_ns=0 if value not in sends else sends[value].call_ns,
        )
        for name, values in algebra.named.items()
        for value in values
    ]
    return judge(NAME, found, algebra.counts, looked_at=algebra.counts["acknowledged"])
