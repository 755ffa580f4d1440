"""White addresses: from where an account, or everybody, needs no signature.

A pattern is an address, ``a.b.c.*``, a range in an octet (``a.b.c.10-20``), a choice of last
octets (``a.b.c.{10,11}``), or ``*``; several stand one after the other with ``,`` or ``;``
between them. IPv6 addresses are compared whole.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, TypeAlias

PATTERNS_MAX: Final = 1_000
"""Patterns in one list: each is looked at for every request that none before it fits."""

_CHOICE: Final = re.compile(r"(?P<head>[^{}]*\.)\{(?P<octets>[^{}]*)\}")
_OCTETS: Final = 4
_OCTET_MAX: Final = 255

# Lowest and highest value of each octet.
_Ranges: TypeAlias = tuple[tuple[int, int], ...]


class WhiteAddresses:
    """A list of patterns, ready to be asked about addresses."""

    __slots__ = ("_anybody", "_exact", "_ranges", "text")

    def __init__(self, text: str = "") -> None:
        """Read a list.

        Raises:
            ValueError: One pattern is none; names it.
        """
        self.text = text
        self._anybody = False
        self._exact: set[str] = set()
        self._ranges: list[_Ranges] = []
        patterns = _split(text)
        if len(patterns) > PATTERNS_MAX:
            raise ValueError(f"{len(patterns)} address patterns, at most {PATTERNS_MAX}")
        for pattern in patterns:
            self._add(pattern)

    def __bool__(self) -> bool:
        return self._anybody or bool(self._exact) or bool(self._ranges)

    def _add(self, pattern: str) -> None:
        if pattern in ("*", "*.*.*.*"):
            self._anybody = True
            return
        choice = _CHOICE.fullmatch(pattern)
        if choice is not None:
            for octet in choice["octets"].split(","):
                self._ranges.append(_ranges(choice["head"] + octet.strip(), pattern))
            return
        if ":" in pattern:
            try:
                self._exact.add(str(ipaddress.IPv6Address(pattern.strip("[]"))))
            except ValueError:
                raise ValueError(f"{pattern!r} is not an address") from None
            return
        ranges = _ranges(pattern, pattern)
        if all(low == high for low, high in ranges):
            self._exact.add(".".join(str(low) for low, _ in ranges))
        else:
            self._ranges.append(ranges)

    def fits(self, host: str) -> bool:
        """Whether one of the patterns is about *host*, a numeric address."""
        if self._anybody:
            return True
        if not self._exact and not self._ranges:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if str(address) in self._exact:
            return True
        if isinstance(address, ipaddress.IPv6Address):
            return False
        octets = address.packed
        return any(
            all(low <= octet <= high for (low, high), octet in zip(ranges, octets, strict=True))
            for ranges in self._ranges
        )


def _split(text: str) -> list[str]:
    """Cut at commas and semicolons that do not stand in braces."""
    parts = re.split(r"[;,](?![^{]*\})", text)
    return [part.strip() for part in parts if part.strip()]


def _ranges(text: str, shown: str) -> _Ranges:
    octets = text.split(".")
    if len(octets) != _OCTETS:
        raise ValueError(f"{shown!r} is not an address, nor a pattern of addresses")
    found: list[tuple[int, int]] = []
    for octet in octets:
        low, dash, high = octet.partition("-")
        if octet == "*":
            found.append((0, _OCTET_MAX))
            continue
        ends = (low, high) if dash else (octet, octet)
        if not all(end.isascii() and end.isdecimal() and int(end) <= _OCTET_MAX for end in ends):
            raise ValueError(f"{shown!r} is not an address, nor a pattern of addresses")
        first, last = int(ends[0]), int(ends[1])
        if first > last:
            raise ValueError(f"{shown!r}: {octet} runs backwards")
        found.append((first, last))
    return tuple(found)
