"""What a producer sends, what a send brings back, and what a consumer reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, overload

from typing_extensions import Buffer

from client.core.compression import decompress
from client.core.errors import MessageIllegalError
from client.core.route import MessageQueue
from commitlog.errors import CorruptRecordError
from commitlog.message_id import encode_offset_message_id
from commitlog.properties import get_property
from commitlog.record import (
    MIN_RECORD_BYTES,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_STORE_HOST_V6,
    Record,
    body_crc,
    decode_record,
)

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""RocketMQ's maxMessageSize, for one message and for a whole batch."""
MAX_DELAY_LEVEL: Final = 64
"""As many delay levels as a broker can be given; one above its own counts as its longest."""
MAX_TOPIC_CHARS: Final = 127
"""Longest topic a client may send to."""
MAX_RETRY_TOPIC_CHARS: Final = 255
"""With the %RETRY% or %DLQ% prefix a group name stands behind."""

_TOPIC_CHARS: Final = frozenset(
    "%|-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
_CLIENT_PROPERTIES: Final = frozenset({"UNIQ_KEY", "KEYS", "TAGS", "DELAY"})
_CLOSED_TOPICS: Final = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "rmq_sys_wheel_timer",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)


@dataclass(slots=True)
class Message:
    """One message to send. The SDK does not change it and keeps it until the send has ended.

    Attributes:
        topic: Where to. A topic nobody created is created by the broker if it is allowed to.
        body: At least one byte, at most `MAX_BODY_BYTES`.
        tags: One tag that consumers filter by.
        keys: Index keys; a string may hold several, separated by spaces.
        properties: Further properties. Neither keys nor values may hold \\x01 or \\x02.
        delay_level: 1 … 18 (1 s … 2 h by default): deliver later. 0: at once.
        delay_ms: Deliver so many milliseconds after the broker got it, at the next whole second.
        deliver_at_ms: Deliver at this wall time, milliseconds since 1970, at the next whole
            second. A time that is over means at once. One of the three delays at most.
        flag: 32 bits of the user's own.
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

    @property
    def is_delayed(self) -> bool:
        """Whether it asks to be delivered later."""
        return self.delay_level > 0 or self.delay_ms != 0 or self.deliver_at_ms != 0


def check_topic(topic: str) -> None:
    """Refuse a topic no broker takes.

    Raises:
        MessageIllegalError: Empty, too long, bad characters, or reserved for the brokers.
    """
    limit = MAX_RETRY_TOPIC_CHARS if topic.startswith(("%RETRY%", "%DLQ%")) else MAX_TOPIC_CHARS
    if not topic:
        raise MessageIllegalError("the topic is empty")
    if len(topic) > limit:
        raise MessageIllegalError(f"the topic has {len(topic)} characters, at most {limit}")
    if not _TOPIC_CHARS.issuperset(topic):
        bad = next(c for c in topic if c not in _TOPIC_CHARS)
        raise MessageIllegalError(f"topic {topic!r} holds {bad!r}; allowed are % | a-z A-Z 0-9 _ -")
    if topic.startswith("%DLQ%"):
        raise MessageIllegalError(
            f"topic {topic!r} is filled by the brokers; Admin.resend_dead_letters gives dead"
            " letters back"
        )
    if topic in _CLOSED_TOPICS:
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

    Raises:
        MessageIllegalError: A key or value holds a separator, or a property the SDK sets itself
            stands in ``properties``.
    """
    text = f"UNIQ_KEY\x01{message_id}\x02"
    pairs = 1
    if message.tags:
        text = f"{text}TAGS\x01{message.tags}\x02"
        pairs += 1
    keys = message.keys
    if keys:
        text = f"{text}KEYS\x01{keys if isinstance(keys, str) else ' '.join(keys)}\x02"
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
    properties = message.properties
    if properties:
        if not _CLIENT_PROPERTIES.isdisjoint(properties):
            taken = sorted(_CLIENT_PROPERTIES.intersection(properties))
            raise MessageIllegalError(f"properties {taken} have fields of their own on Message")
        items = [f"{key}\x01{value}\x02" for key, value in properties.items() if key and value]
        text += "".join(items)
        pairs += len(items)
    if text.count("\x01") != pairs or text.count("\x02") != pairs:
        raise MessageIllegalError("tags, keys and properties cannot hold \\x01 or \\x02")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MessageIllegalError(f"a property cannot be written as UTF-8: {error}") from error


def _timer_property(message: Message) -> str:
    if message.delay_level > 0 or (message.delay_ms and message.deliver_at_ms):
        raise MessageIllegalError("a message has one of delay_level, delay_ms and deliver_at_ms")
    if message.delay_ms < 0 or message.deliver_at_ms < 0:
        raise MessageIllegalError("a delay, and a time, is not negative")
    if message.delay_ms:
        return f"TIMER_DELAY_MS\x01{message.delay_ms}\x02"
    return f"TIMER_DELIVER_MS\x01{message.deliver_at_ms}\x02"


