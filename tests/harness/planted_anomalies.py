"""One planter per kind of anomaly: the smallest change to a clean history that shows it.

A planter edits an operation that is there wherever an edit shows one anomaly alone; where it would
show several, it adds one or two operations. It returns the operations a checker must name, and what
other checkers may report too: one event can break two guarantees.
"""

from collections.abc import Callable
from itertools import pairwise

from dledger.jepsen_like.checkers import (
    availability,
    batches,
    consumer_offsets,
    contents,
    delayed,
    final_reads,
    locks,
    polls,
    queue_log,
    replicas,
    retention,
    total_queue,
    transactions,
)
from dledger.jepsen_like.checkers.fault_record import ELECTION_NS
from dledger.jepsen_like.checkers.locks import LEASE_NS
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome
from tests.harness.history_world import LAST_PROCESS, LATE_MAX_NS, ORDERLY, POLLERS, TOPIC
from tests.harness.planted_replicas import (
    failed_but_there,
    logs_differ,
    lost_on_a_replica,
    missing_queue,
    not_entitled,
    not_equal,
    queues_differ,
    removed_without_retention,
    stored_twice,
    tables_differ,
    total_lost,
    unexpected,
)
from tests.harness.planted_scene import InapplicableError, Kind, Planted, Planter, Scene
from tests.harness.planted_transactions import (
    checked_decided,
    checked_early,
    checked_often,
    commit_lost,
    committed_twice,
    decided_twice,
    discarded_committed,
    discarded_twice,
    dropped,
    failed_visible,
    half_visible,
    never_begun,
    other_queue,
    rolled_back_visible,
    shared_offset,
)

# -- queue_log ---------------------------------------------------------------------------------


def _miss(scene: Scene, *, after_send: bool) -> Planted:
    """A read reports the end of the queue where something was found before."""
    queue = scene.queue()
    first = scene.first_present(queue, scene.rng.randrange(len(scene.log(queue)[1]) or 1))
    if first.is_send != after_send:
        raise InapplicableError
    off = scene.rng.randint(max(0, first.off - 2), first.off)
    if scene.first_present(queue, off) != first:
        raise InapplicableError
    read = scene.add(F.MAX_OFFSET, first.at_ns + 1, first.at_ns + 2, queue)
    read.max_off = off
    also = {(batches.NAME, batches.TORN), (delayed.NAME, delayed.LATE)}
    return Planted((read.op_id, first.op_id), frozenset(also))


def stale_read(scene: Scene) -> Planted:
    return _miss(scene, after_send=True)


def non_monotonic(scene: Scene) -> Planted:
    return _miss(scene, after_send=False)


def _send_late(scene: Scene, *, after_send: bool) -> Planted:
    """A send is called only when something from its offset on was known."""
    send = scene.pick(scene.sends())
    queue = (send.topic, send.queue)
    first = scene.first_present(queue, send.off, besides=send.op_id)
    if first.is_send != after_send or scene.log(queue)[0] > 0:
        raise InapplicableError
    send.call_ns, send.ret_ns = first.at_ns + 1, first.at_ns + 2
    return Planted((send.op_id, first.op_id))


def send_inverted(scene: Scene) -> Planted:
    return _send_late(scene, after_send=True)


def from_the_future(scene: Scene) -> Planted:
    return _send_late(scene, after_send=False)


def inconsistent_offsets(scene: Scene) -> Planted:
    """A pull shows another value than everybody else, one that may have been stored."""
    pull = scene.pick(op for op in scene.rows(F.PULL) if op.values and op.topic == TOPIC)
    send = scene.add(F.SEND, 0, NEVER, (pull.topic, pull.queue))
    send.outcome, send.value = Outcome.INFO, 1_000_000
    at = scene.rng.randrange(len(pull.values))
    old = pull.values[at]
    others = [op for op in scene.rows(F.PULL) if old in op.values and op is not pull]
    acked = [op for op in scene.rows(F.SEND) if op.value == old and op.off != NOTHING]
    if not others and not acked:
        raise InapplicableError
    pull.values = (*pull.values[:at], send.value, *pull.values[at + 1 :])
    also = {(batches.NAME, batches.SCATTERED), (total_queue.NAME, total_queue.DUPLICATED)}
    return Planted((pull.op_id,), frozenset(also))


