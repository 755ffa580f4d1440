"""Where frames begin in a byte stream that is read in pieces of any size."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

FRAME_BYTES_MAX: Final = 33 << 20
"""Longer frames are never kept to be looked at, bytes: above what either protocol allows."""

_LENGTH: Final = struct.Struct(">I")


class Piece(NamedTuple):
    """Bytes of a stream.

    Attributes:
        is_frame: They are one whole frame; else a part of one that must pass as it is.
    """

    data: bytes
    is_frame: bool


class FrameEdges:
    """Follows one stream of frames, each behind its length as a big-endian u32.

    Bytes are either *followed*, which only counts, or *cut* into frames, which keeps the begin of
    an unfinished frame back. One may turn into the other anywhere in the stream: a frame whose
    begin was followed goes to its end as it is.

    Invariant: at most one of `_head`, `_left` and `_rest` is not empty.
    """

    __slots__ = ("_head", "_left", "_rest")

    def __init__(self) -> None:
        self._head = b""  # bytes of a length that have passed before it was whole
        self._left = 0  # bytes to come of a frame whose begin has passed
        self._rest = bytearray()  # begin of a frame that waits for its end

    @property
    def has_rest(self) -> bool:
        """Whether the begin of a frame is kept back."""
        return bool(self._rest)

    def release(self) -> bytes:
        """Return what is kept back; it goes on with the next bytes or not at all."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    def follow(self, data: memoryview) -> None:
        """Count bytes that pass as they are. Nothing may be kept back."""
        at, end = self._end_of_begun(data), len(data)
        while end - at >= _LENGTH.size:
            at += _LENGTH.size + int(_LENGTH.unpack_from(data, at)[0])
        if at < end:
            self._head = bytes(data[at:])
        elif at > end:
            self._left = at - end

    def cut(self, data: memoryview) -> list[Piece]:
        """Return the whole frames that *data* completes, and what must pass before or after."""
        pieces = []
        if not self._rest:
            begun = self._end_of_begun(data)
            if begun:
                pieces.append(Piece(bytes(data[:begun]), is_frame=False))
                data = data[begun:]
        self._rest += data
        at, rest = 0, self._rest
        while len(rest) - at >= _LENGTH.size:
            size = _LENGTH.size + int(_LENGTH.unpack_from(rest, at)[0])
            if size > FRAME_BYTES_MAX:
                pieces.append(Piece(bytes(rest[at:]), is_frame=False))
                self._left = max(0, size - (len(rest) - at))
                at = min(len(rest), at + size)
                break
            if at + size > len(rest):
                break
            pieces.append(Piece(bytes(rest[at : at + size]), is_frame=True))
            at += size
        del rest[:at]
        return pieces

    def _end_of_begun(self, data: memoryview) -> int:
        """Return where the first frame begins whose begin has not passed, at most at the end."""
        at, end = self._left, len(data)
        if self._head:
            missing = _LENGTH.size - len(self._head)
            head, self._head = self._head + data[:missing], b""
            if len(head) < _LENGTH.size:
                self._head = head
                return end
            at = missing + int.from_bytes(head, "big")
        self._left = max(0, at - end)
        return min(at, end)
