"""``dledger bench produce|consume``, and the fail-over of ``dledger bench all``: closed loads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final

import trio
from cyclopts import Parameter

from dledger import aio
from dledger.cli.bench_load import (
    POSITIVE,
    WARM_UP_S,
    Duration,
    Figures,
    Queues,
    Size,
    Tally,
    Target,
    Temporary,
    Topic,
    bounds_of,
    cpu_s,
    fill,
    read,
    send,
)
from dledger.cli.commands import open_admin, open_client
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.output import CliError

CONSUME_PASSES: Final = 3
"""A backlog is read in a moment; the same one is read again to measure longer."""

FAILOVER_TOPIC: Final = "bench-failover"
FAILOVER_LOAD_S: Final = 3.0
"""Load before the kill, and after another one leads."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceLoad:
    """What is sent: *inflight* calls outstanding, each of one message or one batch."""

    size: Size = 256
    inflight: Annotated[int, POSITIVE, Parameter(help="Outstanding sends.")] = 64
    batch: Annotated[int, POSITIVE, Parameter(help="Messages of one send.")] = 1
    duration: Duration = 10.0
    queues: Queues = 4
    topic: Topic = "bench"
    idempotent: Annotated[
        bool, Parameter(negative="--no-idempotent", help="Number the sends, as the SDK does.")
    ] = True
    asyncio: Annotated[
        bool, Parameter(negative=(), help="Send through dledger.aio, not in trio.")
    ] = False


@dataclass(slots=True)
class _Cpu:
    """Processor seconds that brokers and this process used in a window."""

    pids: list[int]
    brokers_s: float = 0.0
    client_s: float = 0.0

    async def measure(
        self, tally: Tally, sleep: Callable[[float], Awaitable[None]] = trio.sleep
    ) -> None:
        await sleep(max(0.0, tally.begin_s - time.perf_counter()))
        brokers_s, client_s = self._used()
        await sleep(max(0.0, tally.end_s - time.perf_counter()))
        brokers_end_s, client_end_s = self._used()
        self.brokers_s, self.client_s = brokers_end_s - brokers_s, client_end_s - client_s

    def _used(self) -> tuple[float, float]:
        return sum(map(cpu_s, self.pids)), time.process_time()


async def bench_produce(target: Target, load: ProduceLoad, tell: Callable[[str], None]) -> Figures:
    """Send for a while and return what was measured.

    Raises:
        CliError: The cluster cannot be reached, or not one send succeeded.
    """
    async with target.opened(tell) as (namesrvs, pids):
        async with open_admin(namesrvs) as admin:
            await admin.create_topic(load.topic, queue_nums=load.queues)
        config, cpu = ProducerConfig(idempotent=load.idempotent), _Cpu(pids)
        tell(f"{load.inflight} outstanding sends of {load.batch} x {load.size} bytes")
        if load.asyncio:
            tally = await trio.to_thread.run_sync(
                asyncio.run, _produce_in_asyncio(namesrvs, load, config, cpu)
            )
            return produced(load, tally, cpu.brokers_s, cpu.client_s)
        async with open_client(namesrvs) as client, Producer(client, "bench", config) as producer:
            tally = _window(load)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cpu.measure, tally)
                for _ in range(load.inflight):
                    nursery.start_soon(send, producer, load.topic, load.size, load.batch, tally)
    return produced(load, tally, cpu.brokers_s, cpu.client_s)


def _window(load: ProduceLoad) -> Tally:
    begin_s = time.perf_counter() + WARM_UP_S
    return Tally(begin_s, begin_s + load.duration)


