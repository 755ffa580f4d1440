"""Sends messages and returns what became of each; sends requests, and recalls scheduled messages.

::

    send ─► checks ─► queue (round robin, selector) ─► record ─► engine: line, request ─► wire
      ▲                                                              │
      └────────────── woken with its own result or error ◄───────────┘

Spec: docs/internals/protocol/remoting.md, section 7.2 (recall).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final

import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.client_state import ManagedScope
from dledger.client.core.errors import (
    AlreadyDeliveredError,
    BackpressureError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    MessageIllegalError,
    NoRouteError,
    RequestFailedError,
    UnknownOutcomeError,
    refusal,
)
from dledger.client.core.hooks import CommunicationMode
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult
from dledger.client.core.retry import error_of_call, time_left_s
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.encoder import SlotEncoder, budget_s
from dledger.client.producer.engine import SendEngine
from dledger.client.producer.lane import Lane
from dledger.client.producer.queue_selection import PublishTopic, PublishTopics
from dledger.client.producer.request_reply import request_reply
from dledger.client.producer.results import (
    BatchSendResult,
    SendFuture,
    SendHooks,
    result_of,
    result_of_one,
)
from dledger.client.trace import TRACE_PRODUCER_GROUP, SendMessageTraceHook, TraceDispatcher
from dledger.commitlog.errors import LocalProtocolError, MQError
from dledger.commitlog.message_id import UniqKeyFactory
from dledger.commitlog.record import pack_host
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import RecallHandle, RecallMessageHeader

MIN_TIMEOUT_S: Final = 0.001
"""What is left of a budget at least: a send whose route came late fails by its own rules."""


async def recall(
    instance: ClientInstance, producer_group: str, handle: str, timeout_s: float
) -> str:
    """Recall the message of *handle*; returns and raises what `Producer.recall` does."""
    try:
        named = RecallHandle.decode(handle)
    except BadRequestError as error:
        raise MessageIllegalError(str(error)) from error
    ext = dict(RecallMessageHeader(named.topic, handle, producer_group).encode())
    what = f"recall of {named.uniq_key} on {named.broker_name}"
    await instance.route(named.topic)  # makes its brokers known
    try:
        answer = await instance.ask_leader(
            named.broker_name,
            RequestCode.RECALL_MESSAGE,
            ext,
            topic=named.topic,
            timeout_s=timeout_s,
            until_known=True,
        )
    except RequestFailedError as error:
        raise error_of_call(what, error) from error
    if answer.code == ResponseCode.SUCCESS:
        return str(answer.ext.get("msgId", named.uniq_key))
    is_late = answer.code == ResponseCode.ILLEGAL_OPERATION
    raise refusal(what, answer, AlreadyDeliveredError if is_late else BrokerRefusedError)


Selector = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]
"""Chooses the queue of an ordered send from the topic's queues."""


