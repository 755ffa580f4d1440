"""Filtered pulls: all that matches is seen, in order, and nothing else.

Messages of a workload with filtering consumers carry a tag, a property that is a text, and most of
them one that is a number, all drawn from their value. So what a filtered pull had to find in the
offsets it passed is known from what is there when the run is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dledger.jepsen_like.checkers.kernel.source import Queue, Source, Want
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.columns import hash_range, operations_of, replica_reads_of
from dledger.jepsen_like.history.operation import NOTHING, F, History, Operation, Outcome, RunHeader

NAME: Final = "filters"

WRONG: Final = "filter passed other messages"

TAGS: Final = 4
NUMBERS: Final = 10
WITHOUT_NUMBER: Final = 7
"""Of this many values one has no number: a comparison with it is neither true nor false."""
PROPERTY: Final = "number"
CUSTOMERS: Final = 5
CUSTOMER_PROPERTY: Final = "customer"


@dataclass(frozen=True, slots=True)
class Filter:
    """What a consumer asks for, and which values that is.

    Attributes:
        is_sql: SQL92; otherwise tags.
        matches: Whether the message with a value passes.
    """

    text: str
    is_sql: bool
    matches: Callable[[int], bool]


def tag_of(value: int) -> str:
    """Return the tag of the message with this value."""
    return f"t{value % TAGS}"


def number_of(value: int) -> int | None:
    """Return its number; None: it has none."""
    return None if value % WITHOUT_NUMBER == 0 else value % NUMBERS


def customer_of(value: int) -> str:
    """Return the text that it has: those of different messages begin alike."""
    return f"customer-{value % CUSTOMERS:03}"


def _known(value: int, holds: Callable[[int], bool]) -> bool:
    number = number_of(value)
    return number is not None and holds(number)


FILTERS: Final[tuple[Filter, ...]] = (
    Filter("t1", False, lambda value: value % TAGS == 1),
    Filter(f"{PROPERTY} > 4", True, lambda value: _known(value, lambda n: n > 4)),
    Filter("t0 || t3", False, lambda value: value % TAGS in (0, 3)),
    Filter(
        f"NOT ({PROPERTY} BETWEEN 2 AND 7)",
        True,
        lambda value: _known(value, lambda n: not 2 <= n <= 7),
    ),
    Filter(
        f"{PROPERTY} IS NULL OR TAGS = 't2'",
        True,
        lambda value: number_of(value) is None or value % TAGS == 2,
    ),
    Filter(
        f"{PROPERTY} IN ('1', '3', '5') AND TAGS <> 't1'",
        True,
        lambda value: value % TAGS != 1 and _known(value, lambda n: n in (1, 3, 5)),
    ),
    Filter(
        f"{CUSTOMER_PROPERTY} = '{customer_of(3)}'",
        True,
        lambda value: customer_of(value) == customer_of(3),
    ),
)
"""A row names one by its place here."""

PULLS: Final = Want((("f", (int(F.FILTERED),)),))
"""The rows of filtered pulls."""


def check_source(source: Source, rows_max: int) -> Verdict | None:
    """Return the verdict over the filtered pulls of a source; None where there are none.

    Raises TooManyRowsError: a queue holds more than *rows_max*, or there are more pulls.
    """
    pulls = operations_of(source.ops(PULLS, rows_max), source.obs(Want(), 0))
    if not pulls:
        return None
    by_queue: dict[Queue, list[Operation]] = {}
    for op in pulls:
        by_queue.setdefault((op.topic, op.queue), []).append(op)
    counts = {"pulls": 0, "messages": 0}
    found: list[Violation] = []
    for queue, rows in sorted(by_queue.items()):
        held = source.obs(Want((("op_id", (NOTHING,)),), queue=queue), rows_max)
        reads = [
            read
            for read in replica_reads_of(source.nodes(), held)
            if (read.topic, read.queue) == queue
        ]
        verdict = check_history(History(RunHeader(""), rows, replica_reads=reads))
        found += verdict.violations
        counts = {name: count + verdict.counts[name] for name, count in counts.items()}
    found.sort(key=lambda violation: violation.operations)
    return judge(NAME, found, counts, looked_at=counts["messages"])


def check_history(history: History) -> Verdict:
    """Return the verdict over the filtered pulls of a history whose replicas were read."""
    there = _there(history)
    found: list[Violation] = []
    rows = passed = 0
    for op in history.operations:
        if op.f != F.FILTERED or op.outcome != Outcome.OK:
            continue
        begin, values = there.get((op.topic, op.queue), (0, ()))
        if op.off < begin or op.max_off > begin + len(values):
            continue  # retention took it, or another checker names what is lost
        rows += 1
        wanted = [
            value
            for value in values[op.off - begin : op.max_off - begin]
            if value != NOTHING and FILTERS[op.status].matches(value)
        ]
        passed += len(wanted)
        if len(wanted) != op.cnt or hash_range(0, wanted) != op.range_hash:
            found.append(_violation(op, wanted))
    counts = {"pulls": rows, "messages": passed}
    return judge(NAME, found, counts, looked_at=passed)


def _there(history: History) -> dict[Queue, tuple[int, tuple[int, ...]]]:
    """Return the first offset and the values of every queue, as the longest replica has them."""
    there: dict[Queue, tuple[int, tuple[int, ...]]] = {}
    pieces: dict[tuple[str, Queue], list[tuple[int, tuple[int, ...]]]] = {}
    for read in history.replica_reads:
        key = (read.node, (read.topic, read.queue))
        pieces.setdefault(key, []).append((read.min_off, read.values))
    for (_, queue), parts in sorted(pieces.items()):
        parts.sort()
        whole = (parts[0][0], tuple(value for _, values in parts for value in values))
        if queue not in there or len(whole[1]) > len(there[queue][1]):
            there[queue] = whole
    return there


def _violation(op: Operation, wanted: list[int]) -> Violation:
    text = (
        f"a pull with {FILTERS[op.status].text!r} passed {op.off} … {op.max_off} and found"
        f" {op.cnt} messages; those that match are {len(wanted)}: {wanted[:8]}"
    )
    return violation_of(WRONG, op.place, text, op)