class SendStatus(Enum):
    """How safe a stored message is. All of them mean: stored."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


class SendResult:
    """A message that is stored.

    Attributes:
        status: How safe it is; our brokers only ever say SEND_OK.
        message_id: The UNIQ_KEY: names the message whatever happens to it.
        message_queue: The queue it is in.
        queue_offset: Its place in that queue.
        phy_offset: Byte position in the broker's log, -1 where the broker did not say.
        recall_handle: Of a message with a time of its own, for `Producer.recall`; else empty.
    """

    __slots__ = (
        "_offset_message_id",
        "_store_host",
        "message_id",
        "message_queue",
        "phy_offset",
        "queue_offset",
        "recall_handle",
        "status",
    )

    def __init__(
        self,
        status: SendStatus,
        message_id: str,
        message_queue: MessageQueue,
        queue_offset: int,
        phy_offset: int = -1,
        store_host: bytes = b"",
        offset_message_id: str | None = None,
        recall_handle: str = "",
    ) -> None:
        self.status = status
        self.recall_handle = recall_handle
        self.message_id = message_id
        self.message_queue = message_queue
        self.queue_offset = queue_offset
        self.phy_offset = phy_offset
        self._store_host = store_host
        self._offset_message_id = offset_message_id

    @property
    def offset_message_id(self) -> str:
        """The id that holds broker address and log position, as admin tools take it."""
        if self._offset_message_id is None:
            if not self._store_host:
                return ""
            self._offset_message_id = encode_offset_message_id(self._store_host, self.phy_offset)
        return self._offset_message_id

    def __repr__(self) -> str:
        return (
            f"SendResult({self.status.name}, {self.message_id}, {self.message_queue}, "
            f"queue_offset={self.queue_offset})"
        )


_QUEUE_ID: Final = struct.Struct(">i")
_QUEUE_OFFSET_AND_PHY: Final = struct.Struct(">qq")
_I32: Final = struct.Struct(">i")
_RECORD_HEAD: Final = struct.Struct(">i4xI8xq8xi44xI")
"""Size, checksum, queue offset, system flag, and bytes of the body where both hosts are IPv4."""
_I64: Final = struct.Struct(">q")
_IPV6_HOSTS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6


class MessageExt:
    """A message as it was read, decoded only where it is looked at.

    It is a view: the whole pulled buffer lives as long as any message of it. Take `body` to keep
    one message of many.
    """

    __slots__ = ("_properties", "_record", "_view", "broker_name", "start")

    def __init__(self, view: memoryview, start: int, broker_name: str = "") -> None:
        """Wrap the record at byte *start* of *view*."""
        self._view = view
        self.start = start
        self.broker_name = broker_name
        self._record: Record | None = None
        self._properties: dict[str, str] | None = None

    @property
    def record(self) -> Record:
        """The whole record, decoded and checked on first use.

        Raises:
            CorruptRecordError: The record is not what its checksum says.
        """
        record = self._record
        if record is None:
            record = self._record = decode_record(self._view, self.start)
        return record

    @property
    def queue_offset(self) -> int:
        """Place in its queue."""
        offset: int = _I64.unpack_from(self._view, self.start + 20)[0]
        return offset

    @property
    def phy_offset(self) -> int:
        """Byte position in the broker's log."""
        offset: int = _I64.unpack_from(self._view, self.start + 28)[0]
        return offset

    @property
    def queue_id(self) -> int:
        """Queue it was read from."""
        queue_id: int = _QUEUE_ID.unpack_from(self._view, self.start + 12)[0]
        return queue_id

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        size: int = _I32.unpack_from(self._view, self.start)[0]
        return size

    @property
    def body(self) -> bytes:
        """The body as bytes of its own, decompressed if it was compressed. Raises as `body_view`.

        Each look copies; `body_view` does not.
        """
        body = self.body_view
        return body if isinstance(body, bytes) else bytes(body)

    @property
    def body_view(self) -> bytes | memoryview:
        """The body without a copy; a compressed one is decompressed.

        Raises:
            CorruptRecordError: The record or the compressed body is damaged, or decompresses to
                more than `client.core.compression.MAX_DECOMPRESSED_BYTES`.
        """
        view, start = self._view, self.start
        (sys_flag,) = _I32.unpack_from(view, start + 36)
        if sys_flag & (SYS_FLAG_COMPRESSED | _IPV6_HOSTS) == 0:
            (body_bytes,) = _I32.unpack_from(view, start + 84)
            return view[start + 88 : start + 88 + body_bytes]
        record = self.record
        if not record.sys_flag & SYS_FLAG_COMPRESSED:
            return record.body
        return decompress(record.body, record.sys_flag)

    @property
    def body_bytes(self) -> bytes:
        """The same as `body`."""
        return self.body

    @property
    def topic(self) -> str:
        """The topic as the record holds it."""
        return self.record.topic

    @property
    def flag(self) -> int:
        """The user's own 32 bits."""
        return self.record.flag

    @property
    def born_timestamp_ms(self) -> int:
        """Wall time of the producer when it was sent."""
        timestamp: int = _I64.unpack_from(self._view, self.start + 40)[0]
        return timestamp

    @property
    def store_timestamp_ms(self) -> int:
        """Wall time of the leader when it was stored; never goes back within a log."""
        return self.record.store_timestamp_ms

    @property
    def born_host(self) -> tuple[str, int]:
        """Address of the producer as the broker saw it."""
        return self.record.born_host

    @property
    def store_host(self) -> tuple[str, int]:
        """Address of the broker that stored it."""
        return self.record.store_host

    @property
    def reconsume_times(self) -> int:
        """How often it was given back for another try."""
        return self.record.reconsume_times

    @property
    def properties(self) -> dict[str, str]:
        """All properties; decoded once."""
        properties = self._properties
        if properties is None:
            properties = self._properties = self.record.property_map
        return properties

    @property
    def tags(self) -> str:
        """Its tag, or an empty string."""
        return self._property(b"TAGS")

    @property
    def keys(self) -> str:
        """Its index keys, separated by spaces."""
        return self._property(b"KEYS")

    @property
    def message_id(self) -> str:
        """The producer's UNIQ_KEY, or the offset message id where there is none."""
        return self._property(b"UNIQ_KEY") or self.offset_message_id

    @property
    def offset_message_id(self) -> str:
        """The id that holds broker address and log position."""
        start = self.start
        (sys_flag,) = _I32.unpack_from(self._view, start + 36)
        at = start + 64 + (12 if sys_flag & SYS_FLAG_BORN_HOST_V6 else 0)
        size = 20 if sys_flag & SYS_FLAG_STORE_HOST_V6 else 8
        return encode_offset_message_id(bytes(self._view[at : at + size]), self.phy_offset)

    def _property(self, key: bytes) -> str:
        value = get_property(self.record.properties, key)
        return "" if value is None else value.decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"MessageExt({self.topic!r}, queue {self.queue_id}, offset {self.queue_offset})"


