"""The JSON dialect of RocketMQ's bodies, which fastjson 1 writes and reads.

Beside standard JSON the reader takes unquoted and single-quoted keys, numeric keys, whole objects
as keys, `$ref` for objects that occur twice, stray commas and number suffixes. What it returns has
the shape of standard JSON: every key is a string; an object used as a key becomes its compact JSON
text, which is also how a key comes that was sent as a string holding an object.

Spec: docs/internals/protocol/remoting.md, section 5.
"""

from __future__ import annotations

import re
from base64 import b64encode
from enum import Enum, StrEnum
from typing import Any, Final

import msgspec
from typing_extensions import Buffer

from dledger.remoting.errors import BadRequestError

# Nothing of RocketMQ nests deeper than ten; the limit keeps hostile bodies off the stack.
MAX_DEPTH: Final = 64
# Of a body that is no standard JSON: its text and what is read of it take several times its size.
DIALECT_BYTES_MAX: Final = 4 << 20


class Dialect(StrEnum):
    """How map keys that are numbers are written."""

    STANDARD = "standard"  # {"0":"…"}: every client's reader takes it
    FASTJSON = "fastjson"  # {0:"…"}: as RocketMQ before 4.9.4 answers routes


_SPACE: Final = re.compile(r"[ \t\r\n\f\b]*")
_SPACE_COMMAS: Final = re.compile(r"[ \t\r\n\f\b,]*")
_NUMBER: Final = re.compile(r"([+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?)[LBSFD]?")
_WORD: Final = re.compile(r"[^\W\d][\w$.\-]*|[$_][\w$.\-]*")
_PLAIN_TEXT: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPES: Final = {
    '"': '"',
    "'": "'",
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "F": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    **{str(digit): chr(digit) for digit in range(8)},
}
_WORDS: Final = {"true": True, "false": False, "null": None, "undefined": None, "NaN": None}
_REF: Final = "$ref"
REFERENCE: Final = re.compile(rb"\$ref")
"""In a body that may refer to an object elsewhere in it."""
_PATH_STEP: Final = re.compile(r"\.((?:\\.|[^.\[\\])+)|\[([^\]]*)\]")
_INDEX: Final = re.compile("[0-9]{1,9}")

_standard: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def loads(data: Buffer) -> Any:
    """Return what a body holds: dicts with string keys, lists, strings, numbers, bools, None.

    Raises BadRequestError: not the dialect, not UTF-8, or nested too deeply.
    """
    try:
        value = _standard(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _read_dialect(data)
    if REFERENCE.search(data) is None:
        return value
    try:
        return _Resolver(value).resolved
    except RecursionError as error:
        raise BadRequestError("body is nested too deeply") from error


def _read_dialect(data: Buffer) -> Any:
    if memoryview(data).nbytes > DIALECT_BYTES_MAX:
        raise BadRequestError(f"body is not JSON, and larger than {DIALECT_BYTES_MAX} bytes")
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"body is not UTF-8: {error}") from error
    reader = _Reader(text)
    value = reader.value(0)
    if reader.skip() != len(text):
        raise reader.wrong("something after the end")
    return value


class _Reader:
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._in_key = False

    def wrong(self, what: str) -> BadRequestError:
        return BadRequestError(f"body is not JSON: {what} at character {self._at}")

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> int:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return self._at

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.wrong(f"nested deeper than {MAX_DEPTH}")
        self.skip()
        first = self._peek()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._array(depth)
        if first in ('"', "'") and first:
            return self._string(first)
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            return self._number(number)
        word = _WORD.match(self._text, self._at)
        if word is not None and word.group() in _WORDS:
            self._at = word.end()
            return _WORDS[word.group()]
        raise self.wrong("no value")

    def _number(self, found: re.Match[str]) -> int | float:
        try:
            if found.group(2) is None and found.group(3) is None:
                return int(found.group(1))
            return float(found.group(1))
        except ValueError as error:  # more digits than Python converts
            raise self.wrong("number too long") from error

    def _array(self, depth: int) -> list[Any]:
        self._at += 1
        items: list[Any] = []
        while True:
            self.skip(_SPACE_COMMAS)
            if self._peek() == "]":
                self._at += 1
                return items
            items.append(self.value(depth + 1))
            self.skip()
            if self._peek() not in (",", "]"):
                raise self.wrong("array goes on without a comma")

    def _object(self, depth: int) -> dict[str, Any]:
        self._at += 1
        fields: dict[str, Any] = {}
        while True:
            self.skip(_SPACE_COMMAS)
            if self._peek() == "}":
                self._at += 1
                return fields
            key = self._key(depth)
            self.skip()
            if self._peek() != ":":
                raise self.wrong("no colon after a key")
            self._at += 1
            fields[key] = self.value(depth + 1)
            self.skip()
            if self._peek() not in (",", "}"):
                raise self.wrong("object goes on without a comma")

    def _key(self, depth: int) -> str:
        first = self._peek()
        if first in ('"', "'") and first:
            return self._string(first)
        if first == "{":
            # Keys in keys do not occur, and their quotes would double with each level.
            if self._in_key:
                raise self.wrong("object as a key inside a key")
            self._in_key = True
            text = _encode(self.value(depth + 1)).decode()
            self._in_key = False
            return text
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            return number.group(1)
        word = _WORD.match(self._text, self._at)
        if word is None:
            raise self.wrong("no key")
        self._at = word.end()
        return word.group()

    def _string(self, quote: str) -> str:
        self._at += 1
        parts: list[str] = []
        plain = _PLAIN_TEXT[quote]
        while True:
            found = plain.match(self._text, self._at)
            if found is not None:
                parts.append(found.group())
                self._at = found.end()
            stop = self._peek()
            if not stop:
                raise self.wrong("string without an end")
            self._at += 1
            if stop == quote:
                return self._joined(parts)
            parts.append(self._escape())

    def _joined(self, parts: list[str]) -> str:
        text = "".join(parts)
        try:
            # Two \uXXXX halves of one character become that character; a lone half is refused.
            return (
                text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
            )
        except UnicodeDecodeError as error:
            raise self.wrong("half a character in a string") from error

    def _escape(self) -> str:
        letter = self._peek()
        self._at += 1
        if letter in ("u", "x") and letter:
            width = 4 if letter == "u" else 2
            digits = self._text[self._at : self._at + width]
            if len(digits) == width and all(d in "0123456789abcdefABCDEF" for d in digits):
                self._at += width
                return chr(int(digits, 16))
            raise self.wrong("bad escape")
        known = _ESCAPES.get(letter)
        if known is None:
            raise self.wrong("bad escape")
        return known


