"""Reads a queue from its first offset to its end, when nothing is sent there any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue

MESSAGES: Final = 32
"""Of one pull: as many as a broker gives at most unless it is set otherwise."""


async def read_queue(
    consumer: PullConsumer, queue: MessageQueue, found: Callable[[MessageExt], object]
) -> int:
    """Call *found* with each message in order; return the queue's first offset.

    Raises:
        ClientError: A request was refused, or a pull got no further.
    Cancellation: *found* has been called with some.
    """
    begin, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
    offset = begin
    while offset < end:
        result = await consumer.pull(queue, offset, max_messages=MESSAGES, timeout_s=0)
        if result.next_begin_offset <= offset:
            raise ClientError(f"{queue}: the drain stands at {offset} of {end}")
        for message in result.messages:
            found(message)
        offset = result.next_begin_offset
    return begin
