"""Our own SDK as an application has it, with default settings.

A producer, and a push consumer each of a plain and of an ordered topic. Each event is a line of
JSON. A line that comes in ends the sending, the end of standard input all.

Arguments: NameServers, what the names of topics and groups begin with, milliseconds between sends.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import trio

from dledger.client.connect import connect
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from tests.fail_over.figures import ORDERED, STREAMS


def put(kind: str, key: str, reason: str = "") -> None:
    """Write one event."""
    at_ms = time.monotonic_ns() // 1_000_000
    print(json.dumps({"kind": kind, "key": key, "at_ms": at_ms, "reason": reason}), flush=True)


async def report(messages: Sequence[DeliveredMessage], _context: ConsumeContext) -> None:
    """Report what comes."""
    for message in messages:
        put("consumed", message.body_bytes.decode())


async def send(producer: Producer, topic: str, stream: str, period_s: float) -> None:
    """Send one message after the other."""
    (first, *_) = await producer.publish_queues(topic)
    number = 0
    while True:
        key = f"{stream}-{number}"
        message = Message(topic, key.encode())
        try:
            if stream == ORDERED:
                await producer.send_to(first, message)
            else:
                await producer.send(message)
            put("sent", key)
        except MQError as error:
            put("failed", key, f"{type(error).__name__}: {error}")
        number += 1
        await trio.sleep(period_s)


async def main(namesrv: str, prefix: str, period_ms: str) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect([namesrv]))
        config = PushConfig(consume_from=FROM_FIRST)
        topics = {stream: f"{prefix}-{stream}" for stream in STREAMS}
        for stream, topic in topics.items():
            consumer = PushConsumer(
                client, topic, report, {topic: "*"}, config, orderly=stream == ORDERED
            )
            await stack.enter_async_context(consumer)
        producer = await stack.enter_async_context(Producer(client, f"{prefix}-producer"))
        async with trio.open_nursery() as nursery:
            for stream, topic in topics.items():
                nursery.start_soon(send, producer, topic, stream, int(period_ms) / 1000)
            await trio.to_thread.run_sync(sys.stdin.readline)
            nursery.cancel_scope.cancel()
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    namesrv, prefix, period_ms = sys.argv[1:]
    trio.run(main, namesrv, prefix, period_ms)
