"""What a push consumer calls with messages, what its answer means, and the hooks around a call."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeAlias, cast

from dledger.client.consumer.process_queue import ConsumeMeter
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.hooks import (
    CONSUME_CONTEXT_TYPE,
    ConsumeMessageContext,
    ConsumeMessageHook,
    ConsumeReturnType,
    call_each,
)
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import trace_dispatcher, unique_ids
from dledger.client.trace import ConsumeMessageTraceHook, TraceDispatcher
from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.topic_names import RETRY_PREFIX
from dledger.remoting.seams import Clock, Executor

_RETRY_TOPIC: Final = b"RETRY_TOPIC"


def retry_topic_of(group: str) -> str:
    """Return the topic through which messages come back to a consumer group."""
    return RETRY_PREFIX + group


class DeliveredMessage(MessageExt):
    """A message on its way to a listener.

    Attributes:
        message_queue: Where it was pulled from; of a retry that is a queue of the retry topic.
    """

    __slots__ = ("_here", "message_queue")

    def __init__(self, message: MessageExt, queue: MessageQueue) -> None:
        """Look at the same record as *message*."""
        super().__init__(message._view, message.start, message.broker_name)
        self.message_queue = queue
        self._here = 0

    @property
    def topic(self) -> str:
        """The topic it was sent to."""
        topic = self.record.topic
        if topic.startswith(RETRY_PREFIX):
            return self._property(_RETRY_TOPIC) or topic
        return topic

    @property
    def reconsume_times(self) -> int:
        """How often it was given back for another try, here or through the retry topic."""
        return self.record.reconsume_times + self._here

    def tried_in_place(self) -> None:
        """Count one more try without a way through the broker."""
        self._here += 1


CONSUME_SUCCESS: Final = "CONSUME_SUCCESS"
RECONSUME_LATER: Final = "RECONSUME_LATER"
ORDERLY_SUCCESS: Final = "SUCCESS"
SUSPEND_CURRENT_QUEUE_A_MOMENT: Final = "SUSPEND_CURRENT_QUEUE_A_MOMENT"


class Handed(NamedTuple):
    """Messages that were handed out."""

    context: ConsumeMessageContext
    since_s: float


@dataclass(eq=False, repr=False)
class ConsumeHooks:
    """The hooks of one consumer."""

    _hooks: Sequence[ConsumeMessageHook]
    group: str
    clock: Clock
    timeout_s: float = float("inf")
    orderly: bool = False

    def __post_init__(self) -> None:
        self._before = [hook.consume_message_before for hook in self._hooks]
        self._after = [hook.consume_message_after for hook in self._hooks]
        self._good = ORDERLY_SUCCESS if self.orderly else CONSUME_SUCCESS
        self._bad = SUSPEND_CURRENT_QUEUE_A_MOMENT if self.orderly else RECONSUME_LATER

    def __bool__(self) -> bool:
        return bool(self._before)

    def before(
        self,
        messages: Sequence[DeliveredMessage],
        queue: MessageQueue,
        *,
        is_listener: bool = False,
    ) -> Handed:
        """Call the hooks before *messages* are handed out."""
        context = ConsumeMessageContext(self.group, tuple(messages), queue, is_listener)
        call_each(self._before, context)
        return Handed(context, self.clock.monotonic())

    def after(self, handed: Handed, returned: ConsumeReturnType) -> None:
        """Tell what came of it."""
        context = handed.context
        context.success = returned is ConsumeReturnType.SUCCESS
        context.status = self._good if context.success else self._bad
        if self.clock.monotonic() - handed.since_s >= self.timeout_s:
            returned = ConsumeReturnType.TIME_OUT
        context.props[CONSUME_CONTEXT_TYPE] = returned.name
        call_each(self._after, context)


def consume_trace(
    instance: ClientInstance, topic: str
) -> tuple[TraceDispatcher, ConsumeMessageTraceHook]:
    """Return what sends trace to *topic*, not yet open, and the hook that gives it something."""
    dispatcher = trace_dispatcher(instance, topic)
    hook = ConsumeMessageTraceHook(dispatcher, instance.clock, unique_ids(instance).create)
    return dispatcher, hook


class ConsumeStatus(Enum):
    """What a listener returns for the messages it was called with; None means SUCCESS."""

    SUCCESS = "success"
    RECONSUME_LATER = "reconsume_later"
    """They come again: through the retry topic, or in place when they are consumed in order."""
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "suspend_current_queue_a_moment"
    """The same, as listeners of ordered messages say it."""


@dataclass(slots=True)
class ConsumeContext:
    """What a listener may want to know, and may say beside its status.

    Attributes:
        queue: Where the messages come from.
        delay_level_when_next_consume: Of those that come again: 0: the broker decides, one level
            more each time; 1 to 18: that level; below 0: no more tries, to the dead letters.
        ack_index: Number of the last message of the batch that was dealt with; those behind it come
            again. None: all of them.
        suspend_ms: How long an ordered queue rests before it is tried again; None: as configured.
        lock_token: Fencing token of the lock under which an ordered queue is consumed; a later
            holder has a larger one. None where the broker gives none.
    """

    queue: MessageQueue
    delay_level_when_next_consume: int = 0
    ack_index: int | None = None
    suspend_ms: int | None = None
    lock_token: int | None = None


Answer: TypeAlias = ConsumeStatus | None
Listener: TypeAlias = Callable[
    [Sequence[DeliveredMessage], ConsumeContext], Answer | Awaitable[Answer]
]
"""An async function, or a plain one, which runs in a worker thread and may block.

