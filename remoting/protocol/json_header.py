"""The JSON header (serialize type 0): what every RocketMQ client speaks by default.

Written strictly (keys in alphabetical order, nulls left out, compact), read leniently: real
clients send numbers and booleans where strings belong, a trailing newline, unknown keys.

Spec: docs/internals/protocol/remoting.md, section 2.1.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from typing_extensions import Buffer

from commitlog.errors import LocalProtocolError, RemoteProtocolError
from remoting.protocol.command import (
    FLAG_RESPONSE,
    OUR_LANGUAGE,
    ExtFields,
    RemotingCommand,
    SerializeType,
)

_JSON: Final = SerializeType.JSON
_I32_MIN: Final = -(1 << 31)
_I32_MAX: Final = (1 << 31) - 1


# Fields stand in the order in which they are written.
class _Header(msgspec.Struct, rename="camel", gc=False):
    code: int
    ext_fields: dict[str, str] | msgspec.UnsetType | None = msgspec.UNSET
    flag: int = 0
    language: str = "OTHER"
    opaque: int = 0
    remark: str | msgspec.UnsetType | None = msgspec.UNSET
    serialize_type_current_rpc: str | msgspec.UnsetType = msgspec.field(
        name="serializeTypeCurrentRPC", default=msgspec.UNSET
    )
    version: int = 0


class _LenientHeader(msgspec.Struct, rename="camel"):
    code: int
    ext_fields: dict[str, Any] | None = None
    flag: int = 0
    language: Any = "OTHER"
    opaque: int = 0
    remark: Any = None
    version: int = 0


_decode: Final = msgspec.json.Decoder(_Header).decode
_decode_lenient: Final = msgspec.json.Decoder(_LenientHeader, strict=False).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode
_UNSET: Final = msgspec.UNSET


def decode_json_header(header: Buffer) -> RemotingCommand:
    """Return the command a JSON header describes, without its body.

    Raises:
        RemoteProtocolError: Not UTF-8, not JSON, no `code`, or a number out of range.
    """
    try:
        parsed = _decode(header)
    except msgspec.ValidationError:
        return _lenient(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"undecodable JSON header: {error}") from error
    ext = parsed.ext_fields
    return _checked(
        RemotingCommand(
            parsed.code,
            parsed.opaque,
            parsed.flag,
            parsed.remark or None,
            ext if type(ext) is dict else None,
            b"",
            parsed.language,
            parsed.version,
            _JSON,
        )
    )


def _lenient(header: Buffer) -> RemotingCommand:
    try:
        parsed = _decode_lenient(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"undecodable JSON header: {error}") from error
    ext: ExtFields = {}
    for key, value in (parsed.ext_fields or {}).items():
        if value is not None:
            ext[key] = text_of(value)
    remark = parsed.remark
    return _checked(
        RemotingCommand(
            parsed.code,
            parsed.opaque,
            parsed.flag,
            text_of(remark) if remark not in (None, "") else None,
            ext,
            b"",
            text_of(parsed.language) if parsed.language is not None else "OTHER",
            parsed.version,
            _JSON,
        )
    )


def _checked(command: RemotingCommand) -> RemotingCommand:
    if not (
        _I32_MIN <= command.opaque <= _I32_MAX
        and _I32_MIN <= command.code <= _I32_MAX
        and _I32_MIN <= command.flag <= _I32_MAX
        and _I32_MIN <= command.version <= _I32_MAX
    ):
        raise RemoteProtocolError("a number in the header does not fit 32 bits")
    return command


def encode_json_header(command: RemotingCommand) -> bytes:
    """Return the header of *command* as compact JSON.

    A response always carries `extFields`, empty if need be: some clients look into it unasked.

    Raises:
        LocalProtocolError: A field is of a kind JSON has no place for.
    """
    ext = command.ext
    header = _Header(
        command.code,
        ext if ext or command.flag & FLAG_RESPONSE else _UNSET,
        command.flag,
        command.language,
        command.opaque,
        _UNSET if command.remark is None else command.remark,
        "JSON" if command.language is OUR_LANGUAGE else _UNSET,
        command.version,
    )
    for value in ext.values():
        if type(value) is not str:
            header.ext_fields = {
                key: text_of(item) for key, item in ext.items() if item is not None
            }
            break
    try:
        return _encode(header)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise LocalProtocolError(f"header cannot be written as JSON: {error}") from error


def text_of(value: Any) -> str:
    """Return a header value as Java's `String.valueOf` writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, bytes):
        raise LocalProtocolError("bytes cannot stand in a header of strings")
    return msgspec.json.encode(value).decode()
