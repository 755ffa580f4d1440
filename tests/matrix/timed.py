"""Rows about time: delays, timers, recalls, retention."""

import time
from collections.abc import AsyncIterator

import trio

from dledger.client.core.message import Message
from tests.matrix.ground import LOOK_S, Ground, retried
from tests.matrix.row import Round, row

RETENTION_MS = 2_000


@row("delayed messages")
async def delayed_messages(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("later")
    tail = await ground.tail("later")

    async def play(number: int) -> None:
        producer, now_ms = ground.producer, int(time.time() * 1000)
        by_level, at_time, taken_back = (
            b"%s %d" % (word, number) for word in (b"level", b"time", b"back")
        )
        due_ms = {by_level: now_ms + 1_000, at_time: now_ms + 1_500}
        await producer.send(Message("later", by_level, delay_level=1))
        await producer.send(Message("later", at_time, deliver_at_ms=due_ms[at_time]))
        waiting = await producer.send(Message("later", taken_back, deliver_at_ms=now_ms + 60_000))
        await retried(lambda: producer.recall(waiting))
        for message in await tail.until(due_ms):
            assert message.store_timestamp_ms >= due_ms[message.body_bytes]

    yield play


@row("retention")
async def retention(ground: Ground) -> AsyncIterator[Round]:
    (queue,) = await ground.topic("short", 1, {"retention.ms": str(RETENTION_MS)})

    async def play(number: int) -> None:
        bodies = [b"short %d-%d" % (number, each) for each in range(2)]
        offsets = [
            (await ground.producer.send(Message("short", body))).queue_offset for body in bodies
        ]
        assert offsets[1] == offsets[0] + 1
        while (first := await retried(lambda: ground.consumer.min_offset(queue))) <= offsets[1]:
            await trio.sleep(LOOK_S)
        assert first == offsets[1] + 1  # not more than is old enough
        assert await retried(lambda: ground.consumer.max_offset(queue)) == first

    yield play
