"""What holds for every replicated table: its records, its rows in a snapshot, its rows in a cut."""

from __future__ import annotations

from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.jepsen_like.simulation.reference_replica import digests_by_field
from dledger.state.accounts import AccessChange, AccountConfig, PolicyConfig
from dledger.state.image import Image, cut_everything, snapshot, take_cut
from dledger.state.pop import PopChange, PopGrant, PopMark, RequestMode
from dledger.state.queue_lock import LockGrant, LockRelease, QueueLocksChange
from dledger.state.snapshot import load
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    ProducerOpenedChange,
    ProducerSendChange,
    QueueFloorsChange,
    StateChange,
    SubscriptionGroupsChange,
    TimersChange,
    TopicsChange,
    TransactionsChange,
    decode_change,
    encode_change,
    state_batch,
)
from dledger.state.topics import (
    HALF_TOPIC,
    TIMER_TOPIC,
    SubscriptionGroupConfig,
    TopicConfig,
    builtin_groups,
    builtin_topics,
)
from dledger.state.transactions import TransactionDecision
from tests.harness.fake_group import BROKER, CLUSTER, FakeGroup

BUILTIN: dict[str, Any] = {
    "builtin_topics": builtin_topics(CLUSTER, BROKER),
    "builtin_groups": builtin_groups(),
}
POLICY = PolicyConfig("Custom", "Topic:orders", ("Pub", "Sub"), ("10.0.0.0/8",), "Allow")
ACCOUNT = AccountConfig(
    "a", "secret-secret", False, True, "10.0.0.*", "DENY", "PUB", {"T": "SUB"}, {"g": "SUB"},
    (POLICY,),
)  # fmt: skip
PRODUCER = b"0123456789abcdef"
QUEUE = ("g", "T", 0)

TABLES: dict[str, tuple[StateChange, ...]] = {
    "topics": (
        TopicsChange((TopicConfig("N", 2, 3, 4, "MULTI_TAG", 4, True, {"a": "b"}),), (), "root"),
        TopicsChange(delete=("N",)),
    ),
    "subscription_groups": (
        SubscriptionGroupsChange(
            (
                SubscriptionGroupConfig(
                    "g", False, False, False, True, 2, 3, 4, 5, False, 6, 7, {"a": "b"}, {"t": "c"}
                ),
            )
        ),
        SubscriptionGroupsChange(delete=("g",), forget=("g",)),
    ),
    "consumer_offsets": (
        ConsumerOffsetsChange((("g", "T", 0, 5), ("g", "T", 1, 300))),
        ConsumerOffsetsChange((("g", "T", 0, 2),)),
    ),
    "delay_progress": (DelayProgressChange(3, 0, 9), DelayProgressChange(3, 9, 10)),
    "timers": (TimersChange(done=(0, 3), recalled=(2,)), TimersChange(done=(1,))),
    "queues": (QueueFloorsChange((("T", 0, 1),), 1_700_000_000_000, (("T", 5),)),),
    "producers": (
        ProducerOpenedChange(PRODUCER),
        ProducerSendChange(PRODUCER, 1 << 40, 300, 299, (2, 7)),
    ),
    "transactions": (
        TransactionsChange(checked=((1, 1),)),
        TransactionsChange(decided=((3, TransactionDecision.COMMIT),)),
        TransactionsChange(decided=((0, TransactionDecision.GIVEN_UP),)),
    ),
    "queue_locks": (
        QueueLocksChange(grants=(LockGrant(QUEUE, "a"), LockGrant(("g", "U", 1), "a"))),
        QueueLocksChange((LockRelease(QUEUE, 4),), (LockGrant(QUEUE, "b"),)),
    ),
    "pops": (
        PopChange(grants=(PopGrant(QUEUE, 100, 0, 2, (0, 1)),)),
        PopChange(acked=(PopMark(QUEUE, 1, 4),)),
    ),
    "request_modes": (PopChange(modes=(RequestMode("g", "T", "POP", 8),)),),
    "accounts": (
        AccessChange((ACCOUNT,), (), "10.9.9.9", "operator at 10.0.0.1"),
        AccessChange((), ("a", "never-there"), ""),
    ),
}
"""Field of the tables, and changes of it."""


@pytest.fixture
def filled(group: FakeGroup) -> FakeGroup:
    """Return a group with the messages that changes are about, in three entries."""
    group.put("T", 0, b"x", b"y")
    group.put(HALF_TOPIC, 0, *[b"h"] * 5)
    group.put(TIMER_TOPIC, 0, *[b"x"] * 5, properties=b"TIMER_OUT_MS\x019000\x02")
    group.settle()
    return group


@pytest.mark.parametrize("table", TABLES)
def test_table_follows_its_changes_by_snapshot_and_cut(table: str, filled: FakeGroup) -> None:
    image, state = Image(), filled.state
    image.take(cut_everything(state))
    for change in TABLES[table]:
        before = digests_by_field(state)
        filled.propose(state_batch(change), lambda _: None)
        filled.settle()
        assert digests_by_field(state)[table] != before[table], change
        data = snapshot(state)
        loaded = load(data, **BUILTIN)
        assert (loaded, snapshot(loaded)) == (state, data), change
        image.take(take_cut(state))
        assert image.snapshot(hints=False) == data, change


@pytest.mark.parametrize("change", [each for every in TABLES.values() for each in every], ids=repr)
def test_record_of_a_table_is_read_as_written_or_refused(change: StateChange) -> None:
    queue_id, body = encode_change(change)
    assert decode_change(queue_id, body) == change
    value = cbor2.loads(body)
    assert cbor2.dumps(value, canonical=True) == body
    for name in value.keys() - {"white_addresses"}:
        rest = {key: item for key, item in value.items() if key != name}
        with pytest.raises(InvariantBroken, match=f"state record on queue {queue_id}"):
            decode_change(queue_id, cbor2.dumps(rest))
    for row in value.get("put", ()):
        row["odd"] = 1
        with pytest.raises(InvariantBroken, match=f"state record on queue {queue_id}"):
            decode_change(queue_id, cbor2.dumps(value))
