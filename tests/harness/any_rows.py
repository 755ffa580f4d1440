"""Rows of every kind that no cluster left: what engines find in them is alike all the same."""

import random

from dledger.jepsen_like.checkers import contents
from dledger.jepsen_like.checkers.all_checks import Settings
from dledger.jepsen_like.checkers.availability import DAMAGED_ERROR
from dledger.jepsen_like.checkers.delayed import DELIVERED_ERROR
from dledger.jepsen_like.checkers.fault_record import HEALED, SERVED
from dledger.jepsen_like.checkers.final_reads import READER
from dledger.jepsen_like.checkers.pop import IN_ORDER_SUFFIX
from dledger.jepsen_like.checkers.pop_ends import STALE
from dledger.jepsen_like.checkers.retention import Keeps
from dledger.jepsen_like.checkers.retries import DEAD_PREFIX, RETRY_PREFIX
from dledger.jepsen_like.checkers.transactions import DISCARD_TOPIC
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    Event,
    F,
    FloorMove,
    History,
    Level,
    Operation,
    Outcome,
    ReplicaRead,
    ReplicaState,
    RunHeader,
)

TOPICS = ("orders", "orders", "bills", DISCARD_TOPIC)
GROUPS = ("", "readers", "readers" + IN_ORDER_SUFFIX, READER)
ERRORS = (STALE, DELIVERED_ERROR, DAMAGED_ERROR, "BrokerBusyError")
MS = 1_000_000
STEP_NS = 100 * MS
LENGTH = 900
"""Steps in which all rows are called."""
ANY = Settings(
    settled=True,
    idempotent=True,
    late_max_ns=3 * MS,
    late_quiet_max_ns=2 * MS,
    keeps=Keeps(keep_bytes=1_000, segment_bytes=100),
)
"""What is demanded: as much as can be."""


def any_rows(seed: int, count: int = 600) -> History:
    """Return a history of *count* rows with small numbers wherever one may stand."""
    rng = random.Random(seed)
    history = History(RunHeader(f"any-{seed}", seed))
    while len(history.operations) < count:
        history.operations += _batch(rng, len(history.operations))
    history.events = [
        Event(at * STEP_NS, at * STEP_NS, kind)
        for at, kind in ((0, "kill"), (9, HEALED), (10, SERVED), (rng.randrange(LENGTH), "kill"))
    ]
    end_ns = (LENGTH + 99) * STEP_NS
    for node in ("n0", "n1"):
        index, chain = rng.randrange(2), rng.randrange(2)
        history.replica_states.append(ReplicaState(end_ns, node, index, chain, str(chain)))
        for topic in rng.sample(TOPICS[1:], 2):
            for queue in range(2):
                held = tuple(rng.randrange(20) for _ in range(rng.randrange(6)))
                low = rng.choice((0, 0, 2))
                history.replica_reads.append(ReplicaRead(end_ns, node, topic, queue, low, held))
        for topic in ("", "orders"):
            move = FloorMove(rng.randrange(end_ns), node, 1, topic, 0, 1, "size")
            move.position, move.end_position = rng.randrange(3) * 100, 1_150
            history.floors.append(move)
    return history


def _batch(rng: random.Random, first_id: int) -> list[Operation]:
    """Return one row, or several sends that share a request."""
    f, outcome = rng.choice(tuple(F)), rng.choices(tuple(Outcome), (7, 2, 1))[0]
    call_ns = rng.randrange(LENGTH) * STEP_NS + first_id
    ret_ns = NEVER if outcome == Outcome.INFO else call_ns + rng.randrange(9 * STEP_NS)
    topic, queue, group = rng.choice(TOPICS), rng.randrange(2), rng.choice(GROUPS)
    if f is F.RETURNED:
        topic = rng.choice((RETRY_PREFIX, DEAD_PREFIX)) + group
    rows = []
    for op_id in range(first_id, first_id + (rng.randint(1, 3) if f is F.SEND else 1)):
        op = Operation(
            op_id, first_id, rng.randrange(9), NOTHING, f, outcome, call_ns, ret_ns, topic, queue
        )
        op.group = group
        for name in ("off", "max_off", "min_off", "token", "txn"):
            setattr(op, name, rng.randint(NOTHING, 6))
        op.value, op.cnt, op.status = rng.randrange(20), rng.randrange(4), rng.randrange(5)
        op.decision = rng.randint(NOTHING, max(Decision))
        op.due_ns = rng.choice((NOTHING, NOTHING, call_ns + rng.randrange(40 * STEP_NS)))
        op.level = rng.choice((Level.LINEARIZABLE, Level.LINEARIZABLE, Level.LOCAL))
        op.err = rng.choice(ERRORS) if outcome == Outcome.FAIL else ""
        if f is F.PULL and outcome == Outcome.OK:
            op.off, op.err = max(op.off, 0), rng.choice(("", "", *contents.ALTERED))
            op.values = tuple(rng.randrange(20) for _ in range(op.cnt))
        rows.append(op)
    return rows