class _Resolver:
    """Replaces ``{"$ref": path}`` by what the path names; None where it names nothing."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.resolved = self._follow(root, []) if _ref_of(root) is None else None

    def _follow(self, value: Any, above: list[Any]) -> Any:
        # Lists and dicts are changed in place, so a path always meets the object itself.
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self._item(item, [*above, value])
        elif isinstance(value, list):
            for index, item in enumerate(value):
                value[index] = self._item(item, [*above, value])
        return value

    def _item(self, item: Any, above: list[Any]) -> Any:
        path = _ref_of(item)
        if path is None:
            return self._follow(item, above)
        if path == "@":
            return above[-1]
        if path == "..":
            return above[-2] if len(above) > 1 else None
        target = self._root
        for step in _PATH_STEP.finditer(path, 1) if path.startswith("$") else ():
            name, index = step.group(1), step.group(2)
            if name is not None and isinstance(target, dict):
                target = target.get(re.sub(r"\\(.)", r"\1", name))
            elif index is not None and isinstance(target, list) and _INDEX.fullmatch(index):
                target = target[int(index)] if int(index) < len(target) else None
            else:
                return None
        return target if path.startswith("$") and _ref_of(target) is None else None


def _ref_of(value: Any) -> str | None:
    if isinstance(value, dict) and len(value) == 1:
        path = value.get(_REF)
        if isinstance(path, str):
            return path
    return None


def dumps(value: Any, dialect: Dialect = Dialect.STANDARD) -> bytes:
    """Return *value* as fastjson would write it: keys sorted, nulls left out, compact.

    Structs may stand as values and as map keys; as a key a struct is written as a bare object,
    which is the only form every Java client reads. A `msgspec.Raw` stands for what was encoded.

    Raises TypeError: something that has no place in JSON.
    """
    if dialect is Dialect.STANDARD:
        try:
            return _encode(without_nulls(msgspec.to_builtins(value, builtin_types=(msgspec.Raw,))))
        except TypeError:
            pass  # a struct is a map key somewhere
    out: list[str] = []
    _write(value, out, dialect is Dialect.FASTJSON)
    return "".join(out).encode()


def member(key: Any, value: Any) -> bytes:
    """Return one member of an object: *key*, which may be a struct, and *value*."""
    return dumps({key: value})[1:-1]


def without_nulls(value: Any) -> Any:
    """Return *value* with every None-valued key of every dict left out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        # Names are most of what is listed.
        return [item if type(item) is str else without_nulls(item) for item in value]
    return value


def _write(value: Any, out: list[str], bare_numbers: bool) -> None:
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        fields = {wire: getattr(value, name) for wire, name in names}
        _write(fields, out, bare_numbers)
    elif isinstance(value, dict):
        opening = "{"
        for key in sorted(value, key=_key_order):
            item = value[key]
            if item is None:
                continue
            out.append(opening)
            opening = ","
            if isinstance(key, msgspec.Struct):
                _write(key, out, bare_numbers)
            elif isinstance(key, int) and bare_numbers:
                out.append(str(int(key)))
            else:
                out.append(_encode(str(key)).decode())
            out.append(":")
            _write(item, out, bare_numbers)
        out.append("{}" if opening == "{" else "}")
    elif isinstance(value, list | tuple | set | frozenset):
        opening = "["
        for item in sorted(value) if isinstance(value, set | frozenset) else value:
            out.append(opening)
            opening = ","
            _write(item, out, bare_numbers)
        out.append("[]" if opening == "[" else "]")
    elif isinstance(value, bytes | bytearray | memoryview):
        out.append(f'"{b64encode(value).decode()}"')
    elif isinstance(value, Enum):
        _write(value.value, out, bare_numbers)
    else:
        out.append(_encode(value).decode())


def _key_order(key: Any) -> tuple[int, Any]:
    if isinstance(key, int):
        return 0, key
    if isinstance(key, msgspec.Struct):
        return 2, _encode(key)
    return 1, str(key)
