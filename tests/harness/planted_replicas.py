"""Planters of what replicas hold: states, queues, retention, the sum of everything."""

from dledger.jepsen_like.checkers import batches, replicas
from dledger.jepsen_like.history.operation import NOTHING, F, Outcome, ReplicaRead
from tests.harness.history_world import KEEPS, NODES, TOPIC, Queue
from tests.harness.planted_scene import InapplicableError, Planted, Scene

# -- replicas ----------------------------------------------------------------------------------


def _state_pair(scene: Scene) -> int:
    """Return the place of a state that has company at its index."""
    states = scene.history.replica_states
    indexes = [state.applied_index for state in states]
    return scene.pick(at for at in range(len(states)) if indexes.count(indexes[at]) > 1)


def logs_differ(scene: Scene) -> Planted:
    scene.history.replica_states[_state_pair(scene)].chain ^= 1
    return Planted()


def tables_differ(scene: Scene) -> Planted:
    scene.history.replica_states[_state_pair(scene)].tables += "-but-not-these"
    return Planted()


def not_equal(scene: Scene) -> Planted:
    last = scene.pick(scene.history.replica_states[-len(NODES) :])
    last.applied_index += 1_000
    return Planted()


def _replica_read(scene: Scene, *nodes: str) -> ReplicaRead:
    return scene.pick(
        read
        for read in scene.history.replica_reads
        if read.node in nodes and read.topic == TOPIC and read.values
    )


def queues_differ(scene: Scene) -> Planted:
    """A message no acknowledgement speaks for is another one on one replica."""
    read = _replica_read(scene, *NODES[1:])
    acked = {op.value for op in scene.rows(F.SEND) if op.off != NOTHING}
    low, log = scene.log((read.topic, read.queue))
    at = scene.pick(
        at
        for at, value in enumerate(read.values)
        if value not in acked and 0 <= read.min_off + at - low < len(log)
    )
    read.values = (*read.values[:at], NOTHING, *read.values[at + 1 :])
    return Planted(also=frozenset({(batches.NAME, batches.SCATTERED)}))


def missing_queue(scene: Scene) -> Planted:
    scene.history.replica_reads.remove(_replica_read(scene, *NODES[1:]))
    return Planted()


def lost_on_a_replica(scene: Scene) -> Planted:
    """One replica ends before something acknowledged."""
    read = _replica_read(scene, *NODES[1:])
    send = scene.pick(
        op
        for op in scene.sends()
        if op.queue == read.queue and op.off >= read.min_off and op.value in read.values
    )
    read.values = read.values[: send.off - read.min_off]
    # Everything acknowledged from there on is lost too; the first of them by call is named.
    return Planted((), frozenset({(batches.NAME, batches.TORN)}))


# -- retention ---------------------------------------------------------------------------------


def removed_without_retention(scene: Scene) -> Planted:
    """One replica begins behind everything that a floor lets go."""
    read = _replica_read(scene, *NODES[1:])
    queue = (read.topic, read.queue)
    least = max(
        [move.min_off for move in scene.history.floors if (move.topic, move.queue) == queue],
        default=0,
    )
    end = read.min_off + len(read.values)
    if end <= least:
        raise InapplicableError
    begin = scene.rng.randint(least + 1, end)
    read.min_off, read.values = begin, read.values[begin - read.min_off :]
    return Planted()


def not_entitled(scene: Scene) -> Planted:
    """A floor takes a segment too many, or messages that are not old, or for no cause at all."""
    move = scene.pick(move for move in scene.history.floors if move.index and not move.topic)
    way = scene.rng.randrange(4)
    if way == 0:
        move.position += KEEPS.segment_bytes
    elif way == 1:
        move.end_position = move.position + KEEPS.keep_bytes - 1
    elif way == 2:
        move.cause, move.stored_ms = "age", move.newest_ms + KEEPS.keep_ms + 1
    else:
        move.cause = "forced"
    return Planted()


# -- total_queue -------------------------------------------------------------------------------


def total_lost(scene: Scene) -> Planted:
    """The first replica holds a nameless message instead of an acknowledged one."""
    read = _replica_read(scene, NODES[0])
    send = scene.pick(op for op in scene.sends() if op.value in read.values)
    read.values = tuple(NOTHING if v == send.value else v for v in read.values)
    also = {(replicas.NAME, replicas.LOST), (replicas.NAME, replicas.QUEUES_DIFFER)}
    return Planted((send.op_id,), frozenset(also))


def _append_to_replicas(scene: Scene, queue: Queue, value: int) -> None:
    for read in scene.history.replica_reads:
        if (read.topic, read.queue) == queue:
            read.values += (value,)


def unexpected(scene: Scene) -> Planted:
    _append_to_replicas(scene, scene.queue(is_whole=False), 1_000_000)
    return Planted()


def stored_twice(scene: Scene) -> Planted:
    queue = scene.queue(is_whole=False)
    _, log = scene.log(queue)
    send = scene.pick(op for op in scene.sends() if op.value in log)
    _append_to_replicas(scene, queue, send.value)
    return Planted((send.op_id,))


def failed_but_there(scene: Scene) -> Planted:
    send = scene.pick(scene.sends(Outcome.FAIL))
    _append_to_replicas(scene, (send.topic, send.queue), send.value)
    return Planted((send.op_id,))
