"""The walks of docs/internals/architecture.md are those of a send and of a judged run."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.spark_jobs.run import judge_run
from tests.harness.shipped_files import ROOT
from tests.harness.walks import counts, files_of, first_missed, stated_counts, stays

SEND = "One send"
HISTORY = "One history of a chaos run"


async def make_topic(node: ClientNode) -> None:
    assert node.instance is not None
    async with Producer(node.instance, "makers") as producer:
        while True:
            with suppress(ClientError):
                queues = await producer.publish_queues("TBW102")
                queue = MessageQueue("Orders", queues[0].broker_name, 0)
                await producer.send_to(queue, Message("Orders", b"made"))
                return
            await node.clock.sleep(0.5)


@pytest.mark.parametrize("title", [SEND, HISTORY])
def test_walk_has_the_files_and_returns_it_states(title: str) -> None:
    files = files_of(title)
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert counts(files) == stated_counts(title)


def test_walk_of_a_send_is_what_runs() -> None:
    entered: list[str] = []

    async def write(node: ClientNode) -> None:
        assert node.instance is not None
        async with Producer(node.instance, "p") as producer:
            for number in range(3):  # route, session and connections are there
                await producer.send(Message("Orders", b"%d" % number))
                await node.clock.sleep(0.513)  # between two heartbeats
            with stays(entered):
                await producer.send(Message("Orders", b"walks"))
                await node.clock.sleep(1)  # it is applied

    async def main(world: World) -> None:
        await world.wait_for_leader()
        await world.client("maker").run(make_topic)
        await world.sleep(5)
        await world.client("writer").run(write)
        await world.sleep(5)

    run_world(5, main)
    assert len(entered) > 1_000
    assert first_missed(files_of(SEND), entered) is None


def test_walk_of_a_history_is_what_runs() -> None:
    folder = ROOT / "spark_jobs" / "notebooks" / "data" / "good"
    entered: list[str] = []
    with stays(entered):
        outcome = judge_run(folder, "local", time.monotonic)
    assert outcome.verdict == "valid"
    judged = [name for name in files_of(HISTORY) if name != "jepsen_like/workloads/recorder.py"]
    assert first_missed(judged[1:], entered) is None


def test_file_out_of_order_is_missed() -> None:
    entered = ["a.py", "b.py", "a.py", "c.py"]
    assert first_missed(["a.py", "b.py", "c.py"], entered) is None
    assert first_missed(["a.py", "b.py", "a.py"], entered) is None
    assert first_missed(["c.py", "b.py"], entered) == "b.py"