def duplicate(scene: Scene) -> Planted:
    send = scene.pick(op for op in scene.sends() if op.value in scene.seen())
    pull = scene.pull_last((send.topic, send.queue), send.value)
    return Planted((pull.op_id,))


def aborted_read(scene: Scene) -> Planted:
    """A send that some pull proves, or an unproved one, is recorded as failed."""
    seen = scene.seen()
    outcome = scene.rng.choice((Outcome.OK, Outcome.INFO))
    send = scene.pick(op for op in scene.sends(outcome) if op.value in seen)
    send.outcome, send.ret_ns = Outcome.FAIL, send.call_ns + 1
    also = frozenset({(total_queue.NAME, total_queue.FAILED_BUT_THERE)})
    return Planted((send.op_id,), also)


def phantom(scene: Scene) -> Planted:
    """The send of something seen is taken out of the history."""
    seen = scene.seen()
    send = scene.pick(op for op in scene.sends(Outcome.INFO) if op.value in seen)
    scene.ops.remove(send)
    pulls = [op for op in scene.rows(F.PULL) if send.value in op.values]
    also = frozenset({(total_queue.NAME, total_queue.UNEXPECTED)})
    return Planted((pulls[0].op_id,), also)


def of_no_send(scene: Scene) -> Planted:
    read = scene.add_last(F.MAX_OFFSET, scene.queue(is_whole=False))
    read.max_off = len(scene.ops)
    return Planted((read.op_id,))


def self_contradiction(scene: Scene) -> Planted:
    pull = scene.pick(op for op in scene.rows(F.PULL) if op.values and op.level == 0)
    if pull.topic != TOPIC:
        raise InapplicableError
    pull.max_off = pull.off + pull.cnt - 1
    also = {(batches.NAME, batches.TORN), (delayed.NAME, delayed.LATE)}
    return Planted((pull.op_id,), frozenset(also))


def min_went_back(scene: Scene) -> Planted:
    reads = [
        op
        for op in scene.rows(F.PULL, F.MIN_OFFSET)
        if op.min_off != NOTHING and op.level == Level.LINEARIZABLE
    ]
    first = scene.pick(reads)
    later = [op for op in reads if op.call_ns > first.ret_ns and op.queue == first.queue]
    low = max((op.min_off for op in later), default=NOTHING)
    if low == NOTHING:
        raise InapplicableError
    reached = [p.at_ns for p in scene.present((first.topic, first.queue)) if p.off >= low]
    if min(reached, default=NEVER) >= first.call_ns:
        raise InapplicableError  # it would be there too early as well
    first.min_off = low + 1
    return Planted((first.op_id,), frozenset({(retention.NAME, retention.REMOVED)}))


# -- consumer_offsets --------------------------------------------------------------------------


def _slot(op: Operation) -> tuple[str, int]:
    return (op.group, op.queue)


def never_committed(scene: Scene) -> Planted:
    fetch = scene.pick(op for op in scene.rows(F.FETCH_COMMIT) if op.group != POLLERS)
    fetch.off = 5_000
    return Planted((fetch.op_id,))


def aborted_commit(scene: Scene) -> Planted:
    commit = scene.pick(scene.rows(F.COMMIT, outcome=Outcome.FAIL))
    fetch = scene.pick(op for op in scene.rows(F.FETCH_COMMIT) if _slot(op) == _slot(commit))
    fetch.off = commit.off
    return Planted((commit.op_id, fetch.op_id))


def before_commit(scene: Scene) -> Planted:
    commit = scene.pick(scene.rows(F.COMMIT))
    fetch = scene.add(
        F.FETCH_COMMIT, commit.call_ns - 3, commit.call_ns - 1, (commit.topic, commit.queue)
    )
    fetch.group, fetch.off = commit.group, commit.off
    return Planted((commit.op_id, fetch.op_id))


def went_back(scene: Scene) -> Planted:
    old = scene.pick(scene.rows(F.COMMIT))
    scene.pick(
        op for op in scene.rows(F.COMMIT) if _slot(op) == _slot(old) and op.call_ns > old.ret_ns
    )
    fetch = scene.add_last(F.FETCH_COMMIT, (old.topic, old.queue))
    fetch.group, fetch.off = old.group, old.off
    return Planted((fetch.op_id,))


