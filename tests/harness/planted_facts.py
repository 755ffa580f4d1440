"""Facts that a checker may overlook, each planted into clean histories; and what breaks nothing.

An anomaly has one name and may be proved by several facts. `planted_anomalies` has one planter for
each name; here is one for each further fact, and changes to a history that break nothing.
"""

from collections.abc import Callable, Collection

import msgspec

from dledger.jepsen_like.checkers import (
    contents,
    final_reads,
    queue_log,
    replicas,
    retention,
    total_queue,
)
from dledger.jepsen_like.checkers.final_reads import READER
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    F,
    FloorMove,
    Level,
    Operation,
    Outcome,
)
from tests.harness.history_world import NODES, POLLERS, QUEUES, TOPIC, Queue
from tests.harness.planted_scene import InapplicableError, Kind, Planted, Planter, Scene

NEW_VALUE = 2_000_000
"""Of messages that a clean history does not have."""


def nothing_below_the_end(scene: Scene) -> Planted:
    """A pull finds nothing at an offset, and its own answer names an end behind it."""
    queue = scene.queue(is_whole=False)
    low, log = scene.log(queue)
    if not log:
        raise InapplicableError
    pull = scene.add_last(F.PULL, queue)
    pull.off = scene.rng.randrange(low, low + len(log))
    pull.min_off, pull.max_off = low, low + len(log)
    return Planted((pull.op_id,))


def first_behind_the_end(scene: Scene) -> Planted:
    """An answer names a first offset kept that is behind the end that it names."""
    queue = scene.queue(is_whole=False)
    low, log = scene.log(queue)
    pull = scene.add_last(F.PULL, queue)
    pull.off = pull.max_off = low + len(log)
    pull.min_off = pull.max_off + 1
    return Planted((pull.op_id,))


def first_before_it_was_there(scene: Scene) -> Planted:
    """An answer has a queue begin behind a message that was not sent yet."""
    send = scene.pick(op for op in scene.sends() if op.off != NOTHING)
    queue = (send.topic, send.queue)
    read = scene.add(F.MIN_OFFSET, send.call_ns - 3, send.call_ns - 1, queue)
    read.min_off = send.off + 1
    return Planted((read.op_id, send.op_id))


def first_that_no_floor_lets(scene: Scene) -> Planted:
    """The last answer names a first offset kept that no floor lets, and replicas have all."""
    queue = scene.queue(is_whole=False)
    low, log = scene.log(queue)
    least = max(
        (move.min_off for move in scene.history.floors if (move.topic, move.queue) == queue),
        default=0,
    )
    if least >= low + len(log):
        raise InapplicableError
    read = scene.add_last(F.MIN_OFFSET, queue)
    read.min_off = scene.rng.randint(least + 1, low + len(log))
    return Planted((read.op_id,))


def first_that_a_member_alone_names(scene: Scene) -> Planted:
    """A member that asks no majority refuses an offset as too small that no floor lets go."""
    planted = first_that_no_floor_lets(scene)
    read = next(op for op in scene.ops if op.op_id in planted.witnesses)
    read.f, read.off, read.level = int(F.PULL), read.min_off - 1, int(Level.LOCAL)
    return planted


def first_page_skipped(scene: Scene) -> Planted:
    """The last client is not given the first page of a queue that replicas have from there on."""
    queue = scene.queue(is_whole=False)
    pulls = [op for op in scene.rows(F.PULL) if op.group == READER and op.values]
    pulls = sorted((op for op in pulls if (op.topic, op.queue) == queue), key=lambda op: op.off)
    if not pulls or pulls[0].cnt < 2:
        raise InapplicableError
    first = pulls[0]
    held = [r for r in scene.history.replica_reads if (r.topic, r.queue) == queue]
    if any(read.min_off > first.off for read in held):
        raise InapplicableError  # retention may have taken it
    first.off, first.cnt, first.values = first.off + 1, first.cnt - 1, first.values[1:]
    return Planted((first.op_id,))


def queue_never_read(scene: Scene) -> Planted:
    """The last client does not read a queue of which replicas hold messages."""
    queue = scene.queue(is_whole=False)
    its = [op for op in scene.ops if op.group == READER and (op.topic, op.queue) == queue]
    if not its or not scene.log(queue)[1]:
        raise InapplicableError
    if all(op.group != READER or op in its for op in scene.ops):
        raise InapplicableError  # there is no last client then
    for op in its:
        op.group = ""
    return Planted()


