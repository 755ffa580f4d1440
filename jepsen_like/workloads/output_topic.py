"""The topic that a part of a workload has for itself: made before its clients begin, read last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.workloads.recorder import Recorder

ASK_AGAIN_S: Final = 0.5
"""After so long a client asks again where there was no leader, or not yet the topic."""


async def make_topic(
    clients: Recorder, instance: ClientInstance, topic: str, queue_nums: int
) -> None:
    """Make a topic; return when clients know its queues. Cancellation: It may have been made."""
    while True:
        try:
            await Admin(instance).create_topic(topic, queue_nums=queue_nums)
            if (await instance.route(topic, fresh=True)).publish_queues:
                return
        except MQError:
            pass  # the cluster is still finding its leader
        await clients.sleep(ASK_AGAIN_S)


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