# -- delayed -----------------------------------------------------------------------------------


def _delayed(scene: Scene, outcome: Outcome = Outcome.OK) -> list[Operation]:
    return [op for op in scene.rows(F.SEND, outcome=outcome) if op.due_ns != NOTHING]


def early(scene: Scene) -> Planted:
    seen = scene.seen()
    send = scene.pick(op for op in _delayed(scene) if op.value in seen)
    pull = seen[send.value]
    send.due_ns = pull.ret_ns + 1
    return Planted((send.op_id, pull.op_id))


def late(scene: Scene) -> Planted:
    """A delayed send was called, answered and due so early that a read ought to have seen it."""
    places = scene.places()
    send = scene.pick(op for op in _delayed(scene) if op.value in places)
    queue, off = places[send.value]
    reads = [
        op
        for op in scene.rows(F.PULL, F.MAX_OFFSET)
        if (op.topic, op.queue) == queue and op.level == Level.LINEARIZABLE
        if NOTHING < op.max_off <= off
    ]
    if not reads:
        raise InapplicableError
    missed = max(reads, key=lambda op: op.call_ns)
    delay_ns = send.due_ns - send.call_ns
    earlier_ns = send.ret_ns + delay_ns + LATE_MAX_NS + 1 - missed.call_ns
    if earlier_ns <= 0:
        raise InapplicableError  # then it was late before
    send.call_ns -= earlier_ns
    send.ret_ns -= earlier_ns
    send.due_ns -= earlier_ns
    return Planted((send.op_id, missed.op_id))


def delivered_twice(scene: Scene) -> Planted:
    seen = scene.seen()
    send = scene.pick(op for op in _delayed(scene) if op.value in seen)
    pull = scene.pull_last((send.topic, send.queue), send.value)
    return Planted((send.op_id, pull.op_id), frozenset({(queue_log.NAME, queue_log.DUPLICATE)}))


def delayed_lost(scene: Scene) -> Planted:
    send = scene.add(F.SEND, 1_000, 2_000, scene.queue())
    send.value, send.due_ns = 1_000_000, 5_000
    return Planted((send.op_id,))


def aborted_delayed(scene: Scene) -> Planted:
    seen = scene.seen()
    outcome = scene.rng.choice((Outcome.OK, Outcome.INFO))
    send = scene.pick(op for op in _delayed(scene, outcome) if op.value in seen)
    send.outcome, send.ret_ns = Outcome.FAIL, send.call_ns + 1
    also = {
        (queue_log.NAME, queue_log.ABORTED_READ),
        (total_queue.NAME, total_queue.FAILED_BUT_THERE),
    }
    return Planted((send.op_id,), frozenset(also))


# -- batches -----------------------------------------------------------------------------------


def _batch(scene: Scene) -> tuple[list[Operation], int]:
    """Return a batch that is there, and its first offset."""
    places = scene.places()
    rows = scene.pick(rows for rows in batches.batches_of(scene.ops) if rows[0].value in places)
    return rows, places[rows[0].value][1]


def torn_batch(scene: Scene) -> Planted:
    """A read that overlaps the batch sees the queue end within it."""
    rows, base = _batch(scene)
    queue = (rows[0].topic, rows[0].queue)
    if scene.log(queue)[0] > 0:
        raise InapplicableError
    seen_ns = scene.first_present(queue, base).at_ns
    read = scene.add(F.MAX_OFFSET, rows[0].call_ns, seen_ns, queue)
    read.max_off = base + scene.rng.randint(1, len(rows) - 1)
    return Planted((rows[0].op_id, read.op_id))


def scattered_batch(scene: Scene) -> Planted:
    """A message of the batch is recorded for the next send, and the other way round."""
    rows, base = _batch(scene)
    queue = (rows[0].topic, rows[0].queue)
    places = scene.places()
    after = scene.pick(
        op for op in scene.sends() if places.get(op.value) == (queue, base + len(rows))
    )
    last = rows[-1]
    last.value, after.value = after.value, last.value
    also = {
        (queue_log.NAME, queue_log.INCONSISTENT_OFFSETS),
        (queue_log.NAME, queue_log.DUPLICATE),
        (queue_log.NAME, queue_log.FROM_THE_FUTURE),
        (queue_log.NAME, queue_log.SEND_INVERTED),
        (replicas.NAME, replicas.LOST),
    }
    return Planted((), frozenset(also))


