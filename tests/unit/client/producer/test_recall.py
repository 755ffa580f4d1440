"""Messages with a time of their own: how they are sent, and taken back."""

from collections.abc import Callable

import pytest
import trio

from dledger.client.core.errors import (
    AlreadyDeliveredError,
    BrokerBusyError,
    BrokerRefusedError,
    ClientError,
    MessageIllegalError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message, encode_message_properties
from dledger.client.producer.producer import Producer
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import RecallHandle
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World, open_world

HANDLE = RecallHandle("T", "g", 5000, "K").encode()

Answer = Callable[[RemotingCommand], Handled]


@pytest.mark.parametrize(
    ("message", "stored"),
    [
        (Message("T", b"x", delay_ms=1500), "TIMER_DELAY_MS\x011500\x02"),
        (Message("T", b"x", deliver_at_ms=9000), "TIMER_DELIVER_MS\x019000\x02"),
    ],
)
async def test_a_message_with_a_time_goes_alone_and_brings_its_handle(
    message: Message, stored: str
) -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        broker = world.group.brokers[0]
        place = {"msgId": "M", "queueId": "0", "queueOffset": "7", "recallHandle": HANDLE}
        broker.intercept = fixed(ext=place)
        result = await producer.send(message)
        (sent,) = [s.command for s in broker.seen if s.code == 310]
    assert stored in sent.ext["i"]
    assert result.recall_handle == HANDLE


async def test_a_batch_holds_no_messages_with_a_time(producer: Producer) -> None:
    with pytest.raises(MessageIllegalError, match="cannot hold delayed"):
        await producer.send_batch([Message("T", b"x", delay_ms=5)])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Message("T", b"x", delay_level=1, delay_ms=5), "one of"),
        (Message("T", b"x", deliver_at_ms=1, delay_ms=5), "one of"),
        (Message("T", b"x", delay_ms=-5), "not negative"),
        (Message("T", b"x", deliver_at_ms=-5), "not negative"),
    ],
)
def test_a_message_has_one_delay(message: Message, why: str) -> None:
    with pytest.raises(MessageIllegalError, match=why):
        encode_message_properties(message, "K")


async def recalled(*answers: Answer) -> str | ClientError:
    """Recall a message at a broker that gives *answers*; return what came, or the error."""
    left = list(answers)

    def next_answer(asked: RemotingCommand) -> Handled:
        return left.pop(0)(asked)

    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        world.group.on(RequestCode.RECALL_MESSAGE, next_answer)
        try:
            return await producer.recall(HANDLE, timeout_s=2.0)
        except ClientError as error:
            return error


async def test_a_recall_without_an_answer_may_be_done() -> None:
    error = await recalled(*[lambda _: DEFERRED] * 9)
    assert type(error) is UnknownOutcomeError


async def test_a_recall_by_an_account_that_is_not_let_in_ends(world: World) -> None:
    world.group.let_nobody_in()
    async with world.client() as client, Producer(client, "p") as producer:
        with pytest.raises(BrokerRefusedError, match="refused with code 1: not now") as caught:
            await producer.recall(HANDLE)
        assert trio.current_time() < 1.0
    assert not caught.value.retriable


def done(asked: RemotingCommand) -> Handled:
    assert (asked.ext["topic"], asked.ext["recallHandle"]) == ("T", HANDLE)
    return response_to(asked, 0, None, {"msgId": "K"})


def refused(code: int, outcome: str = "not_stored") -> Answer:
    return fixed(code, "why", {"outcome": outcome})


async def test_a_recall_returns_the_message_id() -> None:
    assert await recalled(done) == "K"


async def test_recall_is_sent_again_while_its_outcome_is_unknown() -> None:
    assert await recalled(refused(1, "unknown"), refused(2), done) == "K"


@pytest.mark.parametrize(
    ("code", "error"),
    [(604, AlreadyDeliveredError), (22, BrokerRefusedError), (16, BrokerRefusedError)],
)
async def test_recall_refused_raises(code: int, error: type[BrokerRefusedError]) -> None:
    reported = await recalled(refused(code))
    assert isinstance(reported, BrokerRefusedError)
    assert type(reported) is error
    assert (reported.outcome, reported.code, reported.remark) == ("not_stored", code, "why")


@pytest.mark.parametrize(
    ("code", "outcome", "error"),
    [(2, "not_stored", BrokerBusyError), (1, "unknown", UnknownOutcomeError)],
)
async def test_recall_ends_with_its_budget(code: int, outcome: str, error: type[Exception]) -> None:
    assert type(await recalled(*[refused(code, outcome)] * 100)) is error


@pytest.mark.parametrize("handle", ["", "nonsense"])
async def test_what_is_no_handle_is_not_sent(producer: Producer, handle: str) -> None:
    with pytest.raises(MessageIllegalError, match="is no recall handle"):
        await producer.recall(handle)