def end_never_asked(scene: Scene) -> Planted:
    """The last client does not ask where a queue ends, and is given less than replicas hold."""
    queue = scene.queue(is_whole=False)
    its = [op for op in scene.ops if op.group == READER and (op.topic, op.queue) == queue]
    ends = [op for op in its if op.f == F.MAX_OFFSET]
    if not ends or not scene.log(queue)[1]:
        raise InapplicableError
    for op in ends:
        op.group = ""
    return Planted()


def altered_before_the_end(scene: Scene) -> Planted:
    """A message was read otherwise than it was sent, in a run without a last client."""
    for op in scene.ops:
        if op.group == READER:
            op.group = ""
    pull = scene.pick(op for op in scene.rows(F.PULL) if op.values and not op.group)
    pull.err = contents.BODY
    return Planted((pull.op_id,))


def _held_last(scene: Scene, queue: Queue, value: int, nodes: Collection[str]) -> None:
    reads = scene.history.replica_reads
    for at, read in enumerate(reads):
        if (read.topic, read.queue) == queue and read.node in nodes:
            reads[at] = msgspec.structs.replace(read, values=(*read.values, value))


def _two_queues(scene: Scene) -> tuple[Queue, Queue]:
    queue = scene.queue(is_whole=False)
    return queue, scene.pick((TOPIC, at) for at in range(QUEUES) if (TOPIC, at) != queue)


def _unknown_send(scene: Scene, queue: Queue) -> Operation:
    send = scene.add_last(F.SEND, queue)
    send.value, send.outcome, send.ret_ns, send.err = NEW_VALUE, Outcome.INFO, NEVER, "TimedOut"
    return send


def in_another_queue(scene: Scene) -> Planted:
    """Replicas hold a message of unknown outcome in another queue than it was sent to."""
    queue, other = _two_queues(scene)
    send = _unknown_send(scene, queue)
    scene.log(other)
    _held_last(scene, other, NEW_VALUE, NODES)
    return Planted((send.op_id,))


def refused_here_and_unknown_elsewhere(scene: Scene) -> Planted:
    """A queue refused a message, another one may have it, and it stands in the first."""
    queue, other = _two_queues(scene)
    refused = scene.add_last(F.SEND, queue)
    refused.value, refused.outcome, refused.err = NEW_VALUE, Outcome.FAIL, "BrokerBusyError"
    send = _unknown_send(scene, other)
    scene.log(queue)
    _held_last(scene, queue, NEW_VALUE, NODES)
    return Planted((send.op_id,))


def missing_on_one_replica(scene: Scene) -> Planted:
    """All replicas but the last one have a message that was acknowledged without an offset."""
    send = _send_without_offset(scene)
    queue = (send.topic, send.queue)
    last = {state.node: state.applied_index for state in scene.history.replica_states}
    if len(set(last.values())) > 1 or last.keys() != set(NODES):
        raise InapplicableError
    _held_last(scene, queue, NEW_VALUE, NODES[:-1])
    return Planted()


def floor_without_its_move(scene: Scene) -> Planted:
    """A row lets a queue begin later, and no row of the move names the cause."""
    planted = first_that_no_floor_lets(scene)
    read = next(op for op in scene.ops if op.op_id in planted.witnesses)
    index = max((move.index for move in scene.history.floors), default=0) + 1
    scene.history.floors.append(
        FloorMove(read.ret_ns, NODES[0], index, read.topic, read.queue, read.min_off, "size")
    )
    return planted


def _send_without_offset(scene: Scene) -> Operation:
    send = scene.add_last(F.SEND, scene.queue())
    send.value = NEW_VALUE
    return send


def _end_before(scene: Scene, append: Operation) -> Operation:
    queue = (append.topic, append.queue)
    low, log = scene.log(queue)
    read = scene.add_last(F.MAX_OFFSET, queue)
    read.max_off = low + len(log)
    return read


def send_without_offset_absent(scene: Scene) -> Planted:
    """A send was acknowledged without an offset, and then the queue ends where it did before."""
    send = _send_without_offset(scene)
    return Planted((send.op_id, _end_before(scene, send).op_id))


