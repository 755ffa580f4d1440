"""Faults at chosen moments: torn logs, doubled consumers, clients killed in the middle of it.

`play` is a function of the plan: what fails here fails again, and ``dledger sim replay`` shows it.

Each replica is compared with one that never restarts; what differs from it is found.
Leadership changes a hundred times over delayed messages: each is delivered once, and in time.
"""

from dataclasses import fields

import pytest

from dledger.commitlog.mark import Anchor
from dledger.jepsen_like.checkers import delayed
from dledger.jepsen_like.checkers.fault_record import HEALED, SERVED
from dledger.jepsen_like.history.operation import Event, F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.play import Played, play
from dledger.jepsen_like.simulation.reference_replica import FROM_SETTINGS, digests_by_field
from dledger.state.pending_timers import PendingTimers
from dledger.state.producer_sessions import ProducerSessions, StoredSend
from dledger.state.tables import QueueBounds, StateTables
from dledger.state.topics import TopicConfig
from dledger.state.transactions import TransactionTable
from tests.harness.extent import EXTENT
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

BUSY = Workload(producers=2, consumers=2, readers=1, interval_ms=200, delayed_per_mille=0)
LATE_MARK = Settings(checkpoint_ms=30_000)


def played(*steps: Step, settings: Settings = LATE_MARK, duration_ms: int = 60_000) -> Played:
    ran = play(Plan(3, duration_ms, steps, workload=BUSY, settings=settings))
    assert ran.is_valid, (ran.violations, ran.verdict.reason)
    return ran


def events(ran: Played, kind: Kind) -> list[Event]:
    return [event for event in ran.history.events if event.kind == kind.value]


@pytest.mark.hunt
def test_a_torn_tail_is_cut_and_comes_back_from_the_leader() -> None:
    ran = played(Step(20_000, Kind.TORN_TAIL, "follower", 500, 4_000))
    (event,) = events(ran, Kind.TORN_TAIL)
    assert "@" in event.detail, event.detail
    assert ran.sometimes["torn_tail_cut"] == 1
    assert ran.world is not None
    node = ran.world.brokers[event.node]
    assert not node.is_trusted, "it lost what it had acknowledged"
    assert ran.sometimes["doubt_ended"] == 0, "and cannot know"
    assert node.seen_commit == max(other.seen_commit for other in ran.world.brokers.values())


@pytest.mark.parametrize("target", gate_part(["leader", "most_ahead"], 1))
@pytest.mark.hunt
def test_no_tail_is_torn_that_an_isolated_voter_may_need(target: str) -> None:
    ran = played(
        Step(8_000, Kind.ISOLATE, "follower", 45_000),
        Step(20_000, Kind.TORN_TAIL, target, 500, 4_000),
    )
    (event,) = events(ran, Kind.TORN_TAIL)
    assert event.detail == "skipped: others do not hold all it may have acknowledged"
    assert ran.sometimes["tail_torn"] == 0


@pytest.mark.hunt
def test_a_consumer_that_resumes_commits_old_offsets_late() -> None:
    ran = played(Step(10_000, Kind.ZOMBIE_CLIENT, "all", 30_000))
    (event,) = events(ran, Kind.ZOMBIE_CLIENT)
    assert int(event.detail.split()[0]) > 0, event.detail
    commits: dict[tuple[str, int], list[int]] = {}
    for op in ran.history.operations:
        if op.f == F.COMMIT and op.outcome == Outcome.OK:
            commits.setdefault((op.group, op.queue), []).append(op.off)
    assert any(offsets != sorted(offsets) for offsets in commits.values()), commits
    assert all(len(set(offsets)) == len(offsets) for offsets in commits.values())
    checked = {verdict.checker: verdict for verdict in ran.verdicts}["consumer_offsets"]
    assert checked.is_valid
    assert checked.counts["reads"] > 20


def test_a_kill_within_a_send_leaves_an_unknown_outcome() -> None:
    ran = played(Step(5_000, Kind.MID_SEND_KILL, "all", 500), duration_ms=12_000)
    (event,) = events(ran, Kind.MID_SEND_KILL)
    open_sends = [
        op
        for op in ran.history.operations
        if op.f == F.SEND and op.outcome == Outcome.INFO and op.call_ns <= event.end_ns
    ]
    assert open_sends
    assert not event.detail


@pytest.mark.hunt
def test_consumers_killed_within_a_batch_go_on_where_committed() -> None:
    ran = played(Step(15_000, Kind.MID_BATCH_KILL, "all", 500))
    (event,) = events(ran, Kind.MID_BATCH_KILL)
    assert not event.detail
    killed_ns = event.end_ns - 500_000_000
    later = [op for op in ran.history.operations if op.call_ns >= killed_ns]
    # No reader watches the second one: what is asked for it, it asks itself.
    first = [(op.f, op.queue) for op in later if op.group == "consumers-1"][:2]
    assert first == [(F.FETCH_COMMIT, 0), (F.FETCH_COMMIT, 1)]
    again = [op for op in later if op.f == F.PULL and op.outcome == Outcome.OK and op.cnt]
    before = {
        (op.queue, op.off + place)
        for op in ran.history.operations
        if op.f == F.PULL and op.ret_ns < event.at_ns
        for place in range(op.cnt)
    }
    assert any((op.queue, op.off) in before for op in again), "nothing came a second time"


