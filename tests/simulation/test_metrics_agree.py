"""Metrics and lag agree with the log: with a replica that never restarts, rebuilt from entries."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from dledger import side_ports
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.simulation.node import BrokerNode, ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from tests.harness.metrics_page import MetricsPage

pytestmark = pytest.mark.slow

TOPIC = "Orders"
SETTINGS = WorldSettings(
    options={"metrics.listen_port": "5557", "store.keep_bytes": str(2 * 256 * 1024)}
)
Pages = dict[int, Callable[[], Iterator[str]]]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Return the pages of the brokers that run, by the identity of their groups."""
    found: Pages = {}

    class Page:
        def __init__(self, _: object, pieces: Any, *_probes: object) -> None:
            found[id(pieces.__self__._group)] = pieces

        async def serve_if_free(self, *_: object) -> bool:
            return True

    monkeypatch.setattr(side_ports, "MetricsServer", Page)
    return found


async def send_and_consume(node: ClientNode) -> None:
    """Send, and go on in every queue behind what was sent; one group stays at the begin."""
    assert node.instance is not None
    async with (
        Producer(node.instance, "producers") as producer,
        PullConsumer(node.instance, "quick") as quick,
        PullConsumer(node.instance, "slow") as slow,
        PullConsumer(node.instance, "stays") as stays,
    ):
        number = 0
        while True:
            number += 1
            with suppress(ClientError):
                result = await producer.send(Message(TOPIC, Random(number).randbytes(6_000)))
                queue, offset = result.message_queue, result.queue_offset
                await quick.commit_offset(queue, offset + 1)
                if number < 20:
                    await stays.commit_offset(queue, 0)
                if number % 5 == 0:
                    await slow.commit_offset(queue, max(offset - number % 7, 0))
            await node.clock.sleep(0.2)


def page_of(node: BrokerNode, pages: Pages) -> MetricsPage:
    assert node.group is not None
    return MetricsPage.read("".join(pages[id(node.group)]()))


def lags_of(world: World) -> dict[tuple[str, ...], float]:
    """Return the lag of each group in each topic, from entries alone."""
    reference = world.reference
    assert reference.tables is not None
    lags: dict[tuple[str, ...], float] = {}
    for (group, topic), offsets in reference.tables.consumer_offsets.items():
        lag = 0
        for (name, queue_id), bounds in reference.tables.queues.items():
            if name == topic:
                end = len(reference.units(name, queue_id))
                lag += max(end - max(offsets.get(queue_id, 0), bounds.min_offset), 0)
        lags[topic, group] = lag
    return lags


async def agrees(world: World, pages: Pages) -> float:
    """Compare every page; return how many messages members have taken as leaders."""
    await world.wait_for_agreement()
    tables, leader = world.reference.tables, world.leader()
    assert tables is not None
    taken = 0.0
    for node in world.brokers.values():
        page = page_of(node, pages)
        assert page.value("dledger_applied_index") == world.reference.applied_index
        assert page.value("dledger_last_index") == world.reference.applied_index
        assert page.value("rocketmq_topic_number") == tables.topics_count
        assert page.value("dledger_is_leader") == (node is leader)
        lags = page.of("rocketmq_consumer_lag_messages", "topic", "consumer_group")
        assert lags == (lags_of(world) if node is leader else {})
        taken += page.of("rocketmq_messages_in_total", "topic").get((TOPIC,), 0.0)
    return taken


def stored(world: World) -> int:
    assert world.reference.tables is not None
    queues = [key for key in world.reference.tables.queues if key[0] == TOPIC]
    return sum(len(world.reference.units(*key)) for key in queues)


def scenario(pages: Pages) -> Callable[[World], Any]:
    async def main(world: World) -> None:
        await world.wait_for_leader()
        client = world.client("c")
        await client.run(send_and_consume)
        await world.sleep(30)
        await client.kill()
        await world.sleep(15)
        assert await agrees(world, pages) == stored(world) > 100
        leader = await world.wait_for_leader()
        await leader.kill()
        await world.heal()
        await client.restart()
        await world.sleep(30)
        await client.kill()
        await world.sleep(15)
        assert await agrees(world, pages) <= stored(world)
        lags = lags_of(world)
        assert lags[TOPIC, "stays"] > lags[TOPIC, "slow"] > lags[TOPIC, "quick"]
        assert world.reference.tables is not None
        assert world.reference.tables.floor.first_index > 1

    return main


def test_metrics_are_those_of_the_log_over_a_fail_over(pages: Pages) -> None:
    run_world(5, scenario(pages), SETTINGS)
