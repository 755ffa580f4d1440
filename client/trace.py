"""Message trace: what is recorded of a message, the hooks that do, and what sends it.

In RocketMQ's encoding, to the byte, each record is text: fields joined by \x01, ended by \x02::

    Pub             time region group topic msgId tags keys storeHost bodyLength cost msgType
                    offsetMsgId success
    SubBefore       time region group requestId msgId retryTimes keys
    SubAfter        requestId msgId cost success keys contextCode time group
    EndTransaction  time region group topic msgId tags keys storeHost msgType transactionId state
                    fromTransactionCheck

The type stands first in each. RocketMQ's clients write ``null`` where a message has no tags, no
keys or no region, and its reader needs the last field of SubBefore: so does this.

Trace waits in a bounded queue. When that is full, or the trace topic takes nothing, steps are
dropped and counted: a message never waits for its trace.

Spec: docs/internals/protocol/semantics.md, section 8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import trio

from dledger.client.core.client_state import ManagedScope
from dledger.client.core.hooks import (
    CONSUME_CONTEXT_TYPE,
    ConsumeMessageContext,
    ConsumeReturnType,
    EndTransactionContext,
    LocalTransactionState,
    MessageType,
    SendMessageContext,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult, SendStatus
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import KEY_SEPARATOR, PROPERTY_MSG_REGION, PROPERTY_TRACE_ON
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.topic_names import TRACE_TOPIC
from dledger.remoting.seams import Clock

CONTENT_SEPARATOR: Final = "\x01"
FIELD_SEPARATOR: Final = "\x02"
DEFAULT_REGION: Final = "DefaultRegion"
_NULL: Final = "null"


class TraceType(Enum):
    """Which step of a message's way."""

    PUB = "Pub"
    SUB_BEFORE = "SubBefore"
    SUB_AFTER = "SubAfter"
    END_TRANSACTION = "EndTransaction"


