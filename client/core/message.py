"""A message to send: what it may hold, and how its properties are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import Buffer

from dledger.client.core.errors import MessageIllegalError
from dledger.commitlog.properties import KEY_SEPARATOR, PROPERTY_EXPIRE_AFTER_MS
from dledger.remoting.protocol.topic_names import CLOSED_TOPICS, DLQ_PREFIX, is_of_copies

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""RocketMQ's maxMessageSize, for one message and for a whole batch."""
MAX_ID_CHARS: Final = 64
"""Of a UNIQ_KEY; RocketMQ's have 32 to 34."""
MAX_DELAY_LEVEL: Final = 64
"""As many delay levels as a broker can be given; one above its own counts as its longest."""
MAX_TTL_MS: Final = 1 << 53
"""Longest time to live that brokers take."""
MAX_TOPIC_CHARS: Final = 127
"""Longest topic a client may send to."""
MAX_RETRY_TOPIC_CHARS: Final = 255
"""With the %RETRY% or %DLQ% prefix a group name stands behind."""

_TOPIC_CHARS: Final = frozenset(
    "%|-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
_CLIENT_PROPERTIES: Final = frozenset({"UNIQ_KEY", "KEYS", "TAGS", "DELAY"})


@dataclass(slots=True)
class Message:
    """One message to send. The SDK does not change it and keeps it until the send has ended.

    Attributes:
        topic: Where to. A topic that does not exist is created by the broker if it is allowed to.
        body: At least one byte, at most `MAX_BODY_BYTES`.
        tags: One tag that consumers filter by; empty: none.
        keys: Index keys; a string may hold several, separated by spaces; empty: none. In a list
            each is one key, without spaces.
        properties: Further properties, text. Neither names nor values are empty, since a record
            cannot hold that, or hold \\x01 or \\x02.
        delay_level: 1 … 18 (1 s … 2 h by default): deliver later. 0: at once.
        delay_ms: Deliver this many milliseconds after the broker got it, at the next whole second.
        deliver_at_ms: Deliver at this wall time, milliseconds since 1970, at the next whole
            second. A time that is over means at once. One of the three delays at most.
        flag: 32 bits of the user's own.
        message_id: Its UNIQ_KEY, of a program that gives messages ids of its own; at most
            `MAX_ID_CHARS`. Empty: the SDK makes one.
        ttl_ms: Not delivered any more this number of milliseconds after it was stored; a delayed
            one counts from when it is delivered. 0: without an end. RocketMQ's brokers know none.
    """

    topic: str
    body: Buffer
    tags: str = ""
    keys: str | Sequence[str] = ""
    properties: Mapping[str, str] | None = None
    delay_level: int = 0
    flag: int = 0
    delay_ms: int = 0
    deliver_at_ms: int = 0
    message_id: str = ""
    ttl_ms: int = 0

    @property
    def is_delayed(self) -> bool:
        """Whether it asks to be delivered later."""
        return self.delay_level > 0 or self.delay_ms != 0 or self.deliver_at_ms != 0


def check_topic(topic: str) -> None:
    """Refuse a topic no broker takes.

    Raises MessageIllegalError: empty, too long, bad characters, or reserved for the brokers.
    """
    limit = MAX_RETRY_TOPIC_CHARS if is_of_copies(topic) else MAX_TOPIC_CHARS
    if not topic:
        raise MessageIllegalError("the topic is empty")
    if len(topic) > limit:
        raise MessageIllegalError(f"the topic has {len(topic)} characters, at most {limit}")
    if not _TOPIC_CHARS.issuperset(topic):
        bad = next(c for c in topic if c not in _TOPIC_CHARS)
        raise MessageIllegalError(f"topic {topic!r} holds {bad!r}; allowed are % | a-z A-Z 0-9 _ -")
    if topic.startswith(DLQ_PREFIX):
        raise MessageIllegalError(
            f"topic {topic!r} is filled by the brokers; Admin.resend_dead_letters gives dead"
            " letters back"
        )
    if topic in CLOSED_TOPICS:
        raise MessageIllegalError(f"topic {topic!r} is the brokers' own, clients cannot send to it")


def check_body(body: Buffer, max_bytes: int = MAX_BODY_BYTES) -> int:
    """Return the body's size.

    Raises:
        MessageIllegalError: Empty or more than *max_bytes*.
        TypeError: Text, or no bytes at all.
    """
    try:
        size = len(body) if isinstance(body, bytes) else memoryview(body).nbytes
    except TypeError:
        hint = ": encode it, body=text.encode()" if isinstance(body, str) else ""
        raise TypeError(
            f"the body of a message is bytes, not {type(body).__name__}{hint}; nothing was sent"
        ) from None
    if size == 0:
        raise MessageIllegalError("the body is empty")
    if size > max_bytes:
        raise MessageIllegalError(f"the body has {size} bytes, at most {max_bytes}")
    return size


def encode_message_properties(message: Message, message_id: str) -> bytes:
    """Return the properties of *message* as a record holds them, UNIQ_KEY first.

    Raises MessageIllegalError: a key or value holds a separator, is empty or no text, or a property
    the SDK sets itself stands in ``properties``.
    """
    if len(message_id) > MAX_ID_CHARS:
        raise MessageIllegalError(f"a message id has at most {MAX_ID_CHARS} characters")
    if "\x01" in message_id or "\x02" in message_id:
        raise MessageIllegalError("a message id holds a separator, \\x01 or \\x02")
    text = f"UNIQ_KEY\x01{message_id}\x02"
    is_plain = not (message.tags or message.keys or message.properties or message.is_delayed)
    if is_plain and not message.delay_level and not message.ttl_ms:
        return text.encode()
    pairs = 1
    if message.tags:
        text = f"{text}TAGS\x01{message.tags}\x02"
        pairs += 1
    keys = message.keys
    if keys:
        text = f"{text}KEYS\x01{keys if isinstance(keys, str) else _joined(keys)}\x02"
        pairs += 1
    if message.delay_level:
        if not 0 < message.delay_level <= MAX_DELAY_LEVEL:
            raise MessageIllegalError(
                f"delay_level {message.delay_level}: brokers have at most {MAX_DELAY_LEVEL},"
                " 18 unless they are configured otherwise"
            )
        text = f"{text}DELAY\x01{message.delay_level}\x02"
        pairs += 1
    if message.delay_ms or message.deliver_at_ms:
        text += _timer_property(message)
        pairs += 1
    if message.ttl_ms:
        if not 0 < message.ttl_ms <= MAX_TTL_MS:
            raise MessageIllegalError(f"ttl_ms {message.ttl_ms} is not from 1 to {MAX_TTL_MS}")
        text = f"{text}{PROPERTY_EXPIRE_AFTER_MS}\x01{message.ttl_ms}\x02"
        pairs += 1
    properties = message.properties
    if properties:
        if not _CLIENT_PROPERTIES.isdisjoint(properties):
            taken = sorted(_CLIENT_PROPERTIES.intersection(properties))
            raise MessageIllegalError(f"properties {taken} have fields of their own on Message")
        for key, value in properties.items():
            if not key or not value or not isinstance(value, str):
                raise MessageIllegalError(
                    f"property {key!r} is {value!r}: a record holds no empty names or values, and"
                    " nothing but text; leave it out, or write it as text"
                )
            text += f"{key}\x01{value}\x02"
        pairs += len(properties)
    if text.count("\x01") != pairs or text.count("\x02") != pairs:
        raise MessageIllegalError("tags, keys and properties cannot hold \\x01 or \\x02")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MessageIllegalError(f"a property cannot be written as UTF-8: {error}") from error


def _joined(keys: Sequence[str]) -> str:
    for key in keys:
        if not key or KEY_SEPARATOR in key:
            raise MessageIllegalError(
                f"key {key!r} of a list is empty or holds a space, which separates keys:"
                " consumers would find other keys"
            )
    return KEY_SEPARATOR.join(keys)


def _timer_property(message: Message) -> str:
    if message.delay_level > 0 or (message.delay_ms and message.deliver_at_ms):
        raise MessageIllegalError("a message has one of delay_level, delay_ms and deliver_at_ms")
    if message.delay_ms < 0 or message.deliver_at_ms < 0:
        raise MessageIllegalError("a delay, and a time, is not negative")
    if message.delay_ms:
        return f"TIMER_DELAY_MS\x01{message.delay_ms}\x02"
    return f"TIMER_DELIVER_MS\x01{message.deliver_at_ms}\x02"
