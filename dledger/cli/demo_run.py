"""The demo's run: a cluster, load, a kill, a restart, a full read.

What it records is judged elsewhere (`dledger.cli.demo_check`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.message import Message
from client.core.route import MessageQueue
from client.producer.producer import Producer
from commitlog.errors import MQError
from dledger.cli.demo_check import Found, Sent, body_of, key_in
from dledger.cli.demo_record import RecordedRun
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.output import CliError
from dledger.cli.sdk import open_client
from dledger.cli.topic_command import create_topic

if TYPE_CHECKING:
    from client.core.message import PullResult

TOPIC = "demo"
PULL_MESSAGES = 1_000
TICK_S = 1.0
REPLACED_S = 10.0
"""A new leader takes about a second; ten times that is a failure worth ending the demo for."""
LOAD_LIMIT_S = 30.0
"""The load ends after this long even when too few messages were acknowledged."""
DRAIN_LIMIT_S = 60.0

SETTINGS = {
    # Three brokers on one disk: 64 MiB segments instead of 1 GiB, small index files.
    "store.mapped_file_size_commit_log": 64 << 20,
    "store.max_hash_slot_num": 100_000,
    "store.max_index_num": 400_000,
}


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How much of what."""

    brokers: int = 3
    queues: int = 4
    messages_min: int = 10_000
    load_s: float = 3.0
    senders: int = 32
    body_bytes: int = 256


@dataclass(slots=True)
class _Stage:
    """What the run has recorded so far."""

    tell: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    sent: list[Sent] = field(default_factory=list)
    seen: list[Found] = field(default_factory=list)
    kills_us: list[int] = field(default_factory=list)
    acknowledged: int = 0
    enough: trio.Event = field(default_factory=trio.Event)
    stop_load: trio.Event = field(default_factory=trio.Event)

    def now_us(self) -> int:
        return round((time.monotonic() - self.began) * 1e6)

    def say(self, text: str) -> None:
        self.tell(f"{time.monotonic() - self.began:6.1f} s  {text}")


async def run_demo(folder: Path, plan: DemoPlan, tell: Callable[[str], None]) -> RecordedRun:
    """Run it in *folder* and return what was recorded; the brokers have been stopped cleanly.

    Raises:
        CliError: The cluster did not start, or did not come back after the kill.
    """
    stage = _Stage(tell)
    async with local_cluster(
        folder, brokers=plan.brokers, settings=SETTINGS, progress=stage.say
    ) as cluster:
        namesrvs = [cluster.namesrv_address]
        await create_topic(namesrvs, TOPIC, queues=plan.queues)
        async with open_client(namesrvs) as client:
            await _load(client, cluster, plan, stage)
            delivered = await _drain(client, stage)
        commit_index = await _settled(cluster)
        stage.say(f"all members have applied entry {commit_index}; stopping them")
    return RecordedRun(
        topic=TOPIC,
        sent=stage.sent,
        delivered=delivered,
        seen=stage.seen,
        kills_us=stage.kills_us,
        commit_index=commit_index,
        nodes={
            name: str(node.store_path.relative_to(folder))
            for name, node in cluster.brokers.items()
            if node.store_path is not None
        },
    )


async def _load(
    client: ClientInstance, cluster: LocalCluster, plan: DemoPlan, stage: _Stage
) -> None:
    """Send and consume all the time while the leader is killed and comes back."""
    async with (
        Producer(client, "demo-producers") as producer,
        PullConsumer(client, "demo-readers") as consumer,
        trio.open_nursery() as nursery,
    ):
        for number in range(plan.senders):
            nursery.start_soon(_send_all_the_time, producer, number, plan, stage)
        readers = await nursery.start(_read_all_the_time, consumer, stage)
        ticker = await nursery.start(_tick, stage)
        try:
            await _kill_and_restart(cluster, plan, stage)
        finally:
            stage.stop_load.set()
            readers.cancel()
            ticker.cancel()


