"""Code of the user's that is called for every send, consumption and end of a transaction.

Names are RocketMQ's. A hook is called in the client's event loop: it must neither block nor change
messages. What it raises is logged, and changes nothing for the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Protocol, TypeVar, runtime_checkable

from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.remoting.log import get_logger

CONSUME_CONTEXT_TYPE: Final = "ConsumeContextType"
"""RocketMQ's name of the property of a `ConsumeMessageContext` that holds a `ConsumeReturnType`."""

_log = get_logger(__name__)


class CommunicationMode(Enum):
    """How a send waits for its answer."""

    SYNC = "sync"
    ASYNC = "async"
    """Through a `SendFuture`."""
    ONEWAY = "oneway"


class MessageType(Enum):
    """What kind of message is sent; the number is RocketMQ's ordinal."""

    NORMAL_MSG = 0
    TRANS_MSG_HALF = 1
    TRANS_MSG_COMMIT = 2
    DELAY_MSG = 3
    ORDER_MSG = 4


class ConsumeReturnType(Enum):
    """How a listener came back; the number is RocketMQ's ordinal."""

    SUCCESS = 0
    TIME_OUT = 1
    """It took longer than the consume timeout, whatever it returned then."""
    EXCEPTION = 2
    """It raised, or was cancelled."""
    RETURNNULL = 3
    """Of Java's listeners only: here None means success."""
    FAILED = 4


class LocalTransactionState(Enum):
    """What became of the local part; the number is what goes over the wire."""

    UNKNOWN = 0
    """Not yet known: the broker asks later."""
    COMMIT = 8
    """Done: consumers are to get the message."""
    ROLLBACK = 12
    """Undone: no consumer is to get it."""


@dataclass(slots=True)
class SendMessageContext:
    """One send: a message, or a batch.

    Attributes:
        producer_group: The group that sends.
        message: What; a sequence of messages for a batch.
        mq: Where to. Afterwards: where it is, or was tried last.
        broker_addr: The leader of that queue's broker group as it is known; empty: none is.
        born_host: This client's address.
        communication_mode: How the sender waits.
        msg_type: What kind of message.
        send_result: Afterwards, when it is stored and there is an answer: a `SendResult`, a
            sequence of them for a batch.
        exception: Afterwards, when it failed.
        mq_trace_context: For one hook to keep something from before to after.
        props: For hooks to tell each other something.
    """

    producer_group: str
    message: Message | Sequence[Message]
    mq: MessageQueue
    broker_addr: str
    born_host: str
    communication_mode: CommunicationMode
    msg_type: MessageType = MessageType.NORMAL_MSG
    send_result: SendResult | Sequence[SendResult] | None = None
    exception: MQError | None = None
    mq_trace_context: object = None
    props: dict[str, str] = field(default_factory=dict)


class SendMessageHook(Protocol):
    """Called for every send of a producer."""

    def send_message_before(self, context: SendMessageContext) -> None:
        """A message is about to leave; not called for retries."""

    def send_message_after(self, context: SendMessageContext) -> None:
        """What became of it is known, or its sender has stopped waiting."""


@runtime_checkable
class MessagePropertiesHook(Protocol):
    """A `SendMessageHook` that also gives messages properties, such as the context of a trace."""

    def send_message_properties(self, message: Message) -> Mapping[str, str]:
        """Return further properties of *message*, which is not encoded yet; not for retries.

        Those that the message has win. What is raised is logged, and nothing is added.
        """


def with_hook_properties(message: Message, hooks: Sequence[MessagePropertiesHook]) -> Message:
    """Return *message* with what *hooks* add; itself when they add nothing."""
    added: dict[str, str] = {}
    for hook in hooks:
        try:
            added.update(hook.send_message_properties(message))
        except Exception:  # noqa: BLE001  # the user's own; the message must not suffer from it
            _log.exception("hook_failed", hook=type(hook).__qualname__)
    if not added:
        return message
    return replace(message, properties={**added, **(message.properties or {})})


@dataclass(slots=True)
class ConsumeMessageContext:
    """Messages in the hands of a listener, or of a caller of `poll`.

    Attributes:
        consumer_group: The group that consumes.
        msg_list: The messages, of one queue.
        mq: That queue.
        is_listener: A listener is called between before and after, in their task.
        success: Afterwards: they count as dealt with.
        status: Afterwards: what the listener returned, in RocketMQ's words.
        mq_trace_context: For one hook to keep something from before to after.
        props: For hooks to tell each other something; afterwards `CONSUME_CONTEXT_TYPE` holds the
            name of a `ConsumeReturnType`.
    """

    consumer_group: str
    msg_list: Sequence[MessageExt]
    mq: MessageQueue
    is_listener: bool = False
    success: bool = False
    status: str = ""
    mq_trace_context: object = None
    props: dict[str, str] = field(default_factory=dict)


class ConsumeMessageHook(Protocol):
    """Called for all messages that a consumer hands out."""

    def consume_message_before(self, context: ConsumeMessageContext) -> None:
        """A listener is about to be called, or a poll to return."""

    def consume_message_after(self, context: ConsumeMessageContext) -> None:
        """The listener came back or was cancelled, or the messages of the poll count as dealt with.

        A consumer that is closed gives up what the last poll returned: that is no success.
        """


@dataclass(slots=True)
class EndTransactionContext:
    """A decision over a transaction that a broker was given.

    Attributes:
        producer_group: The group that decided.
        message: The message; after a question of the broker as it was read.
        broker_addr: The leader of the broker group as it is known; empty: none is.
        msg_id: The message's id.
        transaction_id: The same: it names the transaction.
        transaction_state: The decision; UNKNOWN: the broker asks later.
        from_transaction_check: The broker had asked.
    """

    producer_group: str
    message: Message | MessageExt
    broker_addr: str
    msg_id: str
    transaction_id: str
    transaction_state: LocalTransactionState
    from_transaction_check: bool


class EndTransactionHook(Protocol):
    """Called for every decision that a broker was given."""

    def end_transaction(self, context: EndTransactionContext) -> None:
        """The broker got it; one that knows another decision has refused, and is not counted."""


C = TypeVar("C")


def call_each(calls: Sequence[Callable[[C], None]], context: C) -> None:
    """Call each hook; one that raises is logged, and the others are still called."""
    for call in calls:
        try:
            call(context)
        except Exception:  # noqa: BLE001  # the user's own; the message must not suffer from it
            _log.exception("hook_failed", hook=getattr(call, "__qualname__", repr(call)))