def send_without_offset_lost(scene: Scene) -> Planted:
    """A send was acknowledged without an offset, and no replica has its message."""
    return Planted((_send_without_offset(scene).op_id,))


def commit_absent(scene: Scene) -> Planted:
    """A transaction was committed, and then the queue ends where it did before."""
    half = scene.add_last(F.HALF, scene.queue())
    half.value, half.txn = NEW_VALUE, NEW_VALUE
    commit = scene.add_last(F.END_TRANSACTION, (half.topic, half.queue))
    commit.value, commit.txn, commit.decision = NEW_VALUE, NEW_VALUE, Decision.COMMIT
    return Planted((commit.op_id, _end_before(scene, commit).op_id))


FACTS: dict[str, tuple[Kind, Planter]] = {
    "nothing below the end": (
        (queue_log.NAME, queue_log.SELF_CONTRADICTION),
        nothing_below_the_end,
    ),
    "first offset behind the end": (
        (queue_log.NAME, queue_log.SELF_CONTRADICTION),
        first_behind_the_end,
    ),
    "first offset before it was there": (
        (queue_log.NAME, queue_log.FROM_THE_FUTURE),
        first_before_it_was_there,
    ),
    "first offset that no floor lets": (
        (retention.NAME, retention.REMOVED),
        first_that_no_floor_lets,
    ),
    "first offset that a member alone names": (
        (retention.NAME, retention.REMOVED),
        first_that_a_member_alone_names,
    ),
    "floor without its move": ((retention.NAME, retention.REMOVED), floor_without_its_move),
    "queue never read": ((final_reads.NAME, final_reads.CUT_SHORT), queue_never_read),
    "end never asked": ((final_reads.NAME, final_reads.CUT_SHORT), end_never_asked),
    "altered before the end": ((contents.NAME, contents.BODY), altered_before_the_end),
    "in another queue": ((total_queue.NAME, total_queue.UNEXPECTED), in_another_queue),
    "refused here, unknown elsewhere": (
        (total_queue.NAME, total_queue.FAILED_BUT_THERE),
        refused_here_and_unknown_elsewhere,
    ),
    "missing on one replica": ((replicas.NAME, replicas.QUEUES_DIFFER), missing_on_one_replica),
    "first page skipped": ((final_reads.NAME, final_reads.CUT_SHORT), first_page_skipped),
    "send without an offset absent": (
        (queue_log.NAME, queue_log.STALE_READ),
        send_without_offset_absent,
    ),
    "send without an offset lost": ((total_queue.NAME, total_queue.LOST), send_without_offset_lost),
    "commit absent": ((queue_log.NAME, queue_log.STALE_READ), commit_absent),
}
"""By fact: the checker and the name under which it is found, and its planter."""


# -- what is right -----------------------------------------------------------------------------


def committed_twice(scene: Scene) -> None:
    """A consumer commits the offset that it has committed just before."""
    commits = [op for op in scene.rows(F.COMMIT) if op.token == NOTHING and op.group != POLLERS]
    first = scene.pick(commits)
    end_ns = first.ret_ns + 3
    slot = (F.COMMIT, first.group, first.queue)
    its = [op for op in scene.ops if (op.f, op.group, op.queue) == slot and op is not first]
    if any(op.ret_ns >= first.call_ns and op.call_ns <= end_ns for op in its):
        raise InapplicableError  # another may be in between
    again = scene.add(F.COMMIT, first.ret_ns + 1, first.ret_ns + 2, (first.topic, first.queue))
    again.group, again.off = first.group, first.off


def refused_and_stored(scene: Scene) -> None:
    """A send is refused once, and its next attempt stores the message."""
    send = scene.pick(scene.sends())
    refused = scene.add(F.SEND, send.call_ns - 3, send.call_ns - 1, (send.topic, send.queue))
    refused.outcome, refused.value, refused.process = Outcome.FAIL, send.value, send.process
    refused.err = "BrokerBusyError"
    send.parent_op_id = refused.op_id


RIGHT: dict[str, Callable[[Scene], None]] = {
    "committed twice": committed_twice,
    "refused and stored": refused_and_stored,
}
"""Changes that a correct broker may show."""