@dataclass(frozen=True, slots=True)
class TraceBean:
    """One message of a `TraceContext`. Which fields are written depends on the type."""

    msg_id: str
    topic: str = ""
    tags: str = ""
    keys: str = ""
    store_host: str = ""
    body_length: int = 0
    msg_type: int = 0
    offset_msg_id: str = ""
    retry_times: int = 0
    transaction_id: str = ""
    transaction_state: str = ""
    from_transaction_check: bool = False


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One step of one or several messages.

    Attributes:
        trace_type: Which step.
        time_stamp_ms: Wall time of the client: when a send or a consumption began; of SubAfter
            when it ended, 0 where an old client did not say.
        cost_time_ms: How long it took.
        request_id: Joins SubBefore and SubAfter.
        context_code: How the listener came back: see `dledger.client.core.hooks.ConsumeReturnType`.
    """

    trace_type: TraceType
    time_stamp_ms: int
    beans: tuple[TraceBean, ...]
    region_id: str = ""
    group_name: str = ""
    cost_time_ms: int = 0
    is_success: bool = True
    request_id: str = ""
    context_code: int = 0


def java_bool(value: bool) -> str:
    """Return *value* as Java writes it."""
    return "true" if value else "false"


def _is_true(text: str) -> bool:
    return text.lower() == "true"


def _or_null(text: str) -> str:
    return text or _NULL


def _not_null(text: str) -> str:
    return "" if text == _NULL else text


class _Field(NamedTuple):
    """A field of a record: its name in a `TraceContext` or a `TraceBean`, and how it is written."""

    name: str
    is_of_message: bool
    write: Callable[[Any], str] = str
    read: Callable[[str], object] = _not_null


_TIME: Final = _Field("time_stamp_ms", False, read=whole_number)
_REGION: Final = _Field("region_id", False, _or_null)
_GROUP: Final = _Field("group_name", False)
_REQUEST: Final = _Field("request_id", False)
_COST: Final = _Field("cost_time_ms", False, read=whole_number)
_SUCCESS: Final = _Field("is_success", False, java_bool, _is_true)
_CODE: Final = _Field("context_code", False, read=whole_number)
_TOPIC: Final = _Field("topic", True)
_ID: Final = _Field("msg_id", True)
_TAGS: Final = _Field("tags", True, _or_null)
_KEYS: Final = _Field("keys", True, _or_null)
_HOST: Final = _Field("store_host", True)
_LENGTH: Final = _Field("body_length", True, read=whole_number)
_KIND: Final = _Field("msg_type", True, read=whole_number)
_PLACE: Final = _Field("offset_msg_id", True)
_RETRIES: Final = _Field("retry_times", True, read=whole_number)
_TRANSACTION: Final = _Field("transaction_id", True)
_STATE: Final = _Field("transaction_state", True)
_CHECK: Final = _Field("from_transaction_check", True, java_bool, _is_true)

_OF_MESSAGE: Final = (_TIME, _REGION, _GROUP, _TOPIC, _ID, _TAGS, _KEYS, _HOST)
_FIELDS: Final = {
    TraceType.PUB: (*_OF_MESSAGE, _LENGTH, _COST, _KIND, _PLACE, _SUCCESS),
    TraceType.SUB_BEFORE: (_TIME, _REGION, _GROUP, _REQUEST, _ID, _RETRIES, _KEYS),
    TraceType.SUB_AFTER: (_REQUEST, _ID, _COST, _SUCCESS, _KEYS, _CODE, _TIME, _GROUP),
    TraceType.END_TRANSACTION: (*_OF_MESSAGE, _KIND, _TRANSACTION, _STATE, _CHECK),
}
_FIELDS_MIN: Final = {
    TraceType.PUB: 12, TraceType.SUB_BEFORE: 6, TraceType.SUB_AFTER: 4,
    TraceType.END_TRANSACTION: 12,
}  # fmt: skip
"""What the oldest clients wrote of them."""


def encode(context: TraceContext) -> str:
    """Return the records of *context*, one for each message."""
    kind = context.trace_type
    records = []
    for bean in context.beans:
        fields = (
            field.write(getattr(bean if field.is_of_message else context, field.name))
            for field in _FIELDS[kind]
        )
        records.append(CONTENT_SEPARATOR.join((kind.value, *fields)) + FIELD_SEPARATOR)
    return "".join(records)


def keys_of(context: TraceContext) -> list[str]:
    """Return what the trace of *context* is found by: ids and keys of its messages."""
    found: dict[str, None] = {}
    for bean in context.beans:
        found[bean.msg_id] = None
        found.update(dict.fromkeys(key for key in bean.keys.split(KEY_SEPARATOR) if key))
    return list(found)


def decode(text: str) -> Iterator[TraceContext]:
    """Yield what a trace message records, also one of another client; a context has one bean.

    A record that cannot be read, or of an unknown type, is passed over: what stands
    around it is worth as much.
    """
    for record in text.split(FIELD_SEPARATOR):
        name, *values = record.split(CONTENT_SEPARATOR)
        try:
            context = _read(TraceType(name), values)
        except ValueError:
            continue
        yield context


def _read(kind: TraceType, values: list[str]) -> TraceContext:
    """Raises ValueError: it is no record of this type."""
    if len(values) < _FIELDS_MIN[kind]:
        raise ValueError(f"{len(values)} fields")
    if kind is TraceType.PUB and len(values) == _FIELDS_MIN[kind]:
        values.insert(-1, "")  # the oldest clients wrote no offset message id
    found: tuple[dict[str, Any], dict[str, Any]] = ({"time_stamp_ms": 0}, {})
    # Some later clients wrote their own address at the end.
    for field, value in zip(_FIELDS[kind], values, strict=False):
        found[field.is_of_message][field.name] = field.read(value)
    return TraceContext(kind, beans=(TraceBean(**found[1]),), **found[0])


_log = get_logger(__name__)

TRACE_PRODUCER_GROUP: Final = "_INNER_TRACE_PRODUCER"
WAITING_TRACES_MAX: Final = 2048
"""RocketMQ's. Steps that wait to be sent; further ones are dropped and counted, as a message must
not wait for its trace."""
TRACE_BATCH_MAX: Final = 100
"""RocketMQ's. Steps in one trace message."""
TRACE_BODY_BYTES: Final = 118_000
"""RocketMQ's: a trace message is sent when its body has grown to this."""
TRACE_KEYS_BYTES: Final = 16_384
"""Of the keys of a trace message, which have to fit into its properties (32,767 bytes)."""
TRACE_LINGER_S: Final = 0.1
"""How long the first step waits for company."""
TRACE_SEND_TIMEOUT_S: Final = 5.0
"""RocketMQ's. Of one trace message; meanwhile others wait, or are dropped."""
TRACE_FLUSH_S: Final = 0.5
"""RocketMQ's. How long what still waits at the end may take; the rest is dropped."""


