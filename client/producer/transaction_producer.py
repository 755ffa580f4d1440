"""Sends messages that appear if, and only if, something local was done.

::

    begin ─► half message, invisible ─► local part ─► finish: COMMIT or ROLLBACK
                     ▲                                   │ lost, or no producer sends it
                     └──── check_local_transaction ◄─────┴── the broker asks back
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from dledger.client.core.broker_requests import Question
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.client_state import ManagedScope
from dledger.client.core.errors import ClientError, TransactionDecidedError
from dledger.client.core.hooks import (
    EndTransactionContext,
    EndTransactionHook,
    LocalTransactionState,
    call_each,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendStatus
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.transaction import (
    HalfMessage,
    TransactionEnd,
    TransactionSendResult,
    half_of,
    send_end,
)
from dledger.client.trace import EndTransactionTraceHook
from dledger.commitlog.errors import MQError
from dledger.remoting.log import get_logger

QUESTIONS_MAX: Final = 2000
"""Questions that wait for their turn; one more is dropped, and asked again by the broker."""

_log = get_logger(__name__)

CheckLocalTransaction = Callable[[MessageExt], Awaitable[LocalTransactionState]]
"""Returns what became of the local part of a transaction, by `MessageExt.message_id`."""

LocalTransaction = Callable[[HalfMessage], Awaitable[LocalTransactionState]]
"""Does the local part."""


@dataclass(frozen=True, slots=True)
class TransactionProducerConfig:
    """Settings of a transaction producer.

    Attributes:
        producer: How half messages are sent. One whose outcome is unknown is sent again only where
            the broker stores it once nevertheless (`ProducerConfig.idempotent`): none would
            decide over a second one.
        end_timeout_s: How long a decision is sent to a group whose leader cannot be found. What
            does not arrive is asked for.
        retry_end: Send it again when it is unknown whether it arrived.
        checks_at_once: Calls of `check_local_transaction` at a time.
        end_transaction_hooks: Called with every decision a broker has; see `client.core.hooks`.
            Those of `producer` are called for half messages.
        topics: Topics whose brokers are to know this producer from the beginning on. Those of
            others know it, and can ask it, once it has sent something there.
    """

    producer: ProducerConfig = field(default_factory=ProducerConfig)
    end_timeout_s: float = 10.0
    retry_end: bool = True
    checks_at_once: int = 16
    topics: tuple[str, ...] = ()
    end_transaction_hooks: tuple[EndTransactionHook, ...] = ()


@dataclass(slots=True)
class TransactionCounters:
    """What a transaction producer has done so far.

    Attributes:
        halves: Half messages stored.
        commits: Commits sent, confirmed or not.
        rollbacks: Rollbacks sent, likewise.
        ends_failed: Decisions that did not reach a broker.
        checks: Questions of brokers.
        checks_failed: Of these, those whose answer raised an error: answered as unknown.
        checks_dropped: Of these, those that came when too many waited.
    """

    halves: int = 0
    commits: int = 0
    rollbacks: int = 0
    ends_failed: int = 0
    checks: int = 0
    checks_failed: int = 0
    checks_dropped: int = 0


class TransactionProducer(ManagedScope):
    """Transactions of one producer group. Open it with ``async with`` inside its instance.

    While it is open brokers ask it about any transaction of its group that has no decision, also
    of those that another process began: `check_local_transaction` must know them all.

    Attributes:
        group: The producer group.
        counters: See `TransactionCounters`.
    """

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        check_local_transaction: CheckLocalTransaction,
        config: TransactionProducerConfig | None = None,
    ) -> None:
        """Prepare a producer.

        Args:
            instance: Shared; must be open when the producer is opened.
            group: Producer group.
            check_local_transaction: Asked when a broker asks. UNKNOWN, or an error, lets the
                broker ask again later, `transactionCheckMax` times in all. It is not asked about
                transactions whose local part runs in this producer just now.
            config: Settings; None: the defaults.
        """
        self.group = group
        self.config = config = config if config is not None else TransactionProducerConfig()
        self.counters = TransactionCounters()
        self._instance = instance
        self._check = check_local_transaction
        # A second one would never be decided: only what is stored once is sent again.
        self._producer = Producer(instance, group, replace(config.producer, max_retries=0))
        self._running: dict[str, LocalTransactionState] = {}
        self._end_hooks = [hook.end_transaction for hook in config.end_transaction_hooks]
        if self._producer.trace is not None:
            hook = EndTransactionTraceHook(self._producer.trace, instance.clock)
            self._end_hooks.append(hook.end_transaction)
        self._questions, self._asked = trio.open_memory_channel[Question](QUESTIONS_MAX)

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        check_backs = self._instance.check_backs
        check_backs.add(self.group, self._on_question)
        try:
            async with self._producer, trio.open_nursery() as nursery:
                for _ in range(self.config.checks_at_once):
                    nursery.start_soon(self._answer_questions)
                for topic in self.config.topics:
                    nursery.start_soon(self._introduce, topic)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            check_backs.remove(self.group)

    async def _introduce(self, topic: str) -> None:
        try:
            await self._instance.route(topic)
        except MQError as error:
            # The instance asks for it again with its other routes.
            _log.info("transaction_topic_unknown", topic=topic, error=str(error))

    # ------------------------------------------------------------------------------ sending

    async def send_in_transaction(
        self,
        message: Message,
        local_transaction: LocalTransaction,
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> TransactionSendResult:
        """Send *message*, do the local part, and let consumers have the message or not.

        Args:
            message: As for `Producer.send`; without a delay.
            local_transaction: Called when the half message is stored. Its result decides; if it
                raises, nothing is decided, and the broker asks `check_local_transaction`.
            queue: Where to; None: the next one in turn.
            timeout_s: Budget of the half message.
        Returns:
            What was decided, and whether the broker has it.
        Raises:
            TransactionDecidedError: The local part decided otherwise than what is decided already,
                by an answer to the broker's question, or because it took too long.
            ClientError: As `Producer.send`: the half message is not stored, or that is unknown; the
                local part was not done.
            Exception: What *local_transaction* raises; the transaction is open.
        Cancellation: The transaction may be open; the broker asks.
        """
        half = await self.begin(message, queue=queue, timeout_s=timeout_s)
        try:
            state = LocalTransactionState.ROLLBACK
            if half.send_result.status is SendStatus.SEND_OK:
                state = await local_transaction(half)
            return await self.finish(half, state)
        finally:
            self._running.pop(half.transaction_id, None)

    async def begin(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> HalfMessage:
        """Send the half message. Until `finish` this producer answers questions as "not yet".

        Raises:
            ClientError: As `Producer.send`.
        """
        half = half_of(message, self.group)
        if queue is None:
            result = await self._producer.send(half, timeout_s=timeout_s)
        else:
            result = await self._producer.send_to(queue, half, timeout_s=timeout_s)
        self.counters.halves += 1
        self._running[result.message_id] = LocalTransactionState.UNKNOWN
        return HalfMessage(message, result, self.group)

    async def finish(
        self, half: HalfMessage, state: LocalTransactionState
    ) -> TransactionSendResult:
        """Tell the broker what became of the local part.

        Raises:
            TransactionDecidedError: It is decided otherwise.
        Cancellation: The decision may count.
        """
        if half.transaction_id in self._running:
            self._running[half.transaction_id] = state
        try:
            is_confirmed = await self.end(half, state)
        except TransactionDecidedError:
            raise
        except ClientError as error:
            return TransactionSendResult(half, state, is_confirmed=False, end_error=error)
        finally:
            self._running.pop(half.transaction_id, None)
        return TransactionSendResult(half, state, is_confirmed)

    async def leave_open(self, half: HalfMessage) -> None:
        """Give up knowing what becomes of a transaction: `check_local_transaction` is asked."""
        self._running.pop(half.transaction_id, None)
        await trio.lowlevel.checkpoint()

    async def end(self, half: HalfMessage, state: LocalTransactionState) -> bool:
        """Tell one decision; tell whether it is confirmed.

        Raises:
            ClientError: As `dledger.client.producer.transaction.tell`.
        """
        end = TransactionEnd(
            self.group,
            half.broker_name,
            half.message.topic,
            half.half_offset,
            half.position,
            half.transaction_id,
            state,
        )
        is_confirmed = await self._send_end(end)
        self._call_hooks(end, half.message)
        return is_confirmed

    async def publish_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """As `Producer.publish_queues`."""
        return await self._producer.publish_queues(topic)

    async def _send_end(self, end: TransactionEnd) -> bool:
        try:
            is_confirmed = await send_end(
                self._instance,
                end,
                self.config.end_timeout_s,
                retry_unknown=self.config.retry_end,
            )
        except ClientError:
            self.counters.ends_failed += 1
            raise
        self._count(end.state)
        return is_confirmed

    def _call_hooks(self, end: TransactionEnd, message: Message | MessageExt) -> None:
        if not self._end_hooks:
            return
        context = EndTransactionContext(
            producer_group=self.group,
            message=message,
            broker_addr=self._instance.leaders.address(end.broker_name) or "",
            msg_id=end.transaction_id,
            transaction_id=end.transaction_id,
            transaction_state=end.state,
            from_transaction_check=end.is_answer,
        )
        call_each(self._end_hooks, context)

    def _count(self, state: LocalTransactionState) -> None:
        if state is LocalTransactionState.COMMIT:
            self.counters.commits += 1
        elif state is LocalTransactionState.ROLLBACK:
            self.counters.rollbacks += 1

    # ------------------------------------------------------------------------------ answering

    def _on_question(self, question: Question) -> None:
        self.counters.checks += 1
        try:
            self._questions.send_nowait(question)
        except trio.WouldBlock:
            self.counters.checks_dropped += 1
            _log.warning("check_back_dropped", group=self.group, waiting=QUESTIONS_MAX)

    async def _answer_questions(self) -> None:
        async for question in self._asked:
            await self._answer(question)

    async def _answer(self, question: Question) -> None:
        message = question.message
        state = self._running.get(message.message_id)
        if state is None:
            state = await self._state_of(message)
        end = TransactionEnd(
            self.group,
            question.broker_name,
            message.topic,
            question.half_offset,
            question.position,
            message.message_id,
            state,
            is_answer=True,
        )
        try:
            if question.broker_name:
                await self._send_end(end)
            else:
                # A RocketMQ that does not say which group it is of: it waits where it asked.
                question.connection.invoke_oneway(end.oneway())
                self._count(state)
            self._call_hooks(end, message)
        except MQError as error:
            # It asks again, this producer or another one.
            _log.info("check_back_unanswered", group=self.group, error=str(error))

    async def _state_of(self, message: MessageExt) -> LocalTransactionState:
        try:
            return LocalTransactionState(await self._check(message))
        except Exception:  # noqa: BLE001  # the user's code: the answer is then UNKNOWN
            self.counters.checks_failed += 1
            _log.exception("check_local_transaction_failed", transaction_id=message.message_id)
            return LocalTransactionState.UNKNOWN
