"""What brokers return: where a message is stored, and the stored messages of a pull.

A body may be compressed by its producer: the record's sysFlag has bit 0 set, and the type in bits 8
to 10. Brokers store and return bodies as they came; only the two ends of a message read them.

Spec: docs/internals/protocol/store.md, section 2.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, overload

import lz4.frame
import zstandard
from typing_extensions import Buffer

from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import ConfigError, CorruptRecordError
from dledger.commitlog.message_id import encode_offset_message_id
from dledger.commitlog.properties import get_property
from dledger.commitlog.record import (
    BODY_CRC_MASK,
    HOST_FLAGS,
    MAGIC_V1,
    MIN_RECORD_BYTES,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_TYPE_MASK,
    Layout,
    Record,
    decode_record,
)

MAX_DECOMPRESSED_BYTES: Final = 64 * 1024 * 1024
"""A compressed body that decompresses to more is refused."""
ZSTD_STEP_BYTES: Final = 256
"""Compressed bytes read between two checks of the size. Four of them can become 128 KiB: such
a body takes 8 MiB more than the limit before it is refused."""

_TYPE_SHIFT: Final = 8
_ZLIB_OF_OLD_CLIENTS: Final = 0


class CompressionType(Enum):
    """How a body is compressed; the number is that of the sysFlag."""

    LZ4 = 1
    """LZ4 frames: the fastest. It has no levels in RocketMQ."""
    ZSTD = 2
    """Zstandard, levels 1 to 22: smaller than zlib, and faster."""
    ZLIB = 3
    """zlib, levels 0 to 9: RocketMQ's default, and all that clients before 4.9.4 can read."""

    @property
    def sys_flag(self) -> int:
        """The bits of a message whose body is compressed this way."""
        return SYS_FLAG_COMPRESSED | self.value << _TYPE_SHIFT


_LEVELS: Final[Mapping[CompressionType, range]] = {
    CompressionType.ZSTD: range(1, 23),
    CompressionType.ZLIB: range(10),
}


def check_level(kind: CompressionType, level: int) -> None:
    """Refuse a level that *kind* does not have. Raises ConfigError: it has no such level."""
    levels = _LEVELS.get(kind)
    if levels is not None and level not in levels:
        raise ConfigError(
            f"compress_level is {level}; {kind.name} has {levels.start} to {levels.stop - 1}"
        )


def compress(body: Buffer, kind: CompressionType, level: int) -> bytes:
    """Return *body* compressed; the caller compares sizes."""
    match kind:
        case CompressionType.LZ4:
            # RocketMQ's Java client reads no frames whose blocks refer to one another.
            return bytes(
                lz4.frame.compress(
                    bytes(body),
                    block_size=lz4.frame.BLOCKSIZE_MAX4MB,
                    block_linked=False,
                    store_size=False,
                )
            )
        case CompressionType.ZSTD:
            return zstandard.ZstdCompressor(level=level).compress(memoryview(body).cast("B"))
        case CompressionType.ZLIB:
            return zlib.compress(body, level)


def decompress(body: Buffer, sys_flag: int, max_bytes: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """Return a body decompressed.

    Args:
        max_bytes: Limit of the decompressed body.
    Raises:
        CorruptRecordError: The type is unknown, the body is damaged or cut, or it has more than
            *max_bytes*.
    """
    kind = (sys_flag & SYS_FLAG_COMPRESSION_TYPE_MASK) >> _TYPE_SHIFT
    decompress_step = _DECOMPRESS.get(kind)
    if decompress_step is None:
        raise CorruptRecordError(
            f"the body is compressed with type {kind}; this client reads 1 (LZ4), 2 (Zstandard) "
            "and 3 (zlib)"
        )
    try:
        whole, is_whole = decompress_step(body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, RuntimeError) as error:
        raise CorruptRecordError(f"the compressed body is damaged: {error}") from error
    if len(whole) > max_bytes:
        raise CorruptRecordError(
            f"the compressed body has more than {max_bytes} bytes, which is the limit here"
        )
    if not is_whole:
        raise CorruptRecordError("the compressed body is cut")
    return whole


def _decompress_lz4(body: Buffer, most: int) -> tuple[bytes, bool]:
    unpacker = lz4.frame.LZ4FrameDecompressor()
    whole = bytes(unpacker.decompress(bytes(body), max_length=most))
    return whole, unpacker.eof


def _decompress_zstd(body: Buffer, most: int) -> tuple[bytes, bool]:
    # It has no bound of its own over a frame that does not say its size, as Java's do not.
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_DECOMPRESSED_BYTES).decompressobj()
    view = memoryview(body).cast("B")
    parts: list[bytes] = []
    size = 0
    for at in range(0, view.nbytes, ZSTD_STEP_BYTES):
        part = unpacker.decompress(view[at : at + ZSTD_STEP_BYTES])
        parts.append(part)
        size += len(part)
        if unpacker.eof or size >= most:
            break
    return b"".join(parts), unpacker.eof


def _decompress_zlib(body: Buffer, most: int) -> tuple[bytes, bool]:
    unpacker = zlib.decompressobj()
    return unpacker.decompress(body, most), unpacker.eof