An error it raises counts as RECONSUME_LATER.
"""


@dataclass(eq=False, repr=False)
class ListenerCall:
    """Calls a listener with the arguments it takes, and the hooks around it.

    *name*: kind of its work there; what has the same worker, too, runs one after the other.

    Raises ConfigError: the listener is a plain function and there is nothing to run it.
    """

    _listener: Listener
    _executor: Executor | None
    _name: str
    _meter: ConsumeMeter | None = None
    _hooks: ConsumeHooks | None = None

    def __post_init__(self) -> None:
        self.is_async = inspect.iscoroutinefunction(self._listener) or inspect.iscoroutinefunction(
            type(self._listener).__call__
        )
        if not self.is_async and self._executor is None:
            raise ConfigError(
                "a plain function as listener needs an executor: use an async function, or a "
                "client made by dledger.client.connect.connect"
            )

    async def __call__(
        self, messages: Sequence[DeliveredMessage], context: ConsumeContext, worker: object
    ) -> ConsumeStatus:
        """Call it and return its status. Raises Exception: whatever it raises."""
        meter = self._meter
        if meter is None:
            return await self._with_hooks(messages, context, worker)
        began_s = meter.consuming(context.queue)
        is_success = False
        try:
            status = await self._with_hooks(messages, context, worker)
            is_success = status is ConsumeStatus.SUCCESS
        finally:
            meter.consumed(context.queue.topic, len(messages), began_s, is_success=is_success)
        return status

    async def _with_hooks(
        self, messages: Sequence[DeliveredMessage], context: ConsumeContext, worker: object
    ) -> ConsumeStatus:
        hooks = self._hooks
        if not hooks:
            return await self._call(messages, context, worker)
        handed = hooks.before(messages, context.queue, is_listener=True)
        returned = ConsumeReturnType.EXCEPTION
        try:
            status = await self._call(messages, context, worker)
            is_done = status is ConsumeStatus.SUCCESS
            returned = ConsumeReturnType.SUCCESS if is_done else ConsumeReturnType.FAILED
            return status
        finally:
            hooks.after(handed, returned)

    async def _call(
        self, messages: Sequence[DeliveredMessage], context: ConsumeContext, worker: object
    ) -> ConsumeStatus:
        if self.is_async:
            answer = await cast("Awaitable[Answer]", self._listener(messages, context))
        else:
            assert self._executor is not None
            answer = cast(
                "Answer",
                await self._executor.run(
                    lambda: self._listener(messages, context), kind=f"{self._name}/{worker}"
                ),
            )
        if answer is None:
            return ConsumeStatus.SUCCESS
        if not isinstance(answer, ConsumeStatus):
            raise TypeError(
                f"a listener returned {answer!r}, which is no ConsumeStatus and not None"
            )
        return answer
