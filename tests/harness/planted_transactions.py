"""Planters of transactions: what is seen of them, their decisions, and when they are checked."""

from dledger.jepsen_like.checkers import queue_log, replicas, total_queue
from dledger.jepsen_like.checkers.transactions import (
    CHECK_INTERVAL_NS,
    CHECKS_MAX,
    DISCARD_TOPIC,
    Transaction,
)
from dledger.jepsen_like.history.operation import Decision, F, Operation, Outcome
from tests.harness.history_world import Queue
from tests.harness.planted_scene import NO_PLACE, InapplicableError, Planted, Scene

# -- transactions ------------------------------------------------------------------------------


def _ended(one: Transaction, decision: Decision) -> list[Operation]:
    return one.ended(decision, only_acknowledged=True)


def half_visible(scene: Scene) -> Planted:
    """Every commit of something visible is taken out; or one was pulled before it was called."""
    seen = scene.seen()
    one = scene.pick(one for one in scene.transactions() if one.value in seen)
    assert one.half is not None
    queue, off = scene.places()[one.value]
    if scene.rng.random() < 0.5:
        for op in one.ends:
            scene.ops.remove(op)
        pull = seen[one.value]
    else:
        called = min(op.call_ns for op in one.ended(Decision.COMMIT))
        pull = scene.add(F.PULL, called - 3, called - 1, queue)
        pull.off, pull.values, pull.cnt = off, (one.value,), 1
    also = {
        (queue_log.NAME, queue_log.PHANTOM),
        (queue_log.NAME, queue_log.FROM_THE_FUTURE),
        (queue_log.NAME, queue_log.NON_MONOTONIC),
        (total_queue.NAME, total_queue.UNEXPECTED),
    }
    return Planted((one.half.op_id, pull.op_id), frozenset(also))


_ABORTED = frozenset(
    {
        (queue_log.NAME, queue_log.ABORTED_READ),
        (queue_log.NAME, queue_log.PHANTOM),
        (total_queue.NAME, total_queue.FAILED_BUT_THERE),
        (total_queue.NAME, total_queue.UNEXPECTED),
    }
)


def rolled_back_visible(scene: Scene) -> Planted:
    one = scene.pick(one for one in scene.transactions() if _ended(one, Decision.ROLLBACK))
    assert one.half is not None
    pull = scene.pull_last((one.half.topic, one.half.queue), one.value)
    return Planted((_ended(one, Decision.ROLLBACK)[0].op_id, pull.op_id), _ABORTED)


def failed_visible(scene: Scene) -> Planted:
    """The half message of something committed is recorded as failed, and so are its ends."""
    one = scene.pick(one for one in scene.transactions() if one.value in scene.seen())
    assert one.half is not None
    one.half.outcome = Outcome.FAIL
    for op in (*one.checks, *_ended(one, Decision.COMMIT)):
        scene.ops.remove(op)
    return Planted((one.half.op_id, scene.seen()[one.value].op_id), _ABORTED)


def decided_twice(scene: Scene) -> Planted:
    decision = scene.rng.choice((Decision.COMMIT, Decision.ROLLBACK))
    one = scene.pick(one for one in scene.transactions() if _ended(one, decision))
    assert one.half is not None
    end = scene.add_last(F.END_TRANSACTION, (one.half.topic, one.half.queue))
    end.value, end.txn = one.value, one.half.txn
    end.decision = Decision.ROLLBACK if decision is Decision.COMMIT else Decision.COMMIT
    also = NO_PLACE | {(total_queue.NAME, total_queue.LOST)}
    return Planted((_ended(one, decision)[0].op_id, end.op_id), also)


def committed_twice(scene: Scene) -> Planted:
    one = scene.pick(one for one in scene.transactions() if one.value in scene.seen())
    assert one.half is not None
    pull = scene.pull_last((one.half.topic, one.half.queue), one.value)
    return Planted((pull.op_id,), frozenset({(queue_log.NAME, queue_log.DUPLICATE)}))


def other_queue(scene: Scene) -> Planted:
    one = scene.pick(one for one in scene.transactions() if one.value in scene.seen())
    assert one.half is not None
    one.half.queue = 1 - one.half.queue
    unexpected = (total_queue.NAME, total_queue.UNEXPECTED)
    also = {(queue_log.NAME, queue_log.PHANTOM), unexpected, *NO_PLACE}
    return Planted((one.half.op_id, scene.seen()[one.value].op_id), frozenset(also))


