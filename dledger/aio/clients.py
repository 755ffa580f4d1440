"""The SDK's classes for asyncio; what each method does stands at the class of the same name."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, cast

from dledger.aio.carried import (
    Face,
    GroupFace,
    ScopedFace,
    all_carried,
    carried,
    in_loop,
    is_async,
    iterated,
    passed,
)
from dledger.aio.guest import Guest
from dledger.client import connect as connecting
from dledger.client.admin import admin
from dledger.client.consumer import (
    lite_pull_consumer,
    pull_consumer,
    push_consumer,
    queue_locks,
    simple_consumer,
)
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import Answer, ConsumeContext, DeliveredMessage, Listener
from dledger.client.consumer.steps import ConsumeStep
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core import client_instance
from dledger.client.core.client_instance import ClientConfig
from dledger.client.core.client_state import ClientCounters
from dledger.client.core.errors import ClientClosedError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.core.route import MessageQueue
from dledger.client.producer import producer, results, transaction_producer
from dledger.client.producer.results import SendCounters
from dledger.client.producer.transaction import TransactionSendResult
from dledger.client.producer.transaction_producer import (
    CheckLocalTransaction,
    LocalTransaction,
    TransactionCounters,
    TransactionProducerConfig,
)

P = ParamSpec("P")
T = TypeVar("T")
AsyncListener: TypeAlias = Callable[[Sequence[DeliveredMessage], ConsumeContext], Awaitable[Answer]]


def connect(
    name_servers: str | Iterable[str] | None = None,
    config: ClientConfig | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> ClientInstance:
    """Return a client for asyncio, not yet open: ``async with aio.connect(...) as client``.

    Arguments and errors as `dledger.connect`.
    """
    return ClientInstance(connecting.connect(name_servers, config, environment=environment))


class ClientInstance(ScopedFace[client_instance.ClientInstance]):
    """`dledger.ClientInstance` for asyncio; `connect` makes one.

    It belongs to the event loop that opens it.
    """

    def __init__(self, instance: client_instance.ClientInstance) -> None:
        """Use *instance*, which is not open, and is used by nothing else."""
        self._inner = instance
        self._entered: Guest | None = None

    def _guest(self) -> Guest:
        if self._entered is None:
            raise ClientClosedError(f"client {self.client_id} is not open; use 'async with'")
        return self._entered

    async def __aenter__(self) -> Self:
        if self._entered is not None:
            raise ClientClosedError("a ClientInstance is opened once")
        self._entered = guest = await Guest.enter()
        try:
            return await super().__aenter__()
        except BaseException:
            await guest.leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await self._guest().leave()

    @property
    def client_id(self) -> str:
        """``ip@instance``."""
        return self._inner.client_id

    @property
    def config(self) -> ClientConfig:
        """Its settings."""
        return self._inner.config

    @property
    def counters(self) -> ClientCounters:
        """What it has done so far."""
        return self._inner.counters

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._inner.is_closed

    route = carried(client_instance.ClientInstance.route)
    ask = carried(client_instance.ClientInstance.ask)
    ask_leader = carried(client_instance.ClientInstance.ask_leader)
    abandon = passed(client_instance.ClientInstance.abandon)


def taken_from(
    kind: Callable[Concatenate[client_instance.ClientInstance, P], T],
) -> Callable[[Callable[[Any], None]], Callable[Concatenate[Face[T], ClientInstance, P], None]]:
    """Return what makes of an ``__init__`` one that takes what *kind* takes, and holds that."""

    def decorate(
        init: Callable[[Any], None],
    ) -> Callable[Concatenate[Face[T], ClientInstance, P], None]:
        @functools.wraps(kind.__init__)
        def make(
            self: Face[T], instance: ClientInstance, *args: P.args, **kwargs: P.kwargs
        ) -> None:
            self._inner = kind(instance._inner, *args, **kwargs)
            self._client = instance

        make.__doc__ = init.__doc__
        return make  # type: ignore[return-value]  # the instance may be named, too

    return decorate


class SendFuture:
    """`dledger.SendFuture` for asyncio."""

    def __init__(self, guest: Guest, future: results.SendFuture) -> None:
        self._guest = guest
        self._future = future

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._future.done

    async def result(self) -> SendResult:
        """Wait for the end of the send. May be called again, by one task at a time.

        Raises:
            ClientError: See `Producer.send`.
        Cancellation: The send goes on; call again to get its result.
        """
        return await self._guest.carry(self._future.result)


class Producer(GroupFace[producer.Producer]):
    """`dledger.Producer` for asyncio. Open it with ``async with`` inside its client."""

    @taken_from(producer.Producer)
    def __init__(self) -> None:
        """As `dledger.Producer`."""

    @property
    def counters(self) -> SendCounters:
        """What it has sent so far."""
        return self._inner.counters

    send = carried(producer.Producer.send)
    send_to = carried(producer.Producer.send_to)
    send_batch = carried(producer.Producer.send_batch)
    send_oneway = carried(producer.Producer.send_oneway)
    request = carried(producer.Producer.request)
    recall = carried(producer.Producer.recall)
    publish_queues = carried(producer.Producer.publish_queues)

    async def send_async(
        self, message: Message, *, timeout_s: float | None = None, queue: MessageQueue | None = None
    ) -> SendFuture:
        """Put *message* on its way and return its future; waits only for a route and a full queue.

        Raises:
            MessageIllegalError, NoRouteError, NoNameServerError, ClientClosedError: Not stored.
        """
        guest = self._guest()
        future = await guest.carry(
            self._inner.send_async, message, timeout_s=timeout_s, queue=queue
        )
        return SendFuture(guest, future)

    def send_nowait(
        self, message: Message, *, timeout_s: float | None = None, queue: MessageQueue | None = None
    ) -> SendFuture:
        """Put *message* on its way without waiting for anything.

        Raises:
            BackpressureError: The queue is full; the message was not queued.
            NoRouteError: The topic's route is not known yet: use `send` or `publish_queues` first.
            MessageIllegalError, ClientClosedError: Not stored.
        """
        guest = self._guest()
        future = self._inner.send_nowait(message, timeout_s=timeout_s, queue=queue)
        return SendFuture(guest, future)


class TransactionProducer(GroupFace[transaction_producer.TransactionProducer]):
    """`dledger.TransactionProducer` for asyncio. Open it with ``async with`` inside its client."""

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        check_local_transaction: CheckLocalTransaction,
        config: TransactionProducerConfig | None = None,
    ) -> None:
        """As `dledger.TransactionProducer`; the function runs in tasks of the event loop."""
        check = in_loop(instance._guest, check_local_transaction)
        self._inner = transaction_producer.TransactionProducer(
            instance._inner, group, check, config
        )
        self._client = instance

    @property
    def counters(self) -> TransactionCounters:
        """What it has done so far."""
        return self._inner.counters

    async def send_in_transaction(
        self,
        message: Message,
        local_transaction: LocalTransaction,
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> TransactionSendResult:
        """As `dledger.TransactionProducer.send_in_transaction`.

        *local_transaction* runs in a task of its own, with the contextvars of the caller.
        """
        return await self._guest().carry(
            self._inner.send_in_transaction,
            message,
            in_loop(self._guest, local_transaction),
            queue=queue,
            timeout_s=timeout_s,
        )

    begin = carried(transaction_producer.TransactionProducer.begin)
    finish = carried(transaction_producer.TransactionProducer.finish)
    leave_open = carried(transaction_producer.TransactionProducer.leave_open)
    publish_queues = carried(transaction_producer.TransactionProducer.publish_queues)


class PushConsumer(GroupFace[push_consumer.PushConsumer]):
    """`dledger.PushConsumer` for asyncio. Open it with ``async with`` inside its client."""

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        listener: Listener,
        subscriptions: Mapping[str, str | SubscriptionExpression] | None = None,
        config: PushConfig | None = None,
        *,
        orderly: bool = False,
    ) -> None:
        """As `dledger.PushConsumer`.

        Args:
            listener: An async function, which runs in tasks of the event loop, or a plain one,
                which runs in worker threads and may block. Either has the contextvars of the task
                that opens the consumer.
        """
        if is_async(listener):
            listener = in_loop(instance._guest, cast("AsyncListener", listener))
        self._inner = push_consumer.PushConsumer(
            instance._inner, group, listener, subscriptions, config, orderly=orderly
        )
        self._client = instance

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are this consumer's now, those of the retry topic included."""
        return self._inner.queues

    @property
    def counts(self) -> dict[str, int]:
        """What has happened so far: messages by what became of them, rebalances, flow control."""
        return self._inner.counts

    subscribe = passed(push_consumer.PushConsumer.subscribe)
    unsubscribe = passed(push_consumer.PushConsumer.unsubscribe)
    suspend = passed(push_consumer.PushConsumer.suspend)
    resume = passed(push_consumer.PushConsumer.resume)
    lock_token = passed(push_consumer.PushConsumer.lock_token)


