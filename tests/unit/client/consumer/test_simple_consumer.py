"""The simple consumer's receipts and answers, without a broker."""

import random
from base64 import b64encode
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

from dledger.client.consumer.ack_batches import ACK_MESSAGES_MAX, ack_requests
from dledger.client.consumer.pop_calls import PopCalls, ReceivedMessage, _messages
from dledger.client.consumer.simple_consumer import DOWN_S, SimpleConsumer
from dledger.client.core.errors import (
    BrokerUnreachableError,
    DamagedAnswerError,
    ReceiptStaleError,
    RequestTimedOutError,
)
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import encode_record
from dledger.remoting.errors import BadRequestError
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.pop_requests import (
    MAX_BITS,
    MAX_READ_BITS,
    MAX_REQUEST_BITS,
    BatchAck,
    BatchAckMessageRequestBody,
    PopMessageResponseHeader,
    ReceiptHandle,
    decode_start_offsets,
    encode_offsets,
    revive_queue_of,
)
from dledger.testing.doubles import ManualClock


def answer(*records: tuple[int, int], **changes: object) -> RemotingCommand:
    offsets: dict[int, list[int]] = {}
    for queue_id, offset in records:
        offsets.setdefault(queue_id, []).append(offset)
    starts, texts = encode_offsets(offsets)
    header = PopMessageResponseHeader(1_000, 30_000, 1_007, 0, starts, texts)
    body = b"".join(
        encode_record(
            topic="T", queue_id=queue_id, body=b"x", properties=b"", queue_offset=offset,
            reconsume_times=1,
        )
        for queue_id, offset in records
    )  # fmt: skip
    return response_to(request(200050), 0, None, {**header.encode(), **changes}, body)


def received() -> list[ReceivedMessage]:
    return _messages(answer((0, 5), (0, 7), (1, 2)), "T", "b")


def items(messages: list[ReceivedMessage]) -> list[BatchAck]:
    (only,) = ack_requests("g", [(each.message_queue, each.receipt) for each in messages])
    return only.items


def test_each_message_has_the_receipt_a_java_client_makes() -> None:
    assert [message.receipt.encode() for message in received()] == [
        "5 1000 30000 1007 0 b 0 5",
        "5 1000 30000 1007 0 b 0 7",
        "2 1000 30000 1007 0 b 1 2",
    ]
    assert received()[0].message_queue == MessageQueue("T", "b", 0)
    assert received()[0].delivery_attempt == 2


def test_batch_names_messages_by_their_distance() -> None:
    batches = items(received())
    assert [(item.c, item.t, item.q, item.so, item.rq, item.pt) for item in batches] == [
        ("g", "T", 0, 5, 1_007, 1_000),
        ("g", "T", 1, 2, 1_007, 1_000),
    ]
    assert [item.offsets for item in batches] == [[5, 7], [2]]


def test_damaged_answer_is_kept_back() -> None:
    broken = answer((0, 5))
    broken.body = bytes(broken.body)[:-1]
    with pytest.raises(DamagedAnswerError):
        _messages(broken, "T", "b")
    with pytest.raises(DamagedAnswerError):
        _messages(answer((0, 5), startOffsetInfo="0 0"), "T", "b")


class Instance:
    """Answers every POP with two messages whose tags have one hash, and takes batches."""

    def __init__(self, nursery: trio.Nursery, stale: Collection[int] = ()) -> None:
        self.nursery = nursery
        self.clock = ManualClock()
        self.rng = random.Random(1)
        self.acked: list[list[int]] = []
        self.bits: list[int] = []
        self.stale = stale

    async def route(self, _topic: str) -> SimpleNamespace:
        return SimpleNamespace(subscribe_queues=[MessageQueue("T", "b", 0)])

    async def ask_leader(
        self, name: str, code: int, ext: object, body: bytes = b"", **rest: object
    ) -> RemotingCommand:
        if code == RequestCode.BATCH_ACK_MESSAGE:
            acks = BatchAckMessageRequestBody.decode(body).acks
            self.acked.append([offset for item in acks for offset in item.offsets])
            self.bits.append(sum(item.bits for item in acks))
            is_stale = any(offset in self.stale for offset in self.acked[-1])
            return response_to(request(code, {}), ResponseCode.NO_MESSAGE if is_stale else 0)
        found = answer((0, 5), (0, 6))
        found.body = b"".join(
            encode_record(
                topic="T", queue_id=0, body=b"x", properties=b"TAGS\x01%s\x02" % tag,
                queue_offset=offset,
            )
            for offset, tag in ((5, b"Aa"), (6, b"BB"))
        )  # fmt: skip
        return found


async def test_message_of_another_tag_is_acknowledged_unseen(nursery: trio.Nursery) -> None:
    instance = Instance(nursery)
    consumer = SimpleConsumer(instance, "g", {"T": "Aa"})  # type: ignore[arg-type]  # a double
    assert [message.tags for message in await consumer.receive(wait_s=0)] == ["Aa"]
    assert instance.acked == [[6]]


