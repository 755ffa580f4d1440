"""What a push consumer calls with messages, and what the answer means."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, cast

from client.consumer.consume_hooks import ConsumeHooks
from client.consumer.consume_meter import ConsumeMeter
from client.consumer.delivered_message import DeliveredMessage
from client.core.hooks import ConsumeReturnType
from client.core.route import MessageQueue
from commitlog.errors import ConfigError
from remoting.seams import Executor


class ConsumeStatus(Enum):
    """What a listener says of the messages it was called with; None says SUCCESS."""

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


class ListenerCall:
    """Calls a listener the way it wants to be called, and tells hooks of it.

    Attributes:
        is_async: It can be cancelled; a plain function cannot.
    """

    def __init__(
        self,
        listener: Listener,
        executor: Executor | None,
        name: str,
        meter: ConsumeMeter | None = None,
        hooks: ConsumeHooks | None = None,
    ) -> None:
        """Wrap *listener*.

        Args:
            executor: Runs plain functions.
            name: Kind of its work there; what has the same worker, too, runs one after the other.
            meter: Told of each call; None: nobody is.
            hooks: Told of every call; None: there are none.
        Raises:
            ConfigError: It is a plain function and there is nothing to run it.
        """
        self.is_async = inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(
            type(listener).__call__
        )
        if not self.is_async and executor is None:
            raise ConfigError(
                "a plain function as listener needs an executor: use an async function, or a "
                "client made by client.connect.connect"
            )
        self._listener = listener
        self._executor = executor
        self._name = name
        self._meter = meter
        self._hooks = hooks

    async def __call__(
        self, messages: Sequence[DeliveredMessage], context: ConsumeContext, worker: object
    ) -> ConsumeStatus:
        """Call it and return its status.

        Raises:
            Exception: Whatever it raises.
        """
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
        handed = hooks.before(messages, context.queue)
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
