"""``dledger bench scale``: many topics, queues, groups, offsets and clients on three brokers.

Always on a cluster of its own: it fills it, measures beside it, stops it and starts it again. The
figures of an empty group come from the same brokers before anything is made.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from dledger.cli.ask_cluster import ask
from dledger.cli.bench_load import Target, cpu_s, percentiles_ms
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.commitlog.errors import MQError
from dledger.loop_stall import NOW_S
from dledger.output import CliError
from dledger.remoting.client import RemotingClient
from dledger.remoting.protocol.bodies import (
    ConsumerData,
    HeartbeatData,
    SubscriptionData,
    TopicList,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import (
    CreateTopicHeader,
    SendMessageHeader,
    UpdateConsumerOffsetHeader,
)
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

_SENT: Final = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    )
)


@dataclass(frozen=True, slots=True)
class ScaleLoad:
    """How much is made, and how long is measured beside it."""

    topics: int = 2_000
    queues: int = 5
    groups: int = 200
    offsets: int = 10_000
    clients: int = 200
    sends_per_s: int = 50
    duration_s: float = 60.0
    idle_s: float = 20.0


class ScaleBench(msgspec.Struct, kw_only=True):
    """What was measured. Stalls: the longest turn of any broker's event loop in that phase.

    Its processor time beside it: the rest of it was spent waiting for a disk or a processor.
    """

    topics: int
    queues: int
    groups: int
    offsets: int
    clients: int
    topics_per_s: float
    first_topics_per_s: float
    last_topics_per_s: float
    stall_creating_ms: float
    stall_creating_cpu_ms: float
    stall_filling_ms: float
    stall_filling_cpu_ms: float
    sends: int
    sends_failed: int
    seconds: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    stall_sending_ms: float
    stall_sending_cpu_ms: float
    stalls_sending: int
    elections_filling: int
    elections_sending: int
    idle_cpu_empty: float
    idle_cpu_full: float
    idle_cpu_ratio: float
    idle_cpu_clients: float
    restart_leader_s: float
    restart_topics_listed_s: float
    stall_restart_ms: float
    broker_mib: float
    namesrv_mib: float


class _Watch:
    """Reads terms and the longest turns of event loops once a second, of every broker."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._stalls: dict[str, int] = {}
        self.longest_ms = self.longest_cpu_ms = 0.0
        self.stalls = 0
        self.term = 0

    async def begin(self) -> None:
        """Begin a phase: what was before it is not counted."""
        await trio.sleep(NOW_S)
        self._stalls.clear()
        await self.look()
        self.longest_ms, self.longest_cpu_ms, self.stalls = 0.0, 0.0, 0

    async def look(self) -> None:
        for name, status in (await self._cluster.statuses()).items():
            self.term = max(self.term, _int(status, "term"))
            loop: Any = status["event_loop"]
            if loop["now_ms"] > self.longest_ms:
                self.longest_ms, self.longest_cpu_ms = loop["now_ms"], loop["now_cpu_ms"]
            self.stalls += loop["stalls"] - self._stalls.get(name, loop["stalls"])
            self._stalls[name] = loop["stalls"]

    async def run(self) -> None:
        while True:
            await self.look()
            await trio.sleep(SAMPLE_S)


@dataclass(slots=True)
class _Run:
    cluster: LocalCluster
    client: RemotingClient
    load: ScaleLoad
    watch: _Watch
    tell: Callable[[str], None]

    async def leader(self) -> str:
        name = await self.cluster.wait_leader()
        return self.cluster.brokers[name].address

    def topic(self, number: int) -> str:
        return f"scale-{number % self.load.topics:06d}"

    async def invoke(self, leader: str, command: RemotingCommand) -> tuple[str, RemotingCommand]:
        """Ask the present leader; return it with the answer."""
        for _ in range(5):
            try:
                answer = await self.client.invoke(leader, command, TIMEOUT_S)
                if answer.code != ResponseCode.NO_PERMISSION and answer.code in _SENT:
                    return leader, answer
                last = f"{answer.code} {answer.remark}"
            except MQError as error:
                last = str(error)
            await trio.sleep(0.5)
            leader = await self.leader()
            command = request(command.code, dict(command.ext), bytes(command.body))
        raise CliError(f"the cluster cannot be filled: {last}")


async def bench_scale(target: Target, load: ScaleLoad, tell: Callable[[str], None]) -> ScaleBench:
    """Fill a temporary cluster, measure beside it, start it again.

    Raises:
        CliError: A request was refused five times, or the cluster did not come back.
    """
    with tempfile.TemporaryDirectory(prefix="dledger-scale-", dir=target.folder) as folder:
        async with (
            local_cluster(
                Path(folder),
                settings={
                    "store.mapped_file_size_commit_log": 256 << 20,
                    # A sparse file a queue: small ones keep the sum of sizes sane.
                    "store.mapped_file_size_consume_queue": 20 * 1_000,
                    **target.settings,
                },
                progress=tell,
            ) as cluster,
            trio.open_nursery() as nursery,
        ):
            client = RemotingClient(nursery, TcpNetwork())
            run = _Run(cluster, client, load, _Watch(cluster), tell)
            result = await _measure(run)
            nursery.cancel_scope.cancel()
    return result


