"""RocketMQ's message record: the bytes in the commit log, in pull answers and in view answers.

One layout everywhere (signed big-endian; offsets for IPv4 hosts)::

    0 totalSize i32     4 magic i32             8 bodyCRC i32          12 queueId i32
    16 flag i32        20 queueOffset i64      28 physicalOffset i64  36 sysFlag i32
    40 bornTimestamp i64                       48 bornHost 8|20       56 storeTimestamp i64
    64 storeHost 8|20  72 reconsumeTimes i32   76 preparedTransactionOffset i64
    84 body i32 length + bytes · topic u8 (V1) or i16 (V2) length + bytes · properties i16 + bytes

Spec: docs/reference/formats.md, section 1.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final, NamedTuple

from typing_extensions import Buffer

from dledger.commitlog.errors import CorruptRecordError, LocalProtocolError
from dledger.commitlog.properties import MAX_PROPERTIES_BYTES, decode_properties

MAGIC_V1: Final = 0xDAA320A7
"""Unsigned. The topic's length is one byte."""
MAGIC_V2: Final = 0xDAA320AB
"""Unsigned. The topic's length is two bytes; chosen when the topic has more than 127 bytes."""
BLANK_MAGIC: Final = 0xCBD43194
"""Unsigned. Not a record: the rest of the segment is unused."""

TOTAL_SIZE_OFFSET: Final = 0
MAGIC_OFFSET: Final = 4
BODY_CRC_OFFSET: Final = 8
QUEUE_ID_OFFSET: Final = 12
QUEUE_OFFSET_OFFSET: Final = 20
PHY_OFFSET_OFFSET: Final = 28
SYS_FLAG_OFFSET: Final = 36
BORN_HOST_OFFSET: Final = 48
# What follows bornHost moves by IPV6_EXTRA_BYTES for each IPv6 host before it.
STORE_TIMESTAMP_OFFSET: Final = 56
BODY_LENGTH_OFFSET: Final = 84
BODY_OFFSET: Final = 88

IPV4_HOST_BYTES: Final = 8
IPV6_HOST_BYTES: Final = 20
IPV6_EXTRA_BYTES: Final = IPV6_HOST_BYTES - IPV4_HOST_BYTES

SYS_FLAG_COMPRESSED: Final = 1
SYS_FLAG_TRANSACTION_MASK: Final = 12
SYS_FLAG_PREPARED: Final = 4
SYS_FLAG_COMMIT: Final = 8
SYS_FLAG_ROLLBACK: Final = 12
SYS_FLAG_BORN_HOST_V6: Final = 16
SYS_FLAG_STORE_HOST_V6: Final = 32
SYS_FLAG_NEED_UNWRAP: Final = 64
SYS_FLAG_INNER_BATCH: Final = 128
SYS_FLAG_COMPRESSION_TYPE_MASK: Final = 7 << 8

MIN_RECORD_BYTES: Final = 91
"""Fixed part of a V1 record with IPv4 hosts: body, topic and properties empty."""
MAX_TOPIC_V1_BYTES: Final = 127
MAX_TOPIC_BYTES: Final = 32767
"""The V2 length field is a signed 16-bit integer."""
BODY_CRC_MASK: Final = 0x7FFFFFFF
"""RocketMQ stores 31 bits of the CRC so that Java's int stays positive."""

NO_HOST: Final = bytes(IPV4_HOST_BYTES)

STORED_MS_BYTES: Final = STORE_TIMESTAMP_OFFSET + IPV6_EXTRA_BYTES + 8
"""Begin of a record up to its store time, whatever its hosts."""

HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6


class Layout(NamedTuple):
    """The fixed part of a record, and at which byte of it what follows bornHost begins."""

    head: struct.Struct
    store_time: int
    store_host: int
    reconsume_times: int

    @property
    def body(self) -> int:
        """Where the body begins, behind its length."""
        return self.head.size

    @classmethod
    def at(cls, records: bytes | bytearray | memoryview, start: int = 0) -> Layout:
        """Return that of the record at byte *start*: its system flag states how long hosts are."""
        return LAYOUTS[records[start + SYS_FLAG_OFFSET + 3] & HOST_FLAGS]


def _layout(flags: int) -> Layout:
    born = IPV6_HOST_BYTES if flags & SYS_FLAG_BORN_HOST_V6 else IPV4_HOST_BYTES
    store = IPV6_HOST_BYTES if flags & SYS_FLAG_STORE_HOST_V6 else IPV4_HOST_BYTES
    time = BORN_HOST_OFFSET + born
    head = struct.Struct(f">IIIiiqqIq{born}sq{store}siqi")
    return Layout(head, time, time + 8, time + 8 + store)