class PullConsumer(GroupFace[pull_consumer.PullConsumer]):
    """`dledger.PullConsumer` for asyncio. Open it with ``async with`` inside its client."""

    @taken_from(pull_consumer.PullConsumer)
    def __init__(self) -> None:
        """As `dledger.PullConsumer`."""

    fetch_message_queues = carried(pull_consumer.PullConsumer.fetch_message_queues)
    pull = carried(pull_consumer.PullConsumer.pull)
    min_offset = carried(pull_consumer.PullConsumer.min_offset)
    max_offset = carried(pull_consumer.PullConsumer.max_offset)
    search_offset = carried(pull_consumer.PullConsumer.search_offset)
    commit_offset = carried(pull_consumer.PullConsumer.commit_offset)
    committed_offset = carried(pull_consumer.PullConsumer.committed_offset)

    @asynccontextmanager
    async def transaction(self, *, timeout_s: float = 10.0) -> AsyncIterator[ConsumeStep]:
        """As `dledger.PullConsumer.transaction`."""
        step = ConsumeStep()
        yield step
        await self._guest().carry(self._inner._store, step, timeout_s)

    iter_messages = iterated(pull_consumer.PullConsumer.iter_messages)
    drain = iterated(pull_consumer.PullConsumer.drain)


class LitePullConsumer(GroupFace[lite_pull_consumer.LitePullConsumer]):
    """`dledger.LitePullConsumer` for asyncio. Open it with ``async with`` inside its client."""

    @taken_from(lite_pull_consumer.LitePullConsumer)
    def __init__(self) -> None:
        """As `dledger.LitePullConsumer`."""

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are this consumer's now."""
        return self._inner.queues

    subscribe = passed(lite_pull_consumer.LitePullConsumer.subscribe)
    unsubscribe = passed(lite_pull_consumer.LitePullConsumer.unsubscribe)
    assign = carried(lite_pull_consumer.LitePullConsumer.assign)
    fetch_message_queues = carried(lite_pull_consumer.LitePullConsumer.fetch_message_queues)

    async def poll(
        self,
        timeout_s: float = lite_pull_consumer.POLL_TIMEOUT_S,
        *,
        max_messages: int = pull_consumer.ROCKETMQ_PULL_MESSAGES,
    ) -> list[DeliveredMessage]:
        """As `dledger.LitePullConsumer.poll`."""
        found: list[DeliveredMessage] = []

        async def poll() -> list[DeliveredMessage]:
            nonlocal found
            found = await self._inner.poll(timeout_s, max_messages=max_messages)
            return found

        try:
            return await self._guest().carry(poll)
        except BaseException:
            # A poll may end in trio before its cancellation arrives: then its caller gets nothing.
            self._inner._put_back(found)
            raise

    seek = passed(lite_pull_consumer.LitePullConsumer.seek)
    seek_to_begin = carried(lite_pull_consumer.LitePullConsumer.seek_to_begin)
    seek_to_end = carried(lite_pull_consumer.LitePullConsumer.seek_to_end)
    pause = passed(lite_pull_consumer.LitePullConsumer.pause)
    resume = passed(lite_pull_consumer.LitePullConsumer.resume)
    commit = carried(lite_pull_consumer.LitePullConsumer.commit)
    committed = carried(lite_pull_consumer.LitePullConsumer.committed)


