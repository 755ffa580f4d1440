"""A ring of hashes on which every node has several places. Pure.

Spec: semantics fact sheet, section 6.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

VIRTUAL_NODES: Final = 10
"""Places of one node; RocketMQ's number, so that both come to the same result."""


def ring_hash(text: str) -> int:
    """Return the place of *text* on the ring: the first four bytes of its MD5, big-endian."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class HashRing:
    """Finds the node that is next on the ring, clockwise."""

    def __init__(self, nodes: Iterable[str], virtual_nodes: int = VIRTUAL_NODES) -> None:
        """Put *nodes* on the ring, each at its places ``node-0``, ``node-1`` …

        Of two nodes at one place the later one has it.
        """
        ring = {
            ring_hash(f"{node}-{number}"): node for node in nodes for number in range(virtual_nodes)
        }
        self._places = sorted(ring)
        self._nodes = [ring[place] for place in self._places]

    def node_of(self, key: str) -> str | None:
        """Return the node at the place of *key* or the next one behind it; None without nodes."""
        if not self._places:
            return None
        return self._nodes[bisect_left(self._places, ring_hash(key)) % len(self._places)]