LAYOUTS: Final = {flags: _layout(flags) for flags in (0, 16, 32, HOST_FLAGS)}
"""By the flags of a record's hosts."""

_FLAGS_BY_HOSTS: Final = {
    (layout.store_time - BORN_HOST_OFFSET, layout.reconsume_times - layout.store_host): flags
    for flags, layout in LAYOUTS.items()
}
_HEAD_V4: Final = LAYOUTS[0].head
_SIZE_AND_MAGIC: Final = struct.Struct(">II")
_U32: Final = struct.Struct(">I")
_I16: Final = struct.Struct(">h")
_pack_i16 = _I16.pack
_pack_head_v4 = _HEAD_V4.pack
# The same, with zeros for what a record that is not stored yet does not have.
_pack_fresh_head = struct.Struct(">IIIii16xIq36xi").pack
_crc32 = zlib.crc32


@dataclass(slots=True)
class Record:
    """One decoded record. `body` is a view that pins the buffer it was decoded from."""

    topic: str
    queue_id: int
    flag: int
    queue_offset: int
    phy_offset: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: tuple[str, int]
    store_timestamp_ms: int
    store_host: tuple[str, int]
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes | memoryview
    properties: bytes
    magic: int
    body_crc: int
    size: int

    @property
    def property_map(self) -> dict[str, str]:
        """The properties decoded; a new dict each time."""
        return decode_properties(self.properties)


def body_crc(body: Buffer) -> int:
    """Return the checksum a record stores for *body*: CRC-32 without its highest bit."""
    return _crc32(body) & BODY_CRC_MASK


def pack_host(host: str, port: int) -> bytes:
    """Return an address as a record holds it: 8 bytes for IPv4, 20 for IPv6.

    Raises LocalProtocolError: *host* is not a numeric address.
    """
    try:
        packed = IPv6Address(host).packed if ":" in host else IPv4Address(host).packed
    except AddressValueError as error:
        raise LocalProtocolError(f"{host!r} is not a numeric address") from error
    return packed + port.to_bytes(4, "big", signed=True)


def unpack_host(packed: Buffer) -> tuple[str, int]:
    """Return host and port of an address packed by `pack_host`.

    Raises CorruptRecordError: neither 8 nor 20 bytes.
    """
    raw = bytes(packed)
    if len(raw) == IPV4_HOST_BYTES:
        host = f"{raw[0]}.{raw[1]}.{raw[2]}.{raw[3]}"
    elif len(raw) == IPV6_HOST_BYTES:
        host = str(IPv6Address(raw[:-4]))
    else:
        raise CorruptRecordError(f"an address has 8 or 20 bytes, not {len(raw)}")
    return host, int.from_bytes(raw[-4:], "big", signed=True)


def encode_record(
    *,
    topic: str | bytes,
    queue_id: int,
    body: Buffer,
    properties: bytes,
    flag: int = 0,
    sys_flag: int = 0,
    born_timestamp_ms: int = 0,
    born_host: bytes = NO_HOST,
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
    queue_offset: int = 0,
    phy_offset: int = 0,
    store_timestamp_ms: int = 0,
    store_host: bytes = NO_HOST,
) -> bytes:
    """Return one record; V2 when the topic has more than 127 bytes.

    Args:
        body: Stored as it is, compressed or not. Copied.
        properties: Encoded (`dledger.commitlog.properties.encode_properties`).
        sys_flag: The two IPv6 bits are set here from the hosts' lengths.
        born_host: Packed, 8 or 20 bytes; *store_host* likewise.
    Raises:
        LocalProtocolError: A part is too long for its length field.
    """
    if isinstance(topic, str):
        topic = topic.encode()
    topic_bytes = len(topic)
    properties_bytes = len(properties)
    if properties_bytes > MAX_PROPERTIES_BYTES:
        raise LocalProtocolError(
            f"properties have {properties_bytes} bytes, the record takes {MAX_PROPERTIES_BYTES}"
        )
    if topic_bytes <= MAX_TOPIC_V1_BYTES:
        magic = MAGIC_V1
        topic_length = topic_bytes.to_bytes(1, "big")
    elif topic_bytes <= MAX_TOPIC_BYTES:
        magic = MAGIC_V2
        topic_length = _pack_i16(topic_bytes)
    else:
        raise LocalProtocolError(f"the topic has {topic_bytes} bytes, at most {MAX_TOPIC_BYTES}")
    body_bytes = len(body) if isinstance(body, bytes) else memoryview(body).nbytes
    size = MIN_RECORD_BYTES - 1 + len(topic_length) + body_bytes + topic_bytes + properties_bytes
    if len(born_host) == IPV4_HOST_BYTES and len(store_host) == IPV4_HOST_BYTES:
        pack_head = _pack_head_v4
        if sys_flag & HOST_FLAGS:
            sys_flag &= ~HOST_FLAGS
    else:
        host_flags = _FLAGS_BY_HOSTS.get((len(born_host), len(store_host)))
        if host_flags is None:
            raise LocalProtocolError("hosts are packed into 8 or 20 bytes")
        head = LAYOUTS[host_flags].head
        pack_head = head.pack
        size += head.size - _HEAD_V4.size
        sys_flag = (sys_flag & ~HOST_FLAGS) | host_flags
    try:
        head_bytes = pack_head(
            size,
            magic,
            _crc32(body) & BODY_CRC_MASK,
            queue_id,
            flag,
            queue_offset,
            phy_offset,
            sys_flag & 0xFFFFFFFF,
            born_timestamp_ms,
            born_host,
            store_timestamp_ms,
            store_host,
            reconsume_times,
            prepared_transaction_offset,
            body_bytes,
        )
    except struct.error as error:
        raise LocalProtocolError(
            f"a number does not fit its field in the record: {error}"
        ) from error
    return b"".join(
        (head_bytes, body, topic_length, topic, _pack_i16(properties_bytes), properties)
    )


