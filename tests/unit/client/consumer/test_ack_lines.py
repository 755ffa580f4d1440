"""Acknowledgements that share requests, each with its own result."""

import pytest
import trio

from dledger.client.consumer.pop_calls import ReceivedMessage
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ReceiptStaleError,
    RequestFailedError,
    RequestTimedOutError,
)
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from tests.unit.client.consumer.popping import PopBroker

SINGLE, BATCH = RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE


@pytest.fixture
def broker(nursery: trio.Nursery) -> PopBroker:
    return PopBroker(nursery, messages=8)


@pytest.fixture
def consumer(broker: PopBroker) -> SimpleConsumer:
    return SimpleConsumer(broker.instance, "g", {"T": "*"})


async def acked(
    consumer: SimpleConsumer, messages: list[ReceivedMessage], timeout_s: float = 10.0
) -> list[MQError | None]:
    """Acknowledge all of them at once; return what each caller got."""
    results: list[MQError | None] = [None] * len(messages)

    async def ack(number: int) -> None:
        try:
            await consumer.ack(messages[number], timeout_s=timeout_s)
        except MQError as error:
            results[number] = error

    async with trio.open_nursery() as nursery:
        for number in range(len(messages)):
            nursery.start_soon(ack, number)
    return results


def acks(broker: PopBroker) -> list[tuple[int, int]]:
    return [each for each in broker.seen if each[0] in (SINGLE, BATCH)]


async def test_acks_of_one_moment_share_a_request(
    broker: PopBroker, consumer: SimpleConsumer
) -> None:
    assert await acked(consumer, await consumer.receive(8)) == [None] * 8
    assert acks(broker) == [(BATCH, 8)]
    assert broker.acked == set(range(8))


