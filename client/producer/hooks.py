"""Tells hooks of sends: each once before and once after, whatever becomes of the send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from client.core.errors import UnknownOutcomeError
from client.core.hooks import (
    CommunicationMode,
    MessageType,
    SendMessageContext,
    SendMessageHook,
    call_each,
)
from client.core.message import Message
from client.core.message_ext import SendResult
from client.producer.state import SendSlot, SlotState
from commitlog.errors import MQError
from commitlog.properties import (
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
)

_DELAYS: Final = frozenset(
    {PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS}
)


class SendHooks:
    """The hooks of one producer, and the sends they wait for the end of."""

    def __init__(
        self,
        hooks: Sequence[SendMessageHook],
        *,
        group: str,
        born_host: str,
        leader_of: Callable[[str], str | None],
        result_of: Callable[[SendSlot], SendResult | Sequence[SendResult]],
    ) -> None:
        """Prepare.

        Args:
            leader_of: Returns the address of a broker group's leader.
            result_of: Returns the result of a send that is stored.
        """
        self._before = [hook.send_message_before for hook in hooks]
        self._after = [hook.send_message_after for hook in hooks]
        self._group = group
        self._born_host = born_host
        self._leader_of = leader_of
        self._result_of = result_of
        self._open: dict[SendSlot, SendMessageContext] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def before(self, slot: SendSlot, mode: CommunicationMode) -> None:
        """Tell that *slot* is about to leave. Nothing without hooks."""
        if not self._before:
            return
        message = slot.message
        context = self._open[slot] = SendMessageContext(
            producer_group=self._group,
            message=message,
            mq=slot.queue,
            broker_addr=self._leader_of(slot.queue.broker_name) or "",
            born_host=self._born_host,
            communication_mode=mode,
            msg_type=type_of(message) if isinstance(message, Message) else MessageType.NORMAL_MSG,
        )
        call_each(self._before, context)

    def after(self, slot: SendSlot) -> None:
        """Tell what became of *slot*. Nothing if that was told, or it never left."""
        if slot.state is SlotState.STORED:
            self._ended(slot, None)
        elif slot.state is SlotState.FAILED:
            self._ended(slot, slot.error)
        else:
            self._ended(
                slot, UnknownOutcomeError("nobody waits any more; the message may be stored")
            )

    def after_oneway(self, slot: SendSlot, error: MQError | None) -> None:
        """Tell that *slot* was handed over, or why not."""
        self._ended(slot, error)

    def _ended(self, slot: SendSlot, error: MQError | None) -> None:
        context = self._open.pop(slot, None)
        if context is None:
            return
        context.mq = slot.queue
        context.broker_addr = self._leader_of(slot.queue.broker_name) or context.broker_addr
        context.exception = error
        if slot.state is SlotState.STORED:
            context.send_result = self._result_of(slot)
        call_each(self._after, context)


def type_of(message: Message) -> MessageType:
    """Return what kind of message it is."""
    properties = message.properties or {}
    if properties.get(PROPERTY_TRANSACTION_PREPARED) == "true":
        return MessageType.TRANS_MSG_HALF
    if message.is_delayed or not _DELAYS.isdisjoint(properties):
        return MessageType.DELAY_MSG
    return MessageType.NORMAL_MSG
