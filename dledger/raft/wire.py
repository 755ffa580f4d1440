"""Frames between the members of a group: CRC'd, bounded, CBOR; no pickle, no commands.

::

    u32 length      bytes after this field, at most FRAME_BYTES_MAX
    u32 crc         CRC-32 of all that follows
    u16 head_bytes  length of the head
    head            CBOR array [kind, term, epoch, sequence, *fields]
    payload         rest: log entries back to back (APPEND), a piece of a snapshot, else empty

*term* is the sender's at the moment the message was made; *epoch* names the connection and
*sequence* rises by at least one per frame in it, so nothing late or doubled is taken for new.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import cbor2

from commitlog.errors import RemoteProtocolError

PROTOCOL_VERSION: Final = 1
"""Version of this file's frames; a peer with a newer one is refused at hello."""

FRAME_BYTES_MAX: Final = 32 << 20
"""Largest frame, bytes: one entry at its cap beside a full append, with room for the head."""

HELLO_BYTES_MAX: Final = 64 << 10
"""Largest frame of somebody who has not introduced himself: a hello names at most a few members."""

_PREFIX: Final = struct.Struct(">II")
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


SIGNS_OF_LIFE: Final = frozenset({Kind.HEARTBEAT, Kind.HEARTBEAT_REPLY})
"""What goes to and fro all the time, and changes little."""

FIELDS: Final = {
    Kind.HELLO: 1,
    Kind.HELLO_ACK: 1,
    Kind.APPEND: 3,
    Kind.APPEND_REPLY: 2,
    Kind.HEARTBEAT: 2,
    Kind.HEARTBEAT_REPLY: 3,
    Kind.VOTE: 3,
    Kind.VOTE_REPLY: 0,
    Kind.PRE_VOTE: 3,
    Kind.PRE_VOTE_REPLY: 2,
    Kind.TERM_NOTICE: 0,
    Kind.SNAPSHOT: 3,
    Kind.SNAPSHOT_REPLY: 3,
    Kind.TIMEOUT_NOW: 1,
    Kind.FETCH: 2,
    Kind.FETCH_REPLY: 1,
}
"""How many fields each kind carries."""


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
    head = cbor2.dumps([int(kind), term, epoch, sequence, *fields])
    return _HEAD_LENGTH.pack(len(head)) + head


def encode_frame(head: bytes, payload: list[memoryview] | None = None) -> bytes:
    """Return one whole frame; the payload's pieces are copied once, into the frame."""
    crc = zlib.crc32(head)
    size = len(head)
    for piece in payload or ():
        crc = zlib.crc32(piece, crc)
        size += len(piece)
    return b"".join([_PREFIX.pack(size + 4, crc), head, *(payload or ())])


class PeerFrameDecoder:
    """Bytes in, frames out. After an error it stays in error.

    Attributes:
        frame_bytes_max: Largest frame it takes; may be changed between two calls.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self.frame_bytes_max = frame_bytes_max
        self._broken = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[PeerFrame]:
        """Take bytes as they come; return the frames that are complete now.

        Raises:
            RemoteProtocolError: Length, CRC, kind or shape is wrong: close the connection.
        """
        if self._broken:
            raise RemoteProtocolError("the connection was in error already")
        self._buffer += data
        frames: list[PeerFrame] = []
        try:
            offset = self._take(frames)
        except RemoteProtocolError:
            self._broken = True
            raise
        if offset:
            del self._buffer[:offset]
        return frames

    def _take(self, frames: list[PeerFrame]) -> int:
        buffer, offset = self._buffer, 0
        while len(buffer) - offset >= _PREFIX.size:
            length, crc = _PREFIX.unpack_from(buffer, offset)
            if not 6 <= length <= self.frame_bytes_max:
                raise RemoteProtocolError(f"a peer frame of {length} bytes")
            start, end = offset + _PREFIX.size, offset + 4 + length
            if len(buffer) < end:
                break
            content = bytes(memoryview(buffer)[start:end])
            if zlib.crc32(content) != crc:
                raise RemoteProtocolError("a peer frame with a wrong CRC")
            frames.append(_decode(memoryview(content)))
            offset = end
        return offset


def _decode(content: memoryview) -> PeerFrame:
    (head_bytes,) = _HEAD_LENGTH.unpack_from(content)
    payload_at = _HEAD_LENGTH.size + head_bytes
    if payload_at > len(content):
        raise RemoteProtocolError("a peer frame shorter than its head")
    encoded = content[_HEAD_LENGTH.size : payload_at]
    try:
        head = cbor2.loads(encoded)
        canonical = len(cbor2.dumps(head)) == head_bytes
    except (cbor2.CBORDecodeError, cbor2.CBOREncodeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError("a peer frame whose head is not CBOR") from error
    if not (isinstance(head, list) and len(head) >= 4 and canonical):
        raise RemoteProtocolError("a peer frame whose head is not what this version sends")
    if not all(type(number) is int and number >= 0 for number in head[:4]):
        raise RemoteProtocolError("a peer frame whose head is not numbers")
    try:
        kind = Kind(head[0])
    except ValueError:
        raise RemoteProtocolError(f"a peer frame of unknown kind {head[0]}") from None
    fields = head[4:]
    if len(fields) != FIELDS[kind]:
        raise RemoteProtocolError(f"a {kind.name} frame with {len(fields)} fields")
    if kind not in (Kind.HELLO, Kind.HELLO_ACK) and not all(
        type(value) in (int, bool) for value in fields
    ):
        raise RemoteProtocolError(f"a {kind.name} frame whose fields are not numbers")
    return PeerFrame(kind, head[1], head[2], head[3], fields, content[payload_at:])
