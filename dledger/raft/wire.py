"""Frames between the members of a group: CRC'd, bounded, numbers or CBOR; no pickle, no commands.

::

    u32 length      bytes after this field, at most FRAME_BYTES_MAX
    u32 crc         CRC-32 of the payload and then of head_bytes and head
    u16 head_bytes  length of the head
    head            kind u8, then term, epoch, sequence and the fields, u64 each: of the kinds in
                    FIXED; else CBOR array [kind, term, epoch, sequence, *fields]
    payload         rest: log entries back to back (APPEND), a piece of a snapshot, else empty

A CBOR array begins with a byte above all kinds, so one form is never taken for the other. The
payload comes first in the CRC: what several members get is read once for all of them.

*term* is the sender's term when it made the message; *epoch* names the connection and *sequence*
rises by at least one per frame in it, so a late or doubled frame never counts as new.

Frames and hellos are checked against the limits of this file where they are decoded: no later code
meets a number that no file can hold or a name that no resolver can look up.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final

import cbor2
from typing_extensions import TypeIs

from dledger.commitlog.errors import RemoteProtocolError
from dledger.remoting.addresses import found_address

TERM_MAX: Final = (1 << 40) - 1
"""Largest term. One election a second for 34,000 years; an entry has 63 bits for it."""

TERM_JUMP_MAX: Final = 1 << 30
"""How far a term may be ahead of one's own. One election a second for 34 years: no member was away
for longer. So no single frame uses up the terms there are."""

INDEX_MAX: Final = (1 << 48) - 1
"""Largest index of an entry. Ten thousand entries a second for 890 years; a position in the file of
indexes still has 63 bits."""

NUMBER_MAX: Final = (1 << 62) - 1
"""Largest of all other numbers: epochs, sequences, heartbeats, sizes."""

NAME_CHARACTERS_MAX: Final = 255
"""Of a cluster, a group or a member."""

INCARNATION_CHARACTERS_MAX: Final = 64
"""Ours have 32."""

HOST_CHARACTERS_MAX: Final = 253
"""As in the DNS."""

PORT_MAX: Final = 65_535

_INCARNATION: Final = re.compile(rf"[0-9A-Za-z_.-]{{1,{INCARNATION_CHARACTERS_MAX}}}", re.ASCII)
_HOST_NAME: Final = re.compile(r"(?:[0-9A-Za-z_-]{1,63}\.)*[0-9A-Za-z_-]{1,63}", re.ASCII)
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]{2,45}(?:%[0-9A-Za-z_.-]{1,32})?", re.ASCII)

PROTOCOL_VERSION: Final = 1
"""Version of this file's frames; a peer with another one is refused at hello."""

FRAME_BYTES_MAX: Final = 32 << 20
"""Largest frame, bytes: one entry at its cap beside a full append, with space for the head."""

HELLO_BYTES_MAX: Final = 64 << 10
"""Largest frame before the hello is accepted: a hello names at most a few members."""

_PREFIX: Final = struct.Struct(">II")
PREFIX_BYTES: Final = 4
"""What a frame has before its *length* bytes."""
_HEAD_LENGTH: Final = struct.Struct(">H")


class Kind(IntEnum):
    """What a frame is. Anything else closes the connection."""

    HELLO = 1
    HELLO_ACK = 2
    APPEND = 3
    APPEND_REPLY = 4
    HEARTBEAT = 5
    HEARTBEAT_REPLY = 6
    VOTE = 7
    VOTE_REPLY = 8
    PRE_VOTE = 9
    PRE_VOTE_REPLY = 10
    TERM_NOTICE = 11
    SNAPSHOT = 12
    SNAPSHOT_REPLY = 13
    TIMEOUT_NOW = 14
    FETCH = 15
    FETCH_REPLY = 16


HEARTBEATS: Final = frozenset({Kind.HEARTBEAT, Kind.HEARTBEAT_REPLY})
"""Frames that travel all the time, and change little."""


class Field(Enum):
    """What a number in a frame is, and so how large it may be."""

    TERM = TERM_MAX
    INDEX = INDEX_MAX
    NUMBER = NUMBER_MAX
    FLAG = 1
    GRANT = 2
    """0: refused, 1: granted, `CERTAIN`: granted, and its sender is not `doubtful`."""


CERTAIN: Final = 2
"""A pre-vote of a member that is not `doubtful`."""

_TERM, _INDEX, _NUMBER, _FLAG = Field.TERM, Field.INDEX, Field.NUMBER, Field.FLAG

