"""Requests and replies of the SDK against a cluster in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing

from dledger.client.core import broker_requests
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BackpressureError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    MessageIllegalError,
    ReplyTimedOutError,
    RequesterAwayError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.request_reply import reply_message
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import encode_record
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.remoting.protocol.outcome import Condition, answer
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.client.producer.fake_replies import REPLY_TOPIC, FakeReplies, push

QUESTION = Message("T", b"what?", tags="A", keys="k", properties={"who": "me"}, flag=7)
HEARTBEAT = RequestCode.HEART_BEAT
REPLY = RequestCode.SEND_REPLY_MESSAGE_V2


class Stage(NamedTuple):
    """A cluster, a client that asks, and one that replies."""

    world: World
    replies: FakeReplies
    client: ClientInstance
    asker: Producer
    replier: Producer

    async def request(self, number: int = 0) -> MessageExt:
        """Return a request as soon as a consumer would get it."""
        while len(self.replies.requests) <= number:
            await trio.sleep(0.01)
        return self.replies.requests[number]

    async def answer(self, body: bytes = b"that", number: int = 0, **how: Any) -> None:
        """Reply to a request as soon as it is there."""
        await self.replier.send(reply_message(await self.request(number), body, **how))


@asynccontextmanager
async def opened(config: ProducerConfig | None = None, **how: bool) -> AsyncIterator[Stage]:
    async with open_world(**how) as world, world.client() as client, world.client() as other:
        replies = FakeReplies(world.group)
        async with Producer(client, "askers", config) as asker, Producer(other, "re") as replier:
            yield Stage(world, replies, client, asker, replier)


# -- both ways --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"idempotent": True}, {"rocketmq": True}])
async def test_a_request_returns_its_reply(how: dict[str, bool]) -> None:
    async with opened(None, **how) as stage, trio.open_nursery() as nursery:
        nursery.start_soon(stage.answer, b"that")
        reply = await stage.asker.request(QUESTION, 3.0)
        assert (reply.body_bytes, reply.topic) == (b"that", REPLY_TOPIC)
        asked = await stage.request()
        assert (asked.body_bytes, asked.tags, asked.keys) == (b"what?", "A", "k")
        properties = asked.properties
        assert properties["REPLY_TO_CLIENT"] == stage.client.client_id
        assert (properties["TTL"], properties["who"]) == ("3000", "me")
        correlation_id = properties["CORRELATION_ID"]
        assert len(correlation_id) == 32
        assert {**reply.properties, "UNIQ_KEY": "", "ARRIVE_TIME": ""} == {
            "UNIQ_KEY": "", "MSG_TYPE": "reply", "CORRELATION_ID": correlation_id,
            "REPLY_TO_CLIENT": stage.client.client_id, "TTL": "3000", "PUSH_REPLY_TIME": "17",
            "ARRIVE_TIME": "",
        }  # fmt: skip
        assert reply.born_host == ("10.0.0.7", 4711)
        assert reply.store_host == ("10.0.0.1", 10911)
        assert reply.store_timestamp_ms == 18
        assert len(stage.client.requests) == 0


async def test_replies_find_their_requests_in_any_order() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        got: dict[bytes, bytes] = {}

        async def ask(body: bytes) -> None:
            got[body] = (await stage.asker.request(replace(QUESTION, body=body), 5.0)).body_bytes

        bodies = [b"%d" % number for number in range(20)]
        for body in bodies:
            nursery.start_soon(ask, body)
        await stage.request(19)
        for number in reversed(range(20)):
            body = stage.replies.requests[number].body_bytes
            await stage.answer(b"re " + body, number)
        with trio.fail_after(5):
            while len(got) < 20:
                await trio.sleep(0.01)
        assert got == {body: b"re " + body for body in bodies}


async def test_a_large_reply_is_packed_and_unpacked() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        nursery.start_soon(stage.answer, bytes(100_000))
        reply = await stage.asker.request(QUESTION, 3.0)
        assert reply.body_bytes == bytes(100_000)
        (sent,) = [seen.command for seen in stage.world.seen if seen.code == REPLY]
        assert len(bytes(sent.body)) < 1000


async def test_reply_is_a_request_of_its_own_without_a_sequence() -> None:
    async with opened(idempotent=True) as stage, trio.open_nursery() as nursery:
        nursery.start_soon(stage.answer)
        await stage.asker.request(QUESTION, 3.0)
        (sent,) = [seen.command for seen in stage.world.seen if seen.code == REPLY]
        header = SendMessageHeader.of(sent)
        assert (header.producer_group, header.topic, header.queue_id) == ("re", REPLY_TOPIC, 0)
        assert "producerId" not in sent.ext
        (asked,) = [
            seen.command for seen in stage.world.seen if seen.code == RequestCode.SEND_MESSAGE_V2
        ]
        extra = set(asked.ext) - set(sent.ext)
        assert {"producerId", "producerEpoch", "producerSequence"} <= extra


def test_what_is_no_request_has_no_reply() -> None:
    def message(**properties: str) -> MessageExt:
        record = encode_record(
            topic="T", queue_id=0, body=b"x", properties=encode_properties(properties)
        )
        return MessageExt(memoryview(record), 0)

    whole = {"CLUSTER": "c", "CORRELATION_ID": "1", "REPLY_TO_CLIENT": "a"}
    reply = reply_message(message(**whole, TTL="7", other="x"), b"y", tags="t", keys="k")
    assert reply == Message(
        "c_REPLY_TOPIC", b"y", tags="t", keys="k",
        properties={"MSG_TYPE": "reply", "CORRELATION_ID": "1", "REPLY_TO_CLIENT": "a",
                    "TTL": "7"},
    )  # fmt: skip
    for key in whole:
        lacking = message(**{name: value for name, value in whole.items() if name != key})
        with pytest.raises(MessageIllegalError, match=key):
            reply_message(lacking, b"y")


# -- which broker knows the requester --------------------------------------------------------


async def test_all_members_know_the_requester_before_its_first_request() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        nursery.start_soon(stage.answer)
        await stage.asker.request(QUESTION, 3.0)
        group = stage.world.group
        for broker in group.brokers:
            codes = [seen.code for seen in broker.seen]
            assert HEARTBEAT in codes
            if broker.leads:
                assert codes.index(HEARTBEAT) < codes.index(RequestCode.SEND_MESSAGE_V2)
        assert [
            stage.replies.known[broker.address][stage.client.client_id][1]
            for broker in group.brokers
        ] == [["askers"]] * 3


async def test_a_broken_connection_is_made_again_while_a_request_waits() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        leader = stage.world.group.brokers[0]

        async def answer_over_a_new_connection() -> None:
            asked = await stage.request()
            await leader.kill()
            await leader.start()
            await stage.replier.send(reply_message(asked, b"back again"))

        nursery.start_soon(answer_over_a_new_connection)
        reply = await stage.asker.request(QUESTION, 10.0)
        assert reply.body_bytes == b"back again"


async def test_a_later_request_waits_for_no_heartbeat() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(lambda n: stage.answer(number=n), number)
            await stage.asker.request(QUESTION, 3.0)
            if number == 0:
                await trio.sleep(1.0)
                reported = stage.world.count(HEARTBEAT)
        assert stage.world.count(HEARTBEAT) == reported


async def test_request_waits_a_moment_only_for_a_silent_follower() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        await stage.world.group.brokers[2].kill()
        host, port = stage.world.group.brokers[2].address.split(":")
        stage.world.network.silent.add((host, int(port)))
        nursery.start_soon(stage.answer)
        began = trio.current_time()
        await stage.asker.request(QUESTION, 5.0)
        assert trio.current_time() - began < 2.0


# -- no reply --------------------------------------------------------------------------------


async def test_request_without_a_reply_has_where_it_is_stored() -> None:
    async with opened() as stage:
        began = trio.current_time()
        with pytest.raises(
            ReplyTimedOutError, match=r"stored in .* no reply came within 2 s"
        ) as caught:
            await stage.asker.request(QUESTION, 2.0)
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)
        assert (caught.value.outcome, caught.value.retriable) == ("stored", False)
        assert caught.value.send_result.message_id == (await stage.request()).message_id
        assert len(stage.client.requests) == 0


async def test_a_late_reply_is_confirmed_and_passed_over() -> None:
    async with opened() as stage:
        with pytest.raises(ReplyTimedOutError):
            await stage.asker.request(QUESTION, 1.0)
        await stage.answer()
        assert [said.code for said in stage.replies.pushed] == [0]
        assert stage.client.requests.unmatched == 1


async def test_a_reply_that_comes_twice_is_confirmed_twice() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        nursery.start_soon(stage.answer)
        await stage.asker.request(QUESTION, 3.0)
        await stage.answer(b"again")
        assert [said.code for said in stage.replies.pushed] == [0, 0]
        assert stage.client.requests.unmatched == 1


async def test_an_unreadable_reply_is_refused() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        nursery.start_soon(stage.answer)
        await stage.asker.request(QUESTION, 3.0)
        connection = next(iter(stage.replies.known.values()))[stage.client.client_id][0]
        said = await connection.invoke(
            request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, {"topic": "T"}, b"x"), 3.0
        )
        assert (said.code, said.remark) == (1, "process reply message fail")
        header = SendMessageHeader("p", "T", "TBW102", 4, 0, 0, 1, 0, "CORRELATION_ID\x01no\x02")
        assert (await push(connection, header, b"x")).code == 0


def refusing(condition: Condition) -> Any:
    return lambda asked: answer(asked, condition, "no")


@pytest.mark.parametrize(
    ("condition", "error", "outcome"),
    [
        (Condition.NO_PERMISSION, BrokerRefusedError, "not_stored"),
        (Condition.MESSAGE_ILLEGAL, MessageIllegalError, "not_stored"),
        (Condition.INTERNAL_ERROR, UnknownOutcomeError, "unknown"),
    ],
)
async def test_request_not_stored_ends_at_once_an_unknown_one_waits(
    condition: Condition, error: type[ClientError], outcome: str
) -> None:
    async with opened() as stage:
        stage.world.group.brokers[0].intercept = refusing(condition)
        began = trio.current_time()
        with pytest.raises(error, match="no") as caught:
            await stage.asker.request(QUESTION, 4.0)
        assert caught.value.outcome == outcome
        waited = trio.current_time() - began
        assert waited < 1.0 if outcome == "not_stored" else waited >= 4.0


async def test_a_reply_to_a_request_of_unknown_fate_is_returned() -> None:
    async with opened(ProducerConfig(retry_unknown=False)) as stage, trio.open_nursery() as nursery:
        leader = stage.world.group.brokers[0]

        def store_and_forget(asked: RemotingCommand) -> RemotingCommand:
            stage.replies._sent(asked)
            return answer(asked, Condition.LEADERSHIP_LOST, "not known")

        leader.intercept = store_and_forget
        nursery.start_soon(stage.answer)
        reply = await stage.asker.request(QUESTION, 4.0)
        assert reply.body_bytes == b"that"


async def test_request_without_a_consumer_is_not_stored() -> None:
    async with opened() as stage:
        await stage.asker.publish_queues("T")
        for broker in stage.world.group.brokers:
            await broker.kill()
        with pytest.raises(BrokerUnreachableError) as caught:
            await stage.asker.request(QUESTION, 2.0)
        assert caught.value.outcome == "not_stored"


async def test_too_many_requests_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_requests, "OPEN_REQUESTS_MAX", 2)
    async with opened() as stage, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(stage.asker.request, QUESTION, 30.0)
        await stage.request(1)
        with pytest.raises(BackpressureError, match="2 requests wait"):
            await stage.asker.request(QUESTION, 3.0)
        assert len(stage.replies.requests) == 2
        nursery.cancel_scope.cancel()
    assert len(stage.client.requests) == 0


async def test_what_a_request_sets_itself_is_refused() -> None:
    async with opened() as stage:
        for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "MSG_TYPE"):
            with pytest.raises(MessageIllegalError, match=name):
                await stage.asker.request(Message("T", b"x", properties={name: "1"}), 3.0)
        assert stage.replies.requests == []
    with pytest.raises(ClientClosedError):
        await stage.asker.request(QUESTION, 3.0)


# -- the replier -----------------------------------------------------------------------------


async def test_reply_without_a_waiting_requester_ends_soon() -> None:
    async with opened() as stage:
        with pytest.raises(ReplyTimedOutError):
            await stage.asker.request(QUESTION, 1.0)
        asked = await stage.request()
        for known in stage.replies.known.values():
            known.pop(stage.client.client_id)
        began = trio.current_time()
        with pytest.raises(RequesterAwayError, match="not connected") as caught:
            await stage.replier.send(reply_message(asked, b"late"))
        assert 0.9 <= trio.current_time() - began < 2.0
        assert (caught.value.outcome, caught.value.retriable) == ("not_stored", True)


async def test_a_requester_that_is_away_for_a_moment_gets_its_reply() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        stage.replies.refuse = [Condition.REQUESTER_AWAY] * 3
        nursery.start_soon(stage.answer)
        assert (await stage.asker.request(QUESTION, 3.0)).body_bytes == b"that"
        assert stage.world.count(REPLY) == 4


async def test_reply_that_may_have_arrived_is_repeated_then_unknown() -> None:
    async with opened() as stage:
        with pytest.raises(ReplyTimedOutError):
            await stage.asker.request(QUESTION, 1.0)
        stage.replies.refuse = [Condition.REPLY_UNCONFIRMED] * 10
        with pytest.raises(UnknownOutcomeError) as caught:
            await stage.answer()
        assert caught.value.outcome == "unknown"
        assert stage.world.count(REPLY) == 3


async def test_a_reply_tries_the_other_group() -> None:
    async with opened() as stage, trio.open_nursery() as nursery:
        second = await stage.world.add_group("h", 1, 10951)
        other = FakeReplies(second)
        stage.replies.refuse = [Condition.REQUESTER_AWAY] * 100

        async def reply() -> None:
            while not (found := [*stage.replies.requests, *other.requests]):
                await trio.sleep(0.01)
            await stage.replier.send(reply_message(found[0], b"the other way"))

        nursery.start_soon(reply)
        reply_ = await stage.asker.request(QUESTION, 5.0)
        assert reply_.body_bytes == b"the other way"
        await trio.testing.wait_all_tasks_blocked()
        assert [said.code for said in other.pushed] == [0]
