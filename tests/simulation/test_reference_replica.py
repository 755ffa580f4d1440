"""Each replica is compared with one that never restarts; what differs from it is found."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dledger.commitlog.mark import Anchor
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.reference_replica import FROM_SETTINGS, digests_by_field
from dledger.state.pending_timers import PendingTimers
from dledger.state.producer_sessions import ProducerSessions, StoredSend
from dledger.state.tables import QueueBounds, StateTables
from dledger.state.topics import TopicConfig
from dledger.state.transactions import TransactionTable

pytestmark = pytest.mark.slow

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
            tables.producers.get(producer).epoch = 1  # type: ignore[union-attr]
    assert digests_by_field(one) != digests_by_field(other)