# -- polls -------------------------------------------------------------------------------------


def _two_polls(scene: Scene) -> tuple[Operation, Operation]:
    """Return two polls of a process with nothing between them, the first of which found some."""
    rows = [op for op in scene.rows(F.PULL, F.FETCH_COMMIT) if op.group == POLLERS]
    rows.sort(key=lambda op: (op.process, op.call_ns))
    return scene.pick(
        (first, second)
        for first, second in pairwise(rows)
        if first.process == second.process and first.f == second.f == F.PULL and first.cnt
        if not (first.off == 0 and first.cnt == 1)
    )


def poll_went_back(scene: Scene) -> Planted:
    """The last poll finds again what the one before did."""
    first, second = _two_polls(scene)
    if any(op.process == second.process and op.call_ns > second.call_ns for op in scene.ops):
        raise InapplicableError
    second.off, second.values, second.cnt = first.off, first.values, first.cnt
    second.max_off = second.min_off = NOTHING
    return Planted((first.op_id, second.op_id))


def poll_skipped(scene: Scene) -> Planted:
    """The former poll has found less than it had."""
    first, second = _two_polls(scene)
    first.values, first.cnt = first.values[:-1], first.cnt - 1
    return Planted((first.op_id, second.op_id))


# -- locks -------------------------------------------------------------------------------------


def _grants(scene: Scene) -> list[Operation]:
    return scene.rows(F.LOCK)


def _grant_last(scene: Scene, queue: int, token: int, *, later_ns: int = 2 * LEASE_NS) -> Operation:
    scene.end_ns += later_ns
    op = scene.add_last(F.LOCK, (TOPIC, queue))
    op.group, op.token = ORDERLY, token
    return op


def _newest(scene: Scene, queue: int) -> Operation:
    grants = [op for op in _grants(scene) if op.queue == queue]
    return max(grants, key=lambda op: op.token)


def two_holders(scene: Scene) -> Planted:
    """A client gets the lock within the lease of a grant that was not given back."""
    held = scene.pick(_grants(scene))
    others = [op for op in scene.ops if (op.queue, op.group) == (held.queue, ORDERLY)]
    is_last = all(op.call_ns <= held.ret_ns for op in others if op.token != NOTHING)
    unlocked = any(op.f == F.UNLOCK and op.process == held.process for op in others)
    if is_last and not unlocked:
        grant = scene.add(F.LOCK, held.ret_ns + 1, held.ret_ns + 2, (TOPIC, held.queue))
        grant.group, grant.token = ORDERLY, _newest(scene, held.queue).token + 1
        return Planted((held.op_id, grant.op_id))
    token = _newest(scene, held.queue).token
    first = _grant_last(scene, held.queue, token + 2)
    later_ns = scene.rng.randint(0, LEASE_NS - 1_000)
    second = _grant_last(scene, held.queue, token + 4, later_ns=later_ns)
    return Planted((first.op_id, second.op_id))


def token_went_back(scene: Scene) -> Planted:
    newest = _newest(scene, scene.pick(_grants(scene)).queue)
    grant = _grant_last(scene, newest.queue, newest.token - 1)
    return Planted((grant.op_id,))


def token_of_two(scene: Scene) -> Planted:
    newest = _newest(scene, scene.pick(_grants(scene)).queue)
    grant = _grant_last(scene, newest.queue, newest.token)
    return Planted((grant.op_id,))


def token_again(scene: Scene) -> Planted:
    unlock = scene.pick(op for op in scene.rows(F.UNLOCK) if op.token != NOTHING)
    if unlock.token != _newest(scene, unlock.queue).token:
        raise InapplicableError
    grant = _grant_last(scene, unlock.queue, unlock.token)
    grant.process = unlock.process
    return Planted((grant.op_id,))


