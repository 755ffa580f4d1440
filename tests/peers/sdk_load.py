"""``python -m tests.peers.sdk_load``: this project's SDK as a load, see `loads`."""

from __future__ import annotations

import sys
import time

import msgspec
import trio

from dledger.cli.ask_cluster import open_client
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.output import CliError
from tests.peers.loads import Result

FILL_BATCH = 200
FILLERS = 8
PULL_MESSAGES = 1_000
"""What NATS' Fetch and RocketMQ's pull are asked for too."""


class Tally:
    """Counts what ends inside the measured seconds, and prints the lines of a load."""

    def __init__(self) -> None:
        self.measuring = False
        self.messages = 0
        self.failed = 0
        self.times_s: list[float] = []
        self._reported_ms = 0

    def stored(self, began_s: float, count: int) -> None:
        if self.measuring:
            self.messages += count
            self.times_s.append(time.perf_counter() - began_s)

    def not_stored(self, count: int) -> None:
        if self.measuring:
            self.failed += count

    def acknowledged(self, began_ms: int, ended_ms: int) -> None:
        if ended_ms > self._reported_ms:
            self._reported_ms = ended_ms
            print("ack", began_ms, ended_ms, flush=True)

    async def window(self, warm_s: float, seconds: float) -> None:
        await trio.sleep(warm_s)
        began_s = time.perf_counter()
        self.measuring = True
        print("begin", flush=True)
        await trio.sleep(seconds)
        self.measuring = False
        took_s = time.perf_counter() - began_s
        print("end", flush=True)
        print("result", msgspec.json.encode(self.result(took_s)).decode(), flush=True)

    def result(self, took_s: float) -> Result:
        times = sorted(self.times_s)
        ranks = [times[int(len(times) * part)] if times else 0.0 for part in (0.5, 0.99, 0.999)]
        p50, p99, p999 = (round(1000 * value, 4) for value in ranks)
        return Result(self.messages, self.failed, took_s, p50, p99, p999)


async def send(producer: Producer, topic: str, body: bytes, batch: int, tally: Tally) -> None:
    """Send one after the other, without end."""
    while True:
        began_s = time.perf_counter()
        try:
            if batch == 1:
                await producer.send(Message(topic, body))
            else:
                await producer.send_batch([Message(topic, body) for _ in range(batch)])
        except MQError:
            tally.not_stored(batch)
            await trio.sleep(0.002)
        else:
            tally.stored(began_s, batch)


async def send_and_report(producer: Producer, topic: str, body: bytes, tally: Tally) -> None:
    """Send one after the other, without end; print acknowledgements."""
    while True:
        began_ms = time.time_ns() // 1_000_000
        try:
            await producer.send(Message(topic, body))
        except MQError:
            await trio.sleep(0.002)
        else:
            tally.acknowledged(began_ms, time.time_ns() // 1_000_000)


async def fill(producer: Producer, topic: str, body: bytes, backlog: int) -> None:
    """Write the backlog; what fails is written again."""
    left = backlog

    async def some() -> None:
        nonlocal left
        while left > 0:
            count = min(FILL_BATCH, left)
            left -= count
            try:
                await producer.send_batch([Message(topic, body) for _ in range(count)])
            except MQError:
                left += count
                await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        for _ in range(FILLERS):
            nursery.start_soon(some)


async def read(consumer: PullConsumer, queues: list[MessageQueue], tally: Tally) -> None:
    """Read these queues from their begin to their end, again and again."""
    while True:
        for queue in queues:
            offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
            while offset < end:
                began_s = time.perf_counter()
                try:
                    pulled = await consumer.pull(queue, offset, max_messages=PULL_MESSAGES)
                except MQError:
                    tally.not_stored(1)
                    await trio.sleep(0.002)
                    continue
                # What a user does with each: look at the body.
                count = sum(1 for message in pulled.messages if len(message.body_view))
                tally.stored(began_s, count)
                offset = pulled.next_begin_offset


async def main(arguments: list[str]) -> None:
    mode, address, topic = arguments[:3]
    outstanding, batch, size = map(int, arguments[3:6])
    warm_s, seconds, backlog = float(arguments[6]), float(arguments[7]), int(arguments[8])
    body = bytes(size)
    tally = Tally()
    async with open_client([address]) as client, Producer(client, "peers") as producer:
        await until_served(producer, topic, body)
        if mode == "drain":
            await fill(producer, topic, body, backlog)
            await drain(client, topic, outstanding, (warm_s, seconds), backlog, tally)
        else:
            async with trio.open_nursery() as nursery:
                for _ in range(outstanding):
                    if mode == "kill":
                        nursery.start_soon(send_and_report, producer, topic, body, tally)
                    else:
                        nursery.start_soon(send, producer, topic, body, batch, tally)
                await tally.window(warm_s, seconds)
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
    client: ClientInstance,
    topic: str,
    readers: int,
    window: tuple[float, float],
    backlog: int,
    tally: Tally,
) -> None:
    async with PullConsumer(client, "peers") as consumer:
        queues = await consumer.fetch_message_queues(topic)
        there = sum(
            [
                await consumer.max_offset(queue) - await consumer.min_offset(queue)
                for queue in queues
            ]
        )
        if there < backlog:
            raise CliError(f"{there} messages of {backlog}")
        async with trio.open_nursery() as nursery:
            for reader in range(readers):
                if queues[reader::readers]:
                    nursery.start_soon(read, consumer, list(queues[reader::readers]), tally)
            await tally.window(*window)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
