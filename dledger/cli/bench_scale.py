"""``dledger bench scale``: many topics, queues, groups, offsets and clients on three brokers.

Always on a cluster of its own: it fills it, measures beside it, stops it and starts it again. The
figures of an empty group come from the same brokers before anything is made.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

import trio
from cyclopts import Parameter

from dledger.cli.bench_load import POSITIVE, Figures, Ground, percentiles_ms, rss_mib
from dledger.cli.bench_topic import send_on_schedule
from dledger.cli.commands import open_admin
from dledger.cli.local_cluster import DEFAULT_GROUP, LocalCluster
from dledger.commitlog.errors import MQError
from dledger.loop_stall import NOW_S
from dledger.output import CliError
from dledger.remoting.client import RemotingClient
from dledger.remoting.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import ExtFields, request
from dledger.remoting.protocol.headers import (
    CreateTopicHeader,
    SendMessageHeader,
    UpdateConsumerOffsetHeader,
)
from dledger.remoting.protocol.outcome import STORED_CODES
from dledger.remoting.tcp import TcpNetwork

CREATORS: Final = 8
FILLERS: Final = 64
CONNECTORS: Final = 32
"""Requests out at a time while the cluster is filled: enough to keep the leader busy."""

HEARTBEAT_S: Final = 30.0
"""As RocketMQ's clients do."""

BODY_BYTES: Final = 256
SETTLE_S: Final = 5.0
"""Between filling and measuring: checkpoints and registrations of the filling end."""