def test_what_needs_real_processes_is_left_out_with_a_reason() -> None:
    ran = played(
        Step(6_000, Kind.FD_LIMIT, "leader", 500),
        Step(6_000, Kind.CONNECTIONS, "leader", 500),
        duration_ms=8_000,
    )
    assert ran.faults["skipped"] == 2
    details = {event.detail for event in ran.history.events if event.kind not in (HEALED, SERVED)}
    assert details == {"skipped: descriptors are those of real processes"}


PLAN = Plan(
    seed=5,
    duration_ms=30_000,
    steps=(Step(8_000, Kind.CLEAN_RESTART, "follower", 1_000),),
    workload=Workload(interval_ms=500, delayed_per_mille=300, timer_per_mille=200),
)


def test_replicas_without_a_bug_equal_the_reference() -> None:
    played = play(PLAN)
    assert played.is_valid, played.verdict.reason
    assert played.sometimes["keys_compared"] == 3
    assert played.world is not None
    assert played.world.reference.applied_index > 30
    assert len(played.world.reference.keys) > 20


def _changed(name: str) -> StateTables:
    """Return empty tables of which one field has something in it."""
    tables = StateTables()
    timers, producers, transactions = PendingTimers(), ProducerSessions(), TransactionTable()
    timers.add([3])
    producers.open(b"p", 1, 2)
    producers.note(b"p", 1, 4, 0, StoredSend(5, (1,)), 6)
    transactions.begin(1, 2, 3)
    values: dict[str, object] = {
        "topics": {"t": TopicConfig("t", 1, 1, 6)},
        "subscription_groups": {"g": ("g",)},
        "consumer_offsets": {("g", "t"): {0: 1}},
        "delay_progress": {1: 2},
        "timers": timers,
        "queues": {("t", 0): QueueBounds(0, 1)},
        "producers": producers,
        "transactions": transactions,
        "floor": Anchor(first_index=2),
        "queue_locks": {("g", "t", 0): ("c", 1)},
        "members_body": b"m",
    }
    setattr(tables, name, values.get(name, 1))
    return tables


def test_the_digest_sees_every_field_of_the_tables() -> None:
    names = [f.name for f in fields(StateTables) if f.compare and f.name not in FROM_SETTINGS]
    empty = digests_by_field(StateTables())
    assert set(names) == set(empty)
    for name in names:
        changed = digests_by_field(_changed(name))
        assert [field for field in names if changed[field] != empty[field]] == [name]


def test_the_digest_sees_the_order_that_is_state() -> None:
    one, other = StateTables(), StateTables()
    for tables, ids in ((one, (b"a", b"b")), (other, (b"b", b"a"))):
        for number, producer in enumerate(ids, 1):
            tables.producers.open(producer, number, 7)
        for producer in ids:
            tables.producers.get(producer).epoch = 1  # type: ignore[union-attr]  # it is there
    assert digests_by_field(one) != digests_by_field(other)


CHANGES = 100
BETWEEN_MS = (4_000, 5_000, 7_000, 12_000)
"""Some leaders never deliver anything, some everything that is due."""

KINDS = (Kind.TRANSFER, Kind.KILL, Kind.ISOLATE)


def changes() -> tuple[Step, ...]:
    """Return steps that take the leadership away, with connections reset or not."""
    steps, at_ms = [], 15_000
    for turn in range(CHANGES):
        kind = KINDS[turn % len(KINDS)]
        target = "follower" if kind is Kind.TRANSFER else "leader"
        steps.append(Step(at_ms, kind, target, 3_000, turn % 2))
        at_ms += BETWEEN_MS[turn % len(BETWEEN_MS)]
    return tuple(steps)


@pytest.mark.parametrize("seed", range(1, 1 + EXTENT))
@pytest.mark.hunt
def test_a_hundred_leaders_deliver_each_message_once(seed: int) -> None:
    steps = changes()
    played = play(
        Plan(
            seed,
            steps[-1].at_ms + 10_000,
            steps,
            workload=Workload(
                producers=2, consumers=1, readers=0, interval_ms=1200, delayed_per_mille=950
            ),
            settings=Settings(delay_levels="1s 5s 10s 30s", heartbeat_ms=300, election_ms=1_000),
        )
    )
    assert played.is_valid, f"seed {seed}: {played.verdict.reason} {played.violations}"
    assert played.faults.total() == CHANGES
    assert played.sometimes["leader_change"] >= CHANGES - 5
    (judged,) = [verdict for verdict in played.verdicts if verdict.checker == delayed.NAME]
    assert judged.is_valid, judged.reason
    assert judged.counts["seen"] > 500
