"""Values of EDN, the notation of Jepsen's histories: text to values and back.

Vectors and lists become tuples, maps become dicts, sets become frozensets, `nil` is None. Keywords,
symbols and tagged values have a type of their own, so that a keyword never equals a string.

Source: the published description of the format, github.com/edn-format/edn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import msgspec

from dledger.commitlog.errors import MQError


class EdnError(MQError):
    """The text is no EDN: the sentence names the line."""


class Keyword(msgspec.Struct, frozen=True):
    """A keyword, without its colon."""

    name: str


class Symbol(msgspec.Struct, frozen=True):
    """A symbol."""

    name: str


class Tagged(msgspec.Struct, frozen=True):
    """A value with a tag in front, without the `#`."""

    tag: str
    value: Any


class FrozenMap(msgspec.Struct, frozen=True):
    """A map that is a value: pairs of a key and what it leads to, in no order."""

    pairs: frozenset[tuple[Any, Any]]


def frozen(value: Any) -> Any:
    """Return *value* so that it has a hash and equals what is equal to it."""
    match value:
        case dict():
            return FrozenMap(frozenset((frozen(k), frozen(v)) for k, v in value.items()))
        case tuple() | list():
            return tuple(map(frozen, value))
        case set() | frozenset():
            return frozenset(map(frozen, value))
        case Tagged(tag, inner):
            return Tagged(tag, frozen(inner))
        case _:
            return value


DIGITS_MAX: Final = 1_000
"""Digits of a number; a longer one is damage, and Python converts it in quadratic time."""

DEPTH_MAX: Final = 200
"""Brackets within brackets; a history has ten, and values deeper than that cannot be compared."""

_TOKEN: Final = re.compile(
    r"""[\s,]+ | ;[^\n]* | \#![^\n]*
    | (?P<open>\#\{ | [(\[{]) | (?P<close>[)\]}])
    | (?P<text>"(?:[^"\\]|\\.)*") | (?P<discard>\#_)
    | (?P<char>\\(?:newline|return|space|tab|formfeed|backspace|u[0-9a-fA-F]{4}|.))
    | (?P<special>\#\#(?:-?Inf|NaN)) | (?P<tag>\#[A-Za-z][^\s,;"()\[\]{}]*)
    | (?P<atom>[^\x00-\x20,;"()\[\]{}\\#^@`~][^\s,;"()\[\]{}\\^@`~]*)""",
    re.VERBOSE | re.DOTALL,
)
_INTEGER: Final = re.compile(r"[+-]?[0-9]+N?")
_RATIO: Final = re.compile(r"[+-]?[0-9]+/[0-9]+")
_DECIMAL: Final = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?M?")
_WORDS: Final[dict[str, Any]] = {"nil": None, "true": True, "false": False}
_SPECIAL: Final = {"##Inf": math.inf, "##-Inf": -math.inf, "##NaN": math.nan}
_CHARS: Final = {
    "newline": "\n", "return": "\r", "space": " ", "tab": "\t", "formfeed": "\f",
    "backspace": "\b",
}  # fmt: skip
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED: Final = {
    "n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", '"': '"', "\\": "\\", "'": "'",
}  # fmt: skip
_HALVES: Final = ("utf-16-le", "surrogatepass")
_CLOSE: Final = {"(": ")", "[": "]", "{": "}", "#{": "}"}


@dataclass(slots=True)
class _Open:
    """What waits for values: a bracket, a tag, a discard."""

    kind: str
    line: int
    tag: str = ""
    items: list[Any] = field(default_factory=list)


def values(text: str) -> Iterator[Any]:
    """Yield the values of *text*, one after the other.

    Raises:
        EdnError: The text is no EDN; the values before it have been yielded.
    """
    stack: list[_Open] = []
    keywords: dict[str, Keyword] = {}
    at, line = 0, 1
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise EdnError(f"line {line}: {text[at : at + 20]!r} begins no value of EDN")
        at = token.end()
        kind, word = token.lastgroup, token[0]
        if kind in ("open", "discard", "tag"):
            if len(stack) == DEPTH_MAX:
                raise EdnError(f"line {line}: values are nested more than {DEPTH_MAX} deep")
            stack.append(_Open(kind if kind != "open" else word, line, word[1:]))
        elif kind is not None:
            if kind == "close":
                value = _closed(stack, word, line)
            elif kind == "atom":
                value = _atom(word, keywords, line)
            else:
                value = _plain(kind, word, line)
            while stack and stack[-1].kind == "tag":
                value = Tagged(stack.pop().tag, value)
            if stack and stack[-1].kind == "discard":
                stack.pop()
            elif stack:
                stack[-1].items.append(value)
            else:
                yield value
        line += word.count("\n")
    if stack:
        raise EdnError(f"line {stack[-1].line}: {stack[-1].kind!r} has no end")


def _closed(stack: list[_Open], word: str, line: int) -> Any:
    begin = stack.pop() if stack else None
    if begin is None or _CLOSE.get(begin.kind) != word:
        raise EdnError(f"line {line}: {word!r} closes nothing")
    items = begin.items
    if begin.kind in ("(", "["):
        return tuple(items)
    is_set = begin.kind == "#{"
    if not is_set and len(items) % 2:
        raise EdnError(f"line {line}: a map has a key without a value")
    try:
        found: Any = frozenset(items) if is_set else dict(zip(items[::2], items[1::2], strict=True))
    except TypeError:
        raise EdnError(f"line {line}: a map is a key or a member of a set") from None
    if len(found) * (1 if is_set else 2) != len(items):
        raise EdnError(f"line {line}: a {'set has a member' if is_set else 'map has a key'} twice")
    return found


def _plain(kind: str, word: str, line: int) -> Any:
    if kind == "special":
        return _SPECIAL[word]
    if kind == "char":
        name = word[1:]
        if len(name) == 1:
            return name
        return _CHARS[name] if name in _CHARS else chr(int(name[1:], 16))
    try:
        text = _ESCAPE.sub(_unescaped, word[1:-1])
    except KeyError as error:
        raise EdnError(f"line {line}: a string has the unknown escape {error}") from None
    # A character beyond 16 bits is escaped in two halves.
    return text if text.isascii() else text.encode(*_HALVES).decode(*_HALVES)


def _unescaped(found: re.Match[str]) -> str:
    word = found[1]
    return chr(int(word[1:], 16)) if len(word) == 5 else _ESCAPED[word]


def _atom(word: str, keywords: dict[str, Keyword], line: int) -> Any:
    if word[0] == ":":
        if len(word) == 1:
            raise EdnError(f"line {line}: a keyword has no name")
        return keywords.setdefault(word, Keyword(word[1:]))
    if word in _WORDS:
        return _WORDS[word]
    if not (word[0].isdigit() or (word[0] in "+-" and word[1:2].isdigit())):
        return Symbol(word)
    if len(word) <= DIGITS_MAX:
        if _INTEGER.fullmatch(word):
            return int(word.rstrip("N"))
        if _DECIMAL.fullmatch(word):
            return float(word.rstrip("M"))
        if _RATIO.fullmatch(word):
            top, below = map(int, word.split("/"))
            if below:
                return Fraction(top, below)
    raise EdnError(f"line {line}: {word[:40]!r} is no number")


def text_of(value: Any) -> str:
    """Return *value* as EDN, on one line.

    Raises:
        TypeError: It holds something that EDN has no notation for.
    """
    match value:
        case None:
            return "nil"
        case bool():
            return "true" if value else "false"
        case Keyword(name):
            return f":{name}"
        case Symbol(name):
            return name
        case Tagged(tag, inner):
            return f"#{tag} {text_of(inner)}"
        case float():
            special = {math.inf: "##Inf", -math.inf: "##-Inf"}
            return "##NaN" if math.isnan(value) else special.get(value, repr(value))
        case int() | Fraction():
            return str(value)
        case str():
            return _quoted(value)
        case tuple() | list():
            return f"[{' '.join(map(text_of, value))}]"
        case dict():
            return "{" + ", ".join(f"{text_of(k)} {text_of(v)}" for k, v in value.items()) + "}"
        case FrozenMap(pairs):
            return text_of(dict(sorted(pairs, key=lambda pair: text_of(pair[0]))))
        case set() | frozenset():
            return "#{" + " ".join(sorted(map(text_of, value))) + "}"
        case _:
            raise TypeError(f"EDN has no notation for {type(value).__name__}")


_TO_ESCAPE: Final = str.maketrans(
    {char: f"\\{name}" for name, char in _ESCAPED.items() if name != "'"}
)


def _quoted(text: str) -> str:
    return f'"{text.translate(_TO_ESCAPE)}"'
