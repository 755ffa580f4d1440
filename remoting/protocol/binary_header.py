"""RocketMQ's binary header (serialize type 1).

Spec: docs/internals/protocol/remoting.md, section 2.2.
"""

from __future__ import annotations

import struct
from typing import Final

from typing_extensions import Buffer

from commitlog.errors import LocalProtocolError, RemoteProtocolError
from remoting.protocol.command import (
    LANGUAGE_CODES,
    LANGUAGES,
    OTHER_LANGUAGE,
    ExtFields,
    RemotingCommand,
    SerializeType,
)
from remoting.protocol.json_header import text_of

# code i16 · language i8 · version i16 · opaque i32 · flag i32 · length of the remark i32
_FIXED: Final = struct.Struct(">hbhiii")
_I32: Final = struct.Struct(">i")
_I16: Final = struct.Struct(">h")
_MAX_I16: Final = 0x7FFF


def decode_binary_header(header: Buffer) -> RemotingCommand:
    """Return the command a binary header describes, without its body.

    Raises:
        RemoteProtocolError: A length points outside the header, bytes are left over, not UTF-8.
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

    Raises:
        LocalProtocolError: The code, the version or a key does not fit its 16 bits, or a value is
            neither string nor number.
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
