"""The load that is measured: sends, batches and pulls through the SDK, where a user stands.

`dledger bench` puts it on a cluster of this project, `tools/bench` on one beside others.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import trio
from cyclopts import Parameter

from dledger import aio
from dledger.cli.broker_command import parse_options
from dledger.cli.commands import open_admin, open_client
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.output import CliError, addresses

WARM_UP_S: Final = 1.0
"""Connections, routes and caches; what ends in this time is not counted."""

RETRY_S: Final = 0.002
NEXT_STEP: Final = "see dledger cluster health"
FILL_BATCH: Final = 200
FILL_INFLIGHT: Final = 8
PULL_MESSAGES: Final = 4_000
SEGMENT_BYTES: Final = 256 << 20
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------------- options


def _positive(_: type, value: float) -> None:
    if not value > 0:
        raise ValueError("must be more than 0")


POSITIVE: Final = Parameter(validator=_positive)
Size = Annotated[int, POSITIVE, Parameter(help="Bytes of a body.")]
Queues = Annotated[int, POSITIVE, Parameter(help="Queues of the topic.")]
Topic = Annotated[str, Parameter(help="Topic to create and use.")]
Duration = Annotated[float, POSITIVE, Parameter(help="Seconds, after one second of warming up.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """Where and how a temporary cluster of three brokers is made."""

    folder: Annotated[
        Path | None, Parameter(name="--dir", help="Where the temporary cluster keeps its data.")
    ] = None
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            negative=(),
            help="Setting of the temporary cluster, table.name=value; may be repeated.",
        ),
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Temporary):
    """An existing cluster, or a temporary one."""

    namesrv: Annotated[
        str | None,
        Parameter(name=["--namesrv", "-n"], help="An existing cluster, host:port;host:port."),
    ] = None


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a load runs; *cluster* is the temporary one, None on an existing one."""

    namesrvs: list[str]
    client: ClientInstance
    cluster: LocalCluster | None
    tell: Callable[[str], None]

    def pids(self) -> list[int]:
        """Return the brokers of the temporary cluster that run."""
        brokers = [] if self.cluster is None else self.cluster.brokers.values()
        return [node.pid for node in brokers if node.pid is not None]

    def brokers_cpu_s(self) -> float:
        """Return the processor seconds that these have used."""
        return sum(map(cpu_s, self.pids()))


@asynccontextmanager
async def open_ground(
    target: Temporary,
    tell: Callable[[str], None],
    *,
    topic: str = "",
    queues: int = 4,
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[Ground]:
    """Find or make the cluster, with *settings*, create *topic*, and open a client."""
    async with AsyncExitStack() as stack:
        cluster = None
        if isinstance(target, Target) and target.namesrv:
            namesrvs = addresses(target.namesrv)
        else:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="dledger-bench-", dir=target.folder)
            )
            every = {"store.mapped_file_size_commit_log": SEGMENT_BYTES, **(settings or {})}
            every |= parse_options(target.set_, {})
            cluster = await stack.enter_async_context(
                local_cluster(Path(folder), settings=every, progress=tell)
            )
            namesrvs = [cluster.namesrv_address]
        if topic:
            async with open_admin(namesrvs) as admin:
                await admin.create_topic(topic, queue_nums=queues)
        client = await stack.enter_async_context(open_client(namesrvs))
        yield Ground(namesrvs, client, cluster, tell)


def cpu_s(pid: int | None) -> float:
    """Return the processor seconds that a process has used, in the kernel too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rss_mib(pid: int | None) -> float:
    """Return the resident memory of a process, pages of mapped files included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


# ------------------------------------------------------------------------------------- load


Figures = dict[str, float]
"""What was measured, by name."""