FIELDS: Final[dict[Kind, tuple[Field, ...]]] = {
    Kind.APPEND: (_INDEX, _TERM, _INDEX),
    Kind.APPEND_REPLY: (_FLAG, _INDEX),
    Kind.HEARTBEAT: (_NUMBER, _INDEX),
    Kind.HEARTBEAT_REPLY: (_NUMBER, _FLAG),
    Kind.VOTE: (_INDEX, _TERM, _FLAG),
    Kind.VOTE_REPLY: (),
    Kind.PRE_VOTE: (_TERM, _INDEX, _TERM),
    Kind.PRE_VOTE_REPLY: (_TERM, Field.GRANT),
    Kind.TERM_NOTICE: (),
    Kind.SNAPSHOT: (_INDEX, _NUMBER, _NUMBER),
    Kind.SNAPSHOT_REPLY: (_INDEX, _NUMBER, _INDEX),
    Kind.TIMEOUT_NOW: (_INDEX,),
    Kind.FETCH: (_INDEX, _INDEX),
    Kind.FETCH_REPLY: (_INDEX,),
}
"""The fields of each kind; those of a hello are one map, see `dledger.raft.identity`."""

_LIMITS: Final = {kind: tuple(field.value for field in fields) for kind, fields in FIELDS.items()}

_HELLOS: Final = frozenset({Kind.HELLO, Kind.HELLO_ACK})

FIXED: Final = frozenset({Kind.APPEND, Kind.APPEND_REPLY, Kind.HEARTBEAT, Kind.HEARTBEAT_REPLY})
"""Frames that each entry or each moment costs: their head is a row of numbers."""

_CBOR_ARRAY: Final = 0x80
"""First byte of the shortest CBOR array."""

_FIXED_BY_NUMBER: Final = {
    int(kind): (kind, struct.Struct(f">B{3 + len(_LIMITS[kind])}Q"), _LIMITS[kind])
    for kind in sorted(FIXED)
}
_FIXED_HEADS: Final = {
    kind: (struct.Struct(f">H{form.format[1:]}"), form.size)
    for kind, form, _ in _FIXED_BY_NUMBER.values()
}


@dataclass(slots=True)
class PeerFrame:
    """One decoded frame. *payload* is a view of the receive buffer's copy; it may be kept."""

    kind: Kind
    term: int
    epoch: int
    sequence: int
    fields: list[Any]
    payload: memoryview


def encode_head(kind: Kind, term: int, epoch: int, sequence: int, fields: tuple[Any, ...]) -> bytes:
    """Return length-prefixed head bytes to be finished with `encode_frame`."""
    fixed = _FIXED_HEADS.get(kind)
    if fixed is not None:
        form, size = fixed
        return form.pack(size, kind, term, epoch, sequence, *fields)
    return encode_cbor_head(kind, term, epoch, sequence, fields)


def encode_cbor_head(
    kind: Kind, term: int, epoch: int, sequence: int, fields: tuple[Any, ...]
) -> bytes:
    """Return length-prefixed head bytes in CBOR, as all kinds may have them."""
    head = cbor2.dumps([int(kind), term, epoch, sequence, *fields])
    return _HEAD_LENGTH.pack(len(head)) + head


def crc_of(payload: Iterable[memoryview]) -> int:
    """Return the CRC-32 of a payload's pieces."""
    crc = 0
    for piece in payload:
        crc = zlib.crc32(piece, crc)
    return crc


def encode_frame(
    head: bytes, payload: list[memoryview] | None = None, payload_crc: int | None = None
) -> bytes:
    """Return one whole frame; the payload's pieces are copied once, into the frame.

    *payload_crc*: `crc_of` the payload, where the caller has it already.
    """
    if not payload:
        return _PREFIX.pack(len(head) + 4, zlib.crc32(head)) + head
    crc = zlib.crc32(head, crc_of(payload) if payload_crc is None else payload_crc)
    size = len(head) + sum(map(len, payload))
    return b"".join([_PREFIX.pack(size + 4, crc), head, *payload])