class RecordTemplate:
    """What fresh records of one topic and queue have in common; writes one faster than the rest."""

    __slots__ = ("_fixed_bytes", "_queue_id", "_topic", "_topic_text")

    def __init__(self, topic: str, queue_id: int) -> None:
        self._queue_id = queue_id
        self._topic_text = topic
        name = topic.encode()
        self._topic = (
            len(name).to_bytes(1, "big") + name if len(name) <= MAX_TOPIC_V1_BYTES else b""
        )
        self._fixed_bytes = MIN_RECORD_BYTES - 1 + len(self._topic)

    def encode(
        self,
        body: Buffer,
        body_bytes: int,
        properties: bytes,
        flag: int,
        sys_flag: int,
        born_timestamp_ms: int,
    ) -> bytes:
        """Return the record that `encode_record` returns for the same, and raise what it raises."""
        properties_bytes = len(properties)
        topic = self._topic
        if topic and properties_bytes <= MAX_PROPERTIES_BYTES and not sys_flag & HOST_FLAGS:
            try:
                return b"".join(
                    (
                        _pack_fresh_head(
                            self._fixed_bytes + body_bytes + properties_bytes,
                            MAGIC_V1,
                            _crc32(body) & BODY_CRC_MASK,
                            self._queue_id,
                            flag,
                            sys_flag,
                            born_timestamp_ms,
                            body_bytes,
                        ),
                        body,
                        topic,
                        _pack_i16(properties_bytes),
                        properties,
                    )
                )
            except struct.error:
                pass  # named below
        return encode_record(
            topic=self._topic_text,
            queue_id=self._queue_id,
            body=body,
            properties=properties,
            flag=flag,
            sys_flag=sys_flag,
            born_timestamp_ms=born_timestamp_ms,
        )


def check_bodies(records: Buffer) -> None:
    """Compare the body of each of *records*, back to back, with its checksum.

    Raises CorruptRecordError: one of them is damaged.
    """
    view = memoryview(records)
    at, end = 0, view.nbytes
    while at < end:
        at += decode_record(view, at).size


