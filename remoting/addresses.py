"""Addresses as text: ``host:port``, an IPv6 host in brackets; and what a host is."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from dledger.commitlog.errors import LocalProtocolError

_ADDRESS: Final = re.compile(r"(?:\[([^\[\]]*:[^\[\]]*)\]|([^:\[\]]+)):([0-9]{1,5})")


def bracketed(host: str) -> str:
    """Return a host as it stands before a port and in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, ``[host]:port`` for an IPv6 address."""
    return f"{bracketed(host)}:{port}"


def found_address(text: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port`` or ``[IPv6 address]:port``; None: it is neither."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 0xFFFF:
        return None
    return found[1] or found[2], int(found[3])


def split_address(text: str) -> tuple[str, int]:
    """Do what `found_address` does; raises LocalProtocolError where that returns None."""
    found = found_address(text)
    if found is None:
        raise LocalProtocolError(f"not an address, host:port or [IPv6]:port: {text!r}")
    return found


def numeric(host: str) -> IPv4Address | IPv6Address | None:
    """Return a peer's address, as IPv4 where IPv6 carries that one; None: it is a name."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Whether a host, that of a peer or of a setting, is this machine itself."""
    address = numeric(host)
    return host == "localhost" if address is None else address.is_loopback
