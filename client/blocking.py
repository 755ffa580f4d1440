"""The client for people without trio: plain calls that block, from any thread.

One worker thread runs the event loop; calls are handed to it and wait for their end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    NamedTuple,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    cast,
)

import trio
import trio.from_thread

from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import Listener
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.client_state import SameCall
from dledger.client.core.errors import ClientClosedError, UnknownOutcomeError
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult, SendStatus
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.results import SendFuture
from dledger.client.producer.transaction import HalfMessage, TransactionSendResult
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.remoting.log import get_logger

_log = get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")
AsyncUser: TypeAlias = Producer | PullConsumer | PushConsumer | TransactionProducer

DEAD_LETTERS_MAX: Final = 1000
"""What `BlockingAdmin.dead_letters` returns at most when it is not asked for more or fewer."""

JOIN_TIMEOUT_S: Final = 15.0
"""How long `close` waits for the loop's thread; sends under way have ended by then."""


class Closing:
    """Is closed where its block ends."""

    def close(self) -> None:
        """Close it. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class LoopThread(Closing, Generic[T]):
    """An event loop in a thread of its own, which keeps a context open until it is closed.

    Attributes:
        opened: What the context gave.
        stop: Set when it is to be closed.
        failure: What ended the loop before; None: nothing did.
    """

    opened: T

    def __init__(
        self, context: AbstractAsyncContextManager[T], name: str, join_s: float = JOIN_TIMEOUT_S
    ) -> None:
        """Start the thread; returns when *context* is open, and raises what opening it raises.

        Args:
            join_s: How long `close` waits for the thread.
        """
        self.stop = trio.Event()
        self.failure: BaseException | None = None
        self._context = context
        self._join_s = join_s
        self._token: trio.lowlevel.TrioToken | None = None
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self.thread.start()
        failed = started.get()
        if failed is not None:
            self.thread.join()
            raise failed

    def _run(self, started: SimpleQueue[BaseException | None]) -> None:
        async def main() -> None:
            try:
                async with self._context as self.opened:
                    self._token = trio.lowlevel.current_trio_token()
                    started.put(None)
                    await self.stop.wait()
                    self._token = None
            finally:
                self._token = None

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001  # handed to the threads that call
            self.failure = error
            started.put(error)

    @property
    def is_open(self) -> bool:
        """Whether `call` gets as far as the loop."""
        return self._token is not None

    def call(self, work: Callable[..., Awaitable[R]], *args: Any) -> R:
        """Run *work* in the loop and return what it returns.

        Raises trio.RunFinishedError: the loop has ended.
        """
        __tracebackhide__ = True  # pytest leaves this frame out
        if self._token is None:
            raise trio.RunFinishedError
        return trio.from_thread.run(work, *args, trio_token=self._token)

    def close(self) -> None:
        """Close the context, and end the thread. Idempotent."""
        if (token := self._token) is not None:
            with suppress(trio.RunFinishedError):
                trio.from_thread.run_sync(self.stop.set, trio_token=token)
        self.thread.join(self._join_s)


@asynccontextmanager
async def _with_users(
    make: Callable[[], AbstractAsyncContextManager[ClientInstance]],
) -> AsyncIterator[tuple[ClientInstance, trio.Nursery]]:
    """Open a client instance, and a nursery for what uses it."""
    is_open = False
    try:
        async with make() as instance, trio.open_nursery() as users:
            is_open = True
            yield instance, users
    except BaseException as error:
        if is_open:
            _log.error("client_broken", exc_info=error)
        raise


class BlockingClient(Closing):
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
        make = make_instance or (lambda: connect(name_servers, config))
        self._loop = LoopThread(_with_users(make), "mq-client")

    async def _hold(self, user: AsyncUser, task_status: trio.TaskStatus[_Held]) -> None:
        """Keep a producer or consumer open until it or the client closes."""
        held = _Held(trio.CancelScope(), trio.Event())
        try:
            async with user:
                with held.until:
                    task_status.started(held)
                    await self._loop.stop.wait()
        finally:
            held.ended.set()

    async def _opened(self, user: AsyncUser) -> _Held:
        held: _Held = await self._loop.opened[1].start(self._hold, user)
        return held

    def _call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        __tracebackhide__ = True  # pytest leaves this frame out
        try:
            return self._loop.call(work, *args)
        except trio.RunFinishedError:
            raise self._closed() from self._loop.failure
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
        if not self._loop.is_open:
            raise self._closed()
        return self._loop.opened[0]

    def _closed(self) -> ClientClosedError:
        broken_by = self._loop.failure
        why = "" if broken_by is None else f": it was ended by {broken_by!r}"
        error = ClientClosedError(f"the client is closed{why}; nothing was sent")
        error.__cause__ = broken_by
        return error

    def close(self) -> None:
        """Close producers, consumers and the instance, and end the thread. Idempotent."""
        self._loop.close()


class _Held(NamedTuple):
    """A producer or consumer that is kept open; *until* is cancelled."""

    until: trio.CancelScope
    ended: trio.Event


P = ParamSpec("P")
I_co = TypeVar("I_co", covariant=True)


def called(method: Callable[Concatenate[Any, P], Awaitable[T]]) -> SameCall[P, T]:
    """Return a method that waits for the end of *method*, which runs in the loop."""

    @functools.wraps(method)
    def call(self: _Face[Any], *args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        return self._client._call(partial(method, self._inner, *args, **kwargs))

    return cast("SameCall[P, T]", call)


def passed(method: Callable[Concatenate[Any, P], T]) -> SameCall[P, T]:
    """Return a method that calls the plain *method* in the loop."""

    @functools.wraps(method)
    def call(self: _Face[Any], *args: P.args, **kwargs: P.kwargs) -> T:
        async def work() -> T:
            return method(self._inner, *args, **kwargs)

        return self._client._call(work)

    return cast("SameCall[P, T]", call)


class _Face(Generic[I_co]):
    """An object of the SDK, for blocking callers."""

    def __init__(self, client: BlockingClient, inner: I_co) -> None:
        self._client = client
        self._inner = inner


class BlockingFuture(_Face[SendFuture]):
    """The result of a send that is under way."""

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._inner.done

    result = called(SendFuture.result)


class BlockingProducer(_Face[Producer]):
    """`Producer` for blocking callers."""

    def send(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        queue: MessageQueue | None = None,
    ) -> SendResult:
        """Send and wait until it is stored. Raises as `Producer.send`."""
        if queue is not None:
            return self._send_to(queue, message, timeout_s=timeout_s)
        return self._send(message, timeout_s=timeout_s)

    def send_async(self, message: Message, *, timeout_s: float | None = None) -> BlockingFuture:
        """Put *message* on its way and return its future."""
        return BlockingFuture(self._client, self._send_async(message, timeout_s=timeout_s))

    _send = called(Producer.send)
    _send_to = called(Producer.send_to)
    _send_async = called(Producer.send_async)
    request = called(Producer.request)
    send_oneway = called(Producer.send_oneway)
    send_batch = called(Producer.send_batch)


class BlockingTransactionProducer(_Face[TransactionProducer]):
    """`TransactionProducer` for blocking callers."""

    def send_in_transaction(
        self,
        message: Message,
        local_transaction: Callable[[HalfMessage], LocalTransactionState],
        *,
        timeout_s: float | None = None,
    ) -> TransactionSendResult:
        """As `TransactionProducer.send_in_transaction`; the local part runs in this thread."""
        half = self._begin(message, timeout_s=timeout_s)
        try:
            state = LocalTransactionState.ROLLBACK
            if half.send_result.status is SendStatus.SEND_OK:
                state = local_transaction(half)
        except BaseException:
            self._leave_open(half)
            raise
        return self._finish(half, state)

    _begin = called(TransactionProducer.begin)
    _leave_open = called(TransactionProducer.leave_open)
    _finish = called(TransactionProducer.finish)


class BlockingPullConsumer(_Face[PullConsumer]):
    """`PullConsumer` for blocking callers."""

    fetch_message_queues = called(PullConsumer.fetch_message_queues)
    pull = called(PullConsumer.pull)
    min_offset = called(PullConsumer.min_offset)
    max_offset = called(PullConsumer.max_offset)
    search_offset = called(PullConsumer.search_offset)
    commit_offset = called(PullConsumer.commit_offset)
    committed_offset = called(PullConsumer.committed_offset)


class BlockingPushConsumer(Closing, _Face[PushConsumer]):
    """`PushConsumer` for blocking callers. Use it in ``with``, or not."""

    def __init__(self, client: BlockingClient, consumer: PushConsumer, held: _Held) -> None:
        super().__init__(client, consumer)
        self._held = held

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """As `PushConsumer.queues`."""
        queues: frozenset[MessageQueue] = self._get("queues")
        return queues

    @property
    def counts(self) -> dict[str, int]:
        """As `PushConsumer.counts`."""
        counts: dict[str, int] = self._get("counts")
        return counts

    _get: SameCall[[str], Any] = passed(getattr)
    subscribe = passed(PushConsumer.subscribe)
    unsubscribe = passed(PushConsumer.unsubscribe)
    suspend = passed(PushConsumer.suspend)
    resume = passed(PushConsumer.resume)

    def close(self) -> None:
        """Leave the group: finish what runs, store offsets, let others take over. Idempotent.

        Must not be called by the listener.
        """

        async def stop() -> None:
            self._held.until.cancel()
            await self._held.ended.wait()

        try:
            self._client._call(stop)
        except ClientClosedError:
            pass  # it was closed with the client


class BlockingAdmin(_Face[Admin]):
    """`Admin` for blocking callers."""

    create_topic = called(Admin.create_topic)
    topic_config = called(Admin.topic_config)
    topic_list = called(Admin.topic_list)
    offsets = called(Admin.offsets)
    view_message = called(Admin.view_message)
    consumer_connection = called(Admin.consumer_connection)
    producer_connection = called(Admin.producer_connection)
    group_progress = called(Admin.group_progress)
    lags = called(Admin.lags)
    reset_offsets = called(Admin.reset_offsets)
    clone_offsets = called(Admin.clone_offsets)
    dead_letter_groups = called(Admin.dead_letter_groups)
    resend_dead_letters = called(Admin.resend_dead_letters)
    set_topic_perm = called(Admin.set_topic_perm)

    def dead_letters(
        self, group: str, *, first_offset: int = 0, limit: int = DEAD_LETTERS_MAX
    ) -> list[tuple[MessageQueue, MessageExt]]:
        """Return the oldest dead letters of each queue; `DeadLetters.read`.

        Args:
            limit: At most this many; they are all in memory.
        """

        async def work() -> list[tuple[MessageQueue, MessageExt]]:
            letters = self._inner.dead_letters(group, first_offset=first_offset, limit=limit)
            return [letter async for letter in letters]

        return self._client._call(work)
