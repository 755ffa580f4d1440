"""Every replicated table and every state record keeps to one contract."""

from dataclasses import fields
from typing import Any

import cbor2
import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.commitlog.mark import Anchor
from dledger.commitlog.properties import TIMER_TOPIC
from dledger.jepsen_like.simulation.reference_replica import digests_by_field
from dledger.remoting.protocol.topic_names import HALF_TOPIC
from dledger.state.accounts import ACCOUNTS, AccessChange, AccountConfig, PolicyConfig
from dledger.state.pending_timers import RECALLED, TIMER_PIECES
from dledger.state.pop import (
    HAS_ROW,
    POPS,
    REQUEST_MODES,
    Out,
    PopChange,
    PopGrant,
    PopMark,
    PopRow,
    RequestMode,
)
from dledger.state.producer_sessions import SESSIONS, ProducerSession, StoredSend
from dledger.state.queue_lock import (
    QUEUE_LOCKS,
    LockGrant,
    LockRelease,
    QueueLock,
    QueueLocksChange,
)
from dledger.state.snapshot import Image, cut_everything, load, snapshot, take_cut
from dledger.state.state_record import (
    CHANGES,
    ConsumerOffsetsChange,
    DelayProgressChange,
    FloorChange,
    FloorReason,
    ProducerOpenedChange,
    ProducerSendChange,
    QueueFloorsChange,
    SubscriptionGroupsChange,
    TimersChange,
    TopicsChange,
    TransactionsChange,
    decode_change,
    encode_change,
    state_batch,
)
from dledger.state.table import Form, StateChange
from dledger.state.tables import (
    CONSUMER_OFFSETS,
    DELAY_PROGRESS,
    FIRST_POSITIONS,
    QUEUES,
    Counters,
    QueueBounds,
    StateTables,
)
from dledger.state.topics import (
    GROUP_BEGINS,
    SUBSCRIPTION_GROUPS,
    TOPIC_BEGINS,
    TOPICS,
    SubscriptionGroupConfig,
    TopicConfig,
)
from dledger.state.transactions import DECISIONS, OPEN_HALVES, OpenHalf, TransactionDecision
from tests.harness.check_table import check_change, check_table
from tests.harness.fake_group import FakeGroup

TOPIC = TopicConfig("T", 2, 3, 4, "MULTI_TAG", 5, True, {"k": "v"})
GROUP = SubscriptionGroupConfig(
    "g", False, False, False, True, 2, 3, 4, 5, False, 6, 7, {"a": "b"}, {"type": "c"}
)
POLICY = PolicyConfig("Custom", "Topic:orders", ("Pub", "Sub"), ("10.0.0.0/8",), "Allow")
ACCOUNT = AccountConfig(
    "order-service",
    "hunter2-hunter2",
    True,
    False,
    "10.0.0.*",
    "PUB",
    "SUB",
    {"orders": "PUB|SUB"},
    {"billing": "SUB"},
    (POLICY,),
)
KEY = ("g", "T", 1)
REASON = FloorReason(
    cause="size",
    decided_ms=1,
    end_position=2,
    reserved_hours=3,
    keep_bytes=4,
    disk_used_permille=5,
    force_permille=6,
    asked_by="root",
)
BIG = 1 << 62
TIMED = b"TIMER_OUT_MS\x019000\x02"

