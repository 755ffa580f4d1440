"""Schedules while leaders are killed and clocks are set: each instant has one message, or is missed
and counted; none comes early."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.remoting.protocol.schedule_bodies import ScheduleInfo
from tests.harness.extent import EXTENT

pytestmark = pytest.mark.slow

TOPIC = "Orders"
SCHEDULES = {"beat": "@every 3s", "minute": "* * * * *"}
STEP_MS = {"beat": 3_000, "minute": 60_000}
PERIOD_S = 18.0


@dataclass
class Seen:
    """What a reader found at the end."""

    messages: list[MessageExt] = field(default_factory=list)
    infos: dict[str, ScheduleInfo] = field(default_factory=dict)

    async def make(self, node: ClientNode) -> None:
        """Make the topic and the schedules, whatever it takes."""
        assert node.instance is not None
        admin = Admin(node.instance)
        missing = dict(SCHEDULES)
        while missing:
            with suppress(ClientError):
                await admin.create_topic(TOPIC, queue_nums=1)
                for name, expression in list(missing.items()):
                    await admin.put_schedule(name, expression, Message(TOPIC, name.encode()))
                    del missing[name]
            await node.clock.sleep(0.5)

    async def read(self, node: ClientNode) -> None:
        assert node.instance is not None
        async with PullConsumer(node.instance, "readers") as consumer:
            queues = await consumer.fetch_message_queues(TOPIC)
            async for _, result in consumer.drain(queues):
                self.messages.extend(result.messages)
        for infos in (await Admin(node.instance).schedules()).values():
            self.infos.update({info.name: info for info in infos})


async def trouble(world: World) -> None:
    """Kill, pause and cut leaders, and set clocks: of the leader, of all, forwards and back."""
    (await world.wait_for_leader()).kill()
    await world.sleep(PERIOD_S)
    await world.heal()
    (await world.wait_for_leader()).jump_clock(7_000)
    await world.sleep(PERIOD_S)
    for node in world.brokers.values():
        node.jump_clock(-20_000)
    await world.sleep(PERIOD_S)
    leader = await world.wait_for_leader()
    leader.pause()
    await world.sleep(PERIOD_S)
    leader.resume()
    await world.sleep(PERIOD_S)
    for node in world.brokers.values():
        node.jump_clock(25_000)
    await world.sleep(PERIOD_S)
    for node in world.brokers.values():
        node.power_cut()
    await world.sleep(PERIOD_S)
    for node in world.brokers.values():
        await node.start()
    (await world.wait_for_leader()).jump_clock(-9_000)
    await world.sleep(PERIOD_S)
    (await world.wait_for_leader()).power_cut()
    await world.sleep(PERIOD_S)
    await world.heal()
    await world.sleep(PERIOD_S)


@pytest.mark.parametrize("seed", range(3 * EXTENT))
def test_each_instant_has_one_message_or_is_counted(seed: int) -> None:
    seen, terms = Seen(), set[int]()

    async def main(world: World) -> None:
        await world.wait_for_leader()
        await world.client("maker").run(seen.make)
        await world.sleep(PERIOD_S)
        await trouble(world)
        terms.add(world.last_term)
        await world.wait_for_agreement()
        await world.client("reader").run(seen.read)
        await world.sleep(8)

    run_world(seed, main)
    assert min(terms) >= 5
    assert set(seen.infos) == set(SCHEDULES)
    for name, info in seen.infos.items():
        step_ms = STEP_MS[name]
        messages = [found for found in seen.messages if bytes(found.body) == name.encode()]
        dues = [int(found.properties["SCHEDULE_DUE_MS"]) for found in messages]
        missed = [int(found.properties.get("SCHEDULE_MISSED", 0)) for found in messages]
        # Instants follow each other without a gap but those that are counted, and none comes twice.
        assert [later - earlier for earlier, later in pairwise(dues)] == [
            step_ms * (1 + count) for count in missed[1:]
        ]
        assert len({found.message_id for found in messages}) == len(messages)
        assert all(
            found.store_timestamp_ms >= due for found, due in zip(messages, dues, strict=True)
        )
        # What was sent while the reader was at work may be in the list and not among the messages.
        assert info.fired - len(messages) in range(8_000 // step_ms + 2)
        assert info.missed >= sum(missed)
        assert len(messages) > 1
    beats = seen.infos["beat"]
    assert beats.fired > 30
    assert beats.missed > 3
