"""Hostile messages and rot in simulated clusters: no node ends, nothing is lost or doubled."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.record import BODY_OFFSET, decode_record
from dledger.group import Group
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, encode_plan
from dledger.jepsen_like.simulation.machine import State
from dledger.jepsen_like.simulation.node import BrokerNode, ClientNode
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from dledger.jepsen_like.worker import Order, plan_of
from dledger.jepsen_like.workloads.presets import simulated_workload
from dledger.jepsen_like.workloads.producers import HostileMessages
from dledger.state.topics import SCHEDULE_TOPIC, SET_ASIDE_TOPIC, TIMER_TOPIC
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

WORKLOAD = msgspec.structs.replace(simulated_workload("hostile"), interval_ms=700)
ROLL_WINDOW_S = 60
"""The shortest there is; the default is two days."""


def test_the_same_seed_draws_the_same_properties() -> None:
    drawn = [HostileMessages(7, 600).properties() for _ in range(2)]
    assert drawn[0] == drawn[1]
    generator = HostileMessages(7, 600)
    many = [generator.properties() for _ in range(300)]
    assert 100 < sum(1 for each in many if each) < 250
    assert {"TIMER_ROLL_TIMES", "REAL_TOPIC", "F", "RETRY_TOPIC"} <= {
        name for each in many for name in each
    }
    assert not any(HostileMessages(7, 0).properties() for _ in range(300))


@pytest.mark.parametrize("seed", gate_part([1, 2], 1))
def test_hostile_messages_through_every_service_under_kills(seed: int) -> None:
    kills = tuple(Step(at, Kind.KILL, "leader", 2_000) for at in range(6_000, 30_000, 8_000))
    run = play(Plan(seed, 40_000, kills, workload=WORKLOAD))
    assert run.is_valid, run.violations
    assert run.operations["send_ok"] > 50
    assert run.operations["send_back_ok"] > 10
    assert run.sometimes["leader_change"] >= 2


@pytest.mark.hunt
def test_hostile_timers_roll_in_a_cluster_under_kills() -> None:
    """A roll window of a minute stands for the two days that no run lasts."""
    workload = msgspec.structs.replace(simulated_workload("rolls"), interval_ms=1000)
    assert workload.hostile_per_mille > 500
    kills = tuple(Step(at, Kind.KILL, "leader", 3_000) for at in range(20_000, 200_000, 40_000))
    run = play(Plan(4, 200_000, kills, workload=workload))
    assert run.is_valid, run.violations
    assert run.sometimes["leader_change"] >= 4
    assert run.sometimes["timer_rolled"] > 50
    texts = [encode_plan(plan_of(1, Order(preset=name))) for name in ("rolls", "timers")]
    assert ["timer_roll_s" in text for text in texts] == [True, False]


def group_of(node: BrokerNode) -> Group:
    assert node.group is not None
    return node.group


async def read_all(node: ClientNode, topic: str) -> list[bytes]:
    assert node.instance is not None
    found: list[bytes] = []
    async with PullConsumer(node.instance, "readers") as consumer:
        for queue in await consumer.fetch_message_queues(topic):
            offset = await consumer.min_offset(queue)
            while offset < await consumer.max_offset(queue):
                result = await consumer.pull(queue, offset, timeout_s=0)
                found += [bytes(message.body) for message in result.messages]
                offset = result.next_begin_offset
    return found


async def send(node: ClientNode, message: Message) -> None:
    assert node.instance is not None
    async with Producer(node.instance, "producers") as producer:
        while True:
            with suppress(ClientError):
                await producer.send(message)
                return
            await node.clock.sleep(0.5)


async def all_alive(world: World) -> None:
    assert [node.state for node in world.brokers.values()] == [State.UP] * 3
    await world.wait_for_agreement()


def test_messages_are_rolled_by_leader_after_leader() -> None:
    delay_ms = 200_000

    async def main(world: World) -> tuple[list[bytes], set[int]]:
        await world.wait_for_leader()
        found: list[bytes] = []
        hostile = HostileMessages(3, 1000)

        async def program(node: ClientNode) -> None:
            for number in range(12):
                properties = {**hostile.properties(), "TIMER_ROLL_TIMES": "abc"}
                message = Message(
                    "orders", b"%d" % number, properties=properties, delay_ms=delay_ms
                )
                await send(node, message)
            await node.clock.sleep(delay_ms / 1000 + 10)
            found.extend(await read_all(node, "orders"))
            await node.clock.sleep(10_000)

        await world.client("c").run(program)
        rolled: set[int] = set()
        for _ in range(4):
            await world.sleep(45)
            leader = await world.wait_for_leader()
            rolled.add(group_of(leader).state.max_offset(TIMER_TOPIC, 0))
            leader.kill()
            await world.sleep(5)
            await leader.start()
        await world.wait_for_leader()
        await world.sleep(60)
        await all_alive(world)
        state = group_of(await world.wait_for_leader()).state
        assert not len(state.timers)
        rolled.add(state.max_offset(TIMER_TOPIC, 0))
        assert state.max_offset(SET_ASIDE_TOPIC, 0) == 0
        return found, rolled

    options = {"store.timer_roll_window_slot": str(ROLL_WINDOW_S)}
    found, rolled = run_world(5, main, WorldSettings(options=options))
    assert sorted(found, key=int) == [b"%d" % number for number in range(12)]
    assert max(rolled) >= 24, "each was stored again"
    assert len(rolled) >= 2, "while one leader after the other was killed"


def test_rot_between_two_scrubs_is_never_delivered() -> None:
    body, rotten = b"pay 100 EUR", b"pay 900 EUR"

    async def main(world: World) -> list[bytes]:
        await world.wait_for_leader()
        found: list[bytes] = []

        async def program(node: ClientNode) -> None:
            await send(node, Message("orders", body, delay_level=4))
            await node.clock.sleep(45)
            found.extend(await read_all(node, "orders"))
            await node.clock.sleep(10_000)

        await world.client("c").run(program)
        await world.sleep(15)
        old = await world.wait_for_leader()
        group = group_of(old)
        assert group.state.max_offset(SCHEDULE_TOPIC, 3) == 1
        unit = group.queues.queue(SCHEDULE_TOPIC, 3).read(0, 1)
        position = int(unit["phy_offset"][0])
        at = position + BODY_OFFSET + body.index(b"1")
        (path,) = [path for path in old.disk.names if path.endswith(f"/commitlog/{0:020}")]
        content = old.disk.names[path].content
        assert content[at] == ord("1")
        content[at] = ord("9")
        await world.sleep(60)
        await all_alive(world)
        assert old.disk.names[path].content[at] == ord("1"), "repaired with the copy of another"
        for node in world.brokers.values():
            assert rotten not in bytes(node.disk.names[path].content)
            state = group_of(node).state
            assert state.max_offset(SET_ASIDE_TOPIC, 0) == 0
            record = decode_record(group_of(node).log.record_at(position))
            assert bytes(record.body) == body
        assert group_of(old).scrub.repaired == 1
        return found

    # A scrub comes by every four hours or so.
    settings = WorldSettings(options={"store.scrub_bytes_per_s": "1"})
    assert run_world(6, main, settings) == [body]
