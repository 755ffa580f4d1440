"""``dledger bench produce|latency``, and the fail-over of ``dledger bench all``: loads of sends.

`produce` keeps a number of sends outstanding: a closed load. `latency` gives each message an
intended time, fixed before the first one leaves, and counts from that: a closed load sends less
while the cluster is slow, and leaves out the sends that would have waited (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
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
    cpu_s,
    percentiles_ms,
    send,
    succeeded,
)
from dledger.cli.commands import open_admin, open_client
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.output import CliError

FAILOVER_TOPIC: Final = "bench-failover"
FAILOVER_LOAD_S: Final = 3.0
"""Load before the kill, and after another one leads."""

MAX_OUTSTANDING: Final = 10_000
"""Sends under way at the same time; beyond it one waits, and the wait is part of its latency."""

SEND_TIMEOUT_S: Final = 30.0
"""More than a producer's 10 s: a late acknowledgement is a latency, a failed send is none."""


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

    Raises CliError: the cluster cannot be reached, or not one send succeeded.
    """
    async with target.opened(load.topic, load.queues, tell) as (namesrvs, pids):
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

    Raises CliError: not one send succeeded.
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
class LatencyLoad:
    """What is sent; measured after `WARM_UP_S` at the same rate."""

    rate: Annotated[
        float, POSITIVE, Parameter(help="Messages a second, whatever the answers do.")
    ] = 1_000.0
    duration: Duration = 10.0
    size: Size = 256
    queues: Queues = 4
    topic: Topic = "bench-latency"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The intended time of every message, in seconds of trio's clock; answers change none."""

    begin_s: float
    rate_per_s: float
    duration_s: float
    warm_up_s: float = WARM_UP_S

    @property
    def messages(self) -> int:
        """How many there are, those of the warm-up included."""
        return round((self.warm_up_s + self.duration_s) * self.rate_per_s)

    @property
    def measured_from_s(self) -> float:
        """When the warm-up ends."""
        return self.begin_s + self.warm_up_s

    def intended_s(self, number: int) -> float:
        """Return when message *number*, from 0 on, is meant to leave."""
        return self.begin_s + number / self.rate_per_s

    def is_measured(self, number: int) -> bool:
        """Return whether message *number* is none of the warm-up."""
        return number >= round(self.warm_up_s * self.rate_per_s)


@dataclass(slots=True)
class ScheduleTally:
    """What became of the measured messages."""

    latencies_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    ended_s: float = 0.0
    """The last acknowledgement, in seconds of the schedule's clock."""


async def bench_latency(target: Target, load: LatencyLoad, tell: Callable[[str], None]) -> Figures:
    """Send at a fixed rate and return the latencies.

    Raises CliError: the cluster cannot be reached, or not one send succeeded.
    """
    async with target.opened(load.topic, load.queues, tell) as (namesrvs, _):
        config = ProducerConfig(send_timeout_s=SEND_TIMEOUT_S)
        async with open_client(namesrvs) as client, Producer(client, "bench", config) as producer:
            body = bytes(load.size)

            async def send() -> None:
                await producer.send(Message(load.topic, body))

            await send()  # the route, the connection: once, before the first intended time
            tell(f"{load.rate:,g} sends/s of {load.size} bytes for {load.duration:g} s")
            schedule = Schedule(trio.current_time(), load.rate, load.duration)
            tally = await send_on_schedule(send, schedule)
    return summary(load, schedule, tally)


async def send_on_schedule(
    send: Callable[[], Awaitable[None]], schedule: Schedule, outstanding: int = MAX_OUTSTANDING
) -> ScheduleTally:
    """Begin a send at each intended time, however many are under way; return when all ended.

    Args:
        send: Sends one message and returns when it is acknowledged; raises `MQError` otherwise.
        outstanding: Most sends under way. Beyond it the next one begins late, and as its latency
            counts from its intended time, nothing is left out.
    """
    tally = ScheduleTally()
    slots = trio.Semaphore(outstanding)

    async def one(number: int) -> None:
        intended_s = schedule.intended_s(number)
        late_s = trio.current_time() - intended_s
        try:
            await send()
        except MQError as error:
            if schedule.is_measured(number):
                tally.failures[error.outcome] = tally.failures.get(error.outcome, 0) + 1
        else:
            if schedule.is_measured(number):
                tally.ended_s = trio.current_time()
                tally.latencies_s.append(tally.ended_s - intended_s)
                tally.late_s.append(late_s)
        finally:
            slots.release()

    async with trio.open_nursery() as nursery:
        for number in range(schedule.messages):
            if trio.current_time() < schedule.intended_s(number):
                await trio.sleep_until(schedule.intended_s(number))
            await slots.acquire()
            nursery.start_soon(one, number)
    return tally


def summary(load: LatencyLoad, schedule: Schedule, tally: ScheduleTally) -> Figures:
    """Return the result.

    Times count from the intended time of a message to its acknowledgement; failed sends are in
    none. *late* is by how much this program began its sends after their time; it is part of the
    latencies. The achieved rate is that of acknowledgements until the last of them.

    Raises CliError: not one send succeeded.
    """
    succeeded(tally.latencies_s, tally.failures)
    took_s = max(load.duration, tally.ended_s - schedule.measured_from_s)
    ranks = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p999_ms": 99.9, "max_ms": 100}
    late = {"late_p50_ms": 50, "late_p99_ms": 99, "late_max_ms": 100}
    return {
        "intended": sum(map(schedule.is_measured, range(schedule.messages))),
        "acknowledged": len(tally.latencies_s),
        "not_stored": tally.failures.get("not_stored", 0),
        "unknown": tally.failures.get("unknown", 0),
        "rate_per_s": load.rate,
        "achieved_per_s": round(len(tally.latencies_s) / took_s, 3),
        **dict(zip(ranks, percentiles_ms(tally.latencies_s, *ranks.values()), strict=True)),
        **dict(zip(late, percentiles_ms(tally.late_s, *late.values()), strict=True)),
        "seconds": load.duration,
        "size": load.size,
        "queues": load.queues,
    }


async def bench_failover(inflight: int, tell: Callable[[str], None]) -> float:
    """Kill the leader of a temporary cluster and return the time without acknowledgements, ms.

    It ends with the first acknowledgement of a send that was begun after SIGKILL.

    Raises CliError: the cluster did not start, or no send was acknowledged after the kill.
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
