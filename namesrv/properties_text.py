"""Java properties text, as RocketMQ's configuration files and configuration requests carry it."""

from __future__ import annotations

from collections.abc import Mapping

from commitlog.errors import ConfigError


def parse_properties(text: str) -> dict[str, str]:
    """Return key → value; a later line wins over an earlier one.

    Understands what such files use in practice: ``#`` and ``!`` comments, ``=`` or ``:`` between
    key and value, a backslash at the end of a line to continue it, and ``\\=`` ``\\:`` ``\\\\``.

    Raises:
        ConfigError: A line without a separator, or an empty key.
    """
    values: dict[str, str] = {}
    for number, line in _logical_lines(text):
        end = next((i for i in range(len(line)) if line[i] in "=:" and not _escaped(line, i)), None)
        key = "" if end is None else _unescape(line[:end].strip())
        if end is None or not key:
            raise ConfigError(f"line {number}: '{line}' is not of the form key=value")
        values[key] = _unescape(line[end + 1 :].strip())
    return values


def format_properties(values: Mapping[str, object]) -> str:
    """Return ``key=value`` lines; booleans as Java spells them."""
    return "".join(f"{key}={_java_text(value)}\n" for key, value in values.items())


def _logical_lines(text: str) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    pending = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not pending and (not line or line[0] in "#!"):
            continue
        if line.endswith("\\") and _escaped(line, len(line)):
            pending += line[:-1]
            continue
        lines.append((number, pending + line))
        pending = ""
    if pending:
        lines.append((len(text.splitlines()), pending))
    return lines


def _escaped(line: str, index: int) -> bool:
    backslashes = len(line[:index]) - len(line[:index].rstrip("\\"))
    return backslashes % 2 == 1


def _unescape(text: str) -> str:
    out: list[str] = []
    characters = iter(text)
    for character in characters:
        out.append(next(characters, "") if character == "\\" else character)
    return "".join(out)


def _java_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