class PeerFrameDecoder:
    """Bytes in, frames out. After an error it stays in error.

    *frame_bytes_max*: largest frame it takes; may be changed between two calls.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self.frame_bytes_max = frame_bytes_max
        self._broken = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of the unfinished frame that are held."""
        return len(self._buffer)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the whole frame of which a part is held; 0: none, or its length is not known."""
        if len(self._buffer) < _PREFIX.size:
            return 0
        length, _ = _PREFIX.unpack_from(self._buffer)
        return PREFIX_BYTES + int(length)

    def feed(self, data: bytes | bytearray | memoryview) -> list[PeerFrame]:
        """Add received bytes; return the frames that are complete now.

        Raises RemoteProtocolError: length, CRC, kind or shape is wrong: close the connection.
        """
        if self._broken:
            raise RemoteProtocolError("the connection was in error already")
        frames: list[PeerFrame] = []
        try:
            if not self._buffer and type(data) is bytes:
                # As a rule whole frames come, which are read where they are.
                offset = self._decode_whole(data, frames)
                if offset < len(data):
                    self._buffer += data[offset:]
                return frames
            self._buffer += data
            offset = self._decode_whole(self._buffer, frames)
        except RemoteProtocolError:
            self._broken = True
            raise
        if offset:
            del self._buffer[:offset]
        return frames

    def _decode_whole(self, buffer: bytes | bytearray, frames: list[PeerFrame]) -> int:
        offset = 0
        while len(buffer) - offset >= _PREFIX.size:
            length, crc = _PREFIX.unpack_from(buffer, offset)
            if not 6 <= length <= self.frame_bytes_max:
                raise RemoteProtocolError(f"a peer frame of {length} bytes")
            start, end = offset + _PREFIX.size, offset + 4 + length
            if len(buffer) < end:
                break
            content = memoryview(buffer)[start:end]
            if type(buffer) is bytearray:  # it goes on to be filled
                content = memoryview(bytes(content))
            frames.append(_decode(content, crc))
            offset = end
        return offset


def _decode(content: memoryview, crc: int) -> PeerFrame:
    payload_at = _HEAD_LENGTH.size + (content[0] << 8 | content[1])
    payload = content[payload_at:]
    if zlib.crc32(content[:payload_at], zlib.crc32(payload) if payload else 0) != crc:
        raise RemoteProtocolError("a peer frame with a wrong CRC")
    if not _HEAD_LENGTH.size < payload_at <= len(content):
        raise RemoteProtocolError("a peer frame without its head")
    if content[2] < _CBOR_ARRAY:
        return _decode_fixed(content, payload_at, payload)
    head = _read_head(content[_HEAD_LENGTH.size : payload_at])
    try:
        kind = Kind(head[0])
    except ValueError:
        raise RemoteProtocolError(f"a peer frame of unknown kind {head[0]}") from None
    fields = head[4:]
    if kind in _HELLOS:
        if len(fields) != 1:
            raise RemoteProtocolError(f"a {kind.name} frame with {len(fields)} fields")
    else:
        _check_fields(kind, fields)
    return PeerFrame(kind, head[1], head[2], head[3], fields, payload)


def _decode_fixed(content: memoryview, payload_at: int, payload: memoryview) -> PeerFrame:
    fixed = _FIXED_BY_NUMBER.get(content[2])
    if fixed is None or payload_at != _HEAD_LENGTH.size + fixed[1].size:
        raise RemoteProtocolError("a peer frame whose head is not CBOR")
    kind, form, limits = fixed
    _, term, epoch, sequence, *fields = form.unpack_from(content, _HEAD_LENGTH.size)
    if term > TERM_MAX or epoch > NUMBER_MAX or sequence > NUMBER_MAX:
        raise RemoteProtocolError("a peer frame with a number that no member comes to")
    for value, limit in zip(fields, limits, strict=True):
        if value > limit:
            raise RemoteProtocolError(f"a {kind.name} frame with a number that no member comes to")
    return PeerFrame(kind, term, epoch, sequence, fields, payload)


def _read_head(encoded: memoryview) -> list[Any]:
    try:
        head = cbor2.loads(encoded)
        canonical = len(cbor2.dumps(head)) == len(encoded)
    except Exception as error:
        # CBOR has tags for dates, fractions, patterns and mails, and each fails in its own way.
        raise RemoteProtocolError("a peer frame whose head is not CBOR") from error
    if not (isinstance(head, list) and len(head) >= 4 and canonical):
        raise RemoteProtocolError("a peer frame whose head is not what this version sends")
    if not all(type(number) is int and number >= 0 for number in head[:4]):
        raise RemoteProtocolError("a peer frame whose head is not numbers")
    if head[1] > TERM_MAX or max(head[0], head[2], head[3]) > NUMBER_MAX:
        raise RemoteProtocolError("a peer frame with a number that no member comes to")
    return head


def _check_fields(kind: Kind, fields: list[Any]) -> None:
    limits = _LIMITS[kind]
    if len(fields) != len(limits):
        raise RemoteProtocolError(f"a {kind.name} frame with {len(fields)} fields")
    if not all(type(value) in (int, bool) for value in fields):
        raise RemoteProtocolError(f"a {kind.name} frame whose fields are not numbers")
    if not all(0 <= value <= limit for value, limit in zip(fields, limits, strict=True)):
        raise RemoteProtocolError(f"a {kind.name} frame with a number that no member comes to")


def is_name(text: object) -> TypeIs[str]:
    """Whether a cluster, a group or a member may have this name."""
    return isinstance(text, str) and 0 < len(text) <= NAME_CHARACTERS_MAX and text.isprintable()


def is_incarnation(text: object) -> bool:
    """Whether a member may have this incarnation."""
    return isinstance(text, str) and _INCARNATION.fullmatch(text) is not None


def is_host(text: object) -> bool:
    """Whether a host may be called so: a name of the DNS or an address, without brackets."""
    if not isinstance(text, str) or len(text) > HOST_CHARACTERS_MAX:
        return False
    pattern = _IPV6 if ":" in text else _HOST_NAME
    return pattern.fullmatch(text) is not None


def is_port(number: object) -> bool:
    """Whether a listener may have this port."""
    return type(number) is int and 0 < number <= PORT_MAX


def parse_address(text: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port``; None when it is none that could be looked up."""
    found = found_address(text)
    return found if found and is_host(found[0]) and is_port(found[1]) else None