class SimpleConsumer(GroupFace[simple_consumer.SimpleConsumer]):
    """`dledger.SimpleConsumer` for asyncio. Open it with ``async with`` inside its client."""

    @taken_from(simple_consumer.SimpleConsumer)
    def __init__(self) -> None:
        """As `dledger.SimpleConsumer`."""

    subscribe = passed(simple_consumer.SimpleConsumer.subscribe)
    unsubscribe = passed(simple_consumer.SimpleConsumer.unsubscribe)
    receive = carried(simple_consumer.SimpleConsumer.receive)
    ack = carried(simple_consumer.SimpleConsumer.ack)
    ack_all = carried(simple_consumer.SimpleConsumer.ack_all)
    change_invisible = carried(simple_consumer.SimpleConsumer.change_invisible)


class LockClient(Face[queue_locks.LockClient]):
    """`dledger.LockClient` for asyncio."""

    @taken_from(queue_locks.LockClient)
    def __init__(self) -> None:
        """As `dledger.LockClient`."""

    lock = carried(queue_locks.LockClient.lock)
    unlock = carried(queue_locks.LockClient.unlock)


if TYPE_CHECKING:
    _EveryMethod = admin.Admin
else:
    _EveryMethod = all_carried(admin.Admin)


class Admin(Face[admin.Admin], _EveryMethod):
    """`dledger.Admin` for asyncio. Holds nothing open of its own."""

    @taken_from(admin.Admin)
    def __init__(self) -> None:
        """Use an instance, which must be open."""
