"""The part of YAML that RocketMQ's ``plain_acl.yml`` and ``tools.yml`` are written in; no more.

Mappings and lists in block form, plain and quoted scalars, ``[]`` and ``[a, b]``, comments.
Everything is text: ``12345678`` stays the text it is, for a secret key is no number. Whatever else
YAML has (anchors, tags, several documents, block scalars, tabs) is refused with its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from commitlog.errors import ConfigError

Node: TypeAlias = "str | list[Node] | dict[str, Node] | None"

DEPTH_MAX: Final = 8
"""Mappings and lists inside each other; the files have three."""

_KEY: Final = re.compile(r"(?P<key>[A-Za-z0-9_.%|-]+|'[^']*'|\"[^\"\\]*\"):(?=\s|$)")
_FORBIDDEN_STARTS: Final = ("&", "*", "!", "|", ">", "@", "`", "{", "? ", "%")
_ADDRESS: Final = re.compile(r"\*[.*:]*\Z")


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    indent: int
    text: str


def parse_plain_yaml(text: str) -> Node:
    """Return what *text* says; an empty document is None.

    Raises:
        ConfigError: Something that is not of this part of YAML; names the line.
    """
    lines = _lines(text)
    if not lines:
        return None
    node, at = _block(lines, 0, lines[0].indent, 0)
    if at < len(lines):
        raise _error(lines[at], "is indented in a way that fits nothing above it")
    return node


def _lines(text: str) -> list[_Line]:
    found: list[_Line] = []
    for number, raw in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        line = _without_comment(raw).rstrip()
        stripped = line.lstrip(" ")
        if not stripped or (stripped == "---" and not found):
            continue
        if "\t" in line[: len(line) - len(line.lstrip())] or stripped in ("---", "..."):
            raise ConfigError(f"line {number}: tabs and several documents are not read here")
        found.append(_Line(number, len(line) - len(stripped), stripped))
    return found


def _without_comment(line: str) -> str:
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (at == 0 or line[at - 1] in " [,:-"):
            quote = char
        elif char == "#" and (at == 0 or line[at - 1] in " \t"):
            return line[:at]
    return line


def _block(lines: list[_Line], at: int, indent: int, depth: int) -> tuple[Node, int]:
    if depth > DEPTH_MAX:
        raise _error(lines[at], f"stands deeper than {DEPTH_MAX} levels")
    if _is_item(lines[at].text):
        return _list(lines, at, indent, depth)
    return _mapping(lines, at, indent, depth)


def _list(lines: list[_Line], at: int, indent: int, depth: int) -> tuple[list[Node], int]:
    items: list[Node] = []
    while at < len(lines) and lines[at].indent == indent and _is_item(lines[at].text):
        line = lines[at]
        rest = line.text[1:].lstrip(" ")
        inner = indent + len(line.text) - len(rest)
        if not rest:
            node, at = _below(lines, at + 1, indent, depth)
            items.append(node)
        elif _is_item(rest) or _KEY.match(rest):
            lines[at] = _Line(line.number, inner, rest)
            node, at = _block(lines, at, inner, depth + 1)
            items.append(node)
        else:
            items.append(_scalar(line, rest))
            at += 1
    return items, at


def _mapping(lines: list[_Line], at: int, indent: int, depth: int) -> tuple[dict[str, Node], int]:
    found: dict[str, Node] = {}
    while at < len(lines) and lines[at].indent == indent and not _is_item(lines[at].text):
        line = lines[at]
        match = _KEY.match(line.text)
        if match is None:
            raise _error(line, "is not 'key: value'")
        key = match["key"].strip("'\"")
        if key in found:
            raise _error(line, f"has the key {key} a second time")
        rest = line.text[match.end() :].strip(" ")
        if rest:
            found[key] = _scalar(line, rest)
            at += 1
        else:
            found[key], at = _below(lines, at + 1, indent, depth, with_list=True)
    return found, at


def _below(
    lines: list[_Line], at: int, indent: int, depth: int, *, with_list: bool = False
) -> tuple[Node, int]:
    """Return what stands below a key or a dash, None for nothing."""
    if at >= len(lines):
        return None, at
    line = lines[at]
    if line.indent > indent or (with_list and line.indent == indent and _is_item(line.text)):
        return _block(lines, at, line.indent, depth + 1)
    return None, at


def _scalar(line: _Line, text: str) -> Node:
    if text in ("~", "null"):
        return None
    if text.startswith("["):
        if not text.endswith("]"):
            raise _error(line, "has a list that does not end on its line")
        inner = text[1:-1].strip()
        return [_scalar(line, part.strip()) for part in inner.split(",")] if inner else []
    for quote in "'\"":
        if text.startswith(quote):
            inner = text[1:-1]
            if len(text) < 2 or not text.endswith(quote) or quote in inner or "\\" in inner:
                raise _error(line, "has a quoted text with quotes or backslashes in it")
            return inner
    if text.startswith(_FORBIDDEN_STARTS) and not _ADDRESS.match(text):
        raise _error(line, "uses more of YAML than is read here")
    if ": " in text or text.endswith(":"):
        raise _error(line, "has a colon in a plain text; quote it")
    return text


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _error(line: _Line, why: str) -> ConfigError:
    # Not the text of the line: it may be a secret.
    return ConfigError(f"line {line.number} {why}")
