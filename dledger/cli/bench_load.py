"""``dledger bench produce|consume``: load through the SDK, measured where a user stands;
``dledger bench store``: one log with records, CRC and queue units, beside a raw write.

The log and the raw write have the same number of bytes into preallocated files of one size and
flush after the same number of bytes, in turns, so that both meet the same disk.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import trio

from dledger import aio
from dledger.cli.ask_cluster import open_client
from dledger.cli.local_cluster import local_cluster
from dledger.cli.topic_command import create_topic
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.derive import derive
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    RecordBatch,
    Run,
    seal_entry,
)
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import MQError
from dledger.commitlog.record import encode_record, pack_host
from dledger.commitlog.store_paths import StorePaths
from dledger.output import CliError

WARM_UP_S = 1.0
"""Connections, routes and caches; sends of this time are not counted."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

FILL_BATCH = 200
FILL_INFLIGHT = 8
PULL_MESSAGES = 4_000
FAILOVER_TOPIC = "bench-failover"
FAILOVER_LOAD_S = 3.0
"""Load before the kill, and after another one leads."""

CONSUME_PASSES = 3
"""A backlog is read in a moment; the same one is read again to measure longer."""


class ProduceBench(msgspec.Struct, kw_only=True):
    """What was measured. A failed send is in none of the rates and times. MB: millions of bytes.

    Processor time is that of a message, in microseconds: of all brokers of a temporary cluster, 0
    with another one, and of this process.
    """

    messages: int
    failed: int
    not_stored: int
    unknown: int
    seconds: float
    messages_per_s: float
    mb_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    brokers_cpu_us: float
    client_cpu_us: float
    size: int
    inflight: int
    batch: int
    queues: int


class ConsumeBench(msgspec.Struct, kw_only=True):
    """What was measured. Times are those of one pull. MB: millions of body bytes."""

    messages: int
    failed: int
    seconds: float
    messages_per_s: float
    mb_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    pulls: int
    size: int
    consumers: int
    queues: int


@dataclass(frozen=True, slots=True)
class Target:
    """An existing cluster, or where and how a temporary one of three brokers is made."""

    namesrvs: list[str] | None = None
    folder: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProduceLoad:
    """What is sent: *inflight* calls outstanding, each of one message or one batch."""

    topic: str
    size: int = 256
    inflight: int = 64
    batch: int = 1
    duration_s: float = 10.0
    queues: int = 4
    idempotent: bool = True
    asyncio: bool = False


@dataclass(slots=True)
class _Tally:
    """Numbers of the sends that ended inside the window."""

    begin: float
    end: float
    messages: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    brokers_cpu_s: float = 0.0
    client_cpu_s: float = 0.0

    def stored(self, began: float, ended: float, messages: int) -> None:
        if self.begin <= ended <= self.end:
            self.messages += messages
            self.latencies_s.append(ended - began)

    def failed(self, outcome: str, messages: int) -> None:
        self.failures[outcome] = self.failures.get(outcome, 0) + messages