async def test_acks_wait_for_the_request_under_way(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    messages = await consumer.receive(8)
    for number, message in enumerate(messages):
        nursery.start_soon(consumer.ack, message)
        await trio.sleep(broker.delay_s / 4 if number else broker.delay_s / 8)
    await trio.sleep(1)
    assert acks(broker) == [(SINGLE, 1), (BATCH, 4), (BATCH, 3)]
    assert broker.acked == set(range(8))


async def test_acks_of_two_topics_share_no_request(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    """What one topic's rights refuse is no answer for the other."""
    first, second = await consumer.receive(2)
    second.message_queue = MessageQueue("U", "b", 0)
    for message in (first, second):
        nursery.start_soon(consumer.ack, message)
    await trio.sleep(1)
    assert acks(broker) == [(SINGLE, 1)] * 2
    assert broker.acked == {0, 1}


async def test_short_time_of_one_ack_leaves_the_others_theirs(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    messages = await consumer.receive(2)
    results: dict[int, type] = {}

    async def ack(message: ReceivedMessage, timeout_s: float) -> None:
        try:
            await consumer.ack(message, timeout_s=timeout_s)
        except MQError as error:
            results[message.queue_offset] = type(error)
        else:
            results[message.queue_offset] = type(None)

    for message, timeout_s in zip(messages, (broker.delay_s / 2, 10.0), strict=True):
        nursery.start_soon(ack, message, timeout_s)
    await trio.sleep(1)
    assert acks(broker) == [(BATCH, 2)]
    assert results == {0: RequestTimedOutError, 1: type(None)}


async def test_each_caller_gets_its_own_result(broker: PopBroker, consumer: SimpleConsumer) -> None:
    messages = await consumer.receive(8)
    for place in (1, 6):
        await consumer.ack(messages[place])
    results = await acked(consumer, messages)
    assert acks(broker)[2:] == [(BATCH, 8)]
    assert [type(each) for each in results] == [
        ReceiptStaleError if place in (1, 6) else type(None) for place in range(8)
    ]
    assert broker.acked == set(range(8))


async def test_many_acks_with_one_receipt_cost_one_request(
    broker: PopBroker, consumer: SimpleConsumer
) -> None:
    first, second, *_ = await consumer.receive(8)
    results = await acked(consumer, [first] * 500 + [second])
    assert [type(each) for each in results].count(ReceiptStaleError) == 499
    assert results[-1] is None
    assert acks(broker) == [(BATCH, 2)]


async def test_stale_receipt_is_asked_about_once(
    broker: PopBroker, consumer: SimpleConsumer
) -> None:
    first, *_ = await consumer.receive(8)
    await consumer.ack(first)
    results = await acked(consumer, [first] * 50)
    assert set(map(type, results)) == {ReceiptStaleError}
    assert acks(broker) == [(SINGLE, 1)] * 2


async def test_acks_after_an_unknown_one_are_asked_again(
    broker: PopBroker, consumer: SimpleConsumer
) -> None:
    first, *_ = await consumer.receive(8)
    broker.failures.append(RequestTimedOutError("no answer"))
    results = await acked(consumer, [first, first])
    assert set(map(type, results)) == {RequestTimedOutError, ReceiptStaleError}
    assert acks(broker) == [(SINGLE, 1)] * 2


async def test_old_broker_gets_single_acks(broker: PopBroker, consumer: SimpleConsumer) -> None:
    broker.names_stale = False
    messages = await consumer.receive(4)
    await consumer.ack(messages[3])
    results = await acked(consumer, messages)
    assert acks(broker) == [(SINGLE, 1)] * 5
    assert [type(each) for each in results] == [type(None)] * 3 + [ReceiptStaleError]


async def test_stale_after_a_lost_answer_is_unknown(
    broker: PopBroker, consumer: SimpleConsumer
) -> None:
    messages = await consumer.receive(3)
    await consumer.ack(messages[0])
    broker.attempts = 2
    results = await acked(consumer, messages)
    assert [type(each) for each in results] == [RequestTimedOutError, type(None), type(None)]


async def test_refusal_reaches_each_caller_by_itself(
    broker: PopBroker, consumer: SimpleConsumer
) -> None:
    messages = await consumer.receive(3)
    broker.refusals[BATCH] = ResponseCode.NO_PERMISSION
    results = await acked(consumer, messages)
    assert [(type(each), getattr(each, "code", 0)) for each in results] == [
        (RequestFailedError, ResponseCode.NO_PERMISSION)
    ] * 3
    assert len(set(map(id, results))) == 3
    assert broker.acked == set()


async def test_cancelled_ack_before_its_request_is_not_sent(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    messages = await consumer.receive(3)
    nursery.start_soon(consumer.ack, messages[0])
    await trio.sleep(broker.delay_s / 2)
    with trio.move_on_after(broker.delay_s / 4):
        await consumer.ack(messages[1])
    await trio.sleep(1)
    assert acks(broker) == [(SINGLE, 1)]
    await consumer.ack(messages[2])
    assert broker.acked == {0, 2}


async def test_cancelled_ack_takes_no_other_with_it(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    messages = await consumer.receive(2)
    ended: list[bool] = []

    async def ack() -> None:
        await consumer.ack(messages[1])
        ended.append(True)

    nursery.start_soon(ack)
    with trio.move_on_after(broker.delay_s / 2):
        await consumer.ack(messages[0])
    await trio.sleep(1)
    assert ended == [True]
    assert broker.acked == {0, 1}, "it was on its way"


async def test_time_is_over_for_sent_and_unsent_acks(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    messages = await consumer.receive(2)
    broker.delay_s = 5
    nursery.start_soon(acked, consumer, [messages[0]])
    await trio.sleep(0.1)
    with pytest.raises(BrokerUnreachableError, match="was not sent"):
        await consumer.ack(messages[1], timeout_s=1)
    await trio.sleep(10)
    broker.delay_s = 50
    results = await acked(consumer, [messages[1]], timeout_s=1)
    assert isinstance(results[0], RequestTimedOutError)


async def test_acks_of_a_closed_client_fail(
    broker: PopBroker, consumer: SimpleConsumer, nursery: trio.Nursery
) -> None:
    messages = await consumer.receive(3)
    results: list[MQError | None] = []

    async def run() -> None:
        results.extend(await acked(consumer, [messages[0]]))
        results.extend(await acked(consumer, [messages[1]]))

    async with trio.open_nursery() as callers, trio.open_nursery() as broker.nursery:
        callers.start_soon(run)
        await trio.sleep(broker.delay_s / 2)
        broker.is_closed = True
        broker.nursery.cancel_scope.cancel()
    assert [type(each) for each in results] == [RequestTimedOutError, ClientClosedError]


async def test_no_ack_waits_for_others_to_come(broker: PopBroker, consumer: SimpleConsumer) -> None:
    messages = await consumer.receive(8)
    for message in messages:
        before_s = trio.current_time()
        await consumer.ack(message)
        assert trio.current_time() - before_s == pytest.approx(broker.delay_s)
    assert acks(broker) == [(SINGLE, 1)] * 8