def test_places_of_a_request_are_those_a_broker_counts() -> None:
    given = [(each.message_queue, each.receipt) for each in received()]
    (only,) = ack_requests("g", [given[2], given[1], given[0]])
    assert [item.offsets for item in only.items] == [[2], [5, 7]]
    assert only.places == [0, 2, 1]


def test_items_of_one_request_have_their_own_topic() -> None:
    (queue, receipt), other = (received()[0].message_queue, received()[0].receipt), received()[1]
    (only,) = ack_requests(
        "g", [(queue, receipt), (MessageQueue("U", "b", 0), receipt), (queue, other.receipt)]
    )
    assert [(item.t, item.offsets) for item in only.items] == [("T", [5, 7]), ("U", [5])]
    assert only.places == [0, 2, 1]


async def test_batch_with_an_unreadable_answer_is_not_known_to_be_done(
    nursery: trio.Nursery,
) -> None:
    """The broker refuses part of it, and does not name which."""
    instance = Instance(nursery, stale={5})
    calls = PopCalls(instance, "g")  # type: ignore[arg-type]  # a double
    with pytest.raises(RequestTimedOutError, match="cannot be read"):
        await calls.ack_each([(each.message_queue, each.receipt) for each in received()])


def test_receipts_of_one_message_have_a_place_each() -> None:
    queue, receipt = received()[0].message_queue, received()[0].receipt
    longer = replace(receipt, invisible_ms=2 * receipt.invisible_ms)
    (only,) = ack_requests("g", [(queue, receipt), (queue, longer)])
    assert [item.offsets for item in only.items] == [[5], [5]]
    assert only.places == [0, 1]


async def test_acks_of_many_messages_are_several_requests(nursery: trio.Nursery) -> None:
    """As many as a broker takes in one, by their number and by the bits between them."""
    instance = Instance(nursery)
    consumer = SimpleConsumer(instance, "g", {"T": "*"})  # type: ignore[arg-type]  # a double
    near = range(ACK_MESSAGES_MAX + 5)
    await consumer.ack_all(_messages(answer(*((0, offset) for offset in near)), "T", "b"))
    assert [len(offsets) for offsets in instance.acked] == [ACK_MESSAGES_MAX, 5]
    assert [offset for offsets in instance.acked for offset in offsets] == list(near)
    instance.acked.clear()
    apart = [0, *(MAX_BITS * (1 + number) - 1 for number in range(300))]
    await consumer.ack_all(_messages(answer(*((0, offset) for offset in apart)), "T", "b"))
    assert [len(offsets) for offsets in instance.acked] == [129, 128, 44]
    assert [offset for offsets in instance.acked for offset in offsets] == apart
    assert max(instance.bits) == MAX_REQUEST_BITS


async def test_stale_receipts_keep_no_other_request_back(nursery: trio.Nursery) -> None:
    instance = Instance(nursery, stale={5})
    consumer = SimpleConsumer(instance, "g", {"T": "*"})  # type: ignore[arg-type]  # a double
    many = _messages(answer(*((0, offset) for offset in range(ACK_MESSAGES_MAX + 5))), "T", "b")
    with pytest.raises(ReceiptStaleError):
        await consumer.ack_all(many)
    assert [len(offsets) for offsets in instance.acked] == [ACK_MESSAGES_MAX, 5]


def test_numbers_of_grants_are_no_revive_queues() -> None:
    assert revive_queue_of(1) == 1_001
    most = (1 << 31) - 1_000
    assert [revive_queue_of(token) for token in (most - 1, most, most + 1)] == [
        (1 << 31) - 1,
        1_000,
        1_001,
    ]


def test_handle_survives_its_text() -> None:
    handle = ReceiptHandle(1, 2, 3, 1_004, "broker-a", 5, 6)
    assert ReceiptHandle.decode(handle.encode()) == handle
    for text in ("", "1 2 3 4 0 b 5", "1 2 3 x 0 b 5 6", "1 " * 600):
        with pytest.raises(BadRequestError):
            ReceiptHandle.decode(text)