SAMPLE_S: Final = 1.0
TIMEOUT_S: Final = 20.0
LISTED_TIMEOUT_S: Final = 120.0
TEMPLATE: Final = "TBW102"
"""The topic that every broker has; its route names the leader."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLoad:
    """How much is made, and how long is measured beside it."""

    topics: Annotated[int, POSITIVE, Parameter(help="Topics to create.")] = 2_000
    queues: Annotated[
        int, POSITIVE, Parameter(help="Queues of each topic; each gets a message.")
    ] = 5
    groups: Annotated[int, POSITIVE, Parameter(help="Consumer groups.")] = 200
    offsets: Annotated[int, Parameter(help="Committed offsets, over all groups.")] = 10_000
    clients: Annotated[int, Parameter(help="Connected clients with heartbeats.")] = 200
    rate: Annotated[int, POSITIVE, Parameter(help="Sends a second, over all queues.")] = 50
    duration: Annotated[float, POSITIVE, Parameter(help="Seconds of sending.")] = 60.0
    idle: Annotated[
        float, POSITIVE, Parameter(help="Seconds for each measurement of the idle cluster.")
    ] = 20.0


class _Phase:
    """What brokers report of one part of the run; what was before is not counted."""

    def __init__(self, statuses: Mapping[str, Any]) -> None:
        self._term = max(_term(status) for status in statuses.values())
        self._stalls = {name: status["event_loop"]["stalls"] for name, status in statuses.items()}
        self.longest_ms = self.longest_cpu_ms = 0.0
        self.stalls = self.elections = 0

    def take(self, statuses: Mapping[str, Any]) -> None:
        for name, status in statuses.items():
            self.elections = max(self.elections, _term(status) - self._term)
            loop = status["event_loop"]
            if loop["now_ms"] > self.longest_ms:
                self.longest_ms, self.longest_cpu_ms = loop["now_ms"], loop["now_cpu_ms"]
            self.stalls += loop["stalls"] - self._stalls.get(name, loop["stalls"])
            self._stalls[name] = loop["stalls"]


@dataclass(slots=True)
class _Run:
    ground: Ground
    cluster: LocalCluster
    load: ScaleLoad

    def topic(self, number: int) -> str:
        return f"scale-{number % self.load.topics:06d}"

    async def ask(self, code: RequestCode, ext: ExtFields, body: bytes = b"") -> None:
        """Ask the leader. Raises MQError: refused, or not answered in time."""
        answer = await self.ground.client.ask_leader(
            DEFAULT_GROUP, code, ext, body, topic=TEMPLATE, timeout_s=TIMEOUT_S
        )
        if answer.code not in STORED_CODES:
            raise MQError(f"{answer.code} {answer.remark}")

    async def send(self, place: int) -> None:
        """Send a message to queue number *place* of all."""
        header = SendMessageHeader(
            producer_group="scale",
            topic=self.topic(place),
            default_topic=TEMPLATE,
            default_topic_queue_nums=4,
            queue_id=place // self.load.topics,
            sys_flag=0,
            born_timestamp=0,
            flag=0,
            properties="",
        )
        await self.ask(RequestCode.SEND_MESSAGE_V2, header.encode_v2(), bytes(BODY_BYTES))

    @asynccontextmanager
    async def phase(self) -> AsyncIterator[_Phase]:
        """Watch the brokers once a second while the block runs."""
        await trio.sleep(NOW_S)
        phase = _Phase(await self.cluster.statuses())

        async def watch() -> None:
            while True:
                phase.take(await self.cluster.statuses())
                await trio.sleep(SAMPLE_S)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            yield phase
            nursery.cancel_scope.cancel()
        phase.take(await self.cluster.statuses())

    async def idle_cpu(self) -> float:
        """Return the processors that three brokers use together without any request."""
        await trio.sleep(SETTLE_S)
        self.ground.tell(f"idle for {self.load.idle:.0f} s")
        before, began = self.ground.brokers_cpu_s(), time.perf_counter()
        await trio.sleep(self.load.idle)
        return (self.ground.brokers_cpu_s() - before) / (time.perf_counter() - began)


async def scale(ground: Ground, load: ScaleLoad) -> Figures:
    """Fill a temporary cluster of three brokers with topics, groups and clients, and measure it.

    Exits 0 whatever the figures are: machines differ.
    """
    # Stalls are the longest turn of any broker's event loop in a phase; its processor time beside
    # it: the rest of it was spent waiting for a disk or a processor.
    assert ground.cluster is not None
    run = _Run(ground, ground.cluster, load)
    found: Figures = {
        "topics": load.topics,
        "queues": load.topics * load.queues,
        "groups": load.groups,
        "offsets": load.offsets,
        "clients": load.clients,
    }
    empty = await run.idle_cpu()
    async with run.phase() as creating:
        found |= await _create_topics(run)
    async with run.phase() as filling:
        await _fill(run)
    full = await run.idle_cpu()
    async with _clients(run):
        with_clients = await run.idle_cpu()
        async with run.phase() as sending:
            found |= await _send(run)
    for name, phase in (("creating", creating), ("filling", filling), ("sending", sending)):
        found |= {
            f"stall_{name}_ms": phase.longest_ms,
            f"stall_{name}_cpu_ms": phase.longest_cpu_ms,
        }
    found |= {
        "stalls_sending": sending.stalls,
        "elections_filling": creating.elections + filling.elections,
        "elections_sending": sending.elections,
        "idle_cpu_empty": empty,
        "idle_cpu_full": full,
        "idle_cpu_ratio": full / empty if empty else 0.0,
        "idle_cpu_clients": with_clients,
        "broker_mib": max(map(rss_mib, ground.pids())),
        "namesrv_mib": rss_mib(run.cluster.namesrv.pid),
    }
    async with run.phase() as restarting:
        found |= await _restart(run)
    return {**found, "stall_restart_ms": restarting.longest_ms}


async def _each(count: int, workers: int, work: Callable[[int], Awaitable[object]]) -> None:
    """Call *work* with 0 … *count* - 1, *workers* of them at a time.

    Raises CliError: the cluster refused a part of what it is filled with.
    """
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            try:
                await work(number)
            except MQError as error:
                raise CliError(f"the cluster cannot be filled: {error}") from error

    async with trio.open_nursery() as nursery:
        for _ in range(workers):
            nursery.start_soon(worker)


async def _create_topics(run: _Run) -> Figures:
    """Return topics a second: all of them, the first tenth, the last tenth."""
    load = run.load
    run.ground.tell(f"creating {load.topics:,} topics of {load.queues} queues")
    ends: list[float] = []

    async def create(number: int) -> None:
        header = CreateTopicHeader(
            topic=run.topic(number),
            default_topic=TEMPLATE,
            read_queue_nums=load.queues,
            write_queue_nums=load.queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
        )
        await run.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, header.encode())
        ends.append(time.perf_counter())

    began = time.perf_counter()
    await _each(load.topics, CREATORS, create)
    tenth = max(1, load.topics // 10)
    last_s = ends[-1] - ends[-1 - tenth] if load.topics > tenth else 0.0
    return {
        "topics_per_s": load.topics / (ends[-1] - began),
        "first_topics_per_s": tenth / (ends[tenth - 1] - began),
        "last_topics_per_s": tenth / last_s if last_s else 0.0,
    }


async def _fill(run: _Run) -> None:
    """Put a message into each queue, and commit the offsets."""
    load = run.load
    run.ground.tell(f"one message into each of {load.topics * load.queues:,} queues")

    await _each(load.topics * load.queues, FILLERS, run.send)
    run.ground.tell(f"{load.offsets:,} offsets of {load.groups:,} groups")

    async def commit(number: int) -> None:
        # Each group has the same number of offsets.
        group, place = number % load.groups, number // load.groups
        topic = run.topic(group * 7 + place // load.queues)
        header = UpdateConsumerOffsetHeader(f"group-{group:05d}", topic, place % load.queues, 1)
        await run.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header.encode())

    await _each(load.offsets, FILLERS, commit)


@asynccontextmanager
async def _clients(run: _Run) -> AsyncIterator[None]:
    """Keep clients connected to the leader, each with a connection and heartbeats of its own."""
    load = run.load
    run.ground.tell(f"{load.clients:,} clients connect")
    leader = run.cluster.brokers[await run.cluster.wait_leader()].address

    async def client(number: int, *, task_status: trio.TaskStatus[None]) -> None:
        body = HeartbeatData(
            client_id=f"client-{number}",
            consumer_data_set=[
                ConsumerData(
                    group_name=f"group-{number % load.groups:05d}",
                    subscription_data_set=[SubscriptionData(topic=run.topic(number))],
                )
            ],
        ).encode()
        async with trio.open_nursery() as nursery:
            remoting = RemotingClient(nursery, TcpNetwork())

            async def beat() -> None:
                command = request(RequestCode.HEART_BEAT, {}, body)
                try:
                    await remoting.invoke(leader, command, TIMEOUT_S)
                except MQError:
                    await trio.sleep(1.0)

            await beat()
            task_status.started()
            while True:
                await trio.sleep(HEARTBEAT_S)
                await beat()

    async with trio.open_nursery() as nursery:
        await _each(load.clients, CONNECTORS, lambda number: nursery.start(client, number))
        yield
        nursery.cancel_scope.cancel()


async def _send(run: _Run) -> Figures:
    """Send at a steady rate to all queues."""
    load = run.load
    run.ground.tell(f"{load.rate} sends/s for {load.duration:.0f} s")
    numbers = itertools.count()

    async def send() -> None:
        await run.send(next(numbers) * 7919 % (load.topics * load.queues))

    began = time.perf_counter()
    tally = await send_on_schedule(send, load.rate, load.duration)
    seconds = time.perf_counter() - began
    latencies_s = list(map(operator.sub, tally.latencies_s, tally.late_s))
    p50, p99, worst = percentiles_ms(latencies_s or [0.0], 50, 99, 100)
    return {
        "sends": len(latencies_s),
        "sends_failed": sum(tally.failures.values()),
        "seconds": seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "max_ms": worst,
    }


async def _restart(run: _Run) -> Figures:
    """Stop all brokers, start them; return seconds to a leader, and from there to all topics."""
    run.ground.tell("stopping all brokers and starting them again")
    cluster = run.cluster
    async with trio.open_nursery() as nursery:
        for name in cluster.brokers:
            nursery.start_soon(cluster.stop, name)
    began = time.perf_counter()
    for name in cluster.brokers:
        await cluster.start(name)
    await cluster.wait_leader(timeout_s=LISTED_TIMEOUT_S)
    leader_s = time.perf_counter() - began
    wanted = {run.topic(number) for number in range(run.load.topics)}
    async with open_admin([cluster.namesrv_address]) as admin:
        with trio.move_on_after(LISTED_TIMEOUT_S):
            while True:
                if wanted <= set(await admin.topic_list()):
                    listed_s = time.perf_counter() - began - leader_s
                    return {"restart_leader_s": leader_s, "restart_topics_listed_s": listed_s}
                await trio.sleep(0.1)
    raise CliError("the NameServer does not list the topics after the start")


def _term(status: Any) -> int:
    return int(status.get("term") or 0)