_DECOMPRESS: Final[Mapping[int, Callable[[Buffer, int], tuple[bytes, bool]]]] = {
    CompressionType.LZ4.value: _decompress_lz4,
    CompressionType.ZSTD.value: _decompress_zstd,
    CompressionType.ZLIB.value: _decompress_zlib,
    _ZLIB_OF_OLD_CLIENTS: _decompress_zlib,
}


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
_I32: Final = struct.Struct(">i")
_RECORD_HEAD: Final = struct.Struct(">iII8xq8xi44xI")
"""Size, magic, checksum, queue offset, flag of the system, bytes of the body behind IPv4 hosts."""
_I64: Final = struct.Struct(">q")
_FLAG_AND_BODY_BYTES: Final = struct.Struct(">i44xI")
"""System flag, and bytes of the body where both hosts are IPv4."""
_BODY_ELSEWHERE: Final = SYS_FLAG_COMPRESSED | HOST_FLAGS
"""With one of these flags a body is not the bytes behind a head of fixed size."""


class MessageExt:
    """A message as it was read, decoded only where it is looked at.

    It is a view: the whole pulled buffer stays as long as any message of it. Take `body` to keep
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
            CorruptRecordError: The record and its checksum differ.
        """
        record = self._record
        if record is None:
            # Names are read as properties are: what passed the block's checks can be read.
            record = decode_record(self._view, self.start, topic_errors="replace")
            self._record = record
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
    def stored(self) -> memoryview:
        """The whole record as the broker stored it; a view, unchecked."""
        return self._view[self.start : self.start + self.size]

    @property
    def body(self) -> bytes:
        """The body as bytes of its own, decompressed if it was compressed. Raises as `body_view`.

        Each look copies; `body_view` does not.
        """
        view, start = self._view, self.start
        sys_flag, body_bytes = _FLAG_AND_BODY_BYTES.unpack_from(view, start + 36)
        if sys_flag & _BODY_ELSEWHERE == 0:
            return bytes(view[start + 88 : start + 88 + body_bytes])
        return bytes(self.body_view)

    @property
    def body_view(self) -> bytes | memoryview:
        """The body without a copy; a compressed one is decompressed.

        Raises:
            CorruptRecordError: The record or the compressed body is damaged, or decompresses to
                more than `dledger.client.core.message_ext.MAX_DECOMPRESSED_BYTES`.
        """
        view, start = self._view, self.start
        sys_flag, body_bytes = _FLAG_AND_BODY_BYTES.unpack_from(view, start + 36)
        if sys_flag & _BODY_ELSEWHERE == 0:
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
        start, layout = self.start, Layout.at(self._view, self.start)
        host = self._view[start + layout.store_host : start + layout.reconsume_times]
        return encode_offset_message_id(bytes(host), self.phy_offset)

    def _property(self, key: bytes) -> str:
        value = get_property(self.record.properties, key)
        return "" if value is None else value.decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"MessageExt({self.topic!r}, queue {self.queue_id}, offset {self.queue_offset})"


MAX_QUEUE_OFFSET: Final = (1 << 63) - 1


def _check_offset(start: int, offset: int, first_offset: int, end_offset: int) -> None:
    if not first_offset <= offset < end_offset:
        raise CorruptRecordError(
            f"record at {start} claims offset {offset}, not one from {first_offset} on "
            f"and below {end_offset}"
        )


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
        """Find the record starts, and compare each body with its checksum and all sizes.

        Nothing is decoded.

        Args:
            buffer: Whole records back to back; kept, not copied.
            broker_name: Where it was read from.
            first_offset: No message may be before this offset of its queue,
            end_offset: nor at this one or behind it.
        Raises:
            CorruptRecordError: The sizes do not add up to the record or the buffer, the offsets do
                not rise, or a body does not fit its checksum.
        """
        view = memoryview(buffer)
        starts: list[int] = []
        start, end = 0, view.nbytes
        unpack_from, head_bytes, crc32 = _RECORD_HEAD.unpack_from, _RECORD_HEAD.size, zlib.crc32
        while start < end:
            if end - start < MIN_RECORD_BYTES:
                raise CorruptRecordError(f"{end - start} bytes are left over after the records")
            size, magic, crc, offset, sys_flag, body_bytes = unpack_from(view, start)
            body_start, next_start = start + head_bytes, start + size
            body_end = body_start + body_bytes
            # One look for each record, as a pull has thousands; the other one finds the reason.
            if (
                magic != MAGIC_V1
                or sys_flag & HOST_FLAGS
                or not first_offset <= offset < end_offset
                or not body_end < next_start <= end
                or (topic_end := body_end + 1 + view[body_end]) + 2 > next_start
                or topic_end + 2 + (view[topic_end] << 8 | view[topic_end + 1]) != next_start
                or crc32(view[body_start:body_end]) & BODY_CRC_MASK != crc
            ):
                _check_offset(start, offset, first_offset, end_offset)
                decode_record(view, start)
            first_offset = offset + 1
            starts.append(start)
            start = next_start
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
