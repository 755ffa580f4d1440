"""The headers in JSON (serialize type 0), as every RocketMQ client has them, and in CBOR (type 2).

JSON is written strictly (keys in alphabetical order, nulls left out, compact) and read leniently:
real clients send numbers and booleans where strings belong, a trailing newline, unknown keys.

CBOR is ours, between our SDK and our daemons only. A map with short integer keys; ext values keep
their kind (integers, bytes, lists), so nothing is printed and parsed again on the way.

====  ========  =============================================
key   field     kind
====  ========  =============================================
0     code      integer
1     opaque    integer
2     flag      integer, left out when 0
3     ext       map text → text, integer, boolean, bytes, list; left out when empty
4     remark    text, left out when null
5     language  text, left out when PYTHON
6     version   integer, left out when it is the one of this release (407)
====  ========  =============================================

Read strictly: definite lengths, no tags, no unknown keys, no bytes left over.

Spec: docs/internals/protocol/remoting.md, section 2.1.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any, Final

import cbor2
import msgspec
from typing_extensions import Buffer

from dledger.commitlog.errors import LocalProtocolError, RemoteProtocolError
from dledger.remoting.protocol.command import (
    FLAG_RESPONSE,
    OUR_LANGUAGE,
    OUR_VERSION,
    ExtFields,
    RemotingCommand,
    SerializeType,
)

# ---------------------------------------------------------------------------------- JSON


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

    Raises RemoteProtocolError: not UTF-8, not JSON, no `code`, or a number out of range.
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

    Raises LocalProtocolError: a field is of a kind JSON has no place for.
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


_WHOLE_NUMBER: Final = re.compile("[+-]?[0-9]+")


def whole_number(value: object) -> int:
    """Return the number that *value* is, or that a client of any language wrote as text.

    That is ASCII digits, perhaps with a sign before them. `int` takes more: underscores, blanks,
    digits of other scripts, fractions that it cuts off.

    Raises ValueError: it is something else.
    """
    if type(value) is int:
        return value
    text = value.decode("ascii") if isinstance(value, bytes) else value
    if not isinstance(text, str) or _WHOLE_NUMBER.fullmatch(text) is None:
        raise ValueError(f"not a whole number: {str(value)[:64]!r}")
    return int(text)


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


# ---------------------------------------------------------------------------------- CBOR


CODE, OPAQUE, FLAG, EXT, REMARK, LANGUAGE, VERSION = range(7)
_NAMES: Final[dict[object, int]] = {
    "code": CODE,
    "opaque": OPAQUE,
    "flag": FLAG,
    "ext": EXT,
    "remark": REMARK,
    "language": LANGUAGE,
    "version": VERSION,
}
# Header map, ext map, a list in it, a pair in that: nothing of ours is deeper.
MAX_DEPTH: Final = 4
_PLAIN: Final = frozenset((str, int, bool, bytes, float))


def _refuse_tag(_decoder: object, *_args: object) -> Any:
    raise cbor2.CBORDecodeError("tags have no place in a header")


# Every tag the library would give a meaning of its own, bignums and regular expressions included.
_NO_TAGS: Final[dict[int, Callable[..., Any]]] = dict.fromkeys(
    (
        *range(6),
        25,
        *range(28, 31),
        *range(35, 38),
        52,
        54,
        100,
        256,
        258,
        260,
        261,
        1004,
        43000,
        55799,
    ),
    _refuse_tag,
)


def decode_cbor_header(header: Buffer) -> RemotingCommand:
    """Return the command a CBOR header describes, without its body.

    Raises RemoteProtocolError: not exactly one well-formed map of the fields above.
    """
    data = bytes(header)
    source = io.BytesIO(data)
    try:
        fields = cbor2.CBORDecoder(
            source,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            semantic_decoders=_NO_TAGS,
            tag_hook=_refuse_tag,
        ).decode()
    except (cbor2.CBORError, ValueError, OverflowError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(f"undecodable CBOR header: {error}") from error
    if source.tell() != len(data):
        raise RemoteProtocolError(f"{len(data) - source.tell()} bytes after the CBOR header")
    if type(fields) is not dict:
        raise RemoteProtocolError("CBOR header is not a map")
    command = RemotingCommand(0, serialize=SerializeType.CBOR)
    seen = 0
    for key, value in fields.items():
        field = _NAMES.get(key, -1) if type(key) is str else key if type(key) is int else -1
        if not 0 <= field <= VERSION or seen & 1 << field:
            raise RemoteProtocolError(f"CBOR header has a field {key!r}")
        seen |= 1 << field
        if field == EXT:
            command.ext = _ext(value)
        elif field in (REMARK, LANGUAGE):
            if type(value) is not str:
                raise RemoteProtocolError(f"field {key!r} of a CBOR header is not text")
            if field == REMARK:
                command.remark = value
            else:
                command.language = value
        else:
            if type(value) is not int or not _I32_MIN <= value <= _I32_MAX:
                raise RemoteProtocolError(f"field {key!r} of a CBOR header is not a 32-bit integer")
            if field == CODE:
                command.code = value
            elif field == OPAQUE:
                command.opaque = value
            elif field == FLAG:
                command.flag = value
            else:
                command.version = value
    if not seen & 1 << CODE:
        raise RemoteProtocolError("CBOR header has no code")
    return command


def _ext(value: object) -> dict[str, Any]:
    if type(value) is not dict:
        raise RemoteProtocolError("ext of a CBOR header is not a map")
    for key, item in value.items():
        if type(key) is not str:
            raise RemoteProtocolError(f"ext key {key!r} of a CBOR header is not text")
        kind = type(item)
        if kind not in _PLAIN:
            if kind is not list:
                raise RemoteProtocolError(f"ext field {key!r} of a CBOR header has kind {kind}")
            _check_list(key, item)
    return value


def _check_list(key: str, items: list[Any]) -> None:
    for item in items:
        if type(item) is list:
            _check_list(key, item)
        elif type(item) not in _PLAIN:
            raise RemoteProtocolError(f"ext field {key!r} of a CBOR header holds a {type(item)}")


def encode_cbor_header(command: RemotingCommand) -> bytes:
    """Return the header of *command* in CBOR.

    Raises LocalProtocolError: an ext value is of a kind the header does not carry.
    """
    fields: dict[int, Any] = {CODE: int(command.code), OPAQUE: command.opaque}
    if command.flag:
        fields[FLAG] = command.flag
    ext = command.ext
    if ext:
        if None in ext.values():
            ext = {key: value for key, value in ext.items() if value is not None}
        fields[EXT] = ext
    if command.remark is not None:
        fields[REMARK] = command.remark
    if command.language != OUR_LANGUAGE:
        fields[LANGUAGE] = command.language
    if command.version != OUR_VERSION:
        fields[VERSION] = command.version
    try:
        return cbor2.dumps(fields)
    except (cbor2.CBOREncodeError, UnicodeEncodeError, OverflowError) as error:
        raise LocalProtocolError(f"header cannot be written as CBOR: {error}") from error