def commit_lost(scene: Scene) -> Planted:
    """A rollback is recorded as a commit."""
    cut = {(read.topic, read.queue) for read in scene.history.replica_reads if read.min_off > 0}
    one = scene.pick(
        one for one in scene.transactions() if len(one.ends) == 1 and _ended(one, Decision.ROLLBACK)
    )
    assert one.half is not None
    if (one.half.topic, one.half.queue) in cut:
        raise InapplicableError
    one.ends[0].decision = Decision.COMMIT
    also = NO_PLACE | {(total_queue.NAME, total_queue.LOST)}
    return Planted((one.half.op_id, one.ends[0].op_id), also)


def shared_offset(scene: Scene) -> Planted:
    first, second = (scene.pick(scene.transactions()).half for _ in range(2))
    assert first is not None
    assert second is not None
    if first is second:
        raise InapplicableError
    second.txn = first.txn
    return Planted((first.op_id, second.op_id))


def _check_last(scene: Scene, half: Operation, later_ns: int = 0) -> Operation:
    scene.end_ns += later_ns
    check = scene.add_last(F.CHECK, (half.topic, half.queue))
    check.call_ns = check.ret_ns
    check.value, check.txn = half.value, half.txn
    return check


def never_begun(scene: Scene) -> Planted:
    """A producer is asked about a half message that failed, or that was never sent."""
    half = scene.pick(scene.rows(F.HALF, outcome=Outcome.FAIL))
    check = _check_last(scene, half)
    if scene.rng.random() < 0.5:
        check.value = 1_000_000
    return Planted((check.op_id,))


def checked_decided(scene: Scene) -> Planted:
    one = scene.pick(
        one
        for one in scene.transactions()
        if any(op.outcome == Outcome.OK for op in one.ends) and len(one.checks) < CHECKS_MAX
    )
    assert one.half is not None
    check = _check_last(scene, one.half, CHECK_INTERVAL_NS)
    return Planted((check.op_id,))


def checked_early(scene: Scene) -> Planted:
    one = scene.pick(one for one in scene.transactions() if one.checks)
    assert one.half is not None
    check = scene.rng.choice(one.checks)
    check.call_ns = check.ret_ns = one.half.call_ns - 1
    return Planted((one.half.op_id, check.op_id))


def _is_open(one: Transaction) -> bool:
    return not any(op.outcome != Outcome.FAIL for op in one.ends)


def checked_often(scene: Scene) -> Planted:
    one = scene.pick(
        one for one in scene.transactions() if _is_open(one) and len(one.checks) < CHECKS_MAX
    )
    assert one.half is not None
    checks = [_check_last(scene, one.half) for _ in range(len(one.checks), CHECKS_MAX + 1)]
    return Planted((one.half.op_id, checks[-1].op_id))


_DISCARD: Queue = (DISCARD_TOPIC, 0)


def discarded_committed(scene: Scene) -> Planted:
    one = scene.pick(one for one in scene.transactions() if one.value in scene.seen())
    pull = scene.pull_last(_DISCARD, one.value)
    return Planted((pull.op_id,))


def discarded_twice(scene: Scene) -> Planted:
    value = scene.pick(scene.log(_DISCARD)[1])
    pull = scene.pull_last(_DISCARD, value)
    return Planted((pull.op_id,))


def dropped(scene: Scene) -> Planted:
    """The discard topic lacks its only message."""
    _, values = scene.log(_DISCARD)
    if len(values) != 1:
        raise InapplicableError
    one = next((one for one in scene.transactions() if one.value == values[0]), None)
    if one is None or one.half is None or not _is_open(one):
        raise InapplicableError
    scene.ops[:] = [op for op in scene.ops if op.topic != DISCARD_TOPIC]
    for read in scene.history.replica_reads:
        if read.topic == DISCARD_TOPIC:
            read.values = ()
    # One replica may keep less of the topic than others.
    also = frozenset({(replicas.NAME, replicas.QUEUES_DIFFER)})
    return Planted((one.half.op_id, max(one.checks, key=lambda op: op.ret_ns).op_id), also)
