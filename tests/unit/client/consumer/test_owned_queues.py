"""Readers follow the leader as soon as anybody has heard of a new one."""

from __future__ import annotations

import trio

from client.consumer.config import PushConfig
from client.consumer.offsets import FROM_FIRST
from client.consumer.push_consumer import PushConsumer
from client.producer.producer import Producer
from tests.unit.client.consumer.consuming import Heard, send, settled
from tests.unit.client.fake_cluster import World


async def test_owned_queue_does_not_wait_for_a_pull_of_a_silent_broker(world: World) -> None:
    heard = Heard()
    async with (
        world.client() as one,
        world.client() as two,
        Producer(two, "p") as producer,
        PushConsumer(one, "c", heard, {"T": "*"}, PushConfig(consume_from=FROM_FIRST)) as consumer,
    ):
        await settled(consumer)
        await trio.sleep(1)
        group = world.groups["g"]
        group.elect(1)  # the old leader says nothing of it to the pulls it holds
        await send(producer, 4)
        # Somebody in this client asks the old leader for anything and is redirected.
        one.leaders.learn("g", group.brokers[1].address, group.term)
        began = trio.current_time()
        await heard.wait_for(4)
        assert trio.current_time() - began < 2
