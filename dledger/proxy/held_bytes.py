"""Bytes that a proxy holds for its clients. Synchronous.

gRPC keeps an answer until its client reads it, and a client that never does keeps its call open; a
request is kept until brokers have answered. So a call that comes while too much is held is refused
before anything is asked of brokers.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

UNREAD_BYTES_MAX: Final = 256 << 20
"""Of answers and commands that wait, for all clients of a proxy, as much as a broker keeps for its
connections. Receives that are under way when it is reached come on top, until there is twice as
much."""

REQUEST_BYTES_MAX: Final = 512 << 20
"""Of requests under way: 128 bodies of the largest size that brokers take."""

HOST_SHARE: Final = 4
"""One host has a fourth of either at most: those of others are served then."""


class HeldBytes:
    """How many bytes are held for each host.

    Args:
        limit_bytes: For all of them.
    Attributes:
        used_bytes: For all of them.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Begin with none."""
        self.used_bytes = 0
        self._limit_bytes = limit_bytes
        self._by_host: Counter[str] = Counter()

    def is_full(self, host: str) -> bool:
        """Return whether nothing more is to be begun for a client of *host*."""
        if self.used_bytes >= self._limit_bytes:
            return True
        return self._by_host[host] >= self._limit_bytes // HOST_SHARE

    def fits(self, size_bytes: int) -> bool:
        """Return whether an answer that was begun before can be kept still."""
        return self.used_bytes + size_bytes <= 2 * self._limit_bytes

    def count(self, host: str, change_bytes: int) -> None:
        """Count what is held from now on; less than none: what is not held any more."""
        self.used_bytes += change_bytes
        held_bytes = self._by_host[host] + change_bytes
        if held_bytes:
            self._by_host[host] = held_bytes
        else:
            self._by_host.pop(host, None)
