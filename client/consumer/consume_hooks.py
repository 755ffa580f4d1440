"""Tells hooks of messages that are handed out: each time once before and once after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from client.consumer.delivered_message import DeliveredMessage
from client.core.hooks import (
    CONSUME_CONTEXT_TYPE,
    ConsumeMessageContext,
    ConsumeMessageHook,
    ConsumeReturnType,
    call_each,
)
from client.core.route import MessageQueue
from remoting.seams import Clock

CONSUME_SUCCESS: Final = "CONSUME_SUCCESS"
RECONSUME_LATER: Final = "RECONSUME_LATER"
ORDERLY_SUCCESS: Final = "SUCCESS"
SUSPEND_CURRENT_QUEUE_A_MOMENT: Final = "SUSPEND_CURRENT_QUEUE_A_MOMENT"


class Handed:
    """Messages that were handed out.

    Attributes:
        context: What the hooks were told.
        since_s: Monotonic time.
    """

    __slots__ = ("context", "since_s")

    def __init__(self, context: ConsumeMessageContext, since_s: float) -> None:
        self.context = context
        self.since_s = since_s


class ConsumeHooks:
    """The hooks of one consumer."""

    def __init__(
        self,
        hooks: Sequence[ConsumeMessageHook],
        *,
        group: str,
        clock: Clock,
        timeout_s: float = float("inf"),
        orderly: bool = False,
    ) -> None:
        """Prepare.

        Args:
            timeout_s: What takes longer has timed out.
            orderly: RocketMQ has other words for what ordered listeners say.
        """
        self._before = [hook.consume_message_before for hook in hooks]
        self._after = [hook.consume_message_after for hook in hooks]
        self._group = group
        self._clock = clock
        self._timeout_s = timeout_s
        self._good = ORDERLY_SUCCESS if orderly else CONSUME_SUCCESS
        self._bad = SUSPEND_CURRENT_QUEUE_A_MOMENT if orderly else RECONSUME_LATER

    def __bool__(self) -> bool:
        return bool(self._before)

    def before(self, messages: Sequence[DeliveredMessage], queue: MessageQueue) -> Handed:
        """Tell that *messages* are about to be handed out."""
        context = ConsumeMessageContext(self._group, tuple(messages), queue)
        call_each(self._before, context)
        return Handed(context, self._clock.monotonic())

    def after(self, handed: Handed, returned: ConsumeReturnType) -> None:
        """Tell what came of it."""
        context = handed.context
        context.success = returned is ConsumeReturnType.SUCCESS
        context.status = self._good if context.success else self._bad
        if self._clock.monotonic() - handed.since_s >= self._timeout_s:
            returned = ConsumeReturnType.TIME_OUT
        context.props[CONSUME_CONTEXT_TYPE] = returned.name
        call_each(self._after, context)
