"""Histories of workloads that `clean_histories` does not draw, by seed, with anomalies in them.

Of messages that are given back, of timers that are recalled, of idempotent producers. Most are
right for the most part: some rows are spoiled, so that few violations stand among many good rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dledger.jepsen_like.checkers.delayed import DELIVERED_ERROR
from dledger.jepsen_like.checkers.filters import FILTERS
from dledger.jepsen_like.checkers.retries import DEAD_PREFIX, MAX_TRIES, RETRY_PREFIX
from dledger.jepsen_like.history.columns import hash_range
from dledger.jepsen_like.history.operation import (
    CLIENT_BITS,
    NEVER,
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)

TOPICS = ("orders", "bills")
QUEUES = 2
NODES = ("n0", "n1")
MS = 1_000_000
LATER_NS = 200 * MS
"""How long after all sends the queues are read."""


class Rows:
    """A history under construction.

    Args:
        seed: Everything that is left to chance comes from it.
        spoiled: Share of the rows that are wrong; 0: none.
    """

    def __init__(self, seed: int, spoiled: float) -> None:
        self.rng = random.Random(seed)
        self.spoiled = spoiled
        self.history = History(RunHeader(f"workload-{seed}", seed))

    def spoils(self) -> bool:
        """Whether the row to come is wrong."""
        return self.rng.random() < self.spoiled

    def add(self, f: F, outcome: Outcome, topic: str = "", queue: int = NOTHING) -> Operation:
        """Return a new row, called after all others."""
        op_id = len(self.history.operations)
        call = op_id * MS
        end = NEVER if outcome == Outcome.INFO else call + self.rng.randint(1, 3 * MS)
        op = Operation(op_id, op_id, op_id, NOTHING, f, outcome, call, end, topic, queue)
        self.history.operations.append(op)
        return op

    def outcome(self) -> Outcome:
        """Return how an operation ends."""
        return self.rng.choices(tuple(Outcome), (7, 2, 1))[0]

    def place(self) -> tuple[str, int]:
        """Return a queue."""
        return self.rng.choice(TOPICS), self.rng.randrange(QUEUES)

    def read(self, logs: dict[tuple[str, int], list[int]]) -> None:
        """Let every replica hold *logs*, and a client pull them."""
        for (topic, queue), log in sorted(logs.items()):
            if log:
                op = self.add(F.PULL, Outcome.OK, topic, queue)
                op.call_ns, op.ret_ns = op.call_ns + LATER_NS, op.ret_ns + LATER_NS
                op.off, op.values, op.cnt = 0, tuple(log), len(log)
        end_ns = len(self.history.operations) * MS + 2 * LATER_NS
        for node in NODES:
            for (topic, queue), log in sorted(logs.items()):
                self.history.replica_reads.append(
                    ReplicaRead(end_ns, node, topic, queue, 0, tuple(log))
                )


def given_back(seed: int, spoiled: float = 0.0) -> History:
    """Return a history of messages that consumers gave back."""
    rows = Rows(seed, spoiled)
    rng = rows.rng
    copies: list[tuple[str, int, int, bool]] = []
    for _ in range(rng.randint(0, 40)):
        op = rows.add(F.SEND_BACK, rows.outcome())
        op.group, op.value = rng.choice(("g0", "g1")), rng.randrange(20)
        op.cnt, op.status = rng.randint(0, MAX_TRIES), rng.choice((0, 0, -1))
        if op.status == 0:
            # Rows are called a millisecond apart: the next one is late enough unless it is spoiled.
            op.due_ns = op.call_ns + rng.randint(0, MS) + (30 * MS if rows.spoils() else 0)
        happened = op.outcome == Outcome.OK or (op.outcome == Outcome.INFO and rng.random() < 0.5)
        if happened != rows.spoils():
            copy = (op.group, op.value, op.cnt + 1, op.status < 0 or op.cnt == MAX_TRIES)
            copies += [copy] * (2 if rows.spoils() else 1)
    rng.shuffle(copies)
    for group, value, tries, dead in copies:
        prefix = DEAD_PREFIX if dead != rows.spoils() else RETRY_PREFIX
        op = rows.add(F.RETURNED, Outcome.OK, prefix + group, rng.randrange(2))
        op.group, op.value, op.cnt, op.min_off = group, value, tries, 0
    if rng.random() < 0.2:
        op = rows.add(F.RETURNED, Outcome.OK, RETRY_PREFIX + "g0", 0)
        op.group, op.value, op.cnt, op.min_off = "g0", NOTHING, 0, rng.randrange(2)
    rows.read({(TOPICS[0], 0): []})
    return rows.history


def recalled(seed: int, spoiled: float = 0.0) -> History:
    """Return a history of timers, some of them recalled."""
    rows = Rows(seed, spoiled)
    rng = rows.rng
    logs: dict[tuple[str, int], list[int]] = {
        (topic, queue): [] for topic in TOPICS for queue in range(QUEUES)
    }
    for value in range(rng.randint(1, 25)):
        send = rows.add(F.SEND, rows.outcome(), *rows.place())
        send.value, send.due_ns = value, send.call_ns + rng.randint(2, 40) * MS
        is_there = send.outcome == Outcome.OK or (
            send.outcome == Outcome.INFO and rng.random() < 0.5
        )
        if rng.random() < 0.5:
            is_there = _recall(rows, send, is_there=is_there)
        if is_there != rows.spoils():
            logs[send.topic, send.queue] += [value] * (2 if rows.spoils() else 1)
    rows.read(logs)
    for _ in range(5):
        op = rows.add(F.MAX_OFFSET, Outcome.OK, *rows.place())
        op.call_ns = rng.randrange(LATER_NS)
        op.ret_ns = op.call_ns + MS
        op.max_off = rng.randint(0, len(logs[op.topic, op.queue])) if rows.spoils() else 0
    return rows.history


def _recall(rows: Rows, send: Operation, *, is_there: bool) -> bool:
    """Take a timer back, and return whether it is delivered nevertheless."""
    op = rows.add(F.RECALL, rows.outcome(), send.topic, send.queue)
    op.value, op.due_ns = send.value, send.due_ns
    if op.outcome == Outcome.FAIL:
        op.err = DELIVERED_ERROR
        if not rows.spoils():
            op.ret_ns = max(op.ret_ns, send.due_ns + MS)
        return is_there
    return is_there and op.outcome == Outcome.INFO and rows.rng.random() < 0.5


def idempotent(seed: int, spoiled: float = 0.0) -> History:
    """Return a history of idempotent producers; a spoiled send stands before an earlier one."""
    rows = Rows(seed, spoiled)
    rng = rows.rng
    logs: dict[tuple[str, int], list[int]] = {
        (topic, queue): [] for topic in TOPICS for queue in range(QUEUES)
    }
    for number in range(rng.randint(1, 40)):
        op = rows.add(F.SEND, rows.outcome(), *rows.place())
        op.value = rng.randint(1, 3) << CLIENT_BITS | number
        if rng.random() < 0.1:
            op.due_ns = op.call_ns + MS
        if op.outcome == Outcome.FAIL or (op.outcome == Outcome.INFO and rng.random() < 0.5):
            continue
        log = logs[op.topic, op.queue]
        log.insert(rng.randint(0, len(log)) if rows.spoils() else len(log), op.value)
    for op in rows.history.operations:
        if op.outcome == Outcome.OK and op.due_ns == NOTHING:
            op.off = logs[op.topic, op.queue].index(op.value)
    if rng.random() < 0.8:
        rows.read(logs)
    return rows.history


def filtered(seed: int, spoiled: float = 0.0) -> History:
    """Return a history of filtered pulls; a spoiled one leaves a message out."""
    rows = Rows(seed, spoiled)
    rng = rows.rng
    logs: dict[tuple[str, int], list[int]] = {
        (topic, queue): [] for topic in TOPICS for queue in range(QUEUES)
    }
    for value in range(rng.randint(20, 60)):
        send = rows.add(F.SEND, Outcome.OK, *rows.place())
        log = logs[send.topic, send.queue]
        send.value, send.off = value, len(log)
        log.append(value)
    for _ in range(rng.randint(5, 20)):
        op = rows.add(F.FILTERED, rows.outcome(), *rows.place())
        log = logs[op.topic, op.queue]
        op.status, op.off = rng.randrange(len(FILTERS)), rng.randint(0, len(log))
        op.max_off = rng.randint(op.off, len(log))
        if op.outcome == Outcome.OK:
            passed = [v for v in log[op.off : op.max_off] if FILTERS[op.status].matches(v)]
            if passed and rows.spoils():
                del passed[rng.randrange(len(passed))]
            op.cnt, op.range_hash = len(passed), hash_range(0, passed)
    rows.read(logs)
    return rows.history


MAKERS: dict[str, Callable[[int, float], History]] = {
    "given back": given_back,
    "recalled": recalled,
    "idempotent": idempotent,
    "filtered": filtered,
}