@dataclass(slots=True)
class TraceCounters:
    """What became of steps so far.

    Attributes:
        sent: Steps in trace messages that are stored.
        dropped: Steps that met a full queue, or waited when all was over.
        failed: Steps in trace messages that are not known to be stored.
    """

    sent: int = 0
    dropped: int = 0
    failed: int = 0


class TraceSender(AbstractAsyncContextManager[object], Protocol):
    """Sends trace messages: a `Producer` that is not open yet and has no hooks of its own."""

    async def send(self, message: Message, *, timeout_s: float | None = None) -> SendResult:
        """Send *message* and return when it is stored."""


class TraceDispatcher(ManagedScope):
    """Takes steps from hooks and sends them. Open it with ``async with``.

    Attributes:
        topic: Where to.
        counters: See `TraceCounters`.
    """

    def __init__(self, producer: TraceSender, clock: Clock, topic: str = TRACE_TOPIC) -> None:
        """Prepare.

        *producer*: not yet open, and without hooks: it is opened and closed with this.
        """
        self.topic = topic
        self.counters = TraceCounters()
        self._producer = producer
        self._clock = clock
        self._waiting: deque[TraceContext] = deque()
        self._arrived = trio.Event()
        self._idle = trio.Event()
        self._is_dropping = False

    def append(self, context: TraceContext) -> bool:
        """Queue a step; return whether it fitted. Never blocks."""
        if len(self._waiting) >= WAITING_TRACES_MAX:
            self.counters.dropped += 1
            if not self._is_dropping:
                self._is_dropping = True
                _log.warning("trace_dropped", topic=self.topic, waiting=WAITING_TRACES_MAX)
            return False
        self._waiting.append(context)
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._arrived.set()
        return True

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        async with self._producer, trio.open_nursery() as nursery:
            nursery.start_soon(self._run)
            try:
                yield
            finally:
                # A cancellation does not wait: then what is left is lost.
                with trio.move_on_after(TRACE_FLUSH_S):
                    await self._flush()
                nursery.cancel_scope.cancel()
                self.counters.dropped += len(self._waiting)
                self._waiting.clear()

    async def _flush(self) -> None:
        if self._waiting or self._arrived.is_set():
            await self._idle.wait()

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._clock.sleep(TRACE_LINGER_S)
            while self._waiting:
                await self._send(self._take())
            self._arrived = trio.Event()
            self._is_dropping = False
            self._idle.set()

    def _take(self) -> tuple[Message, int]:
        """Return the next trace message and how many steps are in it."""
        body: list[str] = []
        keys: dict[str, None] = {}
        body_bytes = key_bytes = 0
        while self._waiting and len(body) < TRACE_BATCH_MAX:
            context = self._waiting[0]
            text, more = encode(context), keys_of(context)
            body_bytes += len(text.encode())
            key_bytes += sum(len(key.encode()) + 1 for key in more)
            if body and (body_bytes > TRACE_BODY_BYTES or key_bytes > TRACE_KEYS_BYTES):
                break
            self._waiting.popleft()
            body.append(text)
            keys.update(dict.fromkeys(more))
        return Message(self.topic, "".join(body).encode(), keys=tuple(keys)), len(body)

    async def _send(self, taken: tuple[Message, int]) -> None:
        message, steps = taken
        try:
            await self._producer.send(message, timeout_s=TRACE_SEND_TIMEOUT_S)
        except MQError as error:
            self.counters.failed += steps
            _log.info("trace_not_sent", topic=self.topic, steps=steps, error=str(error))
        else:
            self.counters.sent += steps


_STATES: Final = {
    LocalTransactionState.UNKNOWN: "UNKNOW",  # as RocketMQ spells it
    LocalTransactionState.COMMIT: "COMMIT_MESSAGE",
    LocalTransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
}


