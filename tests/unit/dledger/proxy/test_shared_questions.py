"""What many clients ask at the same moment, a proxy asks brokers once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio

from dledger.client.consumer.pop_calls import PopCalls
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.receives import LINES_MAX, Receives
from dledger.proxy.renewals import RenewalTable
from dledger.proxy.routes import CONFIG_LIFETIME_S, FAILED_LIFETIME_S, BrokerConfigs
from dledger.proxy.service import ROUTED_MAX, MessagingService
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.unit.client.consumer.popping import PopBroker
from tests.unit.client.fake_cluster import World

CALLER = Caller("client-1", time_left_s=60.0)
TOPIC, GROUP = pb.Resource(name="T"), pb.Resource(name="g")
FIFO_TOPIC = TopicConfig("T", attributes={"+message.type": "FIFO"})
EVERY_TYPE = (pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION)


# ---------------------------------------------------------------------------------- types


async def test_senders_of_one_moment_ask_for_types_once(world: World) -> None:
    def state(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {}, FIFO_TOPIC.encode())

    world.group.on(RequestCode.GET_TOPIC_CONFIG, state)
    found: list[object] = []
    async with world.client() as client:
        configs = BrokerConfigs(client)

        async def ask() -> None:
            found.append(await configs.types("T"))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
    assert found == [(pb.FIFO,)] * 20
    assert world.count(RequestCode.GET_TOPIC_CONFIG) == 1


async def test_types_are_asked_for_again_when_asker_leaves(world: World) -> None:
    answers: list[RemotingCommand] = []

    def state(asked: RemotingCommand) -> Handled:
        answers.append(asked)
        if len(answers) == 1:
            return DEFERRED  # and never answered
        return response_to(asked, 0, None, {}, FIFO_TOPIC.encode())

    world.group.on(RequestCode.GET_TOPIC_CONFIG, state)
    found: list[object] = []
    async with world.client() as client:
        configs = BrokerConfigs(client)

        async def ask() -> None:
            found.append(await configs.types("T"))

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.2) as hurry:
                async with trio.open_nursery() as hurried:
                    hurried.start_soon(ask)
                    await trio.sleep(0.1)
                    for _ in range(20):
                        nursery.start_soon(ask)
            assert hurry.cancelled_caught
    assert found == [(pb.FIFO,)] * 20
    assert world.count(RequestCode.GET_TOPIC_CONFIG) == 2


async def test_known_types_count_while_no_broker_states_them(world: World) -> None:
    config = TopicConfig("T", attributes={"+message.type": "FIFO"})
    is_away = [False]

    def state(asked: RemotingCommand) -> RemotingCommand:
        if is_away[0]:
            return response_to(asked, ResponseCode.SYSTEM_BUSY, "later")
        return response_to(asked, 0, None, {}, config.encode())

    world.group.on(RequestCode.GET_TOPIC_CONFIG, state)
    async with world.client() as client:
        configs = BrokerConfigs(client)
        assert await configs.types("T") == (pb.FIFO,)
        is_away[0] = True
        await trio.sleep(CONFIG_LIFETIME_S)
        assert await configs.types("T") == (pb.FIFO,)
        is_away[0], config.attributes = False, {"+message.type": "DELAY"}
        assert await configs.types("T") == (pb.FIFO,)
        await trio.sleep(FAILED_LIFETIME_S)
        assert await configs.types("T") == (pb.DELAY,)


async def test_broker_without_types_is_asked_once_a_second(world: World) -> None:
    def busy(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, ResponseCode.SYSTEM_BUSY, "later")

    world.group.on(RequestCode.GET_TOPIC_CONFIG, busy)
    async with world.client() as client:
        configs = BrokerConfigs(client)
        assert await configs.types("T") == EVERY_TYPE
        asked, began_s = world.count(RequestCode.GET_TOPIC_CONFIG), trio.current_time()
        for _ in range(10):
            assert await configs.types("T") == EVERY_TYPE
        assert world.count(RequestCode.GET_TOPIC_CONFIG) == asked
        assert trio.current_time() == began_s, "no send waits for them"
        await trio.sleep(FAILED_LIFETIME_S)
        await configs.types("T")
        assert world.count(RequestCode.GET_TOPIC_CONFIG) > asked


# ---------------------------------------------------------------------------------- subscriptions


def consumer_of(names: list[str]) -> pb.TelemetryCommand:
    entries = [pb.SubscriptionEntry(topic=pb.Resource(name=name)) for name in names]
    subscription = pb.Subscription(group=GROUP, subscriptions=entries)
    return pb.TelemetryCommand(
        settings=pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)
    )


@pytest.mark.parametrize("known_at", [0, ROUTED_MAX + 5])
async def test_settings_of_many_topics_ask_for_few_routes(world: World, known_at: int) -> None:
    names = [f"Unknown{number}" for number in range(5_000)]
    names[known_at] = "T"
    group = SubscriptionGroupConfig("g", consume_message_orderly=True)

    def state(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {}, group.encode())

    world.group.on(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, state)
    service = MessagingService(world.client(), ("127.0.0.1", 8081))
    async with service.open():
        answer = await service.telemetry(consumer_of(names), CALLER)
        assert answer is not None
        assert answer.status.code == pb.OK
        assert answer.settings.subscription.fifo, "no default is put for what brokers state"
    asked = world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    rounds = 1 + known_at // ROUTED_MAX
    assert asked <= rounds * ROUTED_MAX + 5


# ---------------------------------------------------------------------------------- acknowledging


class Configs:
    """Every broker group is known."""

    async def find_broker(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


def receives_of(broker: PopBroker) -> Receives:
    configs = cast("BrokerConfigs", Configs())
    return Receives(broker.instance, configs, RenewalTable())


async def handles(broker: PopBroker, count: int) -> list[str]:
    found = await PopCalls(broker.instance, "g").pop(
        "T", "b", SubscriptionExpression.by_tag("*"), max_messages=count, invisible_s=60, hold_s=1
    )
    return [message.receipt.encode() for message in found]


def ack_of(*receipts: str) -> pb.AckMessageRequest:
    entries = [pb.AckMessageEntry(message_id="1", receipt_handle=each) for each in receipts]
    return pb.AckMessageRequest(topic=TOPIC, group=GROUP, entries=entries)


async def test_acks_of_many_calls_share_a_request(nursery: trio.Nursery) -> None:
    broker = PopBroker(nursery, messages=8)
    receives, answers = receives_of(broker), {}
    receipts = await handles(broker, 8)

    async def ack(receipt: str) -> None:
        answers[receipt] = await receives.ack(ack_of(receipt), CALLER)

    async with trio.open_nursery() as calls:
        for receipt in receipts:
            calls.start_soon(ack, receipt)
    assert broker.acked == set(range(8))
    assert len([each for each in broker.seen if each[0] != RequestCode.POP_MESSAGE]) <= 2
    assert {answers[each].status.code for each in receipts} == {pb.OK}
    # Each has an outcome of its own: they are stale by now.
    again: Any = await receives.ack(ack_of(receipts[3], "no receipt"), CALLER)
    assert [entry.status.code for entry in again.entries] == [pb.INVALID_RECEIPT_HANDLE] * 2


async def test_lines_of_many_groups_are_bounded(nursery: trio.Nursery) -> None:
    receives = receives_of(PopBroker(nursery))
    for number in range(3 * LINES_MAX):
        receives._lines_of(f"group {number}")
    assert len(receives._ack_lines) <= LINES_MAX
