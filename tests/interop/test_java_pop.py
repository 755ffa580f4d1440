"""RocketMQ's Java push consumer 5.5.0 in POP mode against three real brokers, their leader killed.

The client is not changed in any way; it comes from its registry. Real processes and sockets.
"""

from functools import partial
from pathlib import Path

import pytest
import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.testing.clusters import process_cluster
from tests.harness.foreign_client import SCRIPTS, java_jars, needs_java

JARS = java_jars("5.5.0")
MESSAGES = 2_000
BATCH = 500
LOOK_S = 0.2

pytestmark = [pytest.mark.slow, pytest.mark.hunt, needs_java]


async def compiled(folder: Path) -> list[str]:
    """Return the command of the consumer, but for its arguments."""
    classes = folder / "classes"
    build = ["javac", "-nowarn", "-cp", f"{JARS}/*", "-d", str(classes)]
    await trio.run_process([*build, str(SCRIPTS / "PopConsumer.java")])
    return ["java", "-Xmx300m", "-cp", f"{classes}:{JARS}/*", "PopConsumer"]


def consumed(path: Path) -> list[tuple[str, int, bool]]:
    """Return bodies, attempts before, and whether they came by POP."""
    lines = (line.split(" ") for line in path.read_text().splitlines(keepends=True))
    whole = (words for words in lines if len(words) == 3 and words[2].endswith("\n"))
    return [(body, int(times), popped.strip() == "true") for body, times, popped in whole]


async def test_java_consumer_pops_everything_over_a_kill(tmp_path: Path) -> None:
    output = tmp_path / "consumed"
    bodies = {f"m{number:05d}" for number in range(MESSAGES)}
    command = await compiled(tmp_path)
    async with process_cluster(topics={"jobs": 4}) as cluster, cluster.client() as client:
        async with Producer(client, "senders") as producer:
            ordered = sorted(bodies)
            for first in range(0, MESSAGES, BATCH):
                batch = ordered[first : first + BATCH]
                await producer.send_batch([Message("jobs", body.encode()) for body in batch])
        route = await client.route("jobs", fresh=True)
        leader = await cluster.leader()
        address = client.leaders.address(route.subscribe_queues[0].broker_name)
        servers = ";".join(client.config.name_servers)
        arguments = [servers, str(address), "jobs", "workers", str(MESSAGES)]
        with output.open("wb") as out:
            run = partial(
                trio.run_process, [*command, *arguments], stdout=out, stderr=out, check=False
            )
            async with trio.open_nursery() as nursery:
                process: trio.Process = await nursery.start(run)
                with trio.fail_after(240):
                    while len(consumed(output)) < MESSAGES // 5:
                        await trio.sleep(LOOK_S)
                    await cluster.kill(leader)
                    await trio.sleep(3)
                    await cluster.start(leader)
                    await process.wait()
        rows = consumed(output)
        assert {body for body, _, _ in rows} == bodies
        assert all(popped for _, _, popped in rows)
        # Refused ones come again, counted; others only where an acknowledgement was lost.
        again = {body for body, times, _ in rows if times}
        assert {body for body in bodies if body.endswith("7")} <= again
        reader = PullConsumer(client, "workers")
        for queue in route.subscribe_queues:
            end = await reader.max_offset(queue)
            assert await reader.committed_offset(queue) in ({None, 0} if not end else {end})