MAX_QUEUE_OFFSET: Final = (1 << 63) - 1


class MessageBlock(Sequence[MessageExt]):
    """Records back to back in one buffer, as a sequence of messages."""

    __slots__ = ("_broker_name", "_starts", "_view")

    def __init__(
        self,
        buffer: Buffer,
        broker_name: str = "",
        first_offset: int = 0,
        end_offset: int = MAX_QUEUE_OFFSET,
    ) -> None:
        """Find the record starts and compare each body with its checksum; nothing is decoded.

        Args:
            buffer: Whole records back to back; kept, not copied.
            broker_name: Where it was read from.
            first_offset: No message may be before this offset of its queue,
            end_offset: nor at this one or behind it.
        Raises:
            CorruptRecordError: The sizes do not add up to the buffer, the offsets do not rise, or
                a body does not fit its checksum.
        """
        view = memoryview(buffer)
        starts: list[int] = []
        start, end = 0, view.nbytes
        unpack_from = _RECORD_HEAD.unpack_from
        while start < end:
            if end - start < MIN_RECORD_BYTES:
                raise CorruptRecordError(f"{end - start} bytes are left over after the records")
            size, crc, offset, sys_flag, body_bytes = unpack_from(view, start)
            if size < MIN_RECORD_BYTES or size > end - start:
                raise CorruptRecordError(f"record at {start} claims {size} bytes")
            if not first_offset <= offset < end_offset:
                raise CorruptRecordError(
                    f"record at {start} claims offset {offset}, not one from {first_offset} on "
                    f"and below {end_offset}"
                )
            if sys_flag & _IPV6_HOSTS:
                decode_record(view, start)
            elif body_crc(view[start + _RECORD_HEAD.size :][:body_bytes]) != crc:
                raise CorruptRecordError(f"the body of the record at {start} is damaged")
            first_offset = offset + 1
            starts.append(start)
            start += size
        self._view = view
        self._starts = starts
        self._broker_name = broker_name

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> MessageExt: ...
    @overload
    def __getitem__(self, index: slice) -> list[MessageExt]: ...
    def __getitem__(self, index: int | slice) -> MessageExt | list[MessageExt]:
        if isinstance(index, slice):
            return [MessageExt(self._view, s, self._broker_name) for s in self._starts[index]]
        return MessageExt(self._view, self._starts[index], self._broker_name)

    def __iter__(self) -> Iterator[MessageExt]:
        view, name = self._view, self._broker_name
        for start in self._starts:
            yield MessageExt(view, start, name)


class PullStatus(Enum):
    """What a pull found."""

    FOUND = "found"
    NO_NEW_MESSAGE = "no_new_message"
    NO_MATCHED_MESSAGE = "no_matched_message"


@dataclass(frozen=True, slots=True)
class PullResult:
    """One answer to a pull.

    Attributes:
        status: Whether there is something in it.
        next_begin_offset: Where to go on.
        min_offset: First offset the queue holds.
        max_offset: One past the last.
        messages: Views over one shared buffer.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: Sequence[MessageExt] = field(default_factory=tuple)