async def _produce_in_asyncio(
    namesrvs: list[str], load: ProduceLoad, config: ProducerConfig, cpu: _Cpu
) -> Tally:
    """Send as `bench_produce` does, from tasks of asyncio."""
    async with (
        aio.connect(namesrvs) as client,
        aio.Producer(client, "bench", config) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        tally = _window(load)
        tasks.create_task(cpu.measure(tally, asyncio.sleep))
        for _ in range(load.inflight):
            tasks.create_task(
                send(producer, load.topic, load.size, load.batch, tally, asyncio.sleep)
            )
    return tally


def produced(load: ProduceLoad, tally: Tally, brokers_cpu_s: float, client_cpu_s: float) -> Figures:
    """Return the result.

    Processor time is that of a message, in microseconds: of all brokers of a temporary cluster, 0
    with another one, and of this process.

    Raises:
        CliError: Not one send succeeded.
    """
    return {
        **tally.figures(load.duration, load.size),
        "not_stored": tally.failures.get("not_stored", 0),
        "unknown": tally.failures.get("unknown", 0),
        "brokers_cpu_us": brokers_cpu_s * 1e6 / tally.messages,
        "client_cpu_us": client_cpu_s * 1e6 / tally.messages,
        "inflight": load.inflight,
        "batch": load.batch,
        "queues": load.queues,
    }


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeLoad:
    """What is read: a backlog that is written first, by one consumer task per queue."""

    size: Size = 256
    messages: Annotated[int, POSITIVE, Parameter(help="Messages to write, then read.")] = 400_000
    queues: Annotated[int, POSITIVE, Parameter(help="Queues of the topic, one consumer each.")] = 4
    topic: Topic = "bench-consume"


async def bench_consume(target: Target, load: ConsumeLoad, tell: Callable[[str], None]) -> Figures:
    """Write a backlog, read it, and return what reading was like.

    Raises:
        CliError: The cluster cannot be reached, or messages are missing.
    """
    async with target.opened(tell) as (namesrvs, _):
        async with open_admin(namesrvs) as admin:
            await admin.create_topic(load.topic, queue_nums=load.queues)
        async with open_client(namesrvs) as client:
            tell(f"writing {load.messages:,} messages of {load.size} bytes")
            await fill(client, load.topic, load.size, load.messages)
            tell("reading them")
            async with PullConsumer(client, "bench") as consumer:
                bounds = await bounds_of(consumer, load.topic)
                tally = Tally(time.perf_counter())
                for _ in range(CONSUME_PASSES):
                    async with trio.open_nursery() as nursery:
                        for queue, begin, end in bounds:
                            nursery.start_soon(read, consumer, queue, begin, end, tally)
                seconds = time.perf_counter() - tally.begin_s
    if tally.messages < load.messages * CONSUME_PASSES:
        raise CliError(f"{tally.messages} messages read of {load.messages * CONSUME_PASSES}")
    counts = {"pulls": len(tally.latencies_s), "consumers": len(bounds), "queues": len(bounds)}
    return {**tally.figures(seconds, load.size), **counts}


async def bench_failover(inflight: int, tell: Callable[[str], None]) -> float:
    """Kill the leader of a temporary cluster and return the time without acknowledgements, ms.

    It ends with the first acknowledgement of a send that was begun after SIGKILL.

    Raises:
        CliError: The cluster did not start, or no send was acknowledged after the kill.
    """
    sends: list[tuple[float, float]] = []
    tally = Tally(0.0, on_stored=lambda began_s, ended_s: sends.append((began_s, ended_s)))
    async with Temporary().cluster(tell) as cluster:
        namesrvs = [cluster.namesrv_address]
        async with open_admin(namesrvs) as admin:
            await admin.create_topic(FAILOVER_TOPIC, queue_nums=4)
        async with (
            open_client(namesrvs) as client,
            Producer(client, "bench-failover") as producer,
            trio.open_nursery() as nursery,
        ):
            for _ in range(inflight):
                nursery.start_soon(send, producer, FAILOVER_TOPIC, 256, 1, tally)
            await trio.sleep(FAILOVER_LOAD_S)
            leader = await cluster.wait_leader()
            tell(f"SIGKILL to {leader}, the leader")
            killed_s = time.perf_counter()
            await cluster.kill(leader)
            await cluster.wait_leader(other_than=leader)
            await trio.sleep(FAILOVER_LOAD_S)
            nursery.cancel_scope.cancel()
    after = [ended_s for began_s, ended_s in sends if began_s >= killed_s]
    if not after:
        raise CliError("no send was acknowledged after the leader was killed")
    return 1000 * (min(after) - killed_s)