def test_bits_of_a_batch_are_bounded() -> None:
    assert BatchAck(so=3, b=[-1, 1]).offsets == [*range(3, 11), 11]
    whole = [255] * (MAX_BITS // 8)
    assert len(BatchAck(b=whole).offsets) == MAX_BITS
    too_many = ([0] * (MAX_READ_BITS // 8 + 1), [*whole, 1])
    for bits in ("not base64!", [None], [256], [-129], ["1_0"], [1.5], *too_many):
        with pytest.raises(BadRequestError):
            _ = BatchAck(b=bits).offsets
    for size in (MAX_READ_BITS // 8 - 2, MAX_READ_BITS // 8):
        item = BatchAck(so=7, b=b64encode(bytes(size - 1) + b"\x80").decode())
        assert (item.bits, item.offsets) == (8 * size, [7 + 8 * size - 1])
    with pytest.raises(BadRequestError):
        _ = BatchAck(b=b64encode(bytes(MAX_READ_BITS // 8 + 1)).decode()).offsets
    with pytest.raises(BadRequestError):
        decode_start_offsets("0 1")


def test_far_apart_messages_are_acknowledged_in_items() -> None:
    messages = _messages(answer((0, 5), (0, 5 + MAX_BITS - 1), (0, 9 + 3 * MAX_BITS)), "T", "b")
    batches = items(messages)
    assert [item.offsets for item in batches] == [[5, 5 + MAX_BITS - 1], [9 + 3 * MAX_BITS]]
    assert all(len(item.b) <= MAX_BITS // 6 + 4 for item in batches)
    one = BatchAck(so=5, b=BatchAck.encode_offsets(5, [5, 9 + 3 * MAX_BITS]))
    assert one.offsets == [5, 9 + 3 * MAX_BITS], "as clients of RocketMQ write it"


class TwoGroups(Instance):
    """Two broker groups have queues of the topic; those in *down* refuse every connection."""

    def __init__(self, nursery: trio.Nursery, *down: str) -> None:
        super().__init__(nursery)
        self.down = down
        self.refused = 0

    async def route(self, _topic: str) -> SimpleNamespace:
        return SimpleNamespace(
            subscribe_queues=[MessageQueue("T", "a", 0), MessageQueue("T", "b", 0)]
        )

    async def ask_leader(
        self, name: str, code: int, ext: object, body: bytes = b"", **rest: object
    ) -> RemotingCommand:
        if name in self.down:
            self.refused += 1
            raise BrokerUnreachableError(f"no member of {name} can be reached")
        return await super().ask_leader(name, code, ext, body, **rest)


@pytest.mark.parametrize("down", ["a", "b"])
async def test_broker_group_that_is_down_hides_no_other(nursery: trio.Nursery, down: str) -> None:
    instance = TwoGroups(nursery, down)
    consumer = SimpleConsumer(instance, "g", {"T": "*"})  # type: ignore[arg-type]  # a double
    for _ in range(4):
        found = await consumer.receive(wait_s=0)
        assert {message.broker_name for message in found} == {"a", "b"} - {down}
    assert instance.refused == 1
    instance.down = ()
    instance.clock.now_s += DOWN_S
    names = {(await consumer.receive(wait_s=0))[0].broker_name for _ in range(2)}
    assert names == {"a", "b"}


async def test_receive_fails_when_all_groups_are_down(nursery: trio.Nursery) -> None:
    consumer = SimpleConsumer(TwoGroups(nursery, "a", "b"), "g", {"T": "*"})  # type: ignore[arg-type]  # a double
    with pytest.raises(BrokerUnreachableError):
        await consumer.receive(wait_s=0)


class FullGroups(Instance):
    """Broker groups at which too many requests wait already: they hold no further one."""

    def __init__(self, nursery: trio.Nursery, groups: int) -> None:
        super().__init__(nursery)
        self.clock = TrioClock()  # type: ignore[assignment]  # of the same use
        self.groups = groups
        self.asked = 0
        self.is_empty = True

    async def route(self, _topic: str) -> SimpleNamespace:
        return SimpleNamespace(
            subscribe_queues=[MessageQueue("T", f"b{n}", 0) for n in range(self.groups)]
        )

    async def ask_leader(
        self, name: str, code: int, ext: object, body: bytes = b"", **rest: object
    ) -> RemotingCommand:
        self.asked += 1
        await trio.sleep(0.001)
        if not self.is_empty:
            return await super().ask_leader(name, code, ext, body, **rest)
        if code == RequestCode.POP_MESSAGE:
            return response_to(request(code), ResponseCode.POLLING_FULL, "full")
        return response_to(request(code), 0, None, {"hasMsg": "false", "pollingFull": "true"})


@pytest.mark.parametrize("groups", [1, 2])
async def test_receive_waits_where_brokers_hold_no_request(
    nursery: trio.Nursery, groups: int
) -> None:
    instance = FullGroups(nursery, groups)
    consumer = SimpleConsumer(instance, "g", {"T": "*"})  # type: ignore[arg-type]  # a double
    assert await consumer.receive(wait_s=4.0) == []
    assert trio.current_time() == pytest.approx(4.0, abs=0.1)
    assert instance.asked < 100

    async def send() -> None:
        await trio.sleep(2.0)
        instance.is_empty = False

    nursery.start_soon(send)
    begin_s = trio.current_time()
    assert await consumer.receive(wait_s=15.0)
    assert trio.current_time() - begin_s == pytest.approx(2.0, abs=1.0)