ROWS: dict[Form[Any, Any], dict[Any, Any]] = {
    TOPICS: {"b": TOPIC, "a": TopicConfig("a")},
    SUBSCRIPTION_GROUPS: {"b": GROUP, "a": SubscriptionGroupConfig("a")},
    TOPIC_BEGINS: {"b": BIG, "a": 0},
    GROUP_BEGINS: {"b": BIG, "a": 0},
    CONSUMER_OFFSETS: {("g", "b"): {2: BIG, 0: 1}, ("g", "a"): {0: 1}},
    DELAY_PROGRESS: {3: BIG, 1: 4},
    TIMER_PIECES: {7: bytearray(b"\x01\x00"), 3: bytearray(b"\x80")},
    RECALLED: {9: True, 4: True},
    QUEUES: {("b", 0): QueueBounds(3, BIG), ("a", 1): QueueBounds(0, 1)},
    FIRST_POSITIONS: {("b", 0): BIG, ("a", 1): 0},
    SESSIONS: {
        b"B": ProducerSession(7, 1, BIG, {3: StoredSend(77, (1, 4)), 1: StoredSend(5)}),
        b"A": ProducerSession(8),
    },
    OPEN_HALVES: {300: OpenHalf(BIG, 2, 3, 4), 2: OpenHalf(1, 2)},
    DECISIONS: {300: TransactionDecision.ROLLBACK, 2: TransactionDecision.COMMIT},
    QUEUE_LOCKS: {("g", "T", 1): QueueLock("b", BIG), ("g", "T", 0): QueueLock("a", 1)},
    POPS: {
        ("g", "T", 1): PopRow(1, 9, {5: Out(2, 3, 4, BIG), 7: Out(1, 2, 3, 4)}),
        ("g", "T", 0): PopRow(0, 1, {0: Out(1, 2, 3, 4)}),
    },
    REQUEST_MODES: {
        ("T", "h"): RequestMode("h", "T", "POP", 8),
        ("T", "g"): RequestMode("g", "T", "PULL"),
    },
    ACCOUNTS: {"b": ACCOUNT, "a": AccountConfig("a", "s")},
}

CHANGED: dict[str, tuple[StateChange, ...]] = {
    "topics": (TopicsChange((TOPIC,), ("x", "y"), "root"), TopicsChange(delete=("T",))),
    "subscription_groups": (
        SubscriptionGroupsChange((GROUP,), ("x",), ("y",)),
        SubscriptionGroupsChange(delete=("g",), forget=("g",)),
    ),
    "topic_begins": (TopicsChange((TOPIC,)), TopicsChange(delete=("T", "U"))),
    "group_begins": (SubscriptionGroupsChange((GROUP,)), SubscriptionGroupsChange(delete=("g",))),
    "consumer_offsets": (
        ConsumerOffsetsChange.of((("g", "T", 0, 5), ("g", "T", 1, BIG), ("h", "T", 0, 1))),
        ConsumerOffsetsChange.of((("g", "T", 0, 2),)),
    ),
    "delay_progress": (DelayProgressChange(3, 0, 9), DelayProgressChange(3, 9, 10)),
    "timers": (TimersChange((0, 3), (2,)), TimersChange((1,))),
    "queues": (QueueFloorsChange((("T", 0, 1),), 1_700_000_300_000, (("T", 5), ("U", 9))),),
    "producers": (
        ProducerOpenedChange(b"0123456789abcdef"),
        ProducerSendChange(b"0123456789abcdef", 1 << 40, 300, 299, (2, 7)),
    ),
    "transactions": (
        TransactionsChange(((3, TransactionDecision.COMMIT),), ((1, 1),)),
        TransactionsChange(((0, TransactionDecision.GIVEN_UP),)),
    ),
    "queue_locks": (
        QueueLocksChange(grants=(LockGrant(KEY, "a"), LockGrant(("g", "U", 1), "a"))),
        QueueLocksChange((LockRelease(KEY, 4),), (LockGrant(KEY, "b"),)),
    ),
    "pops": (
        PopChange(grants=(PopGrant(KEY, 100, 0, 2, (0, 1)),)),
        PopChange(
            (PopMark(KEY, 1, 4),),
            (PopMark(KEY, 3, 4),),
            (PopMark(KEY, 0, 4, 700),),
            (PopGrant(KEY, 100, 2, 9, (2, 3), ((1, 7),), HAS_ROW),),
        ),
    ),
    "request_modes": (PopChange(modes=(RequestMode("g", "T", "POP", 8),)),),
    "accounts": (
        AccessChange((ACCOUNT,), ("other",), "10.9.9.9", "root"),
        AccessChange(delete=("order-service", "never-there"), white_addresses=""),
    ),
}
"""Field of the tables, and what changes it, entry by entry."""