def not_fenced(scene: Scene) -> Planted:
    """What an old holder was refused is recorded as accepted."""
    refused = scene.pick(op for op in scene.rows(F.COMMIT, outcome=Outcome.FAIL) if op.token >= 0)
    newer = [
        op
        for op in _grants(scene)
        if op.queue == refused.queue and op.token > refused.token and op.ret_ns < refused.call_ns
    ]
    scene.pick(newer)
    refused.outcome = Outcome.OK
    also = frozenset({(consumer_offsets.NAME, consumer_offsets.WENT_BACK)})
    return Planted((refused.op_id,), also)


# -- final_reads -------------------------------------------------------------------------------


def cut_short(scene: Scene) -> Planted:
    """The last client is not given the last page of a queue."""
    pulls = [op for op in scene.rows(F.PULL) if op.group == final_reads.READER]
    last = max((op for op in pulls if op.topic == TOPIC), key=lambda op: (op.queue, op.off))
    if last.cnt == 1:
        raise InapplicableError
    last.values, last.cnt = last.values[:-1], last.cnt - 1
    return Planted((last.op_id,))


def not_asked(scene: Scene) -> Planted:
    fetches = [op for op in scene.rows(F.FETCH_COMMIT) if op.process == LAST_PROCESS]
    slot = {(op.group, op.queue) for op in scene.rows(F.COMMIT)}
    fetch = scene.pick(op for op in fetches if (op.group, op.queue) in slot)
    scene.ops.remove(fetch)
    commits = [op for op in scene.rows(F.COMMIT) if _slot(op) == _slot(fetch)]
    return Planted((min(op.op_id for op in commits),))


# -- contents ----------------------------------------------------------------------------------


def _altered(anomaly: str) -> Callable[[Scene], Planted]:
    """A reader has compared a message and found something that was sent otherwise."""

    def plant(scene: Scene) -> Planted:
        pull = scene.pick(op for op in scene.rows(F.PULL) if op.values)
        pull.err = anomaly
        return Planted((pull.op_id,))

    return plant


# -- availability ------------------------------------------------------------------------------


def too_few_decided(scene: Scene) -> Planted:
    """Two reads that were called when nothing was wrong have no answer."""
    served_ns = max(event.at_ns for event in scene.history.events)
    asked = [op for op in scene.rows(F.MAX_OFFSET) if op.call_ns >= served_ns + ELECTION_NS]
    lost = sorted(scene.rng.sample(asked, 2), key=lambda op: (op.call_ns, op.op_id))
    for op in lost:
        op.outcome, op.ret_ns, op.max_off = Outcome.INFO, NEVER, NOTHING
    # They may be of the last client.
    also = frozenset({(final_reads.NAME, final_reads.CUT_SHORT)})
    return Planted(tuple(op.op_id for op in lost), also)


def damaged_answer(scene: Scene) -> Planted:
    pull = scene.add_last(F.PULL, scene.queue(is_whole=False))
    pull.outcome, pull.err, pull.off = Outcome.FAIL, availability.DAMAGED_ERROR, 0
    return Planted((pull.op_id,))


def silent(scene: Scene) -> Planted:
    """The last sends are refused, each for a moment's reason, for longer than a bound."""
    refused: list[Operation] = []
    for place in range(availability.SENDS_LEAST):
        scene.end_ns += availability.SILENT_MAX_NS
        send = scene.add_last(F.SEND, scene.queue(is_whole=False))
        send.outcome, send.err, send.value = Outcome.FAIL, "BrokerBusyError", 1_000_000 + place
        refused.append(send)
    return Planted((refused[0].op_id, refused[-1].op_id))


