"""Which settings a daemon has: the path, type, limits, default, keys and meaning of each.

A daemon lists its settings once, as fields of msgspec structs, one for each TOML table::

    class ServerTable(Struct, frozen=True, kw_only=True):
        listen_port: Annotated[int, setting("Port for clients.", "listenPort", ge=0)] = 10911

Files, command lines, requests for settings and the documentation are read off these fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

_SIZE: Final = re.compile(r"(\d+)\s*([KMG])i?B", re.IGNORECASE)
_SHIFT: Final = {"K": 10, "M": 20, "G": 30}
_EXPECTED: Final = re.compile(r"^Expected `(\w+)((?: [^`]*)?`.*)$", re.DOTALL)
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}


def setting(
    about: str,
    *keys: str,
    is_live: bool = False,
    parse: Callable[[object], object] | None = None,
    show: Callable[[Any], str] | None = None,
    **limits: Any,
) -> Meta:
    """Return the annotation of a field that is a setting.

    Args:
        about: What it means, for people.
        keys: RocketMQ's names of it.
        is_live: It can change while the daemon runs.
        parse: Makes a value from text or from what TOML gives; raises ValueError.
        show: Makes text from a value that *parse* reads back.
        limits: Of msgspec's `Meta`: ``ge``, ``le``, ``min_length`` and so on.
    """
    extra = {"keys": keys, "is_live": is_live, "parse": parse, "show": show}
    return Meta(description=about, extra=extra, **limits)


class Setting(Struct, frozen=True, kw_only=True):
    """One setting, as files and documentation see it."""

    path: str
    type: Any
    default: Any
    about: str
    keys: tuple[str, ...]
    is_live: bool
    parse_raw: Callable[[object], object] | None
    show_value: Callable[[Any], str] | None

    @property
    def table(self) -> str:
        """Name of the TOML table."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Name inside the table."""
        return self.path.partition(".")[2]

    def parse(self, raw: object) -> Any:
        """Return *raw* as a value of this setting, checked against its type and limits.

        Args:
            raw: Text from anywhere, or what TOML gave. ``"8 MiB"`` is a number too.
        Raises:
            ValueError: It is not one; names what is expected.
        """
        if self.parse_raw is not None:
            raw = self.parse_raw(raw)
        elif isinstance(raw, str) and isinstance(self.default, int):
            match = _SIZE.fullmatch(raw.strip())
            if match is not None:
                raw = int(match[1]) << _SHIFT[match[2].upper()]
        elif isinstance(raw, float):
            raise ValueError("expected a whole number")
        try:
            return msgspec.convert(raw, self.type, strict=not isinstance(raw, str))
        except msgspec.ValidationError as error:
            raise ValueError(_in_words(str(error), raw)) from None

    def show(self, value: Any) -> str:
        """Return a value as ``-p`` and the documentation print it; `parse` reads it back."""
        if self.show_value is not None:
            return self.show_value(value)
        if isinstance(value, tuple):
            return ";".join(str(part) for part in value)
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)

    @property
    def default_text(self) -> str:
        """The default as text."""
        return self.show(self.default)


class Schema:
    """All settings of a daemon.

    Attributes:
        tables: Name of a TOML table → the struct of its settings.
        settings: Path ``table.name`` → setting, in the order of the tables.
        keys: RocketMQ's key → path.
    """

    def __init__(self, tables: Mapping[str, type[Struct]]) -> None:
        self.tables = tables
        self.settings = {
            found.path: found for name, table in tables.items() for found in _settings(name, table)
        }
        self.keys = {key: found.path for found in self.settings.values() for key in found.keys}

    def show(self, path: str, value: Any) -> str:
        """Return a value of the setting *path* as text."""
        return self.settings[path].show(value)


def _settings(table: str, struct: type[Struct]) -> list[Setting]:
    hints = get_type_hints(struct, include_extras=True)
    found: list[Setting] = []
    for field in msgspec.structs.fields(struct):
        annotated = hints[field.name]
        meta: Meta = get_args(annotated)[1]
        extra = meta.extra or {}
        found.append(
            Setting(
                path=f"{table}.{field.name}",
                type=annotated,
                default=field.default,
                about=meta.description or "",
                keys=extra["keys"],
                is_live=extra["is_live"],
                parse_raw=extra["parse"],
                show_value=extra["show"],
            )
        )
    return found


def split_list(value: object) -> list[object]:
    """Return the parts of ``a;b`` or ``a,b``, or of a list.

    Raises:
        ValueError: Neither text nor a list.
    """
    if isinstance(value, str):
        return [part for part in re.split(r"[;,]", value) if part.strip()]
    if isinstance(value, Sequence):
        return list(value)
    raise ValueError("expected text or a list")


def parse_addresses(value: object) -> tuple[str, ...]:
    """Return addresses from ``host:port;host:port`` or a list.

    Raises:
        ValueError: One of them is not ``host:port``; names it.
    """
    addresses: list[str] = []
    for part in split_list(value):
        address = str(part).strip()
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError(f"{address!r} is not host:port")
        addresses.append(address)
    return tuple(addresses)


def _in_words(reason: str, raw: object) -> str:
    """Return msgspec's reason for people: kinds of values in words."""
    found = _EXPECTED.match(reason)
    if found is None:
        return reason.replace("`", "").replace("Expected", "expected", 1)
    kind, rest = _KINDS.get(found[1], found[1]), found[2].replace("`", "")
    # Settings come as text: that it is text is not what is wrong with one.
    return f"expected {kind}" + ("" if isinstance(raw, str) and rest == ", got str" else rest)
