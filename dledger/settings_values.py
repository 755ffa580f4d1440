"""From what stands in a file or on a command line to the value of a setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from dledger.settings_tables import SETTINGS, Peer, Setting

_SIZE = re.compile(r"(\d+)\s*([KMG])i?B", re.IGNORECASE)
_SHIFT = {"K": 10, "M": 20, "G": 30}
_DELAY = re.compile(r"(\d+)([smhd])")
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PEER = re.compile(r"([A-Za-z0-9_.]+)-(\[[0-9A-Fa-f:.]+\]|[^:\s]+):(\d{1,5})")

MAX_DELAY_LEVELS = 64
"""Each level is a queue of its own and a delivery loop on the leader."""


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delay of each level in milliseconds; the first one is level 1.

    Raises:
        ValueError: Not a list like ``1s 5s 1m 2h``, or longer than 64.
    """
    delays: list[int] = []
    for part in text.split():
        match = _DELAY.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a delay such as 10s, 5m, 2h or 1d")
        delays.append(int(match[1]) * _UNIT_MS[match[2]])
    if not 1 <= len(delays) <= MAX_DELAY_LEVELS:
        raise ValueError(f"expected 1 to {MAX_DELAY_LEVELS} delays, got {len(delays)}")
    return tuple(delays)


def parse_peers(value: object) -> tuple[Peer, ...]:
    """Return the members of a group from ``n0-host:port;n1-host:port``, a list or a table.

    Raises:
        ValueError: One of them has another shape; names it.
    """
    if isinstance(value, Mapping):
        parts: Sequence[object] = [f"{peer}-{address}" for peer, address in value.items()]
    else:
        parts = _parts(value)
    peers: list[Peer] = []
    for part in parts:
        match = _PEER.fullmatch(str(part).strip())
        if match is None or not 0 < int(match[3]) < 65_536:
            raise ValueError(f"{part!r} is not a peer such as n0-127.0.0.1:20911")
        peers.append(Peer(match[1], match[2].strip("[]"), int(match[3])))
    return tuple(peers)


def parse_addresses(value: object) -> tuple[str, ...]:
    """Return addresses from ``host:port;host:port`` or a list.

    Raises:
        ValueError: One of them is not ``host:port``; names it.
    """
    addresses: list[str] = []
    for part in _parts(value):
        address = str(part).strip()
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError(f"{address!r} is not host:port")
        addresses.append(address)
    return tuple(addresses)


def parse_hours(value: object) -> tuple[int, ...]:
    """Return hours of the day from ``04`` or ``04;16``, a number or a list.

    Raises:
        ValueError: One of them is not from 0 to 23.
    """
    parts: Sequence[object] = [value] if isinstance(value, int) else _parts(value)
    hours: list[int] = []
    for part in parts:
        text = str(part).strip()
        if not text.isdecimal() or int(text) > 23:
            raise ValueError(f"{text!r} is not an hour from 00 to 23")
        hours.append(int(text))
    if not hours:
        raise ValueError("expected at least one hour")
    return tuple(hours)


def _parts(value: object) -> list[object]:
    if isinstance(value, str):
        return [part for part in re.split(r"[;,]", value) if part.strip()]
    if isinstance(value, (list, tuple)):
        return list(value)
    raise ValueError("expected text or a list")


_FRACTION = re.compile(r"0?\.\d+|1\.0+")


def _delay_text(value: object) -> str:
    text = str(value)
    parse_delay_levels(text)
    return " ".join(text.split())


def _percent(value: object) -> object:
    """RocketMQ's system properties are fractions, its settings are whole percents."""
    text = str(value).strip()
    if _FRACTION.fullmatch(text):
        return round(float(text) * 100)
    return value if isinstance(value, int) else text


EXPORTER_TYPES = ("DISABLE", "OTLP_GRPC", "PROM", "LOG")
"""RocketMQ's, by their numbers: its files have either."""


def exporter_type(value: object) -> str:
    """Return RocketMQ's name of an exporter of metrics from its name or number."""
    text = str(value).strip().upper()
    if text.isdecimal() and int(text) < len(EXPORTER_TYPES):
        return EXPORTER_TYPES[int(text)]
    return text


_PARSERS: dict[str, Callable[[object], object]] = {
    "broker.namesrv_addr": parse_addresses,
    "raft.peers": parse_peers,
    "metrics.exporter_type": exporter_type,
    "store.delete_when": parse_hours,
    "store.message_delay_level": _delay_text,
    "store.disk_max_used_space_ratio": _percent,
    "store.disk_space_clean_forcibly_ratio": _percent,
    "store.disk_space_warning_level_ratio": _percent,
}


def parse_value(setting: Setting, raw: object) -> Any:
    """Return *raw* as a value of the setting, checked against its type and limits.

    Args:
        raw: Text from anywhere, or what TOML gave. ``"8 MiB"`` is a number too.
    Raises:
        ValueError: It is not one; says what is expected.
    """
    parser = _PARSERS.get(setting.path)
    if parser is not None:
        raw = parser(raw)
    elif isinstance(raw, str) and isinstance(setting.default, int):
        match = _SIZE.fullmatch(raw.strip())
        if match is not None:
            raw = int(match[1]) << _SHIFT[match[2].upper()]
    elif isinstance(raw, float):
        raise ValueError("expected a whole number")
    try:
        return msgspec.convert(raw, setting.type, strict=not isinstance(raw, str))
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error), raw)) from None


_EXPECTED: Final = re.compile(r"^Expected `(\w+)((?: [^`]*)?`.*)$", re.DOTALL)
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}


def _in_words(said: str, raw: object) -> str:
    """Return what msgspec says of a value, for people: kinds of values in words."""
    found = _EXPECTED.match(said)
    if found is None:
        return said.replace("`", "").replace("Expected", "expected", 1)
    kind, rest = _KINDS.get(found[1], found[1]), found[2].replace("`", "")
    # Settings come as text: that it is text is not what is wrong with one.
    return f"expected {kind}" + ("" if isinstance(raw, str) and rest == ", got str" else rest)


def show_value(path: str, value: object) -> str:
    """Return a value as ``-p`` and the documentation print it; `parse_value` reads it back."""
    if path == "store.delete_when" and isinstance(value, tuple):
        return ";".join(f"{hour:02}" for hour in value)
    if isinstance(value, tuple):
        return ";".join(str(part) for part in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def default_text(path: str) -> str:
    """Return the default of a setting as text."""
    return show_value(path, SETTINGS[path].default)
