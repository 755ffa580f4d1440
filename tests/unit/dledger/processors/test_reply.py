"""Replies reach the client that waits for them; the broker reports if they did, and keeps them."""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing

from dledger.commitlog.message_id import encode_offset_message_id
from dledger.commitlog.record import Record, decode_record
from dledger.processors.reply import PUSH_WITHIN_S
from dledger.remoting.errors import ConnectionLostError, RequestTimedOutError, TooManyInFlightError
from dledger.remoting.protocol.bodies import HeartbeatData, ProducerData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import (
    CLUSTER,
    LEADER,
    STORE_HOST,
    FakeConnection,
    FakeGroup,
    over_the_wire,
)

REPLY_TOPIC = f"{CLUSTER}_REPLY_TOPIC"
PROPERTIES = (
    "MSG_TYPE\x01reply\x02CORRELATION_ID\x01c-1\x02REPLY_TO_CLIENT\x01asker\x02TTL\x013000\x02"
    "UNIQ_KEY\x01ABC\x02"
)
ALWAYS = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
KEPT_NOWHERE = {"msgId": "0", "queueId": "0", "queueOffset": "0", **ALWAYS}


@dataclass(eq=False)
class Asker(FakeConnection):
    """A client that waits for replies."""

    code: int = 0
    fails: Exception | None = None
    pushed: list[RemotingCommand] = field(default_factory=list)
    within: list[float] = field(default_factory=list)

    async def invoke(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        await trio.lowlevel.checkpoint()
        self.pushed.append(over_the_wire(command))
        self.within.append(timeout_s)
        if self.fails is not None:
            raise self.fails
        return response_to(command, self.code, "process reply message fail" if self.code else None)


def heartbeat(
    broker: Broker, connection: FakeConnection, *groups: str, client_id: str = "asker"
) -> None:
    producers = [ProducerData(group_name=group) for group in groups]
    body = HeartbeatData(client_id=client_id, producer_data_set=producers).encode()
    assert broker.call(RequestCode.HEART_BEAT, {}, body, connection=connection).code == 0


def leave(broker: Broker, connection: FakeConnection, group: str) -> None:
    ext = {"clientID": "asker", "producerGroup": group}
    assert broker.call(RequestCode.UNREGISTER_CLIENT, ext, connection=connection).code == 0


def reply_command(body: bytes = b"answer", **changes: Any) -> RemotingCommand:
    ext = {
        "a": "repliers", "b": REPLY_TOPIC, "c": "TBW102", "d": "4", "e": "0", "f": "0",
        "g": "1699999999000", "h": "7", "i": PROPERTIES, "j": "0", "k": "false", "m": "false",
        **changes,
    }  # fmt: skip
    return request(RequestCode.SEND_REPLY_MESSAGE_V2, ext, body)


async def send(broker: Broker, command: RemotingCommand | None = None) -> RemotingCommand:
    """Return the answer to a reply; the group settles while it is waited for."""
    handled = broker.handle(command or reply_command())
    if not isinstance(handled, Awaitable):
        assert isinstance(handled, RemotingCommand)
        return handled
    answers: list[RemotingCommand] = []

    async def wait(handling: Awaitable[RemotingCommand]) -> None:
        answers.append(await handling)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, handled)
            while not answers:
                await trio.testing.wait_all_tasks_blocked()
                broker.group.settle()
    return answers[0]


def kept(group: FakeGroup) -> list[Record]:
    units = group.queues.queue(REPLY_TOPIC, 0).read(0, group.state.max_offset(REPLY_TOPIC, 0))
    return [decode_record(bytes(group.log.record_at(int(at)))) for at in units["phy_offset"]]


async def test_a_reply_reaches_the_requester_as_rocketmq_pushes_it(broker: Broker) -> None:
    asker = Asker()
    heartbeat(broker, asker, "p")
    assert (await send(broker)).code == 0
    (pushed,) = asker.pushed
    now = str(broker.clock.wall_ms())
    assert (pushed.code, pushed.is_oneway, bytes(pushed.body)) == (326, False, b"answer")
    assert pushed.ext == {
        "producerGroup": "repliers", "topic": REPLY_TOPIC, "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4", "queueId": "0", "sysFlag": "0",
        "bornTimestamp": "1699999999000", "flag": "7", "reconsumeTimes": "0", "unitMode": "false",
        "properties": f"{PROPERTIES}PUSH_REPLY_TIME\x01{now}\x02",
        "bornHost": "10.1.2.3:4567", "storeHost": LEADER, "storeTimestamp": now,
    }  # fmt: skip
    assert asker.within == [PUSH_WITHIN_S]