def cpu_s(pid: int | None) -> float:
    """Return the processor seconds that a process has used, in the kernel too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@asynccontextmanager
async def cluster_for_bench(
    target: Target, tell: Callable[[str], None]
) -> AsyncIterator[tuple[list[str], list[int]]]:
    """Give the NameServers to use: those named, or a temporary cluster's of three brokers.

    Also the processes of its brokers; none when it is not temporary.
    """
    namesrvs = target.namesrvs
    if namesrvs is not None:
        yield namesrvs, []
        return
    with tempfile.TemporaryDirectory(prefix="dledger-bench-", dir=target.folder) as folder:
        async with local_cluster(
            Path(folder),
            settings={"store.mapped_file_size_commit_log": 256 << 20, **target.settings},
            progress=tell,
        ) as cluster:
            pids = [node.pid for node in cluster.brokers.values() if node.pid is not None]
            yield [cluster.namesrv_address], pids


async def bench_failover(inflight: int, tell: Callable[[str], None]) -> float:
    """Kill the leader of a temporary cluster and return the time without acknowledgements, ms.

    It ends with the first acknowledgement of a send that was begun after SIGKILL.

    Args:
        inflight: Sends outstanding all the time.

    Raises:
        CliError: The cluster did not start, or no send was acknowledged after the kill.
    """
    acknowledged: list[tuple[float, float]] = []

    async def send_on(producer: Producer) -> None:
        while True:
            began_s = trio.current_time()
            try:
                await producer.send(Message(FAILOVER_TOPIC, bytes(256)))
            except MQError:
                await trio.sleep(0.01)  # the outcome of this one is not what is measured
            else:
                acknowledged.append((began_s, trio.current_time()))

    with tempfile.TemporaryDirectory(prefix="dledger-bench-") as folder:
        async with local_cluster(
            Path(folder),
            settings={"store.mapped_file_size_commit_log": 64 << 20},
            progress=tell,
        ) as cluster:
            namesrvs = [cluster.namesrv_address]
            await create_topic(namesrvs, FAILOVER_TOPIC, queues=4)
            async with (
                open_client(namesrvs) as client,
                Producer(client, "bench-failover") as producer,
                trio.open_nursery() as nursery,
            ):
                for _ in range(inflight):
                    nursery.start_soon(send_on, producer)
                await trio.sleep(FAILOVER_LOAD_S)
                leader = await cluster.wait_leader()
                tell(f"SIGKILL to {leader}, the leader")
                killed_s = trio.current_time()
                await cluster.kill(leader)
                await cluster.wait_leader(other_than=leader)
                await trio.sleep(FAILOVER_LOAD_S)
                nursery.cancel_scope.cancel()
    after = [ended_s for began_s, ended_s in acknowledged if began_s >= killed_s]
    if not after:
        raise CliError("no send was acknowledged after the leader was killed")
    return 1000 * (min(after) - killed_s)


async def bench_produce(
    target: Target, load: ProduceLoad, tell: Callable[[str], None]
) -> ProduceBench:
    """Send for a while and return what was measured.

    Raises:
        CliError: The cluster cannot be reached, or not one send succeeded.
    """
    async with cluster_for_bench(target, tell) as (addresses, pids):
        await create_topic(addresses, load.topic, queues=load.queues)
        config = ProducerConfig(idempotent=load.idempotent)
        if load.asyncio:
            tell(f"{load.inflight} outstanding sends of {load.batch} x {load.size} bytes, asyncio")
            tally = await trio.to_thread.run_sync(
                asyncio.run, _produce_in_asyncio(addresses, pids, load, config)
            )
            return _produced(load, tally)
        async with open_client(addresses) as client, Producer(client, "bench", config) as producer:
            begin = time.perf_counter() + WARM_UP_S
            tally = _Tally(begin, begin + load.duration_s)
            tell(f"{load.inflight} outstanding sends of {load.batch} x {load.size} bytes")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_measure_cpu, pids, tally)
                for _ in range(load.inflight):
                    nursery.start_soon(_produce, producer, load, tally)
    return _produced(load, tally)


async def _measure_cpu(
    pids: list[int], tally: _Tally, sleep: Callable[[float], Awaitable[None]] = trio.sleep
) -> None:
    """Measure the processor time of the window."""

    def used() -> tuple[float, float]:
        return sum(map(cpu_s, pids)), time.process_time()

    await sleep(max(0.0, tally.begin - time.perf_counter()))
    brokers_s, client_s = used()
    await sleep(max(0.0, tally.end - time.perf_counter()))
    brokers_end_s, client_end_s = used()
    tally.brokers_cpu_s, tally.client_cpu_s = brokers_end_s - brokers_s, client_end_s - client_s


async def _produce_in_asyncio(
    addresses: list[str], pids: list[int], load: ProduceLoad, config: ProducerConfig
) -> _Tally:
    """Send as `bench_produce` does, from tasks of asyncio."""
    async with (
        aio.connect(addresses) as client,
        aio.Producer(client, "bench", config) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        begin = time.perf_counter() + WARM_UP_S
        tally = _Tally(begin, begin + load.duration_s)
        tasks.create_task(_measure_cpu(pids, tally, asyncio.sleep))
        for _ in range(load.inflight):
            tasks.create_task(_produce(producer, load, tally, asyncio.sleep))
    return tally


async def _produce(
    producer: Producer | aio.Producer,
    load: ProduceLoad,
    tally: _Tally,
    sleep: Callable[[float], Awaitable[None]] = trio.sleep,
) -> None:
    body = bytes(range(256)) * (load.size // 256 + 1)
    body = body[: load.size]
    clock = time.perf_counter
    end = tally.end
    while True:
        began = clock()
        if began >= end:
            return
        try:
            if load.batch == 1:
                await producer.send(Message(load.topic, body))
            else:
                await producer.send_batch([Message(load.topic, body) for _ in range(load.batch)])
        except MQError as error:
            tally.failed(error.outcome, load.batch)
            await sleep(0.01)
            continue
        tally.stored(began, clock(), load.batch)


def _produced(load: ProduceLoad, tally: _Tally) -> ProduceBench:
    if not tally.latencies_s:
        raise CliError(
            f"no send succeeded; failed: {tally.failures}", next_step="see dledger cluster health"
        )
    p50, p99, p999, worst = percentiles_ms(tally.latencies_s)
    return ProduceBench(
        messages=tally.messages,
        failed=sum(tally.failures.values()),
        not_stored=tally.failures.get("not_stored", 0),
        unknown=tally.failures.get("unknown", 0),
        seconds=load.duration_s,
        messages_per_s=tally.messages / load.duration_s,
        mb_per_s=tally.messages * load.size / load.duration_s / 1e6,
        p50_ms=p50,
        p99_ms=p99,
        p999_ms=p999,
        max_ms=worst,
        brokers_cpu_us=tally.brokers_cpu_s * 1e6 / tally.messages,
        client_cpu_us=tally.client_cpu_s * 1e6 / tally.messages,
        size=load.size,
        inflight=load.inflight,
        batch=load.batch,
        queues=load.queues,
    )


def percentiles_ms(latencies_s: list[float]) -> tuple[float, float, float, float]:
    """Return p50, p99, p99.9 and the largest of *latencies_s*, in milliseconds."""
    values = np.percentile(np.array(latencies_s), [50, 99, 99.9, 100]) * 1000
    p50, p99, p999, worst = (round(value, 3) for value in values.tolist())
    return p50, p99, p999, worst


@dataclass(frozen=True, slots=True)
class ConsumeLoad:
    """What is read: a backlog that is written first, by one consumer task per queue."""

    topic: str
    size: int = 256
    messages: int = 400_000
    queues: int = 4


async def bench_consume(
    target: Target, load: ConsumeLoad, tell: Callable[[str], None]
) -> ConsumeBench:
    """Write a backlog, read it, and return what reading was like.

    Raises:
        CliError: The cluster cannot be reached, or messages are missing.
    """
    async with cluster_for_bench(target, tell) as (addresses, _):
        await create_topic(addresses, load.topic, queues=load.queues)
        async with open_client(addresses) as client:
            tell(f"writing {load.messages:,} messages of {load.size} bytes")
            await fill(client, load)
            tell("reading them")
            return await _consume(client, load)


async def fill(client: ClientInstance, load: ConsumeLoad) -> None:
    """Write a backlog, in batches; returns when all of it is stored."""
    body = bytes(load.size)
    left = load.messages

    async def send(producer: Producer) -> None:
        nonlocal left
        while left > 0:
            count = min(FILL_BATCH, left)
            left -= count
            try:
                await producer.send_batch([Message(load.topic, body) for _ in range(count)])
            except MQError:
                left += count
                await trio.sleep(0.05)

    async with Producer(client, "bench") as producer, trio.open_nursery() as nursery:
        for _ in range(FILL_INFLIGHT):
            nursery.start_soon(send, producer)


async def _consume(client: ClientInstance, load: ConsumeLoad) -> ConsumeBench:
    read = failed = 0
    latencies_s: list[float] = []

    async def follow(consumer: PullConsumer, queue: MessageQueue, begin: int, end: int) -> None:
        nonlocal read, failed
        offset = begin
        while offset < end:
            began = time.perf_counter()
            try:
                pulled = await consumer.pull(queue, offset, max_messages=PULL_MESSAGES)
            except MQError:
                failed += 1
                await trio.sleep(0.01)
                continue
            latencies_s.append(time.perf_counter() - began)
            for message in pulled.messages:
                # What a user does with each: look at the body.
                if len(message.body_view) != load.size:
                    raise CliError(f"a body of {len(message.body_view)} bytes came back")
            read += len(pulled.messages)
            offset = pulled.next_begin_offset

    async with PullConsumer(client, "bench") as consumer:
        queues = await consumer.fetch_message_queues(load.topic)
        bounds = [
            (queue, await consumer.min_offset(queue), await consumer.max_offset(queue))
            for queue in queues
        ]
        began = time.perf_counter()
        for _ in range(CONSUME_PASSES):
            async with trio.open_nursery() as nursery:
                for queue, begin, end in bounds:
                    nursery.start_soon(follow, consumer, queue, begin, end)
        took = time.perf_counter() - began
    if read < load.messages * CONSUME_PASSES:
        raise CliError(f"{read} messages read of {load.messages * CONSUME_PASSES}")
    p50, p99, p999, worst = percentiles_ms(latencies_s)
    return ConsumeBench(
        messages=read,
        failed=failed,
        seconds=took,
        messages_per_s=read / took,
        mb_per_s=read * load.size / took / 1e6,
        p50_ms=p50,
        p99_ms=p99,
        p999_ms=p999,
        max_ms=worst,
        pulls=len(latencies_s),
        size=load.size,
        consumers=len(bounds),
        queues=len(bounds),
    )


SIZE_TABLE_BYTES = 4
ROUNDS = 4
"""Turns of each side: one slow moment of the disk does not decide."""

MIB = 1 << 20


class StoreBench(msgspec.Struct, kw_only=True):
    """What was measured. MB are millions of bytes."""

    records: int
    entries: int
    bytes: int
    body_bytes: int
    log_s: float
    raw_s: float
    mb_per_s: float
    raw_mb_per_s: float
    ratio: float
    records_per_s: float


@dataclass(slots=True)
class StoreLoad:
    """What one run writes."""

    body_bytes: int = 1_024
    entry_bytes: int = MIB
    total_bytes: int = 512 * MIB
    flush_bytes: int = 64 * MIB
    segment_bytes: int = 256 * MIB


def bench_store(folder: Path, load: StoreLoad) -> StoreBench:
    """Measure in *folder*, which is removed afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _Bench(folder, load).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Bench:
    def __init__(self, folder: Path, load: StoreLoad) -> None:
        self._load = load
        self._disk = OsDisk()
        root = str(folder / "store")
        self._disk.make_dir(root)
        self._log = EntryLog.open(self._disk, root, segment_bytes=load.segment_bytes, trusted=None)
        self._queues = ConsumeQueueStore(self._disk, StorePaths(root).consumequeue)
        self._raw_folder = str(folder / "raw")
        record = encode_record(
            topic="bench",
            queue_id=0,
            body=bytes(load.body_bytes),
            properties=b"UNIQ_KEY\x01" + b"A" * 32 + b"\x02",
        )
        count = max((load.entry_bytes - ENTRY_HEADER_BYTES) // (len(record) + SIZE_TABLE_BYTES), 1)
        self._batch = RecordBatch(
            record * count, np.full(count, len(record), np.uint32), (Run("bench", 0, count),)
        )
        self._frame_bytes = ENTRY_HEADER_BYTES + count * (len(record) + SIZE_TABLE_BYTES)
        self._offset = 0

    def run(self) -> StoreBench:
        load = self._load
        per_round = max(load.total_bytes // ROUNDS // self._frame_bytes, 1)
        log_s = raw_s = 0.0
        payload = bytes(memoryview(self._batch.records)) + bytes(
            self._frame_bytes - len(memoryview(self._batch.records))
        )
        for number in range(ROUNDS):
            log_s += self._log_round(per_round)
            raw_s += self._raw_round(number, payload, per_round)
        self._queues.close()
        self._log.close()
        entries = per_round * ROUNDS
        written = entries * self._frame_bytes
        records = entries * len(self._batch.sizes)
        return StoreBench(
            records=records,
            entries=entries,
            bytes=written,
            body_bytes=load.body_bytes,
            log_s=log_s,
            raw_s=raw_s,
            mb_per_s=written / log_s / 1e6,
            raw_mb_per_s=written / raw_s / 1e6,
            ratio=raw_s / log_s,
            records_per_s=records / log_s,
        )

    def _log_round(self, entries: int) -> float:
        log, queue = self._log, self._queues.queue("bench", 0)
        host = pack_host("127.0.0.1", 10911)
        per_flush = max(self._load.flush_bytes // self._frame_bytes, 1)
        # A broker does this in a worker before it needs the space; so does the raw side.
        log.allocator.reserve_next()
        began = time.perf_counter()
        for number in range(entries):
            frame = seal_entry(
                [self._batch],
                [self._offset],
                index=log.last_index + 1,
                term=1,
                position=log.place(self._frame_bytes),
                prev_chain=log.last_chain,
                store_time_ms=1,
                store_host=host,
            )
            header = log.append(frame, sealed_here=True)
            derived = derive(frame, header)
            queue.put(self._offset, derived.units)
            self._offset += header.record_count
            if (number + 1) % per_flush == 0:
                log.flush()
            if log.allocator.needs_reserve:
                log.allocator.reserve_next()
        log.flush()
        self._queues.flush()
        return time.perf_counter() - began

    def _raw_round(self, number: int, payload: bytes, entries: int) -> float:
        file = self._disk.create(
            f"{self._raw_folder}/{number:020}", entries * len(payload), reserve=True
        )
        file.flush()
        per_flush = max(self._load.flush_bytes // len(payload), 1)
        began = time.perf_counter()
        for place in range(entries):
            file.write_at(place * len(payload), payload)
            if (place + 1) % per_flush == 0:
                file.flush()
        file.flush()
        took = time.perf_counter() - began
        file.close()
        return took
