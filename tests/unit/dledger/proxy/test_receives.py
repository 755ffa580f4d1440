"""Receives and pulls of a proxy: in the order of their group, and for how long they wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from google.protobuf.duration_pb2 import Duration

from dledger.client.core.route import MessageQueue, TopicRoute
from dledger.commitlog.errors import MQError
from dledger.commitlog.record import decode_record, encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.routes import CONFIG_LIFETIME_S, BrokerConfigs
from dledger.proxy.service import MessagingService
from dledger.proxy.status import RefusedError
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.own_fields import NOT_MADE_FIELD
from tests.unit.client.fake_cluster import Group, World

CALLER = Caller("client-1", time_left_s=8.0)
TOPIC = pb.Resource(name="T")
GROUP = pb.Resource(name="clerks")
QUEUE = pb.MessageQueue(topic=TOPIC, id=0, broker=pb.Broker(name="g"))
RECORD = decode_record(
    encode_record(topic="T", queue_id=0, body=b"one", properties=b"", phy_offset=0)
)


def orderly(asked: RemotingCommand) -> RemotingCommand:
    config = SubscriptionGroupConfig("clerks", consume_message_orderly=True)
    return response_to(asked, 0, None, None, config.encode())


def busy(asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked, ResponseCode.SYSTEM_ERROR, "no leader yet")


def not_made(asked: RemotingCommand) -> RemotingCommand:
    body = SubscriptionGroupConfig("clerks").encode()
    return response_to(asked, 0, None, {NOT_MADE_FIELD: "true"}, body)


def take_orders(group: Group) -> list[str]:
    """Let receives find nothing; return whether each was to be in order."""
    orders: list[str] = []

    def pop(asked: RemotingCommand) -> RemotingCommand:
        orders.append(str(asked.ext["order"]).lower())
        return response_to(asked, ResponseCode.POLLING_TIMEOUT, "nothing")

    for broker in group.brokers:
        broker.on(RequestCode.POP_MESSAGE, pop)
    return orders


class Stated:
    """How the brokers of a group state the consumer group."""

    def __init__(
        self, group: Group, answer: Callable[[RemotingCommand], RemotingCommand] = busy
    ) -> None:
        self.answer = answer
        for broker in group.brokers:
            broker.on(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, self._state)

    def _state(self, asked: RemotingCommand) -> RemotingCommand:
        return self.answer(asked)


RECEIVE = pb.ReceiveMessageRequest(group=GROUP, message_queue=QUEUE)
CONSUMER = pb.TelemetryCommand(
    settings=pb.Settings(
        client_type=pb.PUSH_CONSUMER,
        subscription=pb.Subscription(
            group=GROUP,
            subscriptions=[
                pb.SubscriptionEntry(topic=pb.Resource(name="NotThere")),
                pb.SubscriptionEntry(topic=TOPIC),
            ],
        ),
    )
)


async def receive(service: MessagingService) -> int:
    received = await service.receive_message(RECEIVE, CALLER)
    return received.answers[0].status.code


async def test_order_of_a_group_is_not_guessed(world: World, service: MessagingService) -> None:
    group = world.groups["g"]
    orders = take_orders(group)
    stated = Stated(group)
    with pytest.raises(MQError):
        await receive(service)
    assert orders == []
    stated.answer = orderly
    assert await receive(service) == pb.MESSAGE_NOT_FOUND
    stated.answer = busy
    await trio.sleep(CONFIG_LIFETIME_S + 1)
    assert await receive(service) == pb.MESSAGE_NOT_FOUND
    assert orders == ["true", "true"], "what was known counts on"


async def test_settings_of_a_group_are_not_guessed(world: World, service: MessagingService) -> None:
    """A client of a group in order would consume in any order until its end."""
    stated = Stated(world.groups["g"])
    answer = await service.telemetry(CONSUMER, CALLER)
    assert answer is not None
    assert answer.status.code != pb.OK
    stated.answer = orderly
    answer = await service.telemetry(CONSUMER, CALLER)
    assert answer is not None
    assert answer.settings.subscription.fifo


@pytest.mark.parametrize("first", [busy, not_made])
async def test_group_is_stated_by_any_broker_group(
    world: World, service: MessagingService, first: Callable[[RemotingCommand], RemotingCommand]
) -> None:
    other = await world.add_group("h", 1, 11_000)
    Stated(world.groups["g"], first)
    Stated(other, orderly)
    orders = take_orders(world.groups["g"])
    assert await receive(service) == pb.MESSAGE_NOT_FOUND
    assert orders == ["true"]


async def test_topic_without_readable_queues_is_refused(
    world: World, service: MessagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = TopicRoute("T", (MessageQueue("T", "g", 0),), (), {"g": {0: "10.0.0.1:1"}})

    async def route(_configs: BrokerConfigs, _topic: str) -> TopicRoute:
        return written

    monkeypatch.setattr(BrokerConfigs, "route", route)
    asked = pb.ReceiveMessageRequest(group=GROUP, message_queue=pb.MessageQueue(topic=TOPIC))
    with pytest.raises(RefusedError) as caught:
        await service.receive_message(asked, CALLER)
    assert caught.value.code == pb.FORBIDDEN


async def test_receive_for_less_than_no_time_waits_for_none(
    world: World, service: MessagingService
) -> None:
    take_orders(world.groups["g"])
    asked = pb.ReceiveMessageRequest(
        group=GROUP, message_queue=QUEUE, long_polling_timeout=Duration(seconds=-3_600)
    )
    received = await service.receive_message(asked, Caller("client-1"))
    assert received.answers[0].status.code == pb.MESSAGE_NOT_FOUND


async def test_pull_waits_no_longer_than_brokers_hold_it(
    world: World, service: MessagingService
) -> None:
    world.groups["g"].store("T", 0, RECORD)
    for seconds in (-3_600, 1 << 40):
        asked = pb.PullMessageRequest(
            group=GROUP,
            message_queue=QUEUE,
            offset=1,
            long_polling_timeout=Duration(seconds=seconds),
        )
        began_s = trio.current_time()
        answers = await service.pull_message(asked, Caller("client-1"))
        assert answers[0].status.code == pb.MESSAGE_NOT_FOUND
        assert trio.current_time() - began_s <= 61