FLOOR = FloorChange(Anchor(5, 400, 2, (1 << 64) - 1, 1_700_000_000_000), REASON)
RECORDS = [*(change for changes in CHANGED.values() for change in changes), FLOOR]


@pytest.mark.parametrize("form", ROWS, ids=lambda form: form.name)
def test_table_keeps_to_its_contract(form: Form[Any, Any]) -> None:
    check_table(form, ROWS[form])


@pytest.mark.parametrize("change", RECORDS, ids=repr)
def test_record_keeps_to_its_contract(change: StateChange) -> None:
    check_change(change)


@pytest.fixture
def filled(group: FakeGroup) -> FakeGroup:
    """Return a group with the messages that changes are about, in three entries."""
    group.put("T", 0, b"x", b"y")
    group.put(HALF_TOPIC, 0, *[b"h"] * 5)
    group.put(TIMER_TOPIC, 0, *[b"x"] * 5, properties=TIMED)
    group.settle()
    return group


@pytest.mark.parametrize("name", CHANGED)
def test_image_follows_each_change_by_cuts(name: str, filled: FakeGroup) -> None:
    state, image, late = filled.state, Image(), Image()
    cuts = [cut_everything(state)]
    image.take(cuts[0])
    for change in (*CHANGED[name], None):
        before = digests_by_field(state)
        if change is None:
            filled.put("T", 0, b"z")
            filled.put(TIMER_TOPIC, 0, b"x", properties=TIMED)
        else:
            filled.propose(state_batch(change), lambda _: None)
        filled.settle()
        assert digests_by_field(state)[name if change else "queues"] != before[name]
        cuts.append(take_cut(state))
        image.take(cuts[-1])
        data = image.snapshot()
        loaded = load(data, state)
        assert (loaded, snapshot(loaded)) == (state, snapshot(state))
        whole = Image()
        whole.take(cut_everything(loaded))
        assert whole.snapshot() == data
    for cut in cuts:
        late.take(cut)
    assert late.snapshot() == image.snapshot(), "a cut shares nothing with the tables"


def test_contract_is_checked_of_every_table_and_record() -> None:
    tables = StateTables()
    assert {table.form for table in tables.tables} == ROWS.keys()
    plain, counters = digests_by_field(tables), {each.name for each in fields(Counters)}
    assert plain.keys() - counters == CHANGED.keys()
    assert {type(change) for change in RECORDS} == set(CHANGES.values())
    for kind in CHANGES.values():
        changes = [change for change in RECORDS if type(change) is kind]
        for name in kind.__struct_fields__:
            assert any(getattr(change, name) for change in changes), (kind, name)


@pytest.mark.parametrize("config", [TOPIC, GROUP, ACCOUNT])
def test_rows_of_the_contract_have_each_field(config: Any) -> None:
    plain = type(config)(*[""] * (2 if config is ACCOUNT else 1))
    names = config.__struct_fields__
    assert [name for name in names if getattr(config, name) == getattr(plain, name)] == []


@pytest.mark.parametrize(("queue_id", "body"), [(0, b"\xff"), (9, cbor2.dumps([1]))])
def test_what_cannot_be_read_stops_the_node(queue_id: int, body: bytes) -> None:
    with pytest.raises(InvariantBroken, match="state record"):
        decode_change(queue_id, body)


def test_offsets_are_written_with_each_name_once() -> None:
    _, body = encode_change(ConsumerOffsetsChange.of((("g", "T", 0, 5), ("g", "T", 1, 300))))
    # [1, {"g": {"T": {0: 5, 1: 300}}}]
    assert body.hex() == "8201a16167a16154a20005" + "0119012c"
