"""Loads on one topic: ``dledger bench produce|latency|consume|pop``, and the fail-over of ``all``.

`produce` keeps a number of sends outstanding: a closed load. `latency` gives each message an
intended time, fixed before the first one leaves, and counts from that: a closed load sends less
while the cluster is slow, and leaves out the sends that would have waited (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
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
    Ground,
    Queues,
    Size,
    Tally,
    Topic,
    bounds_of,
    fill,
    percentiles_ms,
    read,
    send,
    succeeded,
)
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.pop_calls import ReceivedMessage
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.output import CliError

FAILOVER_LOAD_S: Final = 3.0
"""Load before the kill, and after another one leads."""

MAX_OUTSTANDING: Final = 10_000
"""Sends under way at the same time; beyond it one waits, and the wait is part of its latency."""

SEND_TIMEOUT_S: Final = 30.0
"""More than a producer's 10 s: a late acknowledgement is a latency, a failed send is none."""

CONSUME_PASSES: Final = 3
"""A backlog is read in a moment; the same one is read again to measure longer."""

END_TIMEOUT_S: Final = 300.0
"""After this long without the whole backlog a consumer is given up."""

EMPTY_WAIT_S: Final = 1.0
"""How long a receive waits when there is nothing left."""


# ------------------------------------------------------------------------- outstanding sends


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


async def produce(ground: Ground, load: ProduceLoad) -> Figures:
    """Send for some seconds; report rate, latency and failures.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    ground.tell(f"{load.inflight} outstanding sends of {load.batch} x {load.size} bytes")
    config = ProducerConfig(idempotent=load.idempotent)
    if load.asyncio:
        return await trio.to_thread.run_sync(asyncio.run, _produce_in_asyncio(ground, load, config))
    async with Producer(ground.client, "bench", config) as producer:

        async def sends(tally: Tally) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(load.inflight):
                    nursery.start_soon(send, producer, load.topic, load.size, load.batch, tally)

        return await _warmed_up(ground, load, sends)


async def _produce_in_asyncio(ground: Ground, load: ProduceLoad, config: ProducerConfig) -> Figures:
    async with (
        aio.connect(ground.namesrvs) as client,
        aio.Producer(client, "bench", config) as producer,
    ):

        async def sends(tally: Tally) -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(load.inflight):
                    tasks.create_task(
                        send(producer, load.topic, load.size, load.batch, tally, asyncio.sleep)
                    )

        return await _warmed_up(ground, load, sends)


async def _warmed_up(
    ground: Ground, load: ProduceLoad, sends: Callable[[Tally], Awaitable[None]]
) -> Figures:
    """Let *sends* run until the end of a tally: that of the warm-up, then the measured one."""
    now_s = time.perf_counter()
    await sends(Tally(now_s, now_s + WARM_UP_S))
    now_s, brokers_s, client_s = time.perf_counter(), ground.brokers_cpu_s(), time.process_time()
    tally = Tally(now_s, now_s + load.duration)
    await sends(tally)
    brokers_s, client_s = ground.brokers_cpu_s() - brokers_s, time.process_time() - client_s
    return produced(load, tally, brokers_s, client_s)


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


# ------------------------------------------------------------------------------ sends at a rate


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


async def latency(ground: Ground, load: LatencyLoad) -> Figures:
    """Send at a fixed rate; report latencies from the intended times, and the achieved rate.

    The rate does not fall while the cluster is slow: what waits then is in the percentiles.
    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    config = ProducerConfig(send_timeout_s=SEND_TIMEOUT_S)
    async with Producer(ground.client, "bench", config) as producer:
        body = bytes(load.size)

        async def send() -> None:
            await producer.send(Message(load.topic, body))

        await send()  # the route, the connection: once, before the first intended time
        ground.tell(f"{load.rate:,g} sends/s of {load.size} bytes for {load.duration:g} s")
        return await latencies(send, load)


async def latencies(send: Callable[[], Awaitable[None]], load: LatencyLoad) -> Figures:
    """Call *send* at a fixed rate, to warm up and to measure, and return the result."""
    await send_on_schedule(send, load.rate, WARM_UP_S)
    return summary(load, await send_on_schedule(send, load.rate, load.duration))