async def _kill_and_restart(cluster: LocalCluster, plan: DemoPlan, stage: _Stage) -> None:
    await trio.sleep(plan.load_s)
    leader = await cluster.wait_leader()
    stage.say(f"SIGKILL to {leader}, the leader, process {cluster.brokers[leader].pid}")
    stage.kills_us.append(stage.now_us())
    await cluster.kill(leader)
    successor = await cluster.wait_leader(other_than=leader, timeout_s=REPLACED_S)
    took_ms = (stage.now_us() - stage.kills_us[-1]) / 1000
    stage.say(f"{successor} leads; seen {took_ms:,.0f} ms after the kill")
    await trio.sleep(plan.load_s / 2)
    stage.say(f"starting {leader} again")
    await cluster.start(leader)
    await cluster.wait_caught_up(leader)
    stage.say(f"{leader} has caught up")
    await trio.sleep(plan.load_s / 2)
    with trio.move_on_after(LOAD_LIMIT_S):
        await stage.enough.wait()


async def _tick(
    stage: _Stage, *, task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        before = 0
        while True:
            await trio.sleep(TICK_S)
            rate = (stage.acknowledged - before) / TICK_S
            before = stage.acknowledged
            stage.say(f"{stage.acknowledged:>9,} acknowledged  {rate:>8,.0f}/s")


async def _send_all_the_time(
    producer: Producer, number: int, plan: DemoPlan, stage: _Stage
) -> None:
    """Send one message after the other and note each one's fate."""
    count = 0
    while not stage.stop_load.is_set():
        key = f"p{number}-{count}"
        count += 1
        message = Message(TOPIC, body_of(key, plan.body_bytes))
        began = stage.now_us()
        try:
            result = await producer.send(message)
        except MQError as error:
            stage.sent.append(Sent(key, began, stage.now_us(), error.outcome))
            await trio.sleep(0.01)
            continue
        stage.sent.append(
            Sent(
                key,
                began,
                stage.now_us(),
                "stored",
                result.message_queue.queue_id,
                result.queue_offset,
            )
        )
        stage.acknowledged += 1
        if stage.acknowledged == plan.messages_min:
            stage.enough.set()


async def _read_all_the_time(
    consumer: PullConsumer,
    stage: _Stage,
    *,
    task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Read all queues while they grow; what was seen once must not change."""
    queues = await consumer.fetch_message_queues(TOPIC)
    with trio.CancelScope() as scope:
        task_status.started(scope)
        async with trio.open_nursery() as nursery:
            for queue in queues:
                nursery.start_soon(_follow, consumer, queue, stage)


async def _follow(consumer: PullConsumer, queue: MessageQueue, stage: _Stage) -> None:
    offset = 0
    while True:
        try:
            pulled = await consumer.pull(queue, offset, max_messages=PULL_MESSAGES)
        except MQError:
            # Nobody to read from while the leader is replaced.
            await trio.sleep(0.05)
            continue
        stage.seen.extend(_found(pulled))
        offset = pulled.next_begin_offset


async def _drain(client: ClientInstance, stage: _Stage) -> list[Found]:
    """Read every queue from its begin to its end."""
    delivered: list[Found] = []
    with trio.move_on_after(DRAIN_LIMIT_S) as limit:
        async with PullConsumer(client, "demo-drain") as consumer:
            for queue in sorted(await consumer.fetch_message_queues(TOPIC)):
                offset = await consumer.min_offset(queue)
                end = await consumer.max_offset(queue)
                while offset < end:
                    pulled = await consumer.pull(queue, offset, max_messages=PULL_MESSAGES)
                    delivered.extend(_found(pulled))
                    offset = pulled.next_begin_offset
    if limit.cancelled_caught:
        raise CliError(f"the queues could not be read within {DRAIN_LIMIT_S:.0f} s")
    stage.say(f"{len(delivered):,} messages read back")
    return delivered


def _found(pulled: PullResult) -> list[Found]:
    return [
        Found(message.queue_id, message.queue_offset, key_in(bytes(message.body)) or "")
        for message in pulled.messages
    ]


async def _settled(cluster: LocalCluster) -> int:
    """Wait until all members have applied what is committed, and return that index."""

    async def same() -> int | None:
        statuses = (await cluster.statuses()).values()
        applied = {int(str(status["applied_index"])) for status in statuses}
        if len(statuses) == len(cluster.brokers) and len(applied) == 1:
            return applied.pop()
        return None

    return await _until(same, "the members did not agree on what is committed")


async def _until(look: Callable[[], Awaitable[int | None]], failure: str) -> int:
    with trio.move_on_after(REPLACED_S):
        while True:
            found = await look()
            if found is not None:
                return found
            await trio.sleep(0.05)
    raise CliError(failure)
