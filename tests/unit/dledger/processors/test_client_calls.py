"""What operators ask of clients goes through the broker, and the client's answer comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio

from commitlog.message_id import encode_offset_message_id
from dledger.processors.client_calls import CLIENT_ANSWERS_WITHIN_S, STATUS_WITHIN_S
from remoting.errors import ConnectionLostError, RequestTimedOutError
from remoting.protocol.bodies import (
    ConsumerData,
    GetConsumerStatusBody,
    HeartbeatData,
    MessageQueue,
)
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request, response_to
from tests.harness.broker import Broker
from tests.harness.fake_group import (
    BROKER,
    STORE_HOST,
    FakeConnection,
    over_the_wire,
)

Answers = Callable[[RemotingCommand], RemotingCommand]


@dataclass(eq=False)
class ClientConnection(FakeConnection):
    """A client that answers."""

    answers: Answers | None = None
    invoked: list[RemotingCommand] = field(default_factory=list)
    within: list[float] = field(default_factory=list)
    fails: Exception | None = None

    async def invoke(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        await trio.lowlevel.checkpoint()
        self.invoked.append(command)
        self.within.append(timeout_s)
        if self.fails is not None:
            raise self.fails
        assert self.answers is not None
        return self.answers(command)


def join(
    broker: Broker,
    connection: FakeConnection,
    client_id: str = "c1",
    *,
    version: int = 407,
    language: str = "JAVA",
) -> None:
    body = HeartbeatData(client_id=client_id, consumer_data_set=[ConsumerData("g")]).encode()
    command = request(RequestCode.HEART_BEAT, {}, body)
    command.version, command.language = version, language
    assert broker.handle(command, connection).code == 0


async def call(broker: Broker, code: RequestCode, **ext: str) -> RemotingCommand:
    handled = broker.handle(request(code, dict(ext)))
    return handled if isinstance(handled, RemotingCommand) else await handled


def says(text: bytes) -> Answers:
    return lambda command: response_to(command, 0, "not set any response code", None, text)


async def test_the_running_info_is_the_clients_own(broker: Broker) -> None:
    client = ClientConnection(answers=says(b'{"properties":{}}'))
    join(broker, client)
    ext = {"consumerGroup": "g", "clientId": "c1", "jstackEnable": "true"}
    response = await call(broker, RequestCode.GET_CONSUMER_RUNNING_INFO, **ext)
    assert (response.code, response.remark) == (0, "not set any response code")
    assert bytes(response.body) == b'{"properties":{}}'
    assert [(c.code, c.ext) for c in client.invoked] == [(307, ext)]
    assert client.within == [CLIENT_ANSWERS_WITHIN_S]


@pytest.mark.parametrize("client_id", ["c2", ""])
async def test_a_client_that_is_not_there_is_told(broker: Broker, client_id: str) -> None:
    join(broker, ClientConnection())
    ext = {"consumerGroup": "g", "clientId": client_id}
    response = await call(broker, RequestCode.GET_CONSUMER_RUNNING_INFO, **ext)
    assert response.code == 1
    assert response.remark == f"The Consumer <g> <{client_id}> not online"


async def test_a_client_that_is_too_old_is_not_asked(broker: Broker) -> None:
    client = ClientConnection()
    join(broker, client, version=61)
    ext = {"consumerGroup": "g", "clientId": "c1"}
    response = await call(broker, RequestCode.GET_CONSUMER_RUNNING_INFO, **ext)
    assert response.code == 1
    assert "too low" in (response.remark or "")
    assert client.invoked == []


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (RequestTimedOutError("10 s"), 207, "unknown"),
        (ConnectionLostError("gone", sent=True), 1, "unknown"),
    ],
)
async def test_a_client_that_does_not_answer_is_told(
    broker: Broker, error: Exception, code: int, outcome: str
) -> None:
    join(broker, ClientConnection(fails=error))
    ext = {"consumerGroup": "g", "clientId": "c1"}
    response = await call(broker, RequestCode.GET_CONSUMER_RUNNING_INFO, **ext)
    assert (response.code, response.ext["outcome"]) == (code, outcome)


async def test_a_message_is_consumed_directly(broker: Broker) -> None:
    broker.group.put("T", 0, b"a", b"b")
    position = int(broker.group.queues.queue("T", 0).read(1, 1)["phy_offset"][0])
    client = ClientConnection(answers=says(b'{"consumeResult":"CR_SUCCESS"}'))
    join(broker, client)
    message_id = encode_offset_message_id(STORE_HOST, position)
    ext = {"consumerGroup": "g", "clientId": "c1", "msgId": message_id}
    response = await call(broker, RequestCode.CONSUME_MESSAGE_DIRECTLY, **ext)
    assert json.loads(bytes(response.body)) == {"consumeResult": "CR_SUCCESS"}
    (passed,) = client.invoked
    assert passed.ext["brokerName"] == BROKER
    assert bytes(passed.body) == bytes(broker.group.log.record_at(position))


@pytest.mark.parametrize("at", [7, 10**9])
async def test_a_message_that_is_not_there_is_told(broker: Broker, at: int) -> None:
    broker.group.put("T", 0, b"a")
    join(broker, ClientConnection())
    message_id = encode_offset_message_id(STORE_HOST, at)
    ext = {"consumerGroup": "g", "clientId": "c1", "msgId": message_id}
    response = await call(broker, RequestCode.CONSUME_MESSAGE_DIRECTLY, **ext)
    assert response.code == 1
    assert message_id in (response.remark or "")


def status(offset: int) -> Answers:
    body = GetConsumerStatusBody({MessageQueue("T", BROKER, 0): offset}).encode()
    return lambda command: response_to(command, 0, None, None, body)


async def test_every_client_says_how_far_it_is(broker: Broker) -> None:
    join(broker, ClientConnection(answers=status(5)), "c1")
    join(broker, ClientConnection(answers=status(9)), "c2")
    silent = ClientConnection(fails=RequestTimedOutError("5 s"))
    join(broker, silent, "c3")
    code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
    response = over_the_wire(await call(broker, code, topic="T", group="g"))
    queue = MessageQueue("T", BROKER, 0)
    assert GetConsumerStatusBody.decode(response.body).consumer_table == {
        "c1": {queue: 5},
        "c2": {queue: 9},
    }
    assert (silent.invoked[0].code, silent.within) == (221, [STATUS_WITHIN_S])
    one = await call(broker, code, topic="T", group="g", clientAddr="c2")
    assert list(GetConsumerStatusBody.decode(one.body).consumer_table) == ["c2"]
    assert (await call(broker, code, topic="T", group="nobody")).code == 206