async def _measure(run: _Run) -> ScaleBench:
    load, watch = run.load, run.watch
    await trio.sleep(SETTLE_S)
    empty = await _idle_cpu(run)
    await watch.begin()
    term = watch.term
    rates = await _create_topics(run)
    creating = watch.longest_ms, watch.longest_cpu_ms
    await watch.begin()
    async with _watching(run):
        await _fill_queues(run)
        await _commit_offsets(run)
    filling = watch.longest_ms, watch.longest_cpu_ms
    await trio.sleep(SETTLE_S)
    full = await _idle_cpu(run)
    async with _clients(run):
        await trio.sleep(SETTLE_S)
        with_clients = await _idle_cpu(run)
        await watch.look()
        filled_term = watch.term
        await watch.begin()
        latencies, failed, seconds = await _send(run)
    sending = watch.longest_ms, watch.longest_cpu_ms
    stalls, sent_term = watch.stalls, watch.term
    broker_mib = max(rss_mib(node.pid) for node in run.cluster.brokers.values())
    namesrv_mib = rss_mib(run.cluster.namesrv.pid)
    leader_s, listed_s = await _restart(run)
    watch.longest_ms = 0.0
    await watch.look()
    p50, p99, _, worst = percentiles_ms(latencies or [0.0])
    return ScaleBench(
        topics=load.topics,
        queues=load.topics * load.queues,
        groups=load.groups,
        offsets=load.offsets,
        clients=load.clients,
        topics_per_s=rates[0],
        first_topics_per_s=rates[1],
        last_topics_per_s=rates[2],
        stall_creating_ms=creating[0],
        stall_creating_cpu_ms=creating[1],
        stall_filling_ms=filling[0],
        stall_filling_cpu_ms=filling[1],
        sends=len(latencies),
        sends_failed=failed,
        seconds=seconds,
        p50_ms=p50,
        p99_ms=p99,
        max_ms=worst,
        stall_sending_ms=sending[0],
        stall_sending_cpu_ms=sending[1],
        stalls_sending=stalls,
        elections_filling=filled_term - term,
        elections_sending=sent_term - filled_term,
        idle_cpu_empty=empty,
        idle_cpu_full=full,
        idle_cpu_ratio=full / empty if empty else 0.0,
        idle_cpu_clients=with_clients,
        restart_leader_s=leader_s,
        restart_topics_listed_s=listed_s,
        stall_restart_ms=watch.longest_ms,
        broker_mib=broker_mib,
        namesrv_mib=namesrv_mib,
    )


@asynccontextmanager
async def _watching(run: _Run) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.watch.run)
        yield
        nursery.cancel_scope.cancel()
    await run.watch.look()


