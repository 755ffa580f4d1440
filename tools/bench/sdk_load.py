"""``python -m tools.bench.sdk_load``: this project's SDK as a load, see `loads`."""

from __future__ import annotations

import sys
import time

import msgspec
import trio

from dledger.cli.bench_load import Tally, bounds_of, fill, read, send
from dledger.cli.commands import open_client
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.output import CliError
from tools.bench.figures import rank
from tools.bench.loads import Result

PULL_MESSAGES = 1_000
"""What NATS' Fetch and RocketMQ's pull are asked for too."""


async def window(tally: Tally) -> None:
    """Print the lines of the measured seconds, and their result."""
    await trio.sleep(max(0.0, tally.begin_s - time.perf_counter()))
    print("begin", flush=True)
    await trio.sleep(max(0.0, tally.end_s - time.perf_counter()))
    print("end", flush=True)
    print("result", msgspec.json.encode(result_of(tally)).decode(), flush=True)


def result_of(tally: Tally) -> Result:
    """Return what was measured in the window."""
    p50, p99, p999 = (round(1000 * rank(tally.latencies_s, part), 4) for part in (0.5, 0.99, 0.999))
    failed = sum(tally.failures.values())
    return Result(tally.messages, failed, tally.end_s - tally.begin_s, p50, p99, p999)


class Reports:
    """Prints acknowledgements in wall time, at most one a millisecond."""

    def __init__(self) -> None:
        self._wall_s = time.time() - time.perf_counter()
        self._reported_ms = 0

    def __call__(self, began_s: float, ended_s: float) -> None:
        began_ms, ended_ms = (int(1000 * (at + self._wall_s)) for at in (began_s, ended_s))
        if ended_ms > self._reported_ms:
            self._reported_ms = ended_ms
            print("ack", began_ms, ended_ms, flush=True)


async def read_again(
    consumer: PullConsumer, bounds: list[tuple[MessageQueue, int, int]], tally: Tally
) -> None:
    """Read these queues from their begin to their end, again and again."""
    while True:
        for queue, begin, end in bounds:
            await read(consumer, queue, begin, end, tally, PULL_MESSAGES)


async def main(arguments: list[str]) -> None:
    mode, address, topic = arguments[:3]
    outstanding, batch, size = map(int, arguments[3:6])
    warm_s, seconds, backlog = float(arguments[6]), float(arguments[7]), int(arguments[8])
    async with open_client([address]) as client, Producer(client, "peers") as producer:
        await until_served(producer, topic, bytes(size))
        if mode == "drain":
            await fill(client, topic, size, backlog)
        begin_s = time.perf_counter() + warm_s
        tally = Tally(begin_s, begin_s + seconds, Reports() if mode == "kill" else None)
        if mode == "drain":
            await drain(client, topic, outstanding, backlog, tally)
            return
        async with trio.open_nursery() as nursery:
            for _ in range(outstanding):
                nursery.start_soon(send, producer, topic, size, batch, tally)
            await window(tally)
            nursery.cancel_scope.cancel()


async def until_served(producer: Producer, topic: str, body: bytes) -> None:
    for attempt in range(100):
        try:
            await producer.send(Message(topic, body))
        except MQError:
            if attempt == 99:
                raise
            await trio.sleep(0.3)
        else:
            return


async def drain(
    client: ClientInstance, topic: str, readers: int, backlog: int, tally: Tally
) -> None:
    async with PullConsumer(client, "peers") as consumer:
        bounds = await bounds_of(consumer, topic)
        found = sum(end - begin for _, begin, end in bounds)
        if found < backlog:
            raise CliError(f"{found} messages of {backlog}")
        async with trio.open_nursery() as nursery:
            for reader in range(readers):
                if bounds[reader::readers]:
                    nursery.start_soon(read_again, consumer, bounds[reader::readers], tally)
            await window(tally)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