def decode_record(
    buf: Buffer, offset: int = 0, *, check_crc: bool = True, topic_errors: str = "strict"
) -> Record:
    """Return the record that starts at byte *offset* of *buf*.

    Args:
        buf: Any buffer; bytes after the record are ignored. The record's body is a view of it.
        check_crc: Also compare the body with its checksum.
        topic_errors: As `errors` of ``bytes.decode``.
    Raises:
        CorruptRecordError: Cut short, not a record, lengths that do not add up, topic or host
            that cannot be read, or a body that does not fit its checksum.
    """
    view = memoryview(buf)
    available = view.nbytes - offset
    if offset < 0 or available < MIN_RECORD_BYTES:
        raise CorruptRecordError(f"{max(available, 0)} bytes are too few for a record")
    size, magic = _SIZE_AND_MAGIC.unpack_from(view, offset)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise CorruptRecordError(f"magic 0x{magic:08X} at {offset} is not a record's")
    if not MIN_RECORD_BYTES <= size <= available:
        raise CorruptRecordError(f"record at {offset} claims {size} bytes, there are {available}")
    end = offset + size
    head = Layout.at(view, offset).head
    body_start = offset + head.size
    if body_start > end:
        raise CorruptRecordError(f"record at {offset} ends within its hosts")
    (
        _,
        _,
        stored_crc,
        queue_id,
        flag,
        queue_offset,
        phy_offset,
        sys_flag,
        born_timestamp_ms,
        born_host,
        store_timestamp_ms,
        store_host,
        reconsume_times,
        prepared_transaction_offset,
        body_bytes,
    ) = head.unpack_from(view, offset)
    topic_length_bytes = 1 if magic == MAGIC_V1 else 2
    topic_start = body_start + body_bytes + topic_length_bytes
    if body_bytes < 0 or topic_start + 2 > end:
        raise CorruptRecordError(f"record at {offset}: body of {body_bytes} bytes does not fit")
    if magic == MAGIC_V1:
        topic_bytes = view[topic_start - 1]
    else:
        (topic_bytes,) = _I16.unpack_from(view, topic_start - 2)
    properties_start = topic_start + topic_bytes + 2
    if topic_bytes < 0 or properties_start > end:
        raise CorruptRecordError(f"record at {offset}: topic of {topic_bytes} bytes does not fit")
    (properties_bytes,) = _I16.unpack_from(view, properties_start - 2)
    if properties_start + properties_bytes != end:
        raise CorruptRecordError(
            f"record at {offset}: properties of {properties_bytes} bytes do not end with it"
        )
    body = view[body_start : body_start + body_bytes]
    if check_crc and _crc32(body) & BODY_CRC_MASK != stored_crc:
        raise CorruptRecordError(f"record at {offset}: the body does not fit its checksum")
    try:
        topic = str(view[topic_start : topic_start + topic_bytes], "utf-8", topic_errors)
    except UnicodeDecodeError as error:
        raise CorruptRecordError(f"record at {offset}: the topic is not UTF-8") from error
    return Record(
        topic=topic,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        phy_offset=phy_offset,
        sys_flag=sys_flag,
        born_timestamp_ms=born_timestamp_ms,
        born_host=unpack_host(born_host),
        store_timestamp_ms=store_timestamp_ms,
        store_host=unpack_host(store_host),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
        body=body,
        properties=bytes(view[properties_start:end]),
        magic=magic,
        body_crc=stored_crc,
        size=size,
    )


def stored_ms_of(record: bytes | bytearray | memoryview) -> int:
    """Return the store time of a record; its first `STORED_MS_BYTES` bytes are enough."""
    at = Layout.at(record).store_time
    return int.from_bytes(record[at : at + 8], "big", signed=True)


def record_properties(record: Buffer) -> bytes:
    """Return the encoded properties of one whole record; its checksum is not looked at.

    Raises CorruptRecordError: the lengths inside do not fit its bytes.
    """
    view = memoryview(record)
    try:
        at = Layout.at(view).body
        (body_bytes,) = _U32.unpack_from(view, at - 4)
        at += body_bytes
        if _SIZE_AND_MAGIC.unpack_from(view)[1] == MAGIC_V2:
            at += 2 + _I16.unpack_from(view, at)[0]
        else:
            at += 1 + view[at]
        (size,) = _I16.unpack_from(view, at)
    except (struct.error, IndexError) as error:
        raise CorruptRecordError(f"a record of {view.nbytes} bytes ends too early") from error
    at += 2
    if size < 0 or at + size != view.nbytes:
        raise CorruptRecordError(f"properties of {size} bytes do not end a record")
    return bytes(view[at:])


def checked_body(buf: Buffer, offset: int) -> tuple[memoryview, int]:
    """Return body and size of the record at *offset*, which was checked before."""
    view = memoryview(buf)
    size, _ = _SIZE_AND_MAGIC.unpack_from(view, offset)
    start = offset + Layout.at(view, offset).body
    return view[start : start + int.from_bytes(view[start - 4 : start], "big")], size


def iter_records(buf: Buffer, *, check_crc: bool = True) -> Iterator[Record]:
    """Yield the records that stand back to back in *buf*, to its last byte.

    Raises CorruptRecordError: at the first bad or cut record; those before it were yielded.
    """
    view = memoryview(buf)
    offset = 0
    while offset < view.nbytes:
        record = decode_record(view, offset, check_crc=check_crc)
        yield record
        offset += record.size
