"""The client for people without trio: plain calls that block, from any thread.

One worker thread runs the event loop; calls are handed to it and wait for their end. This module
alone owns a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

import trio
import trio.from_thread

from dledger.client.admin.admin import Admin
from dledger.client.admin.groups import OffsetsReset
from dledger.client.admin.messages import DeadLetterGroup
from dledger.client.connect import connect
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import Listener
from dledger.client.consumer.pull_consumer import SUSPEND_S, PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.errors import ClientClosedError, UnknownOutcomeError
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, PullResult, SendResult, SendStatus
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.results import BatchSendResult, SendFuture
from dledger.client.producer.transaction import HalfMessage, TransactionSendResult
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.bodies import ClientConnection, ConsumerConnection, OffsetWrapper

_log = get_logger(__name__)

T = TypeVar("T")
AsyncUser: TypeAlias = Producer | PullConsumer | PushConsumer | TransactionProducer

DEAD_LETTERS_MAX: Final = 1000
"""What `BlockingAdmin.dead_letters` returns at most when it is not asked for more or fewer."""

JOIN_TIMEOUT_S: Final = 15.0
"""How long `close` waits for the loop's thread; sends under way have ended by then."""


class _Closing:
    """Is closed where its block ends."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlockingClient(_Closing):
    """A client instance in a thread of its own. Use it in ``with``, or call `close`.

    Calls may come from any number of threads at the same time. An error of the SDK is raised in
    the thread that called. An error that no call waits for, as where a consumer cannot read its
    offset file, ends the client: it is logged, and is the cause of the errors of later calls.
    """

    def __init__(
        self,
        name_servers: str | Iterable[str] | None = None,
        config: ClientConfig | None = None,
        *,
        make_instance: Callable[[], AbstractAsyncContextManager[ClientInstance]] | None = None,
    ) -> None:
        """Start the thread and open the instance.

        Args:
            name_servers: As for `dledger.client.connect.connect`.
            config: Likewise.
            make_instance: Instead of both.
        Raises:
            ConfigError: No NameServer is named.
        """
        self._make: Callable[[], AbstractAsyncContextManager[ClientInstance]] = (
            make_instance if make_instance is not None else lambda: connect(name_servers, config)
        )
        self._token: trio.lowlevel.TrioToken | None = None
        self._users: trio.Nursery | None = None
        self._stop = trio.Event()
        self._instance: ClientInstance | None = None
        self._broken_by: BaseException | None = None
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_loop, args=(started,), name="mq-client", daemon=True
        )
        self._thread.start()
        failed = started.get()
        if failed is not None:
            self._thread.join()
            raise failed

    def _run_loop(self, started: SimpleQueue[BaseException | None]) -> None:
        async def main() -> None:
            try:
                async with self._make() as self._instance, trio.open_nursery() as self._users:
                    self._token = trio.lowlevel.current_trio_token()
                    started.put(None)
                    await self._stop.wait()
                    self._token = None
            finally:
                self._token = None

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001  # handed to the threads that call
            self._broken_by = error
            if self._users is not None:
                _log.error("client_broken", exc_info=error)
            started.put(error)

    async def _hold(self, user: _Held, task_status: trio.TaskStatus[None]) -> None:
        """Keep a producer or consumer open until it or the client closes."""
        try:
            async with user.user:
                task_status.started()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_end_with, nursery, user.stop)
                    nursery.start_soon(_end_with, nursery, self._stop)
        finally:
            user.ended.set()

    async def _opened(self, user: AsyncUser) -> _Held:
        assert self._users is not None
        held = _Held(user)
        await self._users.start(self._hold, held)
        return held

    def _call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        __tracebackhide__ = True  # pytest leaves this frame out
        token = self._token
        if token is None:
            raise self._closed()
        try:
            return trio.from_thread.run(work, *args, trio_token=token)
        except trio.RunFinishedError:
            raise self._closed() from self._broken_by
        except trio.Cancelled as error:
            raise UnknownOutcomeError(
                "the client was closed during the call; what it sent may be stored"
            ) from error

    def producer(self, group: str, config: ProducerConfig | None = None) -> BlockingProducer:
        """Return an open producer; it is closed with the client."""
        producer = Producer(self._open(), group, config)
        self._call(self._opened, producer)
        return BlockingProducer(self, producer)

    def transaction_producer(
        self,
        group: str,
        check_local_transaction: Callable[[MessageExt], LocalTransactionState],
        config: TransactionProducerConfig | None = None,
    ) -> BlockingTransactionProducer:
        """Return an open producer of transactions; it is closed with the client.

        Args:
            check_local_transaction: Called in threads of their own; may block.

        Raises:
            ConfigError: This client has a transaction producer of *group* already.
        """

        async def check(message: MessageExt) -> LocalTransactionState:
            return await trio.to_thread.run_sync(
                check_local_transaction, message, abandon_on_cancel=True
            )

        producer = TransactionProducer(self._open(), group, check, config)
        self._call(self._opened, producer)
        return BlockingTransactionProducer(self, producer)

    def pull_consumer(self, group: str) -> BlockingPullConsumer:
        """Return an open consumer; it is closed with the client."""
        consumer = PullConsumer(self._open(), group)
        self._call(self._opened, consumer)
        return BlockingPullConsumer(self, consumer)

    def push_consumer(
        self,
        group: str,
        listener: Listener,
        subscriptions: Mapping[str, str | SubscriptionExpression] | None = None,
        config: PushConfig | None = None,
        *,
        orderly: bool = False,
    ) -> BlockingPushConsumer:
        """Return an open consumer; it is closed with the client, or by itself.

        Args:
            listener: A plain function, called in worker threads: it may block, and use this
                client. Several calls run at the same time.
            subscriptions: As for `PushConsumer`.
            config: As for `PushConsumer`.
            orderly: As for `PushConsumer`.
        Raises:
            SubscriptionIllegalError: A subscription is no expression.
            ConfigError: The group is here already.
        """
        consumer = PushConsumer(
            self._open(), group, listener, subscriptions, config, orderly=orderly
        )
        return BlockingPushConsumer(self, consumer, self._call(self._opened, consumer))

    def admin(self) -> BlockingAdmin:
        """Return administration through this client."""
        return BlockingAdmin(self, Admin(self._open()))

    def _open(self) -> ClientInstance:
        if self._instance is None or self._token is None:
            raise self._closed()
        return self._instance

    def _closed(self) -> ClientClosedError:
        broken_by = self._broken_by
        why = "" if broken_by is None else f": it was ended by {broken_by!r}"
        error = ClientClosedError(f"the client is closed{why}; nothing was sent")
        error.__cause__ = broken_by
        return error

    def close(self) -> None:
        """Close producers, consumers and the instance, and end the thread. Idempotent."""
        token = self._token
        if token is not None:
            try:
                trio.from_thread.run_sync(self._stop.set, trio_token=token)
            except trio.RunFinishedError:
                self._token = None
        self._thread.join(JOIN_TIMEOUT_S)


class _Held:
    """A producer or consumer that is kept open."""

    def __init__(self, user: AsyncUser) -> None:
        self.user = user
        self.stop = trio.Event()
        self.ended = trio.Event()


async def _end_with(nursery: trio.Nursery, event: trio.Event) -> None:
    await event.wait()
    nursery.cancel_scope.cancel()


class BlockingFuture:
    """The result of a send that is under way."""

    def __init__(self, client: BlockingClient, future: SendFuture) -> None:
        self._client = client
        self._future = future

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._future.done

    def result(self) -> SendResult:
        """Wait for the end of the send. Raises as `Producer.send`."""
        return self._client._call(self._future.result)


class BlockingProducer:
    """`Producer` for blocking callers."""

    def __init__(self, client: BlockingClient, producer: Producer) -> None:
        self._client = client
        self._producer = producer

    def send(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        queue: MessageQueue | None = None,
    ) -> SendResult:
        """Send and wait until it is stored. Raises as `Producer.send`."""

        async def work() -> SendResult:
            if queue is not None:
                return await self._producer.send_to(queue, message, timeout_s=timeout_s)
            return await self._producer.send(message, timeout_s=timeout_s)

        return self._client._call(work)

    def request(self, message: Message, timeout_s: float) -> MessageExt:
        """Send a request and wait for its reply. Raises as `Producer.request`."""
        return self._client._call(self._producer.request, message, timeout_s)

    def send_async(self, message: Message, *, timeout_s: float | None = None) -> BlockingFuture:
        """Put *message* on its way and return its future."""

        async def work() -> SendFuture:
            return await self._producer.send_async(message, timeout_s=timeout_s)

        return BlockingFuture(self._client, self._client._call(work))

    def send_oneway(self, message: Message) -> None:
        """Write *message* to the connection; its outcome is never reported."""
        self._client._call(self._producer.send_oneway, message)

    def send_batch(
        self, messages: Sequence[Message], *, timeout_s: float | None = None
    ) -> BatchSendResult:
        """Send a batch and wait until it is stored. Raises as `Producer.send_batch`."""

        async def work() -> BatchSendResult:
            return await self._producer.send_batch(messages, timeout_s=timeout_s)

        return self._client._call(work)


class BlockingTransactionProducer:
    """`TransactionProducer` for blocking callers."""

    def __init__(self, client: BlockingClient, producer: TransactionProducer) -> None:
        self._client = client
        self._producer = producer

    def send_in_transaction(
        self,
        message: Message,
        local_transaction: Callable[[HalfMessage], LocalTransactionState],
        *,
        timeout_s: float | None = None,
    ) -> TransactionSendResult:
        """As `TransactionProducer.send_in_transaction`; the local part runs in this thread."""

        async def begin() -> HalfMessage:
            return await self._producer.begin(message, timeout_s=timeout_s)

        half = self._client._call(begin)
        try:
            state = LocalTransactionState.ROLLBACK
            if half.send_result.status is SendStatus.SEND_OK:
                state = local_transaction(half)
        except BaseException:
            self._client._call(self._producer.leave_open, half)
            raise
        return self._client._call(self._producer.finish, half, state)


class BlockingPullConsumer:
    """`PullConsumer` for blocking callers."""

    def __init__(self, client: BlockingClient, consumer: PullConsumer) -> None:
        self._client = client
        self._consumer = consumer

    def fetch_message_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """As `PullConsumer.fetch_message_queues`."""
        return self._client._call(self._consumer.fetch_message_queues, topic)

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_messages: int = 32,
        tags: str | SubscriptionExpression = "*",
        timeout_s: float = SUSPEND_S,
        with_expired: bool = False,
    ) -> PullResult:
        """As `PullConsumer.pull`."""

        async def work() -> PullResult:
            return await self._consumer.pull(
                queue,
                offset,
                max_messages=max_messages,
                tags=tags,
                timeout_s=timeout_s,
                with_expired=with_expired,
            )

        return self._client._call(work)

    def min_offset(self, queue: MessageQueue) -> int:
        """As `PullConsumer.min_offset`."""
        return self._client._call(self._consumer.min_offset, queue)

    def max_offset(self, queue: MessageQueue) -> int:
        """As `PullConsumer.max_offset`."""
        return self._client._call(self._consumer.max_offset, queue)

    def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """As `PullConsumer.search_offset`."""
        return self._client._call(self._consumer.search_offset, queue, timestamp_ms)

    def commit_offset(self, queue: MessageQueue, offset: int) -> None:
        """As `PullConsumer.commit_offset`."""
        self._client._call(self._consumer.commit_offset, queue, offset)

    def committed_offset(self, queue: MessageQueue) -> int | None:
        """As `PullConsumer.committed_offset`."""
        return self._client._call(self._consumer.committed_offset, queue)


class BlockingPushConsumer(_Closing):
    """`PushConsumer` for blocking callers. Use it in ``with``, or not."""

    def __init__(self, client: BlockingClient, consumer: PushConsumer, held: _Held) -> None:
        self._client = client
        self._consumer = consumer
        self._held = held

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """As `PushConsumer.queues`."""
        return self._on_loop(lambda: self._consumer.queues)

    @property
    def counts(self) -> dict[str, int]:
        """As `PushConsumer.counts`."""
        return self._on_loop(lambda: self._consumer.counts)

    def subscribe(self, topic: str, expression: str | SubscriptionExpression = "*") -> None:
        """As `PushConsumer.subscribe`."""
        self._on_loop(lambda: self._consumer.subscribe(topic, expression))

    def unsubscribe(self, topic: str) -> None:
        """As `PushConsumer.unsubscribe`."""
        self._on_loop(lambda: self._consumer.unsubscribe(topic))

    def suspend(self) -> None:
        """As `PushConsumer.suspend`."""
        self._on_loop(self._consumer.suspend)

    def resume(self) -> None:
        """As `PushConsumer.resume`."""
        self._on_loop(self._consumer.resume)

    def _on_loop(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self._client._call(run)

    def close(self) -> None:
        """Leave the group: finish what runs, store offsets, let others take over. Idempotent.

        Must not be called by the listener.
        """

        async def stop() -> None:
            self._held.stop.set()
            await self._held.ended.wait()

        try:
            self._client._call(stop)
        except ClientClosedError:
            pass  # it was closed with the client


class BlockingAdmin:
    """`Admin` for blocking callers."""

    def __init__(self, client: BlockingClient, admin: Admin) -> None:
        self._client = client
        self._admin = admin

    def create_topic(self, topic: str, *, queue_nums: int = 8) -> list[str]:
        """As `Admin.create_topic`."""

        async def work() -> list[str]:
            return await self._admin.create_topic(topic, queue_nums=queue_nums)

        return self._client._call(work)

    def topic_list(self) -> list[str]:
        """As `Admin.topic_list`."""
        return self._client._call(self._admin.topic_list)

    def offsets(self, topic: str) -> dict[MessageQueue, tuple[int, int]]:
        """As `Admin.offsets`."""
        return self._client._call(self._admin.offsets, topic)

    def view_message(self, offset_message_id: str) -> MessageExt:
        """As `Admin.view_message`."""
        return self._client._call(self._admin.view_message, offset_message_id)

    def consumer_connection(self, group: str) -> ConsumerConnection | None:
        """As `Admin.consumer_connection`."""
        return self._client._call(self._admin.consumer_connection, group)

    def producer_connection(self, group: str) -> list[ClientConnection]:
        """As `Admin.producer_connection`."""
        return self._client._call(self._admin.producer_connection, group)

    def group_progress(self, group: str) -> dict[MessageQueue, OffsetWrapper]:
        """As `Admin.group_progress`."""
        return self._client._call(self._admin.group_progress, group)

    def lags(self) -> dict[str, dict[str, int]]:
        """As `Admin.lags`."""
        return self._client._call(self._admin.lags)

    def reset_offsets(
        self, group: str, topic: str, timestamp_ms: int, *, offset: int | None = None
    ) -> OffsetsReset:
        """As `Admin.reset_offsets`."""
        return self._client._call(
            partial(self._admin.reset_offsets, offset=offset), group, topic, timestamp_ms
        )

    def clone_offsets(self, source: str, target: str, *, topic: str | None = None) -> None:
        """As `Admin.clone_offsets`."""

        async def work() -> None:
            await self._admin.clone_offsets(source, target, topic=topic)

        self._client._call(work)

    def dead_letter_groups(self) -> list[DeadLetterGroup]:
        """As `Admin.dead_letter_groups`."""
        return self._client._call(self._admin.dead_letter_groups)

    def dead_letters(
        self, group: str, *, first_offset: int = 0, limit: int = DEAD_LETTERS_MAX
    ) -> list[tuple[MessageQueue, MessageExt]]:
        """Return the oldest dead letters of each queue; `DeadLetters.read`.

        Args:
            limit: At most this many; they are all in memory.
        """

        async def work() -> list[tuple[MessageQueue, MessageExt]]:
            letters = self._admin.dead_letters(group, first_offset=first_offset, limit=limit)
            return [letter async for letter in letters]

        return self._client._call(work)

    def resend_dead_letters(
        self,
        group: str,
        *,
        offset: int | None = None,
        limit: int | None = None,
        queue: MessageQueue | None = None,
    ) -> int:
        """As `Admin.resend_dead_letters`."""

        async def work() -> int:
            return await self._admin.resend_dead_letters(
                group, offset=offset, limit=limit, queue=queue
            )

        return self._client._call(work)

    def set_topic_perm(self, topic: str, perm: int) -> list[str]:
        """As `Admin.set_topic_perm`."""
        return self._client._call(self._admin.set_topic_perm, topic, perm)
