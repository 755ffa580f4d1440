"""Values of a broker's settings that text spells in a way of its own: members, hours, delays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from remoting.settings.schema import split_list

_DELAY: Final = re.compile(r"(\d+)([smhd])")
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PEER: Final = re.compile(r"([A-Za-z0-9_.]+)-(\[[0-9A-Fa-f:.]+\]|[^:\s]+):(\d{1,5})")
_FRACTION: Final = re.compile(r"0?\.\d+|1\.0+")


class Peer(Struct, frozen=True):
    """One member of a broker group: its id and where its peers reach it."""

    id: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port`` of the peer connection."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.id}-{self.address}"


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
        parts = split_list(value)
    peers: list[Peer] = []
    for part in parts:
        match = _PEER.fullmatch(str(part).strip())
        if match is None or not 0 < int(match[3]) < 65_536:
            raise ValueError(f"{part!r} is not a peer such as n0-127.0.0.1:20911")
        peers.append(Peer(match[1], match[2].strip("[]"), int(match[3])))
    return tuple(peers)


def parse_hours(value: object) -> tuple[int, ...]:
    """Return hours of the day from ``04`` or ``04;16``, a number or a list.

    Raises:
        ValueError: One of them is not from 0 to 23.
    """
    parts: Sequence[object] = [value] if isinstance(value, int) else split_list(value)
    hours: list[int] = []
    for part in parts:
        text = str(part).strip()
        if not text.isdecimal() or int(text) > 23:
            raise ValueError(f"{text!r} is not an hour from 00 to 23")
        hours.append(int(text))
    if not hours:
        raise ValueError("expected at least one hour")
    return tuple(hours)


def show_hours(hours: tuple[int, ...]) -> str:
    """Return hours of the day as `parse_hours` reads them."""
    return ";".join(f"{hour:02}" for hour in hours)


def delay_text(value: object) -> str:
    """Return a list of delays with single blanks.

    Raises:
        ValueError: As `parse_delay_levels`.
    """
    text = str(value)
    parse_delay_levels(text)
    return " ".join(text.split())


def percent(value: object) -> object:
    """Return whole percents: RocketMQ's system properties are fractions, its settings percents."""
    text = str(value).strip()
    if _FRACTION.fullmatch(text):
        return round(float(text) * 100)
    return value if isinstance(value, int) else text


EXPORTER_TYPES = ("DISABLE", "OTLP_GRPC", "PROM", "LOG")
"""RocketMQ's, by their numbers: its files have either."""


def parse_exporter(value: object) -> str:
    """Return RocketMQ's name of an exporter of metrics from its name or number."""
    text = str(value).strip().upper()
    if text.isdecimal() and int(text) < len(EXPORTER_TYPES):
        return EXPORTER_TYPES[int(text)]
    return text
