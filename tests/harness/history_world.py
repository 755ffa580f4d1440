"""The small world that clean histories are drawn from: queues, locks, pollers, half messages."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dledger.jepsen_like.checkers.locks import LEASE_NS
from dledger.jepsen_like.checkers.retention import Keeps
from dledger.jepsen_like.checkers.transactions import CHECKS_MAX, DISCARD_TOPIC
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    F,
    FloorMove,
    Level,
    Operation,
    Outcome,
    ReplicaState,
)

TOPIC = "orders"


QUEUES = 2


CALM_STEPS = 6
"""Messages after the faults."""


NODES = ("n0", "n1", "n2")


GROUP = "readers"


ORDERLY = "orderly"


POLLERS = "pollers"


LAST_PROCESS = 7_001
"""The client that reads everything at the end."""


MS = 1_000_000


LATE_MAX_NS = 30 * MS
"""How late delayed messages come here."""


SEGMENT = 4_096


KEEPS = Keeps(keep_bytes=2 * SEGMENT, segment_bytes=SEGMENT)
"""What is kept here: each cut takes one more segment."""


Queue = tuple[str, int]


OUTCOMES = (Outcome.OK, Outcome.INFO, Outcome.FAIL)


@dataclass(slots=True)
class Lock:
    """The holder of a queue."""

    owner: int = NOTHING
    token: int = NOTHING
    end_ns: int = 0
    newest: int = NOTHING


@dataclass(slots=True)
class Poller:
    """A subscribed consumer and where it is; it does one thing at a time."""

    process: int
    queue: int
    position: int = NOTHING
    committed: int = NOTHING
    idle_ns: int = 0


@dataclass(slots=True)
class Half:
    """A half message as the broker keeps it."""

    row: Operation
    is_stored: bool
    decision: Decision = Decision.UNKNOWN
    is_discarded: bool = False
    asked: int = 0


@dataclass(slots=True)
class World:
    """The broker, and what its clients know."""

    rng: random.Random
    now: int = 1_000 * MS
    rows: list[Operation] = field(default_factory=list)
    logs: dict[Queue, list[int]] = field(default_factory=dict)
    low: dict[Queue, int] = field(default_factory=dict)
    later: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    unused: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    locks: dict[int, Lock] = field(default_factory=dict)
    halves: list[Half] = field(default_factory=list)
    states: list[ReplicaState] = field(default_factory=list)
    floors: list[FloorMove] = field(default_factory=list)
    pollers: list[Poller] = field(
        default_factory=lambda: [Poller(8_001 + queue, queue) for queue in range(QUEUES)]
    )
    value: int = 100
    half_offset: int = 0
    index: int = 10
    process: int = 0
    may_cut: bool = False
    owners: list[int] = field(default_factory=lambda: [9_001, 9_002, 9_003])

    # -- steps -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Let some time pass, and let happen in it what is due."""
        rng = self.rng
        step = rng.randint(10_000, 8 * MS)
        if rng.random() < 0.02:
            step += rng.randint(LEASE_NS // 2, 2 * LEASE_NS)
        self.until(self.now + step)

    def until(self, end: int) -> None:
        """Go to an instant; what is due before happens at its own."""
        while self.later:
            first = min(self.later)
            if first[0] > end:
                break
            self.later.remove(first)
            self.now = max(self.now, first[0])
            first[2]()
        self.now = end

    def at(self, when: int, act: Callable[[], None]) -> None:
        """Let *act* happen at an instant to come."""
        self.later.append((when, len(self.later) + self.rng.randrange(1 << 40), act))

    def row(
        self, f: F, outcome: Outcome, *, after: int = 0, queue: Queue | None = None
    ) -> Operation:
        """Return a new row around this instant, not called before *after* has passed."""
        rng = self.rng
        lag = rng.choice((0, 3 * MS, 20 * MS))
        call = self.now - rng.randint(0, lag) if lag else self.now
        ret = NEVER if outcome is Outcome.INFO else self.now + rng.randint(1, lag + 1)
        topic, queue_id = queue if queue is not None else (TOPIC, rng.randrange(QUEUES))
        self.process += 1
        op_id = len(self.rows)
        row = Operation(
            op_id, op_id, self.process, NOTHING, f, outcome, max(call, after), ret, topic, queue_id
        )
        self.rows.append(row)
        return row

    def next_value(self) -> int:
        self.value += 1
        return self.value

    def outcome(self) -> Outcome:
        return self.rng.choices(OUTCOMES, (7, 2, 1))[0]

    def effect(self, outcome: Outcome, act: Callable[[], None]) -> None:
        """Let it happen now when it went well; now, later or never when the outcome is unknown."""
        chance = self.rng.random()
        if outcome is Outcome.OK or (outcome is Outcome.INFO and chance < 0.4):
            act()
        elif outcome is Outcome.INFO and chance < 0.7:
            self.at(self.now + self.rng.randint(1, 300 * MS), act)

    def log(self, op: Operation) -> list[int]:
        return self.logs[op.topic, op.queue]

    # -- queues ----------------------------------------------------------------------------

    def append(self, op: Operation, values: tuple[int, ...]) -> None:
        self.log(op).extend(values)
        self.index += 1

    def send(self) -> None:
        op = self.row(F.SEND, self.outcome())
        op.value = self.next_value()
        if op.outcome == Outcome.OK:
            op.off = len(self.log(op))
        self.effect(Outcome(op.outcome), lambda: self.append(op, (op.value,)))

    def batch(self) -> None:
        first = self.row(F.SEND, self.outcome())
        rows = [first]
        for _ in range(self.rng.randint(1, 3)):
            other = self.row(F.SEND, Outcome(first.outcome), queue=(first.topic, first.queue))
            other.call_ns, other.ret_ns = first.call_ns, first.ret_ns
            other.parent_op_id, other.process = first.op_id, first.process
            rows.append(other)
        for place, op in enumerate(rows):
            op.value = self.next_value()
            if op.outcome == Outcome.OK:
                op.off = len(self.log(op)) + place
        values = tuple(op.value for op in rows)
        self.effect(Outcome(first.outcome), lambda: self.append(first, values))

    def send_delayed(self) -> None:
        op = self.row(F.SEND, self.outcome())
        op.value = self.next_value()
        delay = self.rng.choice((MS, 40 * MS, 200 * MS))
        op.due_ns = op.call_ns + delay
        due = self.now + delay + self.rng.choice((0, 0, LATE_MAX_NS))

        def schedule() -> None:
            self.at(max(due, self.now), lambda: self.append(op, (op.value,)))

        self.effect(Outcome(op.outcome), schedule)

    def calm(self) -> None:
        """Append a message and ask for the end while nothing is wrong."""
        self.until(self.now + 700 * MS)
        op = self.row(F.SEND, Outcome.OK)
        op.value, op.off = self.next_value(), len(self.log(op))
        self.append(op, (op.value,))
        self.ask_end()

    def pull(self) -> None:
        if self.rng.random() < 0.05:
            self.row(F.PULL, self.rng.choice((Outcome.INFO, Outcome.FAIL)))
            return
        op = self.row(F.PULL, Outcome.OK)
        log, low = self.log(op), self.low[op.topic, op.queue]
        op.off = self.rng.randint(low, len(log))
        op.values = tuple(log[op.off : op.off + self.rng.randint(0, 6)])
        op.cnt = len(op.values)
        if self.rng.random() < 0.15:
            op.level = Level.LOCAL  # a follower that is behind
            op.values = op.values[: self.rng.randint(0, len(op.values))]
            op.cnt, op.max_off = len(op.values), op.off + len(op.values)
        elif op.off == len(log) or (op.values and self.rng.random() < 0.5):
            op.max_off, op.min_off = len(log), low

    def ask_end(self) -> None:
        op = self.row(F.MAX_OFFSET, Outcome.OK)
        op.max_off = len(self.log(op))

    def ask_begin(self) -> None:
        op = self.row(F.MIN_OFFSET, Outcome.OK)
        op.min_off = self.low[op.topic, op.queue]

    def cut(self) -> None:
        queue = (TOPIC, self.rng.randrange(QUEUES))
        if self.may_cut:
            self.low[queue] = self.rng.randint(self.low[queue], len(self.logs[queue]))
            self.move_floor(queue, self.low[queue])

    def move_floor(self, queue: Queue, low: int) -> None:
        number = len(self.floors) // 2 + 1
        begin = number * SEGMENT
        move = FloorMove(self.now, NODES[0], number, cause="size", position=begin)
        move.end_position = begin + KEEPS.keep_bytes + number
        move.newest_ms, move.stored_ms = number, number + 1
        self.floors += [move, FloorMove(self.now, NODES[0], number, *queue, low, "size")]

    # -- consumer offsets ------------------------------------------------------------------

    def commit(
        self, group: str = GROUP, token: int = NOTHING, queue: int | None = None
    ) -> Operation:
        op = self.row(F.COMMIT, self.outcome())
        op.queue = op.queue if queue is None else queue
        slot = (group, op.queue)
        op.group, op.token = group, token
        unused = self.unused.setdefault(slot, self.rng.sample(range(1_000), 200))
        op.off = unused.pop()
        return op

    def commit_plain(self) -> None:
        op = self.commit()
        slot = (op.group, op.queue)
        self.effect(Outcome(op.outcome), lambda: self.offsets.__setitem__(slot, op.off))

    def fetch(self) -> None:
        op = self.row(F.FETCH_COMMIT, Outcome.OK)
        op.group = self.rng.choice((GROUP, GROUP, ORDERLY))
        op.off = self.offsets.get((op.group, op.queue), NOTHING)

    # -- polls -----------------------------------------------------------------------------

    def poll(self) -> None:
        """A subscribed consumer goes on, commits, or is replaced by one that begins again."""
        poller = self.rng.choice(self.pollers)
        if poller.idle_ns >= self.now:
            return
        chance = self.rng.random()
        queue = (TOPIC, poller.queue)
        if poller.position == NOTHING or chance < 0.2:
            op = self.row(F.FETCH_COMMIT, Outcome.OK, after=poller.idle_ns + 1, queue=queue)
            op.off = poller.committed
            if poller.position == NOTHING or (op.off != NOTHING and chance < 0.1):
                op.cnt = 1
                poller.position = op.off if op.off != NOTHING else self.low[queue]
        elif poller.position > poller.committed and chance < 0.4:
            op = self.row(F.COMMIT, Outcome.OK, after=poller.idle_ns + 1, queue=queue)
            op.off = poller.committed = poller.position
        else:
            op = self.row(F.PULL, Outcome.OK, after=poller.idle_ns + 1, queue=queue)
            self.go_on(poller, op)
        op.group, op.process = POLLERS, poller.process
        poller.idle_ns = op.ret_ns
        if self.rng.random() < 0.05:
            poller.process, poller.position = poller.process + 10, NOTHING

    def go_on(self, poller: Poller, op: Operation) -> None:
        log, low = self.log(op), self.low[op.topic, op.queue]
        op.off = poller.position
        if op.off < low:
            op.min_off = poller.position = low
            return
        op.values = tuple(log[op.off : op.off + self.rng.randint(1, 6)])
        op.cnt = len(op.values)
        poller.position += op.cnt
        if not op.values:
            op.max_off, op.min_off = len(log), low

    # -- locks -----------------------------------------------------------------------------

    def lock(self) -> None:
        outcome = self.rng.choices((Outcome.OK, Outcome.INFO), (5, 1))[0]
        op = self.row(F.LOCK, outcome)
        owner = self.rng.randrange(len(self.owners))
        op.group, op.process = ORDERLY, self.owners[owner]
        lock = self.locks[op.queue]
        if outcome is Outcome.INFO:
            self.owners[owner] = self.owners[owner] + 10  # retired
            self.effect(outcome, lambda: self.grant_or_refuse(op, lock))
        elif self.grant(op, lock):
            op.token = lock.token
        else:
            op.outcome = Outcome.FAIL

    def grant(self, op: Operation, lock: Lock) -> bool:
        is_held = lock.owner != NOTHING and self.now < lock.end_ns
        if is_held and lock.owner != op.process:
            return False
        if not is_held:
            self.index += 2
            lock.owner, lock.token, lock.newest = op.process, self.index, self.index
        lock.end_ns = self.now + LEASE_NS
        return True

    def grant_or_refuse(self, op: Operation, lock: Lock) -> None:
        self.grant(op, lock)

    def unlock(self) -> None:
        queue = self.rng.randrange(QUEUES)
        lock = self.locks[queue]
        known = [
            op
            for op in self.rows
            if op.f == F.LOCK
            and op.queue == queue
            and op.outcome == Outcome.OK
            and op.process in self.owners
            and op.ret_ns < self.now
        ]
        if not known:
            return
        grant = known[-1] if self.rng.random() < 0.8 else self.rng.choice(known)
        outcome = self.rng.choices((Outcome.OK, Outcome.INFO), (4, 1))[0]
        op = self.row(F.UNLOCK, outcome, after=grant.ret_ns + 1, queue=(TOPIC, queue))
        op.group, op.process = ORDERLY, grant.process
        op.token = grant.token if self.rng.random() < 0.8 else NOTHING
        if outcome is Outcome.INFO:
            self.owners[self.owners.index(grant.process)] += 10

        def release() -> None:
            if lock.owner == op.process and op.token in (NOTHING, lock.token):
                lock.owner = NOTHING

        self.effect(outcome, release)

    def commit_under_lock(self) -> None:
        granted = [op for op in self.rows if op.f == F.LOCK and op.outcome == Outcome.OK]
        if not granted:
            return
        grant = granted[-1] if self.rng.random() < 0.7 else self.rng.choice(granted)
        if grant.ret_ns >= self.now:
            return
        op = self.commit(ORDERLY, grant.token, grant.queue)
        op.call_ns = max(op.call_ns, grant.ret_ns + 1)
        lock = self.locks[op.queue]
        if grant.token != lock.newest and op.outcome == Outcome.OK:
            op.outcome = Outcome.FAIL

        def accept() -> None:
            if op.token == lock.newest:
                self.offsets[ORDERLY, op.queue] = op.off

        self.effect(Outcome(op.outcome), accept)

    # -- transactions ----------------------------------------------------------------------

    def half(self) -> None:
        op = self.row(F.HALF, self.outcome())
        op.value = self.next_value()
        half = Half(op, is_stored=op.outcome == Outcome.OK)
        self.halves.append(half)
        self.half_offset += 1
        if op.outcome == Outcome.OK:
            op.txn = self.half_offset
        self.effect(Outcome(op.outcome), lambda: setattr(half, "is_stored", True))

    def decide(self) -> None:
        known = [
            half
            for half in self.halves
            if half.row.ret_ns < self.now or (half.row.outcome == Outcome.INFO and half.asked)
        ]
        if known:
            recent = known[-3:] if self.rng.random() < 0.8 else known
            said = self.rng.choices(list(Decision), (1, 6, 3))[0]
            self.end(self.rng.choice(recent), said)

    def end(self, half: Half, decision: Decision) -> None:
        after = half.row.ret_ns + 1 if half.row.outcome == Outcome.OK else 0
        op = self.row(F.END_TRANSACTION, self.outcome(), after=after)
        op.topic, op.queue, op.value = half.row.topic, half.row.queue, half.row.value
        op.txn, op.decision = half.row.txn, decision
        if op.outcome == Outcome.FAIL or decision is Decision.UNKNOWN:
            return
        other = half.decision not in (Decision.UNKNOWN, decision)
        if op.outcome == Outcome.OK and (other or half.is_discarded or not half.is_stored):
            op.outcome = Outcome.FAIL

        def write() -> None:
            if half.is_stored and not half.is_discarded and half.decision is Decision.UNKNOWN:
                half.decision = decision
                if decision is Decision.COMMIT:
                    self.append(op, (op.value,))

        self.effect(Outcome(op.outcome), write)

    def ask(self) -> None:
        open_halves = [half for half in self.halves if self.may_be_asked(half)]
        if open_halves:
            self.check(self.rng.choice(open_halves))

    def may_be_asked(self, half: Half) -> bool:
        is_open = half.decision is Decision.UNKNOWN and not half.is_discarded
        return half.is_stored and is_open and half.asked < CHECKS_MAX

    def check(self, half: Half) -> None:
        half.asked += 1
        op = self.row(F.CHECK, Outcome.OK)
        op.call_ns = op.ret_ns = self.now + self.rng.randint(0, 30 * MS)
        op.topic, op.queue, op.value = half.row.topic, half.row.queue, half.row.value
        op.txn = half.row.txn if half.row.outcome == Outcome.OK else NOTHING
        if half.asked == CHECKS_MAX:
            self.at(self.now + 10 * MS, lambda: self.discard(half))

    def discard(self, half: Half) -> None:
        if half.decision is Decision.UNKNOWN:
            half.is_discarded = True
            self.logs[DISCARD_TOPIC, 0].append(half.row.value)

    def ask_in_vain(self) -> None:
        """A producer that never answers: its half message is given up."""
        half = next((half for half in self.halves if self.may_be_asked(half)), None)
        if half is None or self.rng.random() > 0.2:
            return
        while self.may_be_asked(half):
            self.check(half)
            self.advance()

    # -- replicas --------------------------------------------------------------------------

    def look(self) -> None:
        node = self.rng.choice(NODES)
        behind = self.rng.randint(0, 3)
        self.states.append(state(self.now, node, max(self.index - behind, 0)))


def state(at_ns: int, node: str, index: int) -> ReplicaState:
    """Return what every replica is at *index*."""
    return ReplicaState(at_ns, node, index, index * 7_919 + 1, f"tables-{index}")


STEPS: tuple[tuple[Callable[[World], None], int], ...] = (
    (World.send, 20),
    (World.batch, 4),
    (World.send_delayed, 6),
    (World.pull, 16),
    (World.ask_end, 8),
    (World.ask_begin, 3),
    (World.cut, 1),
    (World.commit_plain, 6),
    (World.fetch, 6),
    (World.poll, 14),
    (World.lock, 8),
    (World.unlock, 4),
    (World.commit_under_lock, 5),
    (World.half, 8),
    (World.decide, 8),
    (World.ask, 3),
    (World.ask_in_vain, 1),
    (World.look, 2),
)
