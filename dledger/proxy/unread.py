"""Bytes of answers and commands that wait until clients read them. Synchronous.

gRPC keeps an answer until its client reads it, and a client that never does keeps its call open.
So one that comes while too much waits is refused before anything is asked of brokers.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

UNREAD_BYTES_MAX: Final = 256 << 20
"""For all clients of a proxy, as much as a broker keeps for its connections. Receives that are
under way when it is reached come on top, until there is twice as much."""

HOST_SHARE: Final = 4
"""One host has a fourth of it at most: those of others are served then."""


class UnreadBytes:
    """How many bytes wait for each host.

    Attributes:
        used_bytes: For all of them.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.used_bytes = 0
        self._by_host: Counter[str] = Counter()

    def is_full(self, host: str) -> bool:
        """Return whether nothing more is to be begun for a client of *host*."""
        if self.used_bytes >= UNREAD_BYTES_MAX:
            return True
        return self._by_host[host] >= UNREAD_BYTES_MAX // HOST_SHARE

    def fits(self, size_bytes: int) -> bool:
        """Return whether an answer that was begun before can be kept still."""
        return self.used_bytes + size_bytes <= 2 * UNREAD_BYTES_MAX

    def count(self, host: str, change_bytes: int) -> None:
        """Count what waits from now on; less than none: what does not wait any more."""
        self.used_bytes += change_bytes
        held_bytes = self._by_host[host] + change_bytes
        if held_bytes:
            self._by_host[host] = held_bytes
        else:
            self._by_host.pop(host, None)
