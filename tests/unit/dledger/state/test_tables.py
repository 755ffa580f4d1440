"""Every replicated table and every state record keeps to one contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import cbor2
import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.commitlog.mark import Anchor
from dledger.state.accounts import ACCOUNTS, AccessChange, AccountConfig, PolicyConfig
from dledger.state.pending_timers import RECALLED, TIMER_PIECES
from dledger.state.pop import (
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
from dledger.state.state_record import (
    CHANGES,
    ConsumerOffsetsChange,
    DelayProgressChange,
    FloorChange,
    FloorReason,
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
)
from dledger.state.table import Form, Table
from dledger.state.tables import (
    CONSUMER_OFFSETS,
    DELAY_PROGRESS,
    FIRST_POSITIONS,
    QUEUES,
    QueueBounds,
    StateTables,
)
from dledger.state.topics import SUBSCRIPTION_GROUPS, TOPICS, SubscriptionGroupConfig, TopicConfig
from dledger.state.transactions import DECISIONS, OPEN_HALVES, OpenHalf, TransactionDecision
from tests.harness.check_table import check_change, check_table

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

ROWS: dict[Form[Any, Any], dict[Any, Any]] = {
    TOPICS: {"b": TOPIC, "a": TopicConfig("a")},
    SUBSCRIPTION_GROUPS: {"b": GROUP, "a": SubscriptionGroupConfig("a")},
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

RECORDS: list[StateChange] = [
    TopicsChange((TOPIC,), ("x", "y"), "root"),
    SubscriptionGroupsChange((GROUP,), ("x",), ("y",)),
    ConsumerOffsetsChange((("g", "T", 0, 5), ("g", "T", 1, BIG), ("h", "T", 0, 1))),
    DelayProgressChange(3, 7, 9),
    FloorChange(Anchor(5, 400, 2, (1 << 64) - 1, 1_700_000_000_000), REASON),
    TransactionsChange(((2, TransactionDecision.COMMIT),), ((5, 15),)),
    PopChange(
        (PopMark(KEY, 1, 2),),
        (PopMark(KEY, 3, 4),),
        (PopMark(KEY, 5, 6, 700),),
        (PopGrant(KEY, 100, 2, 9, (2, 3), ((1, 7),), -1), PopGrant(KEY, 100, 2, 9)),
        (RequestMode("g", "T", "POP", 8),),
    ),
    QueueLocksChange((LockRelease(KEY, 7),), (LockGrant(KEY, "c", 9),)),
    ProducerOpenedChange(b"0123456789abcdef"),
    ProducerSendChange(b"0123456789abcdef", 1 << 40, 300, 299, (2, 7)),
    TimersChange((1, 2), (3,)),
    QueueFloorsChange((("T", 1, 7), ("U", 0, 1)), 1_700_000_300_000, (("T", 5), ("U", 9))),
    AccessChange((ACCOUNT,), ("other",), "10.9.9.9", "root"),
]


@pytest.mark.parametrize("form", ROWS, ids=lambda form: form.name)
def test_table_keeps_to_its_contract(form: Form[Any, Any]) -> None:
    check_table(form, ROWS[form])


@pytest.mark.parametrize("change", RECORDS, ids=lambda change: type(change).__name__)
def test_record_keeps_to_its_contract(change: StateChange) -> None:
    check_change(change)


def tables_in(value: Any) -> Iterator[Table[Any, Any]]:
    if isinstance(value, Table):
        yield value
    elif is_dataclass(value):
        for each in fields(value):
            yield from tables_in(getattr(value, each.name))


def test_contract_is_checked_of_every_table_and_record() -> None:
    tables = StateTables()
    assert {table.form for table in tables_in(tables)} == ROWS.keys()
    assert [table.form for table in tables.tables] == [table.form for table in tables_in(tables)]
    kinds = set(get_args(StateChange))
    assert {type(change) for change in RECORDS} == kinds == set(CHANGES.values())


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
    _, body = encode_change(ConsumerOffsetsChange((("g", "T", 0, 5), ("g", "T", 1, 300))))
    # [1, {"g": {"T": {0: 5, 1: 300}}}]
    assert body.hex() == "8201a16167a16154a20005" + "0119012c"