PLANTERS: dict[Kind, Planter] = {
    (contents.NAME, contents.BODY): _altered(contents.BODY),
    (contents.NAME, contents.PROPERTIES): _altered(contents.PROPERTIES),
    (contents.NAME, contents.BORN): _altered(contents.BORN),
    (contents.NAME, contents.STORED): _altered(contents.STORED),
    (final_reads.NAME, final_reads.CUT_SHORT): cut_short,
    (final_reads.NAME, final_reads.NOT_ASKED): not_asked,
    (availability.NAME, availability.UNDECIDED): too_few_decided,
    (availability.NAME, availability.DAMAGED): damaged_answer,
    (availability.NAME, availability.SILENT): silent,
    (queue_log.NAME, queue_log.SEND_INVERTED): send_inverted,
    (queue_log.NAME, queue_log.STALE_READ): stale_read,
    (queue_log.NAME, queue_log.NON_MONOTONIC): non_monotonic,
    (queue_log.NAME, queue_log.FROM_THE_FUTURE): from_the_future,
    (queue_log.NAME, queue_log.INCONSISTENT_OFFSETS): inconsistent_offsets,
    (queue_log.NAME, queue_log.DUPLICATE): duplicate,
    (queue_log.NAME, queue_log.ABORTED_READ): aborted_read,
    (queue_log.NAME, queue_log.PHANTOM): phantom,
    (queue_log.NAME, queue_log.OF_NO_SEND): of_no_send,
    (queue_log.NAME, queue_log.SELF_CONTRADICTION): self_contradiction,
    (queue_log.NAME, queue_log.MIN_WENT_BACK): min_went_back,
    (consumer_offsets.NAME, consumer_offsets.NEVER_COMMITTED): never_committed,
    (consumer_offsets.NAME, consumer_offsets.ABORTED_COMMIT): aborted_commit,
    (consumer_offsets.NAME, consumer_offsets.BEFORE_COMMIT): before_commit,
    (consumer_offsets.NAME, consumer_offsets.WENT_BACK): went_back,
    (delayed.NAME, delayed.EARLY): early,
    (delayed.NAME, delayed.LATE): late,
    (delayed.NAME, delayed.TWICE): delivered_twice,
    (delayed.NAME, delayed.NOT_DELIVERED): delayed_lost,
    (delayed.NAME, delayed.ABORTED): aborted_delayed,
    (replicas.NAME, replicas.LOGS_DIFFER): logs_differ,
    (replicas.NAME, replicas.TABLES_DIFFER): tables_differ,
    (replicas.NAME, replicas.NOT_EQUAL): not_equal,
    (replicas.NAME, replicas.QUEUES_DIFFER): queues_differ,
    (replicas.NAME, replicas.MISSING): missing_queue,
    (replicas.NAME, replicas.LOST): lost_on_a_replica,
    (retention.NAME, retention.REMOVED): removed_without_retention,
    (retention.NAME, retention.NOT_ENTITLED): not_entitled,
    (total_queue.NAME, total_queue.LOST): total_lost,
    (total_queue.NAME, total_queue.UNEXPECTED): unexpected,
    (total_queue.NAME, total_queue.DUPLICATED): stored_twice,
    (total_queue.NAME, total_queue.FAILED_BUT_THERE): failed_but_there,
    (batches.NAME, batches.TORN): torn_batch,
    (batches.NAME, batches.SCATTERED): scattered_batch,
    (polls.NAME, polls.WENT_BACK): poll_went_back,
    (polls.NAME, polls.SKIPPED): poll_skipped,
    (locks.NAME, locks.TWO_HOLDERS): two_holders,
    (locks.NAME, locks.TOKEN_WENT_BACK): token_went_back,
    (locks.NAME, locks.TOKEN_OF_TWO): token_of_two,
    (locks.NAME, locks.TOKEN_AGAIN): token_again,
    (locks.NAME, locks.NOT_FENCED): not_fenced,
    (transactions.NAME, transactions.HALF_VISIBLE): half_visible,
    (transactions.NAME, transactions.ROLLED_BACK_VISIBLE): rolled_back_visible,
    (transactions.NAME, transactions.FAILED_VISIBLE): failed_visible,
    (transactions.NAME, transactions.DECIDED_TWICE): decided_twice,
    (transactions.NAME, transactions.COMMITTED_TWICE): committed_twice,
    (transactions.NAME, transactions.OTHER_QUEUE): other_queue,
    (transactions.NAME, transactions.COMMIT_LOST): commit_lost,
    (transactions.NAME, transactions.SHARED_OFFSET): shared_offset,
    (transactions.NAME, transactions.NEVER_BEGUN): never_begun,
    (transactions.NAME, transactions.CHECKED_DECIDED): checked_decided,
    (transactions.NAME, transactions.CHECKED_EARLY): checked_early,
    (transactions.NAME, transactions.CHECKED_OFTEN): checked_often,
    (transactions.NAME, transactions.DISCARDED_COMMITTED): discarded_committed,
    (transactions.NAME, transactions.DISCARDED_TWICE): discarded_twice,
    (transactions.NAME, transactions.DROPPED): dropped,
}
