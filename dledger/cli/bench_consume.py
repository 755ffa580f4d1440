"""``dledger bench consume|pop``: a backlog, written once, and consumed by pull, push and POP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import trio
from cyclopts import Parameter

from dledger.cli.bench_load import (
    POSITIVE,
    Figures,
    Queues,
    Size,
    Tally,
    Target,
    Topic,
    bounds_of,
    fill,
    read,
)
from dledger.cli.commands import open_client
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.pop_calls import ReceivedMessage
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.output import CliError

CONSUME_PASSES: Final = 3
"""A backlog is read in a moment; the same one is read again to measure longer."""

END_TIMEOUT_S: Final = 300.0
"""After this long without the whole backlog a consumer is given up."""

EMPTY_WAIT_S: Final = 1.0
"""How long a receive waits when there is nothing left."""


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

    Raises CliError: the cluster cannot be reached, or messages are missing.
    """
    async with (
        target.opened(load.topic, load.queues, tell) as (namesrvs, _),
        open_client(namesrvs) as client,
    ):
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


async def bench_pop(target: Target, load: PopLoad, tell: Callable[[str], None]) -> Figures:
    """Write a backlog, consume it by push, one by one and in batches, and return the rates.

    Raises CliError: the cluster cannot be reached, or not all messages came in time.
    """
    async with (
        target.opened(load.topic, load.queues, tell) as (namesrvs, _),
        open_client(namesrvs) as client,
    ):
        tell(f"writing {load.messages:,} messages of {load.size} bytes")
        await fill(client, load.topic, load.size, load.messages)
        tell("consuming them by push")
        push_s = await _pushed(client, load)
        tell("receiving and acknowledging them one by one")
        single_s = await _received(client, load, 1, "bench-single")
        tell(f"receiving and acknowledging up to {load.batch} together")
        batch_s = await _received(client, load, load.batch, "bench-batch")
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


async def _pushed(client: ClientInstance, load: PopLoad) -> float:
    count = _Count(load.messages)

    async def listen(messages: Sequence[DeliveredMessage], context: ConsumeContext) -> None:
        count.add(messages)

    config = PushConfig(consume_from=FROM_FIRST)
    async with PushConsumer(client, "bench-push", listen, {load.topic: "*"}, config):
        return await count.took_s()


async def _received(client: ClientInstance, load: PopLoad, together: int, group: str) -> float:
    async with SimpleConsumer(client, group, {load.topic: "*"}) as consumer:
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
