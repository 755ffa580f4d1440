"""A clean history in which an anomaly is planted, and what a planter reports of it."""

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.transactions import Transaction, transactions_of
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    F,
    History,
    Level,
    Operation,
    Outcome,
)
from tests.harness.history_world import NODES, QUEUES, TOPIC, Queue

T = TypeVar("T")


Kind = tuple[str, str]
"""Checker and name of the anomaly."""


NO_PLACE: frozenset[Kind] = frozenset(
    (queue_log.NAME, name)
    for name in (
        queue_log.STALE_READ,
        queue_log.SEND_INVERTED,
        queue_log.NON_MONOTONIC,
        queue_log.FROM_THE_FUTURE,
        queue_log.OF_NO_SEND,
    )
)
"""The field of an acknowledged commit on a queue that has no place for it."""


class InapplicableError(Exception):
    """This history has nothing the anomaly could be planted in."""


class Planted(NamedTuple):
    """What a planter did.

    Attributes:
        witnesses: Operations one violation must name, all of them.
        also: Other violations that it may cause; of other checkers only.
    """

    witnesses: tuple[int, ...] = ()
    also: frozenset[Kind] = frozenset()


class Proof(NamedTuple):
    """That a queue reached an offset by, or had not reached it at, some instant."""

    off: int
    at_ns: int
    op_id: int
    is_send: bool


class Scene:
    """A clean history and what is needed to plant an anomaly in it."""

    def __init__(self, history: History, seed: int) -> None:
        self.history = history
        self.rng = random.Random(f"planter-{seed}")
        self.ops = history.operations
        self._next_id = len(self.ops)
        stamps = [op.ret_ns for op in self.ops if op.ret_ns != NEVER]
        stamps += [op.call_ns for op in self.ops] + [r.at_ns for r in history.replica_reads]
        self.end_ns = max(stamps) + 1_000

    def pick(self, choices: Iterable[T]) -> T:
        """Return one of *choices*."""
        every = list(choices)
        if not every:
            raise InapplicableError
        return self.rng.choice(every)

    def add(self, f: F, call_ns: int, ret_ns: int, queue: Queue = (TOPIC, 0)) -> Operation:
        """Return a new row that ended well."""
        op_id = self._next_id
        self._next_id += 1
        process = 100_000 + op_id
        op = Operation(op_id, op_id, process, NOTHING, f, Outcome.OK, call_ns, ret_ns, *queue)
        self.ops.append(op)
        return op

    def add_last(self, f: F, queue: Queue = (TOPIC, 0)) -> Operation:
        """Return a new row after everything else."""
        self.end_ns += 10
        return self.add(f, self.end_ns - 8, self.end_ns - 2, queue)

    def pull_last(self, queue: Queue, *values: int) -> Operation:
        """Return a pull that finds *values* beyond the end of everything known."""
        op = self.add_last(F.PULL, queue)
        low, log = self.log(queue)
        op.off, op.values, op.cnt = low + len(log), values, len(values)
        return op

    def log(self, queue: Queue) -> tuple[int, tuple[int, ...]]:
        """Return the first offset the first replica keeps of a queue, and the values from there."""
        for read in self.history.replica_reads:
            if (read.topic, read.queue) == queue and read.node == NODES[0]:
                return read.min_off, read.values
        raise InapplicableError

    def queue(self, *, is_whole: bool = True) -> Queue:
        """Return a queue, one that retention did not cut if *is_whole*."""
        queues = [(TOPIC, queue) for queue in range(QUEUES)]
        cut = {(r.topic, r.queue) for r in self.history.replica_reads if r.min_off > 0}
        return self.pick(queue for queue in queues if not is_whole or queue not in cut)

    def rows(self, *fs: F, outcome: Outcome = Outcome.OK) -> list[Operation]:
        """Return operations of some kinds, with one outcome."""
        return [op for op in self.ops if op.f in fs and op.outcome == outcome]

    def sends(self, outcome: Outcome = Outcome.OK) -> list[Operation]:
        """Return sends that are not delayed and of no batch."""
        shared = [op.parent_op_id for op in self.ops]
        return [
            op
            for op in self.rows(F.SEND, outcome=outcome)
            if op.due_ns == NOTHING and shared.count(op.parent_op_id) == 1
        ]

    def seen(self) -> dict[int, Operation]:
        """Return the client that pulled each value first."""
        first: dict[int, Operation] = {}
        for op in sorted(self.rows(F.PULL), key=lambda op: op.ret_ns):
            if op.topic == TOPIC:
                for value in op.values:
                    first.setdefault(value, op)
        return first

    def transactions(self) -> list[Transaction]:
        """Return the transactions whose half message certainly was stored."""
        every = transactions_of(self.ops).values()
        return [one for one in every if one.half is not None and one.half.outcome == Outcome.OK]

    def is_known(self, one: Transaction) -> bool:
        """Whether a value stands in a queue, or did."""
        return one.value in self.places()

    def places(self) -> dict[int, tuple[Queue, int]]:
        """Return where each value is."""
        where: dict[int, tuple[Queue, int]] = {}
        for op in self.rows(F.PULL):
            for at, value in enumerate(op.values):
                where[value] = ((op.topic, op.queue), op.off + at)
        for read in self.history.replica_reads:
            for at, value in enumerate(read.values):
                where[value] = ((read.topic, read.queue), read.min_off + at)
        return where

    def present(self, queue: Queue) -> list[Proof]:
        """Return all proofs that a queue had reached an offset."""
        proofs = [
            Proof(op.off, op.ret_ns, op.op_id, is_send=True)
            for op in self.rows(F.SEND)
            if (op.topic, op.queue) == queue and op.off != NOTHING
        ]
        places = self.places()
        for one in transactions_of(self.ops).values():
            done = one.ended(Decision.COMMIT, only_acknowledged=True)
            if done and places.get(one.value, ((), 0))[0] == queue:
                first = min(done, key=lambda op: op.ret_ns)
                off = places[one.value][1]
                proofs.append(Proof(off, first.ret_ns, first.op_id, is_send=True))
        for op in self._reads(queue):
            off = max(op.off + op.cnt if op.cnt else 0, op.max_off) - 1
            if off >= 0:
                proofs.append(Proof(off, op.ret_ns, op.op_id, is_send=False))
        return proofs

    def _reads(self, queue: Queue) -> list[Operation]:
        return [
            op
            for op in self.rows(F.PULL, F.MAX_OFFSET)
            if (op.topic, op.queue) == queue and op.level == Level.LINEARIZABLE
        ]

    def first_present(self, queue: Queue, off: int, *, besides: int = NOTHING) -> Proof:
        """Return the earliest proof that a queue had reached *off*."""
        proofs = [p for p in self.present(queue) if p.off >= off and p.op_id != besides]
        if not proofs:
            raise InapplicableError
        first = min(proofs, key=lambda proof: proof.at_ns)
        if sum(proof.at_ns == first.at_ns for proof in proofs) > 1:
            raise InapplicableError  # which of them is named is left open
        return first


Planter = Callable[[Scene], Planted]
