"""Frames: length · mark · header · body. Sans-IO: bytes in, commands out, and back.

::

    total  u32  bytes that follow this field
    mark   u32  high byte = serialize type, low 24 bits = length of the header
    header
    body

A header is JSON, CBOR, or RocketMQ's binary one (serialize type 1).

Spec: docs/internals/protocol/remoting.md, sections 1 and 2.2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from typing_extensions import Buffer

from dledger.commitlog.errors import LocalProtocolError, RemoteProtocolError
from dledger.remoting.protocol.command import (
    LANGUAGE_CODES,
    LANGUAGES,
    OTHER_LANGUAGE,
    ExtFields,
    RemotingCommand,
    SerializeType,
)
from dledger.remoting.protocol.header_codec import (
    decode_cbor_header,
    decode_json_header,
    encode_cbor_header,
    encode_json_header,
    text_of,
)

# code i16 · language i8 · version i16 · opaque i32 · flag i32 · length of the remark i32
_FIXED: Final = struct.Struct(">hbhiii")
_I32: Final = struct.Struct(">i")
_I16: Final = struct.Struct(">h")
_MAX_I16: Final = 0x7FFF


def decode_binary_header(header: Buffer) -> RemotingCommand:
    """Return the command a binary header describes, without its body.

    Raises RemoteProtocolError: a length points outside the header, bytes are left over, not UTF-8.
    """
    data = bytes(header)
    end = len(data)
    try:
        code, language, version, opaque, flag, remark_size = _FIXED.unpack_from(data)
        position = _FIXED.size
        if not 0 <= remark_size <= end - position:
            raise RemoteProtocolError(f"remark of {remark_size} bytes in a header of {end}")
        remark = data[position : position + remark_size].decode() if remark_size else None
        position += remark_size
        # Some writers stop here when there is no map.
        map_size = _I32.unpack_from(data, position)[0] if position < end else 0
        position += 4
        if map_size and map_size != end - position:
            raise RemoteProtocolError(f"ext fields of {map_size} bytes, {end - position} are there")
        if not map_size and position < end:
            raise RemoteProtocolError(f"{end - position} bytes after the header")
        ext: ExtFields = {}
        while position < end:
            (size,) = _I16.unpack_from(data, position)
            start = position + 2
            position = start + size
            if size < 0 or position > end:
                raise RemoteProtocolError(f"ext key of {size} bytes reaches out of the header")
            key = data[start:position].decode()
            (size,) = _I32.unpack_from(data, position)
            start = position + 4
            position = start + size
            if size < 0 or position > end:
                raise RemoteProtocolError(f"ext value of {size} bytes reaches out of the header")
            ext[key] = data[start:position].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"undecodable binary header: {error}") from error
    return RemotingCommand(
        code,
        opaque,
        flag,
        remark,
        ext,
        b"",
        LANGUAGES[language] if 0 <= language < len(LANGUAGES) else "OTHER",
        version,
        SerializeType.ROCKETMQ,
    )


def encode_binary_header(command: RemotingCommand) -> bytes:
    """Return the header of *command* in RocketMQ's binary form.

    Raises LocalProtocolError: the code, the version or a key does not fit its 16 bits, or a value
    is neither string nor number.
    """
    if command.code > _MAX_I16:
        raise LocalProtocolError(
            f"request code {command.code} does not fit the 16 bits of a ROCKETMQ header; use JSON"
        )
    try:
        remark = b"" if command.remark is None else command.remark.encode()
        parts = [b"", remark, b""]
        map_size = 0
        for key, value in command.ext.items():
            if value is None:
                continue
            raw_key = key.encode()
            raw_value = (value if type(value) is str else text_of(value)).encode()
            parts += (_I16.pack(len(raw_key)), raw_key, _I32.pack(len(raw_value)), raw_value)
            map_size += 6 + len(raw_key) + len(raw_value)
        parts[0] = _FIXED.pack(
            command.code,
            LANGUAGE_CODES.get(command.language, OTHER_LANGUAGE),
            command.version,
            command.opaque,
            command.flag,
            len(remark),
        )
        parts[2] = _I32.pack(map_size)
    except (struct.error, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"header does not fit the ROCKETMQ form: {error}") from error
    return b"".join(parts)


# com.rocketmq.remoting.frameMaxLength: the whole frame, length field included.
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
# A frame larger than this that arrives in pieces keeps its receive buffer as the body instead of
# being copied out of it.
VIEW_BODY_BYTES: Final = 32 * 1024
MAX_HEADER_BYTES: Final = 0xFFFFFF

_LENGTH: Final = struct.Struct(">i")
_PREFIX: Final = struct.Struct(">iI")
_PREFIX_BYTES: Final = _PREFIX.size

_decoders: Final[dict[int, Callable[[Buffer], RemotingCommand]]] = {
    SerializeType.JSON: decode_json_header,
    SerializeType.ROCKETMQ: decode_binary_header,
    SerializeType.CBOR: decode_cbor_header,
}
_encoders: Final[dict[int, Callable[[RemotingCommand], bytes]]] = {
    SerializeType.JSON: encode_json_header,
    SerializeType.ROCKETMQ: encode_binary_header,
    SerializeType.CBOR: encode_cbor_header,
}


class FrameDecoder:
    """Turns received bytes into commands, however the bytes are cut.

    It keeps at most one unfinished frame, never more bytes than arrived. After an error the
    stream has no meaning any more: `error` is set and every further `feed` raises it.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_total = max_frame_bytes - 4
        self._pending = bytearray()
        self.error: RemoteProtocolError | None = None

    @property
    def bytes_needed(self) -> int:
        """Bytes missing to go on with the frame that has begun; 0 between frames."""
        pending = self._pending
        if not pending:
            return 0
        if len(pending) < _PREFIX_BYTES:
            return _PREFIX_BYTES - len(pending)
        return int(_LENGTH.unpack_from(pending)[0]) + 4 - len(pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the unfinished frame that are held."""
        return len(self._pending)

    def discard(self) -> None:
        """Give back the memory of the unfinished frame; the stream has ended."""
        self._pending = bytearray()

    def feed(self, data: Buffer) -> list[RemotingCommand]:
        """Return the commands completed by *data*, in order; bytes are copied where they are kept.

        Bodies are `bytes`, or a read-only view for a large body.

        Raises RemoteProtocolError: the bytes are not frames. Commands before the bad one are not
        lost: they are returned first, `error` is set and the next call raises.
        """
        if self.error is not None:
            raise self.error
        commands: list[RemotingCommand] = []
        try:
            self._feed(data, commands)
        except RemoteProtocolError as error:
            self.error = error
            self._pending = bytearray()
            if not commands:
                raise
        return commands

    def _feed(self, data: Buffer, commands: list[RemotingCommand]) -> None:
        chunk = data if type(data) is bytes else memoryview(data).cast("B")
        end = len(chunk)
        position = self._complete_pending(chunk, commands) if self._pending else 0
        max_total = self._max_total
        while end - position >= _PREFIX_BYTES:
            total, mark = _PREFIX.unpack_from(chunk, position)
            header_size = mark & 0xFFFFFF
            self._check(total, header_size, max_total)
            header_start = position + _PREFIX_BYTES
            frame_end = position + 4 + total
            if frame_end > end:
                break
            body_start = header_start + header_size
            decode = _decoders.get(mark >> 24)
            if decode is None:
                raise RemoteProtocolError(f"unknown serialize type {mark >> 24}")
            command = decode(chunk[header_start:body_start])
            if frame_end > body_start:
                command.body = bytes(chunk[body_start:frame_end])
            commands.append(command)
            position = frame_end
        if position < end:
            rest = end - position
            if rest >= 4:
                (total,) = _LENGTH.unpack_from(chunk, position)
                self._check(total, 0, max_total)
            self._pending += chunk[position:]

    def _complete_pending(self, chunk: bytes | memoryview, commands: list[RemotingCommand]) -> int:
        """Fill the frame that has begun; return how many bytes of *chunk* it took."""
        pending = self._pending
        position = 0
        if len(pending) < _PREFIX_BYTES:
            position = min(_PREFIX_BYTES - len(pending), len(chunk))
            pending += chunk[:position]
            if len(pending) >= 4:
                self._check(_LENGTH.unpack_from(pending)[0], 0, self._max_total)
            if len(pending) < _PREFIX_BYTES:
                return position
        total: int
        mark: int
        total, mark = _PREFIX.unpack_from(pending)
        header_size = mark & 0xFFFFFF
        self._check(total, header_size, self._max_total)
        take = min(total + 4 - len(pending), len(chunk) - position)
        pending += memoryview(chunk)[position : position + take]
        position += take
        if len(pending) < total + 4:
            return position
        self._pending = bytearray()
        decode = _decoders.get(mark >> 24)
        if decode is None:
            raise RemoteProtocolError(f"unknown serialize type {mark >> 24}")
        body_start = _PREFIX_BYTES + header_size
        frame = memoryview(pending).toreadonly()
        command = decode(frame[_PREFIX_BYTES:body_start])
        if len(frame) > body_start:
            body = frame[body_start:]
            command.body = body if len(body) >= VIEW_BODY_BYTES else bytes(body)
        commands.append(command)
        return position

    @staticmethod
    def _check(total: int, header_size: int, max_total: int) -> None:
        if not 4 <= total <= max_total:
            raise RemoteProtocolError(f"frame of {total} bytes; the limit is {max_total + 4}")
        if header_size > total - 4:
            raise RemoteProtocolError(f"header of {header_size} bytes in a frame of {total}")


def encode_command_parts(
    command: RemotingCommand, max_frame_bytes: int = MAX_FRAME_BYTES
) -> tuple[bytes, Buffer]:
    """Return prefix with header, and the body untouched, to be sent one after the other.

    Raises LocalProtocolError: the header cannot be written in its encoding, or the frame is larger
    than a peer accepts; nothing was sent.
    """
    header = _encoders[command.serialize](command)
    body = command.body
    size = len(body) if type(body) is bytes else memoryview(body).nbytes
    total = 4 + len(header) + size
    if total + 4 > max_frame_bytes or len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"frame of {total + 4} bytes; the limit is {max_frame_bytes}")
    return _PREFIX.pack(total, command.serialize << 24 | len(header)) + header, body


def encode_command(command: RemotingCommand) -> bytes:
    """Return the whole frame of *command*.

    Raises LocalProtocolError: see `encode_command_parts`.
    """
    head, body = encode_command_parts(command)
    return b"".join((head, body)) if body else head