async def test_what_the_requester_has_is_kept_and_named(broker: Broker) -> None:
    heartbeat(broker, Asker(), "p")
    first, second = await send(broker), await send(broker, reply_command(b"again"))
    records = kept(broker.group)
    assert [(bytes(r.body), r.flag, r.property_map) for r in records] == [
        (body, 7, {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "asker",
                   "TTL": "3000", "UNIQ_KEY": "ABC"})
        for body in (b"answer", b"again")
    ]  # fmt: skip
    assert [answered.ext for answered in (first, second)] == [
        {
            "msgId": encode_offset_message_id(STORE_HOST, record.phy_offset),
            "queueId": "0",
            "queueOffset": str(offset),
            **ALWAYS,
        }
        for offset, record in enumerate(records)
    ]


async def test_the_long_header_is_read_as_well(broker: Broker) -> None:
    asker = Asker()
    heartbeat(broker, asker, "p")
    ext = {
        "producerGroup": "repliers", "topic": REPLY_TOPIC, "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4", "queueId": "-1", "sysFlag": "1", "flag": "0",
        "bornTimestamp": "1", "properties": PROPERTIES.removesuffix("\x02"),
    }  # fmt: skip
    answered = await send(broker, request(RequestCode.SEND_REPLY_MESSAGE, ext, b"packed"))
    assert (answered.code, answered.ext["queueId"]) == (0, "0")
    assert asker.pushed[0].ext["queueId"] == "-1"
    assert "reconsumeTimes" not in asker.pushed[0].ext
    assert [(r.sys_flag & 1, bytes(r.body)) for r in kept(broker.group)] == [(1, b"packed")]


async def test_nothing_is_kept_when_the_switch_is_off(group: FakeGroup) -> None:
    broker = Broker(group, store_reply_message_enable=False)
    asker = Asker()
    heartbeat(broker, asker, "p")
    answered = await send(broker)
    assert (answered.code, answered.ext) == (0, KEPT_NOWHERE)
    assert len(asker.pushed) == 1
    assert kept(group) == []


async def test_delivered_reply_is_no_failure_when_not_stored(group: FakeGroup) -> None:
    broker = Broker(group)
    asker = Asker()
    heartbeat(broker, asker, "p")
    handled = broker.handle(reply_command())
    group.step_down()  # while it is pushed
    answered = await handled
    assert (answered.code, answered.ext) == (0, KEPT_NOWHERE)
    assert len(asker.pushed) == 1
    assert kept(group) == []


@pytest.mark.parametrize(
    ("fails", "code", "outcome", "retriable"),
    [
        (RequestTimedOutError("2.5 s"), 1, "unknown", "true"),
        (ConnectionLostError("gone", sent=True), 1, "unknown", "true"),
        (ConnectionLostError("gone", sent=False), 1, "not_stored", "true"),
        (TooManyInFlightError("full"), 1, "not_stored", "true"),
        (None, 1, "not_stored", "true"),
    ],
)
async def test_unconfirmed_reply_is_reported_and_not_stored(
    broker: Broker, fails: Exception | None, code: int, outcome: str, retriable: str
) -> None:
    heartbeat(broker, Asker(fails=fails, code=1), "p")
    answered = await send(broker)
    assert (answered.code, answered.remark) == (code, "push reply message to asker fail.")
    reason = {"reason": "requester_away"} if outcome == "not_stored" else {}
    assert answered.ext == {"outcome": outcome, "retriable": retriable, **reason, **ALWAYS}
    assert kept(broker.group) == []


async def test_absent_requester_is_reported_in_rocketmqs_words(broker: Broker) -> None:
    answered = await send(broker)
    assert answered.code == 1
    assert answered.remark == "push reply message fail, channel of <asker> not found."
    away = {"outcome": "not_stored", "retriable": "true", "reason": "requester_away"}
    assert answered.ext == {**away, **ALWAYS}
    nobody = await send(broker, reply_command(i="CORRELATION_ID\x01c-1\x02"))
    assert nobody.remark == "reply message properties[REPLY_TO_CLIENT] is null"
    assert (nobody.code, nobody.ext) == (1, {"outcome": "not_stored", **ALWAYS})
    assert kept(broker.group) == []