async def _each(count: int, workers: int, work: Callable[[int], Any]) -> None:
    """Call *work* with 0 … *count* - 1, *workers* of them at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    async with trio.open_nursery() as nursery:
        for _ in range(workers):
            nursery.start_soon(worker)


async def _create_topics(run: _Run) -> tuple[float, float, float]:
    """Return topics a second: all of them, the first tenth, the last tenth."""
    load = run.load
    run.tell(f"creating {load.topics:,} topics of {load.queues} queues")
    leader = await run.leader()
    ends: list[float] = []

    async def create(number: int) -> None:
        nonlocal leader
        header = CreateTopicHeader(
            topic=run.topic(number),
            default_topic="TBW102",
            read_queue_nums=load.queues,
            write_queue_nums=load.queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
        )
        leader, _ = await run.invoke(
            leader, request(RequestCode.UPDATE_AND_CREATE_TOPIC, header.encode())
        )
        ends.append(time.perf_counter())

    began = time.perf_counter()
    async with _watching(run):
        await _each(load.topics, CREATORS, create)
    tenth = max(1, load.topics // 10)
    return (
        load.topics / (ends[-1] - began),
        tenth / (ends[tenth - 1] - began),
        tenth / max(ends[-1] - ends[-1 - tenth], 1e-9) if load.topics > tenth else 0.0,
    )


def _send_command(topic: str, queue_id: int) -> RemotingCommand:
    header = SendMessageHeader(
        producer_group="scale",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
        properties="",
    )
    return request(RequestCode.SEND_MESSAGE_V2, header.encode_v2(), bytes(BODY_BYTES))


async def _fill_queues(run: _Run) -> None:
    load = run.load
    run.tell(f"one message into each of {load.topics * load.queues:,} queues")
    leader = await run.leader()

    async def fill(number: int) -> None:
        nonlocal leader
        command = _send_command(run.topic(number), number // load.topics)
        leader, _ = await run.invoke(leader, command)

    await _each(load.topics * load.queues, FILLERS, fill)


def _slots(load: ScaleLoad) -> Iterator[tuple[int, int, int]]:
    """Yield number of group, of topic and queue: each group has the same number of offsets."""
    for number in range(load.offsets):
        group, place = number % load.groups, number // load.groups
        yield group, group * 7 + place // load.queues, place % load.queues


async def _commit_offsets(run: _Run) -> None:
    load = run.load
    run.tell(f"{load.offsets:,} offsets of {load.groups:,} groups")
    leader = await run.leader()
    slots = list(_slots(load))

    async def commit(number: int) -> None:
        nonlocal leader
        group, topic, queue_id = slots[number]
        header = UpdateConsumerOffsetHeader(f"group-{group:05d}", run.topic(topic), queue_id, 1)
        leader, _ = await run.invoke(
            leader, request(RequestCode.UPDATE_CONSUMER_OFFSET, header.encode())
        )

    await _each(len(slots), FILLERS, commit)


@asynccontextmanager
async def _clients(run: _Run) -> AsyncIterator[None]:
    """Keep clients connected to the leader, each with a connection and heartbeats of its own."""
    load = run.load
    if not load.clients:
        yield
        return
    run.tell(f"{load.clients:,} clients connect")
    leader = await run.leader()

    async def client(number: int, connected: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            remoting = RemotingClient(nursery, TcpNetwork())
            group = f"group-{number % load.groups:05d}"
            body = HeartbeatData(
                client_id=f"client-{number}",
                consumer_data_set=[
                    ConsumerData(
                        group_name=group,
                        subscription_data_set=[SubscriptionData(topic=run.topic(number))],
                    )
                ],
            ).encode()
            first = True
            while True:
                try:
                    await remoting.invoke(
                        leader, request(RequestCode.HEART_BEAT, {}, body), TIMEOUT_S
                    )
                except MQError:
                    await trio.sleep(1.0)
                if first:
                    connected.started()
                    first = False
                await trio.sleep(HEARTBEAT_S)

    async with trio.open_nursery() as nursery:

        async def connect(number: int) -> None:
            await nursery.start(_as_started, client, number)

        await _each(load.clients, CONNECTORS, connect)
        yield
        nursery.cancel_scope.cancel()


async def _as_started(
    client: Callable[[int, trio.TaskStatus[None]], Any],
    number: int,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    await client(number, task_status)


async def _send(run: _Run) -> tuple[list[float], int, float]:
    """Send at a steady rate to all queues; return latencies in seconds, failures and the time."""
    load = run.load
    run.tell(f"{load.sends_per_s} sends/s for {load.duration_s:.0f} s")
    leader = await run.leader()
    latencies: list[float] = []
    failed = 0
    queues = load.topics * load.queues

    async def send(number: int) -> None:
        nonlocal failed, leader
        place = number * 7919 % queues
        began = time.perf_counter()
        try:
            answer = await run.client.invoke(
                leader, _send_command(run.topic(place), place // load.topics), TIMEOUT_S
            )
        except MQError:
            failed += 1
            return
        if answer.code in _SENT:
            latencies.append(time.perf_counter() - began)
        else:
            failed += 1
            leader = await run.leader()

    began = time.perf_counter()
    async with _watching(run), trio.open_nursery() as nursery:
        number = 0
        while (elapsed := time.perf_counter() - began) < load.duration_s:
            while number < elapsed * load.sends_per_s:
                nursery.start_soon(send, number)
                number += 1
            await trio.sleep(0.5 / load.sends_per_s)
    return latencies, failed, time.perf_counter() - began


async def _idle_cpu(run: _Run) -> float:
    """Return the processors that three brokers use together without any request."""
    run.tell(f"idle for {run.load.idle_s:.0f} s")
    pids = [node.pid for node in run.cluster.brokers.values()]
    before = sum(map(cpu_s, pids))
    began = time.perf_counter()
    await trio.sleep(run.load.idle_s)
    return (sum(map(cpu_s, pids)) - before) / (time.perf_counter() - began)


def rss_mib(pid: int | None) -> float:
    """Return the resident memory of a process, pages of mapped files included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def _restart(run: _Run) -> tuple[float, float]:
    """Stop all brokers, start them; return seconds to a leader, and from there to all topics."""
    run.tell("stopping all brokers and starting them again")
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
    with trio.move_on_after(LISTED_TIMEOUT_S):
        while True:
            answer = await ask(
                cluster.namesrv_address,
                RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
                timeout_s=TIMEOUT_S,
            )
            if wanted <= set(TopicList.decode(answer.body).topic_list):
                return leader_s, time.perf_counter() - began - leader_s
            await trio.sleep(0.1)
    raise CliError("the NameServer does not list the topics after the start")


def _int(status: Any, name: str) -> int:
    value = status.get(name, 0)
    return value if isinstance(value, int) else 0