@dataclass(slots=True)
class Tally:
    """Counts what ends inside a window of one clock.

    *failures*: by outcome; from the begin of the window on.
    """

    begin_s: float
    end_s: float = float("inf")
    on_stored: Callable[[float, float], object] | None = None
    messages: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)

    def stored(self, began_s: float, ended_s: float, messages: int) -> None:
        """Count a send or a pull that succeeded."""
        if self.begin_s <= ended_s <= self.end_s:
            self.messages += messages
            self.latencies_s.append(ended_s - began_s)
        if self.on_stored is not None:
            self.on_stored(began_s, ended_s)

    def failed(self, outcome: str, ended_s: float, messages: int) -> None:
        """Count a send or a pull that failed."""
        if self.begin_s <= ended_s:
            self.failures[outcome] = self.failures.get(outcome, 0) + messages

    def figures(self, seconds: float, size: int) -> Figures:
        """Return what every closed load reports. MB: millions of body bytes.

        Times are those of one send, batch or pull; what failed is in none of the rates and times.

        Raises CliError: nothing succeeded.
        """
        succeeded(self.latencies_s, self.failures)
        p50, p99, p999, worst = percentiles_ms(self.latencies_s, 50, 99, 99.9, 100)
        return {
            "messages": self.messages,
            "failed": sum(self.failures.values()),
            "seconds": seconds,
            "messages_per_s": self.messages / seconds,
            "mb_per_s": self.messages * size / seconds / 1e6,
            "p50_ms": p50,
            "p99_ms": p99,
            "p999_ms": p999,
            "max_ms": worst,
            "size": size,
        }


def succeeded(latencies_s: list[float], failures: dict[str, int]) -> None:
    """Refuse to report of a load of which nothing succeeded."""
    if not latencies_s:
        raise CliError(f"no send succeeded; failed: {failures}", next_step=NEXT_STEP)


def percentiles_ms(latencies_s: list[float], *ranks: float) -> list[float]:
    """Return the percentiles *ranks* of *latencies_s*, in milliseconds."""
    values_ms = np.percentile(np.array(latencies_s), ranks) * 1000
    return [round(value, 3) for value in values_ms.tolist()]


async def send(
    producer: Producer | aio.Producer,
    topic: str,
    size: int,
    batch: int,
    tally: Tally,
    sleep: Callable[[float], Awaitable[None]] = trio.sleep,
) -> None:
    """Send one after the other until the window ends; each send has *batch* messages."""
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    clock = time.perf_counter
    while (began_s := clock()) < tally.end_s:
        try:
            if batch == 1:
                await producer.send(Message(topic, body))
            else:
                await producer.send_batch([Message(topic, body) for _ in range(batch)])
        except MQError as error:
            tally.failed(error.outcome, clock(), batch)
            await sleep(RETRY_S)
        else:
            tally.stored(began_s, clock(), batch)


async def fill(client: ClientInstance, topic: str, size: int, messages: int) -> None:
    """Write a backlog, in batches; returns when all of it is stored."""
    left = messages

    async def some(producer: Producer) -> None:
        nonlocal left
        while left > 0:
            count = min(FILL_BATCH, left)
            left -= count
            try:
                await producer.send_batch([Message(topic, bytes(size)) for _ in range(count)])
            except MQError:
                left += count
                await trio.sleep(0.05)

    async with Producer(client, "bench") as producer, trio.open_nursery() as nursery:
        for _ in range(FILL_INFLIGHT):
            nursery.start_soon(some, producer)


async def bounds_of(consumer: PullConsumer, topic: str) -> list[tuple[MessageQueue, int, int]]:
    """Return each queue with its first offset and one past its last."""
    return [
        (queue, await consumer.min_offset(queue), await consumer.max_offset(queue))
        for queue in await consumer.fetch_message_queues(topic)
    ]


async def read(
    consumer: PullConsumer,
    queue: MessageQueue,
    begin: int,
    end: int,
    tally: Tally,
    most: int = PULL_MESSAGES,
) -> None:
    """Read a part of a queue, up to *most* messages a pull."""
    offset = begin
    while offset < end:
        began_s = time.perf_counter()
        try:
            pulled = await consumer.pull(queue, offset, max_messages=most)
        except MQError as error:
            tally.failed(error.outcome, time.perf_counter(), 1)
            await trio.sleep(RETRY_S)
            continue
        # What a user does with each: look at the body.
        count = sum(1 for message in pulled.messages if len(message.body_view))
        tally.stored(began_s, time.perf_counter(), count)
        offset = pulled.next_begin_offset
