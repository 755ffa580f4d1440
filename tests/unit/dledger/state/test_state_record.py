"""State records have fixed bytes; a reader of another version stops."""

from __future__ import annotations

import cbor2
import pytest

from dledger.commitlog.errors import InvariantBroken
from dledger.commitlog.mark import Anchor
from dledger.commitlog.record import decode_record
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    FloorChange,
    FloorReason,
    QueueFloorsChange,
    StateChange,
    TopicsChange,
    TransactionsChange,
    decode_change,
    encode_change,
    state_batch,
)
from dledger.state.topics import (
    CONSUMER_OFFSETS_QUEUE,
    DELAY_PROGRESS_QUEUE,
    STATE_TOPIC,
    SUBSCRIPTION_GROUPS_QUEUE,
    TOPICS_QUEUE,
    TRANSACTIONS_QUEUE,
    TopicConfig,
)
from dledger.state.transactions import TransactionDecision

GOLDEN: list[tuple[StateChange, int, str]] = [
    (
        ConsumerOffsetsChange((("g", "T", 1, 300), ("g", "T", 0, 5))),
        CONSUMER_OFFSETS_QUEUE,
        # {"v": 1, "offsets": {"g": {"T": {0: 5, 1: 300}}}}
        "a2" "6176" "01" "676f666673657473" "a1" "6167" "a1" "6154" "a2" "0005" "0119012c",
    ),
    (
        DelayProgressChange(3, 7, 9),
        DELAY_PROGRESS_QUEUE,
        # {"v": 1, "to": 9, "from": 7, "level": 3}
        "a4" "6176" "01" "62746f" "09" "6466726f6d" "07" "656c6576656c" "03",
    ),
    (
        TopicsChange(put=(TopicConfig("T", 1, 2, 6, attributes={"k": "v"}),), delete=("D",)),
        TOPICS_QUEUE,
        # {"v": 1, "put": [{"perm": 6, "order": false, "topic": "T", "attributes": {"k": "v"}, …
        "a4" "6176" "01" "63707574" "81" "a8"
        "647065726d" "06" "656f72646572" "f4" "65746f706963" "6154"
        "6a61747472696275746573" "a1" "616b" "6176"
        "6e746f7069635f7379735f666c6167" "00"
        "6f726561645f71756575655f6e756d73" "01"
        "7077726974655f71756575655f6e756d73" "02"
        "71746f7069635f66696c7465725f74797065" "6a53494e474c455f544147"
        "6664656c657465" "81" "6144" "6861736b65645f6279" "60",
    ),
    (
        TransactionsChange(
            decided=((2, TransactionDecision.COMMIT), (300, TransactionDecision.ROLLBACK)),
            checked=((5, 15),),
        ),
        TRANSACTIONS_QUEUE,
        # {"v": 1, "checked": {5: 15}, "decided": {2: 8, 300: 12}}
        "a3" "6176" "01" "67636865636b6564" "a1" "05" "0f"
        "6764656369646564" "a2" "02" "08" "19012c" "0c",
    ),
]  # fmt: skip

FLOOR = Anchor(5, 400, 2, 0x1122334455667788, 1_700_000_000_000)
REASON = FloorReason(
    cause="size", decided_ms=1_700_000_300_000, end_position=9_000, reserved_hours=72,
    keep_bytes=500, disk_used_permille=912, force_permille=0, asked_by="root at 10.0.0.1",
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        FloorChange(FLOOR, REASON),
        QueueFloorsChange((("T", 1, 7),)),
        QueueFloorsChange((("T", 1, 7), ("U", 0, 1)), 1_700_000_300_000, (("T", 5), ("U", 9))),
    ],
)
def test_floors_are_read_as_they_were_written(change: StateChange) -> None:
    assert decode_change(*encode_change(change)) == change


@pytest.mark.parametrize(("change", "queue_id", "golden"), GOLDEN)
def test_bodies_are_canonical_cbor(change: StateChange, queue_id: int, golden: str) -> None:
    assert encode_change(change) == (queue_id, bytes.fromhex(golden))


def test_state_batch_is_one_record_per_change() -> None:
    batch = state_batch(DelayProgressChange(1, 0, 1), TopicsChange(delete=("T",)))
    assert [(run.topic, run.queue_id, run.count) for run in batch.runs] == [
        (STATE_TOPIC, DELAY_PROGRESS_QUEUE, 1),
        (STATE_TOPIC, TOPICS_QUEUE, 1),
    ]
    record = decode_record(batch.records)
    assert (record.topic, record.queue_id) == (STATE_TOPIC, DELAY_PROGRESS_QUEUE)
    assert decode_change(DELAY_PROGRESS_QUEUE, record.body) == DelayProgressChange(1, 0, 1)


def test_a_newer_version_stops_the_node() -> None:
    body = cbor2.dumps({"v": 2, "level": 1, "from": 0, "to": 1}, canonical=True)
    with pytest.raises(InvariantBroken, match="version 2"):
        decode_change(DELAY_PROGRESS_QUEUE, body)


@pytest.mark.parametrize(
    ("queue_id", "body"),
    [
        (TOPICS_QUEUE, b"\xff"),
        (TOPICS_QUEUE, cbor2.dumps({"v": 1, "put": [{"topic": "T", "odd": 1}], "delete": []})),
        (SUBSCRIPTION_GROUPS_QUEUE, cbor2.dumps([1])),
        (9, cbor2.dumps({"v": 1})),
    ],
)
def test_what_cannot_be_read_stops_the_node(queue_id: int, body: bytes) -> None:
    with pytest.raises(InvariantBroken, match="state record"):
        decode_change(queue_id, body)
