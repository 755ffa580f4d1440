"""Fields of a stored record by their places in RocketMQ's layout, read and written by hand.

It shares nothing with the codec: offsets are those of the layout with IPv4 hosts, twelve more bytes
for each IPv6 host before them.
"""

from __future__ import annotations

import struct

from typing_extensions import Buffer

BORN_V6, STORE_V6 = 16, 32


def _places(record: bytes) -> tuple[int, int]:
    """Return where the store time stands, and how many bytes the store host has."""
    (flags,) = struct.unpack_from(">i", record, 36)
    return 56 + (12 if flags & BORN_V6 else 0), 20 if flags & STORE_V6 else 8


def with_store(record: Buffer, phy_offset: int, store_ms: int, store_host: bytes) -> bytes:
    """Return a record as another broker stores it: an IPv4 store host of the same length."""
    data = bytearray(record)
    at, host_bytes = _places(bytes(data))
    assert host_bytes == len(store_host), "a copy is appended with space for an IPv4 host"
    struct.pack_into(">q", data, 28, phy_offset)
    struct.pack_into(">q", data, at, store_ms)
    data[at + 8 : at + 8 + host_bytes] = store_host
    return bytes(data)


def kept_fields(record: Buffer) -> bytes:
    """Return what a copy has to keep of a record: all but position, store time and store host."""
    data = bytes(record)
    at, host_bytes = _places(data)
    (flags,) = struct.unpack_from(">i", data, 36)
    size = len(data) - host_bytes
    head = struct.pack(">i", size) + data[4:28] + struct.pack(">i", flags & ~STORE_V6) + data[40:at]
    return head + data[at + 8 + host_bytes :]