async def test_a_client_is_there_as_long_as_one_of_its_producers_is(broker: Broker) -> None:
    asker = Asker()
    heartbeat(broker, asker, "p", "q")
    leave(broker, asker, "p")
    assert (await send(broker)).code == 0
    leave(broker, asker, "q")
    assert (await send(broker)).code == 1
    heartbeat(broker, asker, "p")
    asker.close()
    assert (await send(broker)).code == 1
    assert len(asker.pushed) == 1


async def test_newest_connection_of_a_client_is_used(broker: Broker, clock: ManualClock) -> None:
    old, new = Asker(), Asker()
    heartbeat(broker, old, "p")
    clock.now_s += 1
    heartbeat(broker, new, "p")
    assert (await send(broker)).code == 0
    assert (len(old.pushed), len(new.pushed)) == (0, 1)
    new.close()
    assert (await send(broker)).code == 0
    assert (len(old.pushed), len(new.pushed)) == (1, 1)


async def test_connection_follows_a_changed_client_id(broker: Broker) -> None:
    asker = Asker()
    heartbeat(broker, asker, "p", client_id="before")
    heartbeat(broker, asker, "p")
    assert (await send(broker)).code == 0
    to_before = PROPERTIES.replace("asker", "before")
    assert (await send(broker, reply_command(i=to_before))).code == 1


async def test_a_follower_sends_repliers_to_the_leader(broker: Broker) -> None:
    asker = Asker()
    heartbeat(broker, asker, "p")
    broker.group.step_down("10.0.0.2:10911")
    answered = await send(broker)
    assert (answered.code, answered.ext["leaderAddr"]) == (14, "10.0.0.2:10911")
    assert answered.ext["outcome"] == "not_stored"
    assert asker.pushed == []


async def test_new_leader_knows_the_waiting_requesters(broker: Broker) -> None:
    broker.group.step_down("10.0.0.2:10911")
    asker = Asker()
    heartbeat(broker, asker, "p")
    broker.group.lead()
    assert (await send(broker)).code == 0
    assert [bytes(pushed.body) for pushed in asker.pushed] == [b"answer"]


@pytest.mark.parametrize(
    ("changes", "body", "code"),
    [
        ({"b": "RMQ_SYS_DLEDGER_STATE"}, b"x", 16),
        ({"b": "missing"}, b"x", 17),
        ({"b": "no good"}, b"x", 1),
        ({"e": "1"}, b"x", 29),
        ({}, b"", 13),
        ({}, bytes(4097), 13),
        ({"i": f"{PROPERTIES}k\x01\ud800\x02"}, b"x", 1),
    ],
)
async def test_what_no_send_may_be_no_reply_may_be(
    broker: Broker, changes: dict[str, str], body: bytes, code: int
) -> None:
    asker = Asker()
    heartbeat(broker, asker, "p")
    answered = await send(broker, reply_command(body, **changes))
    assert (answered.code, answered.ext["outcome"]) == (code, "not_stored")
    assert asker.pushed == []


async def test_a_broker_that_takes_no_writes_takes_no_replies(group: FakeGroup) -> None:
    broker = Broker(group, broker_permission=4)
    heartbeat(broker, Asker(), "p")
    assert (await send(broker)).code == 16


# -- byte by byte ----------------------------------------------------------------------------


def frame(header: str, body: bytes = b"") -> bytes:
    head = header.encode()
    return (4 + len(head) + len(body)).to_bytes(4) + len(head).to_bytes(4) + head + body


ASKED = frame(
    '{"code":325,"extFields":{"a":"repliers","b":"REPLY_TOPIC","c":"TBW102","d":"4","e":"0","f":"0",'
    '"g":"1795147871927","h":"0","i":"CORRELATION_ID\\u0001c-1\\u0002REPLY_TO_CLIENT\\u0001'
    '10.0.0.9@77\\u0002MSG_TYPE\\u0001reply\\u0002TTL\\u00013000","j":"0","k":"false",'
    '"m":"false"},"flag":0,"language":"JAVA","opaque":8,"serializeTypeCurrentRPC":"JSON",'
    '"version":407}'.replace("REPLY_TOPIC", REPLY_TOPIC),
    b"that",
)
"""As RocketMQ's Java client writes it."""


async def answered(broker: Broker) -> bytes:
    (command,) = FrameDecoder().feed(ASKED)
    response = await send(broker, command)
    assert response.opaque == 8
    return encode_command(response)
