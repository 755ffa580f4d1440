"""Histories of a correct broker, by seed: every kind of operation, overlapping in real time.

One sequential object is played step by step; each operation has its effect at one instant between
its call and its return. Unknown outcomes take effect, take effect long after, or never do.
"""

import random

import msgspec

from dledger.jepsen_like.checkers.fault_record import ELECTION_NS, HEALED, SERVED
from dledger.jepsen_like.checkers.final_reads import READER
from dledger.jepsen_like.checkers.locks import LEASE_NS
from dledger.jepsen_like.checkers.transactions import DISCARD_TOPIC
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Event,
    F,
    FloorMove,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from tests.harness.history_world import (
    CALM_STEPS,
    LAST_PROCESS,
    MS,
    NODES,
    POLLERS,
    QUEUES,
    STEPS,
    TOPIC,
    Lock,
    World,
    state,
)


def clean_history(seed: int, steps: int = 100) -> History:
    """Return a history that no checker may object to."""
    rng = random.Random(seed)
    world = World(rng)
    world.may_cut = rng.random() < 0.3
    queues = [*((TOPIC, queue) for queue in range(QUEUES)), (DISCARD_TOPIC, 0)]
    world.logs = {queue: [] for queue in queues}
    world.low = dict.fromkeys(queues, 0)
    world.locks = {queue: Lock() for queue in range(QUEUES)}
    acts, weights = zip(*STEPS, strict=True)
    for _ in range(steps):
        world.advance()
        rng.choices(acts, weights)[0](world)
    world.until(world.now + 1_000 * MS)
    history = History(RunHeader(f"clean-{seed}", seed))
    history.events = [
        Event(0, world.now, "kill", "leader", NODES[0]),
        Event(world.now, world.now, HEALED),
        Event(world.now + MS, world.now + MS, SERVED),
    ]
    world.until(world.now + ELECTION_NS + 100 * MS)
    for _ in range(CALM_STEPS):
        world.calm()
    _read_everything(world)
    history.operations = _in_order_of_calls(world.rows)
    end = world.now + 3 * LEASE_NS
    for node in NODES:
        for queue in queues:
            low = world.low[queue] + (node != NODES[0] and world.may_cut and rng.random() < 0.3)
            low = min(low, len(world.logs[queue]))
            values = tuple(world.logs[queue][low:])
            if low > world.low[queue]:
                world.move_floor(queue, low)
            history.replica_reads.append(ReplicaRead(end, node, *queue, low, values))
        world.states.append(state(end, node, world.index))
    history.replica_states = world.states
    history.floors = world.floors + [FloorMove(end, node) for node in NODES]
    return history


def _read_everything(world: World) -> None:
    for queue, log in world.logs.items():
        at = world.low[queue]
        while at < len(log):
            world.until(world.now + 50 * MS)
            op = world.row(F.PULL, Outcome.OK, queue=queue)
            op.off, op.values = at, tuple(log[at : at + 8])
            op.cnt = len(op.values)
            op.group, op.process = READER, LAST_PROCESS
            at += op.cnt
        world.until(world.now + 50 * MS)
        op = world.row(F.MAX_OFFSET, Outcome.OK, queue=queue)
        op.max_off, op.min_off = len(log), world.low[queue]
        op.group, op.process = READER, LAST_PROCESS
    _read_offsets(world)


def _read_offsets(world: World) -> None:
    committed = {(POLLERS, poller.queue): poller.committed for poller in world.pollers}
    slots = {(op.group, op.queue) for op in world.rows if op.f == F.COMMIT}
    for group, queue in sorted(slots):
        world.until(world.now + 50 * MS)
        op = world.row(F.FETCH_COMMIT, Outcome.OK, queue=(TOPIC, queue))
        op.off = (world.offsets | committed).get((group, queue), NOTHING)
        op.group, op.process = group, LAST_PROCESS


def _in_order_of_calls(rows: list[Operation]) -> list[Operation]:
    """Number the rows again: ids are given when operations are called."""
    ordered = sorted(rows, key=lambda op: (op.call_ns, op.op_id))
    new_id = {op.op_id: place for place, op in enumerate(ordered)}
    for op in ordered:
        op.op_id, op.parent_op_id = new_id[op.op_id], new_id[op.parent_op_id]
    return ordered


def interrupted(history: History) -> History:
    """Return what was known of a clean history at some instant: what was under way is unknown."""
    rng = random.Random(history.header.seed)
    at_ns = rng.choice(history.operations).call_ns
    known = History(msgspec.structs.replace(history.header, run_id=f"{history.header.run_id}-cut"))
    for op in history.operations:
        if op.call_ns > at_ns or (op.f == F.CHECK and op.ret_ns > at_ns):
            continue
        if op.ret_ns > at_ns:
            op = msgspec.structs.replace(op, outcome=Outcome.INFO, ret_ns=NEVER)
            if op.f == F.SEND:
                op.off = NOTHING
            elif op.f == F.LOCK:
                op.token = NOTHING
            elif op.f == F.HALF:
                op.txn = NOTHING
        known.operations.append(op)
    known.floors = [move for move in history.floors if move.at_ns <= at_ns]
    known.replica_states = [state for state in history.replica_states if state.at_ns <= at_ns]
    return known