class Producer(ManagedScope):
    """Sends messages of one producer group. Open it with ``async with`` inside its instance.

    Leaving the block waits for the sends that are under way; leaving it by an exception or a
    cancellation fails them.

    Attributes:
        group: The producer group.
        counters: See `SendCounters`; those of redirects and route refreshes are the instance's.
        trace: Sends message trace; None: it is not enabled.
    """

    def __init__(
        self, instance: ClientInstance, group: str, config: ProducerConfig | None = None
    ) -> None:
        """Prepare a producer.

        Args:
            instance: Shared; must be open when the producer is opened.
            group: Producer group.
            config: Settings; None: the defaults.
        """
        self.group = group
        self.config = config = config if config is not None else ProducerConfig()
        self._instance = instance
        self._closed = True
        self._topics = PublishTopics(instance, latency_fault_enable=config.latency_fault_enable)
        self._slots = SlotEncoder(
            config,
            instance.clock,
            unique_ids(instance),
            group=group,
            default_topic_queue_nums=instance.config.default_topic_queue_nums,
        )
        hooks = list(config.send_message_hooks)
        self.trace: TraceDispatcher | None = None
        if config.enable_msg_trace:
            self.trace = trace_dispatcher(instance, config.trace_topic)
            hooks.append(SendMessageTraceHook(self.trace, instance.clock))
        self._hooks = SendHooks(
            hooks,
            group=group,
            born_host=instance.config.client_ip,
            leader_of=instance.leaders.address,
            result_of=result_of,
        )
        self._engine = SendEngine(instance, group, config, self._slots, self._topics, self._hooks)
        self.counters = self._engine.sends.counters

    # ------------------------------------------------------------------------------ start and end

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        instance = self._instance
        instance.nursery  # noqa: B018  # raises ClientClosedError when it is not open
        instance.heartbeats.add_producer(self.group)
        try:
            async with self.trace or nullcontext(), trio.open_nursery() as nursery:
                self._engine.open(nursery)
                self._closed = False
                try:
                    yield
                    self._closed = True
                    await self._engine.sends.drain()
                finally:
                    self._closed = True
                    self._engine.close()
                    nursery.cancel_scope.cancel()
        finally:
            await instance.heartbeats.remove_producer(self.group)

    # ------------------------------------------------------------------------------ sending

    async def send(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        selector: Selector | None = None,
        selector_arg: Any = None,
    ) -> SendResult:
        """Send *message* and return when it is stored.

        Args:
            message: Not changed; must not be changed before this returns.
            timeout_s: Whole budget, above 0; default ``config.send_timeout_s``.
            selector: Chooses the queue; the message is then never moved to another one.
            selector_arg: Given to *selector*.
        Returns:
            Where it is stored.
        Raises:
            MessageIllegalError: Refused before sending; not stored.
            NoRouteError, NoNameServerError: Nowhere to send it, or no broker with a leader within
                *timeout_s*; not stored.
            BrokerRefusedError, BrokerUnreachableError: Not stored.
            UnknownOutcomeError: May be stored.
            ClientClosedError: The producer is not open; not stored.
        Cancellation: The message may be stored; other sends in the same request go on.
        """
        queue = None
        if selector is not None:
            topic, timeout_s = await self._topic(message.topic, timeout_s)
            queue = selector(topic.queues, message, selector_arg)
        return await self._send(message, queue, timeout_s)

    async def send_to(
        self,
        queue: MessageQueue,
        message: Message,
        *,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send *message* to *queue* and nowhere else; otherwise as `send`."""
        return await self._send(message, queue, timeout_s)

    async def send_async(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        queue: MessageQueue | None = None,
    ) -> SendFuture:
        """Put *message* on its way and return its future; waits only for a route and a full queue.

        Raises:
            MessageIllegalError, NoRouteError, NoNameServerError, ClientClosedError: Not stored.
        """
        topic = self._topics.known(message.topic)
        if topic is None:
            topic, timeout_s = await self._topic(message.topic, timeout_s)
        queue, lane, pinned = self._choose(topic, queue)
        if not lane.line.has_space:
            timeout_s = await self._wait_for_space(lane, timeout_s)
        mode = CommunicationMode.ASYNC
        return SendFuture(self._engine.enqueue(lane, message, queue, pinned, timeout_s, mode))

    def send_nowait(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        queue: MessageQueue | None = None,
    ) -> SendFuture:
        """Put *message* on its way without waiting for anything.

        Raises:
            BackpressureError: The queue is full; the message was not queued.
            NoRouteError: The topic's route is not known yet: use `send` or `publish_queues` first.
            MessageIllegalError, ClientClosedError: Not stored.
        """
        topic = self._topics.known(message.topic)
        if topic is None:
            raise NoRouteError(f"the route of {message.topic} is not known yet")
        queue, lane, pinned = self._choose(topic, queue)
        if not lane.line.has_space:
            raise BackpressureError(f"{lane.line.waiting_bytes} bytes wait for {lane.broker_name}")
        mode = CommunicationMode.ASYNC
        return SendFuture(self._engine.enqueue(lane, message, queue, pinned, timeout_s, mode))

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> BatchSendResult:
        """Send messages of one topic to one queue; all of them are stored or none.

        Args:
            messages: At least one, same topic, no delay, together at most
                ``config.max_message_bytes``.
            queue: Where to; None: the next one in turn.
            timeout_s: Whole budget.
        Returns:
            One result per message, in their order.
        Raises:
            MessageIllegalError: The batch breaks a rule; nothing was sent.
            ClientError: As `send`, for the whole batch.
        """
        if not messages:
            raise MessageIllegalError("the batch is empty")
        name = messages[0].topic
        topic, timeout_s = await self._topic(name, timeout_s)
        queue, lane, pinned = self._choose(topic, queue)
        as_records = lane.records is not False
        slot = self._slots.batch(messages, topic.name, queue, pinned, timeout_s, as_records)
        if not lane.line.has_space:
            left_s = time_left_s(slot.deadline, self._instance.clock.monotonic())
            await self._engine.wait_for_space(lane, left_s)
        self._hooks.before(slot, CommunicationMode.SYNC)
        self._engine.offer(lane, slot)
        await self._engine.sends.wait(slot)
        return BatchSendResult.of(slot)

    async def send_oneway(self, message: Message, *, queue: MessageQueue | None = None) -> None:
        """Write *message* to the broker's connection; its outcome is never reported.

        Waits for a route and a connection the first time, never for a broker's answer.

        Raises:
            MessageIllegalError, NoRouteError, NoNameServerError: Not sent.
            BrokerUnreachableError: No connection, or its buffer is full; not sent.
            BrokerRefusedError: The broker does not let this account in; not sent.
        """
        topic, _ = await self._topic(message.topic, None)
        queue, lane, pinned = self._choose(topic, queue)
        slot = self._slots.single(message, queue, pinned, None)
        command = self._slots.request_of(slot)
        self._hooks.before(slot, CommunicationMode.ONEWAY)
        error: MQError | None = UnknownOutcomeError("the sender was cancelled; it may be stored")
        try:
            await self._hand_over(command, lane)
            error = None
        except MQError as failed:
            error = failed
            raise
        finally:
            self._hooks.after_oneway(slot, error)

    async def _hand_over(self, command: RemotingCommand, lane: Lane) -> None:
        instance = self._instance
        address = instance.leaders.address(lane.broker_name)
        if address is None:
            raise BrokerUnreachableError(f"no leader of {lane.broker_name} is known")
        timeout_s = self.config.attempt_timeout_s
        try:
            link = await instance.link(address, timeout_s, group=lane.broker_name)
        except RequestFailedError as error:
            raise BrokerRefusedError(str(error), code=error.code, remark=error.remark) from error
        try:
            link.connection.invoke_oneway(command)
        except LocalProtocolError as error:
            raise MessageIllegalError(str(error)) from error
        except MQError as error:
            raise BrokerUnreachableError(f"broker {address}: {error}") from error

    async def request(
        self, message: Message, timeout_s: float, *, queue: MessageQueue | None = None
    ) -> MessageExt:
        """Send *message* to a consumer of its topic, and return the reply to it.

        Args:
            message: As for `send`; a consumer answers with `request_reply.reply_message`.
            timeout_s: For all of it: the send, the consumer's work and the way back.
            queue: Where to; None: the next one in turn.
        Returns:
            The reply; ``born_host`` is the address of the replier.
        Raises:
            ReplyTimedOutError: The request is stored, but no reply came in time.
            UnknownOutcomeError: No reply came, and the request may be stored.
            BackpressureError: Too many requests of this client wait; nothing was sent.
            ClientError: As `send`; the request is not stored.
        Cancellation: The request may be stored; its reply will be passed over.
        """

        async def send(message: Message, *, timeout_s: float | None) -> SendResult:
            if queue is not None:
                return await self.send_to(queue, message, timeout_s=timeout_s)
            return await self.send(message, timeout_s=timeout_s)

        if self._closed:
            raise self._not_open()
        return await request_reply(self._instance, self.group, send, message, timeout_s)

    async def recall(self, sent: SendResult | str, *, timeout_s: float | None = None) -> str:
        """Take back a message with a time of its own before it is delivered.

        Repeated after a time-out, or a fail-over, it does no harm and returns the same.

        Args:
            sent: What its send returned, or the ``recall_handle`` in it.
            timeout_s: Whole budget, above 0; default ``config.send_timeout_s``.
        Returns:
            The message id; the message never will be delivered.
        Raises:
            MessageIllegalError: Not a handle, or the send did not return one.
            AlreadyDeliveredError: It was delivered; nothing can be taken back.
            BrokerRefusedError: No such message is known; nothing was recalled.
            BrokerUnreachableError, BrokerBusyError: Not recalled.
            UnknownOutcomeError: It may be recalled; ask again.
        Cancellation: It may be recalled.
        """
        handle = sent if isinstance(sent, str) else sent.recall_handle
        return await recall(
            self._instance, self.group, handle, budget_s(timeout_s, self.config.send_timeout_s)
        )

    async def publish_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues messages of *topic* can go to.

        Raises:
            NoRouteError, NoNameServerError: There are none, or none answers.
        """
        found, _ = await self._topic(topic, None)
        return found.queues

    # ------------------------------------------------------------------------------ inside

    async def _send(
        self,
        message: Message,
        queue: MessageQueue | None,
        timeout_s: float | None,
    ) -> SendResult:
        topic = self._topics.known(message.topic)
        if topic is None:
            topic, timeout_s = await self._topic(message.topic, timeout_s)
        queue, lane, pinned = self._choose(topic, queue)
        engine = self._engine
        if not lane.line.has_space:
            timeout_s = await self._wait_for_space(lane, timeout_s)
        mode = CommunicationMode.SYNC
        slot = engine.enqueue(lane, message, queue, pinned, timeout_s, mode)
        await engine.sends.wait(slot)
        return result_of_one(slot)

    def _choose(
        self, topic: PublishTopic, queue: MessageQueue | None
    ) -> tuple[MessageQueue, Lane, bool]:
        if self._closed:
            raise self._not_open()
        if queue is not None:
            return queue, self._engine.lane(queue.broker_name), True
        queue = self._topics.next_queue(topic)
        return queue, self._engine.lane(queue.broker_name), False

    async def _wait_for_space(self, lane: Lane, timeout_s: float | None) -> float:
        """Return what is left of *timeout_s* when another send may be put in line."""
        clock = self._instance.clock
        left_s = budget_s(timeout_s, self.config.send_timeout_s)
        until = clock.monotonic() + left_s
        await self._engine.wait_for_space(lane, left_s)
        return max(time_left_s(until, clock.monotonic()), MIN_TIMEOUT_S)

    def _not_open(self) -> ClientClosedError:
        return ClientClosedError(f"producer {self.group} is not open; use 'async with'")

    async def _topic(self, name: str, timeout_s: float | None) -> tuple[PublishTopic, float | None]:
        """Return the topic, and what is left of *timeout_s* after the wait for its route."""
        topic = self._topics.known(name)
        if topic is not None:
            return topic, timeout_s
        if self._closed:
            raise self._not_open()
        clock = self._instance.clock
        left_s = budget_s(timeout_s, self.config.send_timeout_s)
        until = clock.monotonic() + left_s
        topic = await self._topics.find(name, left_s)
        return topic, max(time_left_s(until, clock.monotonic()), MIN_TIMEOUT_S)


def unique_ids(instance: ClientInstance) -> UniqKeyFactory:
    """Return what makes ids that no other process makes."""
    return UniqKeyFactory(
        pack_host(instance.config.client_ip, 0)[:-4],
        instance.config.pid,
        instance.rng.randrange(1 << 32),
    )


def trace_dispatcher(instance: ClientInstance, topic: str) -> TraceDispatcher:
    """Return what sends message trace to *topic*, not yet open."""
    return TraceDispatcher(Producer(instance, TRACE_PRODUCER_GROUP), instance.clock, topic)