@dataclass(slots=True)
class ScheduleTally(Tally):
    """What became of the messages, in seconds of trio's clock.

    *late_s*: by how much each send began after its intended time, which is part of its latency.
    """

    last_s: float = 0.0
    late_s: list[float] = field(default_factory=list)


async def send_on_schedule(
    send: Callable[[], Awaitable[None]],
    rate_per_s: float,
    duration_s: float,
    outstanding: int = MAX_OUTSTANDING,
) -> ScheduleTally:
    """Begin a send at each intended time, however many are under way; return when all ended.

    Args:
        send: Sends one message and returns when it is acknowledged; raises `MQError` otherwise.
        outstanding: Most sends under way. Beyond it the next one begins late, and as its latency
            counts from its intended time, nothing is left out.
    """
    tally = ScheduleTally(trio.current_time())
    slots = trio.Semaphore(outstanding)

    async def one(intended_s: float) -> None:
        late_s = trio.current_time() - intended_s
        try:
            await send()
        except MQError as error:
            tally.failed(error.outcome, trio.current_time(), 1)
        else:
            tally.last_s = trio.current_time()
            tally.stored(intended_s, tally.last_s, 1)
            tally.late_s.append(late_s)
        finally:
            slots.release()

    async with trio.open_nursery() as nursery:
        for number in range(round(rate_per_s * duration_s)):
            intended_s = tally.begin_s + number / rate_per_s
            if trio.current_time() < intended_s:
                await trio.sleep_until(intended_s)
            await slots.acquire()
            nursery.start_soon(one, intended_s)
    return tally


