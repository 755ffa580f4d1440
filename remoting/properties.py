"""Java properties: RocketMQ's configuration files, and its configuration requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dledger.commitlog.errors import ConfigError

_WHITE = " \t\f"
_COMMENT_BEHIND = re.compile(r"[ \t\f](#|//).*")
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str) -> list[tuple[int, str, str]]:
    """Return ``(line number, key, value)`` of each setting, in order; a key may come twice.

    Raises:
        ConfigError: A ``\\u`` escape without four hexadecimal digits; names the line.
    Format:
        That of java.util.Properties: ``key=value``, ``key: value`` or ``key value``; comments
        begin with ``#`` or ``!``; a backslash at the end of a line continues it.
    """
    return [
        (number, *_split(line, number)) for number, line in _logical_lines(text) if line.strip()
    ]


def read_properties(text: str) -> dict[str, str]:
    """Return key → value; a later line wins over an earlier one.

    Raises ConfigError: as `parse_properties`, or a line that begins with its separator.
    """
    values: dict[str, str] = {}
    for number, key, value in parse_properties(text):
        if not key:
            raise ConfigError(f"line {number}: a key is needed before the value '{value}'")
        values[key] = value
    return values


def inline_comment(value: str) -> str:
    """Return what resembles a comment behind a value, from its mark on; empty: nothing does.

    In this format it belongs to the value: a comment has a line of its own.
    """
    found = _COMMENT_BEHIND.search(value)
    return found.group().strip() if found else ""


def comment_hint(value: str) -> str:
    """Return what to do about a comment behind a value, for an error; empty: there is none."""
    comment = inline_comment(value)
    if not comment:
        return ""
    return f" ('{comment}' is taken as part of the value: give a comment a line of its own)"


def format_properties(values: Mapping[str, object]) -> str:
    """Return ``key=value`` lines that `parse_properties` reads; booleans as Java spells them."""
    return "".join(f"{_escape(key)}={_escape(_java_text(v))}\n" for key, v in values.items())


def _java_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    whole, first = "", 0
    for number, natural in enumerate(text.splitlines(), 1):
        line = natural.lstrip(_WHITE)
        if not first and line[:1] in ("#", "!"):
            continue
        first = first or number
        trailing = len(line) - len(line.rstrip("\\"))
        if trailing % 2:
            whole += line[:-1]
            continue
        yield first, whole + line
        whole, first = "", 0
    if first:
        yield first, whole


def _split(line: str, number: int) -> tuple[str, str]:
    at = 0
    while at < len(line) and line[at] not in "=: \t\f":
        at += 2 if line[at] == "\\" else 1
    key, rest = line[:at], line[at:].lstrip(_WHITE)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_WHITE)
    # Properties keeps blanks at the end of a value; no setting here has a use for them.
    return _unescape(key, number), _unescape(rest.rstrip(_WHITE), number)


def _unescape(text: str, number: int) -> str:
    if "\\" not in text:
        return text
    out: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char != "\\" or at >= len(text):
            out.append(char)
            continue
        char = text[at]
        at += 1
        if char != "u":
            out.append(_ESCAPES.get(char, char))
            continue
        digits = text[at : at + 4]
        if not _HEX.fullmatch(digits):
            raise ConfigError(f"line {number}: bad \\u escape {digits!r}")
        out.append(chr(int(digits, 16)))
        at += 4
    return "".join(out)
