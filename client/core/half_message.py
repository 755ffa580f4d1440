"""A half message as its producer knows it, and what may become of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from client.core.errors import ClientError, MessageIllegalError
from client.core.message import Message, SendResult
from commitlog.message_id import decode_offset_message_id
from commitlog.properties import (
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
)

_DELAYS: Final = frozenset(
    {PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS}
)


class LocalTransactionState(Enum):
    """What became of the local part; the number is what goes over the wire."""

    UNKNOWN = 0
    """Not yet known: the broker asks later."""
    COMMIT = 8
    """Done: consumers are to get the message."""
    ROLLBACK = 12
    """Undone: nobody is to get it."""


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A message that is stored and that no consumer sees until its transaction is committed.

    Attributes:
        message: What was sent.
        send_result: Where the half message is; its queue offset is that of the half topic.
        group: The producer group that decides.
    """

    message: Message
    send_result: SendResult
    group: str

    @property
    def transaction_id(self) -> str:
        """Names the transaction; the message has it as `MessageExt.message_id` everywhere."""
        return self.send_result.message_id

    @property
    def broker_name(self) -> str:
        """The broker group that holds it."""
        return self.send_result.message_queue.broker_name

    @property
    def half_offset(self) -> int:
        """Its place in the half topic."""
        return self.send_result.queue_offset

    @property
    def position(self) -> int:
        """Its place in the broker's log."""
        if self.send_result.phy_offset >= 0:
            return self.send_result.phy_offset
        return decode_offset_message_id(self.send_result.offset_message_id)[-1]


@dataclass(frozen=True, slots=True)
class TransactionSendResult:
    """What became of a transactional send.

    Attributes:
        half: The half message.
        state: What the local part came to; ROLLBACK without asking it when the half message was
            not stored as safely as asked for.
        is_confirmed: The broker has the decision; nothing can change it any more. Never with a
            real RocketMQ, which answers nothing.
        end_error: Why the broker could not be told. The transaction is open or decided as told;
            the broker asks back, and `check_local_transaction` answers.
    """

    half: HalfMessage
    state: LocalTransactionState
    is_confirmed: bool
    end_error: ClientError | None = None


def half_of(message: Message, group: str) -> Message:
    """Return *message* as it is sent to wait for the decision of *group*.

    Raises:
        MessageIllegalError: It asks for a delay.
    """
    properties: Mapping[str, str] = message.properties or {}
    if message.delay_level > 0 or not _DELAYS.isdisjoint(properties):
        raise MessageIllegalError("a transactional message cannot be delayed")
    marks = {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: group}
    return replace(message, properties={**properties, **marks})