def summary(load: LatencyLoad, tally: ScheduleTally) -> Figures:
    """Return the result.

    Times count from the intended time of a message to its acknowledgement; failed sends are in
    none. *late* is by how much this program began its sends after their time; it is part of the
    latencies. The achieved rate is that of acknowledgements until the last of them.

    Raises CliError: not one send succeeded.
    """
    succeeded(tally.latencies_s, tally.failures)
    took_s = max(load.duration, tally.last_s - tally.begin_s)
    ranks = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p999_ms": 99.9, "max_ms": 100}
    late = {"late_p50_ms": 50, "late_p99_ms": 99, "late_max_ms": 100}
    return {
        "intended": round(load.rate * load.duration),
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


# --------------------------------------------------------------------------------- fail-over


async def failover(ground: Ground, load: ProduceLoad) -> Figures:
    """Kill the leader of a temporary cluster; return the time without acknowledgements.

    It ends with the first acknowledgement of a send that was begun after SIGKILL.

    Raises CliError: no send was acknowledged after the kill.
    """
    assert ground.cluster is not None
    sends: list[tuple[float, float]] = []
    tally = Tally(0.0, on_stored=lambda began_s, ended_s: sends.append((began_s, ended_s)))
    async with Producer(ground.client, load.topic) as producer, trio.open_nursery() as nursery:
        for _ in range(load.inflight):
            nursery.start_soon(send, producer, load.topic, load.size, load.batch, tally)
        await trio.sleep(FAILOVER_LOAD_S)
        leader = await ground.cluster.wait_leader()
        ground.tell(f"SIGKILL to {leader}, the leader")
        killed_s = time.perf_counter()
        await ground.cluster.kill(leader)
        await ground.cluster.wait_leader(other_than=leader)
        await trio.sleep(FAILOVER_LOAD_S)
        nursery.cancel_scope.cancel()
    after = [ended_s for began_s, ended_s in sends if began_s >= killed_s]
    if not after:
        raise CliError("no send was acknowledged after the leader was killed")
    return {"failover_ms": 1000 * (min(after) - killed_s)}


# --------------------------------------------------------------------------------- a backlog


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeLoad:
    """What is read: a backlog that is written first, by one consumer task per queue."""

    size: Size = 256
    messages: Annotated[int, POSITIVE, Parameter(help="Messages to write, then read.")] = 400_000
    queues: Annotated[int, POSITIVE, Parameter(help="Queues of the topic, one consumer each.")] = 4
    topic: Topic = "bench-consume"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PopLoad:
    """A backlog that is written once and consumed by three groups, one after another."""

    size: Size = 256
    messages: Annotated[int, POSITIVE, Parameter(help="Messages to write, then consume.")] = 20_000
    queues: Queues = 4
    receivers: Annotated[int, POSITIVE, Parameter(help="Receives under way at the same time.")] = 64
    batch: Annotated[int, POSITIVE, Parameter(help="Messages of a receive of the batches.")] = 32
    topic: Topic = "bench-pop"


async def consume(ground: Ground, load: ConsumeLoad) -> Figures:
    """Write a backlog, then read all of it; report the reading.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    ground.tell(f"writing {load.messages:,} messages of {load.size} bytes")
    await fill(ground.client, load.topic, load.size, load.messages)
    ground.tell("reading them")
    async with PullConsumer(ground.client, "bench") as consumer:
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


async def pop(ground: Ground, load: PopLoad) -> Figures:
    """Write a backlog, consume it by push, then by receipts; report the rates and their ratios.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    ground.tell(f"writing {load.messages:,} messages of {load.size} bytes")
    await fill(ground.client, load.topic, load.size, load.messages)
    ground.tell("consuming them by push")
    push_s = await _pushed(ground, load)
    ground.tell("receiving and acknowledging them one by one")
    single_s = await _received(ground, load, 1, "bench-single")
    ground.tell(f"receiving and acknowledging up to {load.batch} together")
    batch_s = await _received(ground, load, load.batch, "bench-batch")
    return rates(load, push_s, single_s, batch_s)


def rates(load: PopLoad, push_s: float, single_s: float, batch_s: float) -> Figures:
    """Return messages a second that each way consumed, and what part of push it is."""
    return {
        "messages": load.messages,
        "push_per_s": load.messages / push_s,
        "single_per_s": load.messages / single_s,
        "batch_per_s": load.messages / batch_s,
        "single_of_push": push_s / single_s,
        "batch_of_push": push_s / batch_s,
        "receivers": load.receivers,
        "batch": load.batch,
        "queues": load.queues,
        "size": load.size,
    }


class _Count:
    """How many different messages came, and when the first and the last of them did."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._seen: set[tuple[str, int, int]] = set()
        self._began_s = time.perf_counter()
        self._ended_s = 0.0
        self.is_whole = trio.Event()

    def add(self, messages: Sequence[DeliveredMessage | ReceivedMessage]) -> None:
        self._seen.update((m.broker_name, m.queue_id, m.queue_offset) for m in messages)
        if len(self._seen) >= self._wanted and not self._ended_s:
            self._ended_s = time.perf_counter()
            self.is_whole.set()

    async def took_s(self) -> float:
        """Return how long all of them took. Raises CliError: some did not come in time."""
        with trio.move_on_after(END_TIMEOUT_S):
            await self.is_whole.wait()
            return self._ended_s - self._began_s
        raise CliError(f"{len(self._seen)} of {self._wanted} messages came in {END_TIMEOUT_S:g} s")


async def _pushed(ground: Ground, load: PopLoad) -> float:
    count = _Count(load.messages)

    async def listen(messages: Sequence[DeliveredMessage], context: ConsumeContext) -> None:
        count.add(messages)

    config = PushConfig(consume_from=FROM_FIRST)
    async with PushConsumer(ground.client, "bench-push", listen, {load.topic: "*"}, config):
        return await count.took_s()


async def _received(ground: Ground, load: PopLoad, together: int, group: str) -> float:
    async with SimpleConsumer(ground.client, group, {load.topic: "*"}) as consumer:
        count = _Count(load.messages)

        async def receive() -> None:
            while not count.is_whole.is_set():
                messages = await consumer.receive(together, wait_s=EMPTY_WAIT_S)
                if len(messages) == 1:
                    await consumer.ack(messages[0])
                elif messages:
                    await consumer.ack_all(messages)
                count.add(messages)

        async with trio.open_nursery() as nursery:
            for _ in range(load.receivers):
                nursery.start_soon(receive)
            seconds = await count.took_s()
            nursery.cancel_scope.cancel()
        return seconds
