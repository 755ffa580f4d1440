"""Connected clients as operators see them, and requests that the broker passes on to them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from dledger.commitlog.message_id import encode_offset_message_id
from dledger.processors.client_calls import CLIENT_ANSWERS_WITHIN_S, STATUS_WITHIN_S
from dledger.remoting.errors import ConnectionLostError, RequestTimedOutError
from dledger.remoting.protocol.bodies import (
    ConsumerData,
    GetConsumerStatusBody,
    HeartbeatData,
    MessageQueue,
    ProducerData,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.accounts import AccessChange, AccountConfig
from dledger.state.state_record import ConsumerOffsetsChange, encode_change
from dledger.state.topics import ACCESS_QUEUE
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, STORE_HOST, FakeConnection, over_the_wire

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
async def test_absent_client_is_answered_with_its_reason(broker: Broker, client_id: str) -> None:
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
async def test_silent_client_is_answered_with_its_reason(
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


async def test_records_of_accounts_are_consumed_by_no_client(broker: Broker) -> None:
    broker.group.put(STATE_TOPIC, ACCESS_QUEUE, access_record())
    units = broker.group.queues.queue(STATE_TOPIC, ACCESS_QUEUE).read(0, 1)
    client = ClientConnection()
    join(broker, client)
    message_id = encode_offset_message_id(STORE_HOST, int(units["phy_offset"][0]))
    ext = {"consumerGroup": "g", "clientId": "c1", "msgId": message_id}
    response = await call(broker, RequestCode.CONSUME_MESSAGE_DIRECTLY, **ext)
    assert response.code == ResponseCode.NO_PERMISSION
    assert client.invoked == []


def access_record() -> bytes:
    return encode_change(AccessChange((AccountConfig("order-service", "hunter2-hunter2"),)))[1]


@pytest.mark.parametrize("at", [7, 10**9])
async def test_absent_message_is_answered_with_its_reason(broker: Broker, at: int) -> None:
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


async def test_every_client_reports_its_progress(broker: Broker) -> None:
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


def beat(broker: Broker, client_id: str, *topics: str, port: int = 1, group: str = "g") -> None:
    data = [SubscriptionData(topic, "A || B") for topic in topics]
    body = HeartbeatData(
        client_id=client_id,
        producer_data_set=[ProducerData("p")],
        consumer_data_set=[ConsumerData(group, subscription_data_set=data)],
    )
    connection = FakeConnection(peer_address=("10.0.0.7", port))
    assert broker.call(RequestCode.HEART_BEAT, {}, body.encode(), connection=connection).code == 0


def asked(broker: Broker, code: RequestCode, **ext: str) -> Any:
    response = broker.call(code, ext)
    return response.code if response.code else json.loads(bytes(response.body))


def commit(broker: Broker, *offsets: tuple[str, str, int, int]) -> None:
    broker.group.store(ConsumerOffsetsChange.of(offsets))


def test_the_consumers_of_a_group(broker: Broker) -> None:
    code = RequestCode.GET_CONSUMER_CONNECTION_LIST
    assert asked(broker, code, consumerGroup="g") == 206
    beat(broker, "c1", "T", port=5)
    body = asked(broker, code, consumerGroup="g")
    assert body["connectionSet"] == [
        {"clientAddr": "10.0.0.7:5", "clientId": "c1", "language": "PYTHON", "version": 407}
    ]
    assert body["subscriptionTable"]["T"]["subString"] == "A || B"
    assert (body["consumeType"], body["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")


def test_the_producers_of_a_group(broker: Broker) -> None:
    code = RequestCode.GET_PRODUCER_CONNECTION_LIST
    assert asked(broker, code, producerGroup="p") == 1
    beat(broker, "c1", port=5)
    beat(broker, "c2", port=6)
    body = asked(broker, code, producerGroup="p")
    assert [(c["clientId"], c["clientAddr"]) for c in body["connectionSet"]] == [
        ("c1", "10.0.0.7:5"),
        ("c2", "10.0.0.7:6"),
    ]


def test_groups_of_a_topic_and_topics_of_a_group(broker: Broker) -> None:
    commit(broker, ("away", "T", 0, 5), ("g", "U", 0, 1), ("away", "V", 0, 1))
    beat(broker, "c1", "T", "W")
    groups = asked(broker, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="T")
    assert groups["groupList"] == ["away", "g"]
    topics = asked(broker, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="g")
    assert topics["topicList"] == ["T", "U", "W"]
    away = asked(broker, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="away")
    assert away["topicList"] == ["T", "V"]


def test_what_a_group_wants_of_a_topic(broker: Broker) -> None:
    code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
    assert asked(broker, code, group="g", topic="T") == {"group": "g", "topic": "T"}
    beat(broker, "c1", "T")
    body = asked(broker, code, group="g", topic="T")
    assert (body["group"], body["topic"]) == ("g", "T")
    assert body["subscriptionData"]["subString"] == "A || B"


def test_follower_answers_from_its_clients_reports(broker: Broker) -> None:
    broker.group.step_down()
    beat(broker, "c1", "T")
    body = asked(broker, RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g")
    assert [client["clientId"] for client in body["connectionSet"]] == ["c1"]


def test_producers_are_listed_with_their_last_heartbeat(broker: Broker, clock: ManualClock) -> None:
    for number, group in enumerate(("p", "q")):
        data = HeartbeatData(
            client_id=f"c{number}", producer_data_set=[ProducerData(group_name=group)]
        )
        connection = FakeConnection(peer_address=("10.0.0.7", 4000 + number))
        broker.call(RequestCode.HEART_BEAT, {}, data.encode(), connection=connection)
    at_ms = clock.wall_ms()
    clock.now_s += 5
    body = json.loads(bytes(broker.call(RequestCode.GET_ALL_PRODUCER_INFO).body))
    assert body == {
        "data": {
            group: [
                {
                    "clientId": f"c{number}",
                    "remoteIP": f"10.0.0.7:{4000 + number}",
                    "language": "PYTHON",
                    "version": 407,
                    "lastUpdateTimestamp": at_ms,
                }
            ]
            for number, group in enumerate(("p", "q"))
        }
    }
