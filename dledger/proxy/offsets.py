"""PullMessage, UpdateOffset, GetOffset and QueryOffset: consumption by offset."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import CorruptRecordError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import TIME_MS_MAX, group_of, milliseconds, received_message, topic_of
from dledger.proxy.receives import BODIES_BYTES_MAX, LONG_POLLING_MS_MAX, batch_size_of, wanted_by
from dledger.proxy.routes import BrokerConfigs
from dledger.proxy.sends import PRODUCER_GROUP
from dledger.proxy.status import OK, RefusedError

PULL_MESSAGES_MAX: Final = 1_024
"""Of one call."""

PULL_MESSAGES: Final = 32
"""Of one call that names no number."""


def queue_of(queue: pb.MessageQueue) -> MessageQueue:
    """Return the queue that a client names. Raises RefusedError: it names none."""
    if not queue.topic.name or not queue.broker.name or queue.id < 0:
        raise RefusedError(pb.BAD_REQUEST, "the queue has no topic, broker or id")
    return MessageQueue(topic_of(queue.topic), queue.broker.name, queue.id)


def hold_s_of(length: Duration) -> float:
    """Return how long a pull waits for messages that asks for *length*."""
    return max(0, min(milliseconds(length), LONG_POLLING_MS_MAX)) / 1000


class Offsets:
    """Pulls and offsets for all consumers of a proxy."""

    def __init__(self, instance: ClientInstance, configs: BrokerConfigs) -> None:
        """Ask over the connections of *instance*."""
        self._instance = instance
        self._configs = configs

    async def pull(
        self, request: pb.PullMessageRequest, caller: Caller
    ) -> list[pb.PullMessageResponse]:
        """Return the answers of one pull: a status, messages, and where to go on.

        It ends before a message that cannot be read or carried: the pull that begins there has the
        error.

        Raises:
            CorruptRecordError: The first message cannot be read; those behind it can be pulled.
            RefusedError, ClientError: As `PullConsumer.pull`.
        """
        queue, group = queue_of(request.message_queue), group_of(request.group)
        batch_size = batch_size_of(request.batch_size, PULL_MESSAGES, PULL_MESSAGES_MAX)
        tags = wanted_by(request.filter_expression)
        if request.offset < 0:
            raise RefusedError(pb.ILLEGAL_OFFSET, f"an offset of {request.offset}")
        await self._configs.find_broker(queue.topic, queue.broker_name, pb.BAD_REQUEST)
        reader = PullConsumer(self._instance, group)
        found = await reader.pull(
            queue,
            request.offset,
            max_messages=batch_size,
            tags=tags,
            timeout_s=caller.timeout_s(hold_s_of(request.long_polling_timeout)),
        )
        status = (
            OK if found.messages else pb.Status(code=pb.MESSAGE_NOT_FOUND, message="no message")
        )
        answers = [pb.PullMessageResponse(status=status)]
        topic, next_offset = request.message_queue.topic, found.next_begin_offset
        bodies_bytes = 0
        for message in found.messages:
            try:
                wire = received_message(message, topic)
            except CorruptRecordError:
                if len(answers) == 1:
                    raise
                next_offset = message.queue_offset
                break
            bodies_bytes += len(wire.body)
            if bodies_bytes > BODIES_BYTES_MAX and len(answers) > 1:
                next_offset = message.queue_offset
                break
            answers.append(pb.PullMessageResponse(message=wire))
        answers.append(pb.PullMessageResponse(next_offset=next_offset))
        return answers

    async def update(
        self, request: pb.UpdateOffsetRequest, caller: Caller
    ) -> pb.UpdateOffsetResponse:
        """Store how far a group is.

        Raises:
            RefusedError: The queue has no such place; nothing is stored.
            ClientError: As `PullConsumer.commit_offset`.
        """
        queue, group = queue_of(request.message_queue), group_of(request.group)
        if request.offset < 0:
            raise RefusedError(pb.ILLEGAL_OFFSET, f"an offset of {request.offset}")
        await self._find_queue(queue)
        reader = PullConsumer(self._instance, group)
        end = await reader.max_offset(queue)
        if request.offset > end:
            raise RefusedError(
                pb.ILLEGAL_OFFSET, f"offset {request.offset} is behind the end {end}"
            )
        await reader.commit_offset(queue, request.offset, timeout_s=caller.timeout_s())
        return pb.UpdateOffsetResponse(status=OK)

    async def get(self, request: pb.GetOffsetRequest, caller: Caller) -> pb.GetOffsetResponse:
        """Return how far a group is.

        Raises:
            RefusedError: It has committed nothing.
            ClientError: As `PullConsumer.committed_offset`.
        """
        queue, group = queue_of(request.message_queue), group_of(request.group)
        await self._configs.find_broker(queue.topic, queue.broker_name, pb.BAD_REQUEST)
        offset = await PullConsumer(self._instance, group).committed_offset(queue)
        if offset is None:
            raise RefusedError(pb.OFFSET_NOT_FOUND, "the group has committed nothing")
        return pb.GetOffsetResponse(status=OK, offset=offset)

    async def query(self, request: pb.QueryOffsetRequest, caller: Caller) -> pb.QueryOffsetResponse:
        """Return the first offset of a queue, the one behind its last, or that of a time.

        Raises:
            RefusedError: There is no such queue or policy, or the time is missing.
            ClientError: As `PullConsumer.min_offset`.
        """
        queue, policy = queue_of(request.message_queue), request.query_offset_policy
        if policy not in (pb.BEGINNING, pb.END, pb.TIMESTAMP):
            raise RefusedError(pb.BAD_REQUEST, f"no policy has the number {policy}")
        if policy == pb.TIMESTAMP and not request.HasField("timestamp"):
            raise RefusedError(pb.BAD_REQUEST, "an offset by time needs a time")
        await self._find_queue(queue)
        reader = PullConsumer(self._instance, PRODUCER_GROUP)
        if policy == pb.BEGINNING:
            offset = await reader.min_offset(queue)
        elif policy == pb.END:
            offset = await reader.max_offset(queue)
        else:
            at_ms = max(0, min(milliseconds(request.timestamp), TIME_MS_MAX))
            offset = await reader.search_offset(queue, at_ms)
        return pb.QueryOffsetResponse(status=OK, offset=offset)

    async def _find_queue(self, queue: MessageQueue) -> None:
        """Let a queue pass that its topic has.

        Raises:
            RefusedError: It has none of that number.
            NoRouteError, NoNameServerError: There is no route, or none can be asked for.
        """
        await self._configs.find_broker(queue.topic, queue.broker_name, pb.BAD_REQUEST)
        for fresh in (False, True):
            route = await self._instance.route(queue.topic, fresh=fresh)
            if queue in route.subscribe_queues or queue in route.publish_queues:
                return
        raise RefusedError(
            pb.BAD_REQUEST, f"{queue.topic} has no queue {queue.queue_id} at {queue.broker_name}"
        )
