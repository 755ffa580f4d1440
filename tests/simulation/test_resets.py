"""Offsets that are set while a group works: what was out comes again, steps begin where it stands.

No drawn workload resets offsets or commits plainly beside steps: their exact checkers know of
neither.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

from dledger.client.admin.admin import Admin
from dledger.client.admin.groups import FIRST_MS
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ReceiptStaleError, StepOvertakenError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import UpdateConsumerOffsetHeader

pytestmark = pytest.mark.slow

MESSAGES = 8
INVISIBLE_S = 300.0
"""Longer than the scene: what is out comes again for the reset alone."""

Scene = Callable[[World, ClientNode, MessageQueue], Awaitable[None]]


async def filled(instance: ClientInstance, topic: str) -> MessageQueue:
    """Make a topic of one queue with messages in it."""
    while True:
        with suppress(MQError):
            await Admin(instance).create_topic(topic, queue_nums=1)
            queues = (await instance.route(topic, fresh=True)).publish_queues
            if queues:
                break
        await instance.clock.sleep(0.5)
    async with Producer(instance, "makers") as producer:
        for number in range(MESSAGES):
            await producer.send_to(queues[0], Message(topic, b"%d" % number))
    return queues[0]


def play(seed: int, scene: Scene) -> None:
    """Play a scene on a client machine of a new cluster."""
    ended: list[bool] = []

    async def main(world: World) -> None:
        await world.wait_for_leader()

        async def run(node: ClientNode) -> None:
            assert node.instance is not None
            await scene(world, node, await filled(node.instance, "Orders"))
            ended.append(True)

        await world.client("c").run(run)
        for _ in range(240):
            await world.sleep(1)
            if ended:
                return

    run_world(seed, main)
    assert ended


async def commit_as_rocketmq_does(
    instance: ClientInstance, group: str, queue: MessageQueue, offset: int
) -> None:
    """Commit one-way: the leader takes the offset for its next flush."""
    header = UpdateConsumerOffsetHeader(group, queue.topic, queue.queue_id, offset)
    link = await instance.link(instance.leaders.address(queue.broker_name) or "", 4)
    link.connection.invoke_oneway(request(RequestCode.UPDATE_CONSUMER_OFFSET, header.encode()))


@pytest.mark.parametrize("leader_dies", [False, True])
def test_reset_ends_what_is_out(leader_dies: bool) -> None:
    async def scene(world: World, node: ClientNode, queue: MessageQueue) -> None:
        assert node.instance is not None
        admin = Admin(node.instance)
        consumer = SimpleConsumer(
            node.instance, "poppers", {queue.topic: "*"}, invisible_s=INVISIBLE_S
        )
        out = await consumer.receive(MESSAGES)
        assert [message.queue_offset for message in out] == list(range(MESSAGES))
        for message in out[:3]:
            await consumer.ack(message)
        assert await consumer.receive(MESSAGES, wait_s=1) == []
        moves = await admin.plan_offset_reset("poppers", queue.topic, FIRST_MS)
        done = await admin.reset_offsets("poppers", queue.topic, FIRST_MS, moves)
        assert {**done.notified, **done.stored} == {queue: 0}
        if leader_dies:
            await (await world.wait_for_leader()).kill()
            await world.sleep(8)
            await world.heal()
        again = await consumer.receive(MESSAGES, wait_s=10)
        assert [message.queue_offset for message in again] == list(range(MESSAGES))
        for message in out:
            with pytest.raises(ReceiptStaleError):
                await consumer.ack(message)
        await consumer.ack_all(again)
        assert await PullConsumer(node.instance, "poppers").committed_offset(queue) == MESSAGES

    play(5, scene)


def test_step_is_compared_with_an_offset_that_was_just_taken() -> None:
    """It is proposed before the step, so nothing takes the group back behind a stored step."""

    async def scene(world: World, node: ClientNode, queue: MessageQueue) -> None:
        assert node.instance is not None
        consumer = PullConsumer(node.instance, "workers")
        for offset in range(0, MESSAGES, 2):
            assert (await consumer.committed_offset(queue) or 0) == offset
            await commit_as_rocketmq_does(node.instance, "workers", queue, offset + 1)
            with pytest.raises(StepOvertakenError):
                async with consumer.transaction(timeout_s=4) as step:
                    step.commit(queue, offset + 2)
            await world.sleep(3)
            assert await consumer.committed_offset(queue) == offset + 1
            async with consumer.transaction(timeout_s=4) as step:
                step.commit(queue, offset + 2)
            await world.sleep(3)

    play(6, scene)


def test_step_beside_a_commit_is_in_one_order_with_it() -> None:
    """Whichever is first, the group stands where the commit has put it, or where a step led it."""

    async def scene(world: World, node: ClientNode, queue: MessageQueue) -> None:
        assert node.instance is not None
        setter = PullConsumer(node.instance, "workers")
        await setter.commit_offset(queue, 0)
        ended = {True: 0, False: 0}
        for number in range(40):
            stepper = PullConsumer(node.instance, "workers")
            assert await stepper.committed_offset(queue) == 0
            is_stored = False

            async def step_on(stepper: PullConsumer = stepper, late_s: float = 0.0) -> None:
                nonlocal is_stored
                await node.clock.sleep(late_s)
                try:
                    async with stepper.transaction(timeout_s=4) as step:
                        step.commit(queue, 1)
                    is_stored = True
                except StepOvertakenError:
                    pass

            async with trio.open_nursery() as nursery:
                nursery.start_soon(step_on, stepper, max(0, number % 16 - 8) / 2_000)
                await node.clock.sleep(max(0, 8 - number % 16) / 2_000)
                await setter.commit_offset(queue, 2)
            ended[is_stored] += 1
            assert await setter.committed_offset(queue) == 2, f"round {number}: {is_stored}"
            await setter.commit_offset(queue, 0)
        assert min(ended.values()) > 0, ended

    play(7, scene)