@dataclass(eq=False, repr=False)
class SendMessageTraceHook:
    """Traces messages that are stored; of a batch each for itself, so that each is found."""

    _dispatcher: TraceDispatcher
    _clock: Clock

    def send_message_before(self, context: SendMessageContext) -> None:
        """Note when it began."""
        context.mq_trace_context = self._clock.wall_ms()

    def send_message_after(self, context: SendMessageContext) -> None:
        """Trace it, if there is a result, as RocketMQ does."""
        began_ms, result, given = context.mq_trace_context, context.send_result, context.message
        if result is None or not isinstance(began_ms, int):
            return
        results = [result] if isinstance(result, SendResult) else result
        messages = [given] if isinstance(given, Message) else given
        cost_ms = self._clock.wall_ms() - began_ms
        for message, result in zip(messages, results, strict=True):
            if message.topic.startswith(self._dispatcher.topic):
                continue
            self._dispatcher.append(
                TraceContext(
                    TraceType.PUB,
                    began_ms,
                    (_sent(message, result, context),),
                    DEFAULT_REGION,
                    context.producer_group,
                    cost_ms,
                    result.status is SendStatus.SEND_OK,
                )
            )


def _sent(message: Message, result: SendResult, context: SendMessageContext) -> TraceBean:
    return TraceBean(
        result.message_id,
        message.topic,
        message.tags,
        _keys(message),
        context.broker_addr,
        memoryview(message.body).nbytes,
        context.msg_type.value,
        result.offset_message_id,
    )


@dataclass(eq=False, repr=False)
class ConsumeMessageTraceHook:
    """Traces messages before and after they are consumed.

    *new_id*: makes ids of consumptions out of the wall time in ms.
    """

    _dispatcher: TraceDispatcher
    _clock: Clock
    _new_id: Callable[[int], str]

    def consume_message_before(self, context: ConsumeMessageContext) -> None:
        """Trace that they are handed out."""
        traced = [
            message
            for message in context.msg_list
            if message.properties.get(PROPERTY_TRACE_ON) != "false"
        ]
        if not traced:
            return
        now_ms = self._clock.wall_ms()
        before = TraceContext(
            TraceType.SUB_BEFORE,
            now_ms,
            tuple(
                TraceBean(
                    message.message_id,
                    message.topic,
                    message.tags,
                    message.keys,
                    retry_times=message.reconsume_times,
                )
                for message in traced
            ),
            traced[-1].properties.get(PROPERTY_MSG_REGION, ""),
            context.consumer_group,
            request_id=self._new_id(now_ms),
        )
        context.mq_trace_context = before
        self._dispatcher.append(before)

    def consume_message_after(self, context: ConsumeMessageContext) -> None:
        """Trace what came of it."""
        before = context.mq_trace_context
        if not isinstance(before, TraceContext):
            return
        now_ms = self._clock.wall_ms()
        self._dispatcher.append(
            TraceContext(
                TraceType.SUB_AFTER,
                now_ms,
                before.beans,
                before.region_id,
                before.group_name,
                (now_ms - before.time_stamp_ms) // len(context.msg_list),
                context.success,
                before.request_id,
                ConsumeReturnType[context.props[CONSUME_CONTEXT_TYPE]].value,
            )
        )


@dataclass(eq=False, repr=False)
class EndTransactionTraceHook:
    """Traces decisions over transactions."""

    _dispatcher: TraceDispatcher
    _clock: Clock

    def end_transaction(self, context: EndTransactionContext) -> None:
        """Trace it."""
        message = context.message
        bean = TraceBean(
            context.msg_id,
            message.topic,
            message.tags,
            _keys(message),
            context.broker_addr,
            msg_type=MessageType.TRANS_MSG_COMMIT.value,
            transaction_id=context.transaction_id,
            transaction_state=_STATES[context.transaction_state],
            from_transaction_check=context.from_transaction_check,
        )
        self._dispatcher.append(
            TraceContext(
                TraceType.END_TRANSACTION,
                self._clock.wall_ms(),
                (bean,),
                DEFAULT_REGION,
                context.producer_group,
            )
        )


def _keys(message: Message | MessageExt) -> str:
    keys = message.keys
    return keys if isinstance(keys, str) else KEY_SEPARATOR.join(keys)
