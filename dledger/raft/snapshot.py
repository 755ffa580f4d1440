"""A leader's snapshot on its way to a follower that is behind the first kept entry.

A snapshot is the state tables at one index and where the kept log begins; the log itself is the
data and follows as ordinary appends (consensus.md, finding 1). It travels in chunks over the
data link, one at a time, each answered; whoever misses one asks for where it stands.

Pure bookkeeping for both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from commitlog.errors import RemoteProtocolError

CHUNK_BYTES: Final = 1 << 20
"""One chunk: a few milliseconds of a link."""

SNAPSHOT_BYTES_MAX: Final = 1 << 30
"""More is refused: tables of that size mean millions of queues."""


@dataclass(slots=True)
class Sending:
    """Leader: one snapshot and how far the follower has it."""

    index: int
    data: bytes
    offset: int = 0
    """Everything before it was answered."""

    def chunk(self) -> memoryview:
        """Return what comes next."""
        return memoryview(self.data)[self.offset : self.offset + CHUNK_BYTES]


@dataclass(slots=True)
class Receiving:
    """Follower: what has arrived of the newest snapshot offered."""

    index: int = 0
    total: int = 0
    parts: list[memoryview] = field(default_factory=list)
    offset: int = 0

    def take(self, index: int, offset: int, total: int, chunk: memoryview) -> bool:
        """Take one chunk; tell whether the snapshot is whole now.

        A chunk that does not follow is passed over: the answer says where to go on.

        Raises:
            RemoteProtocolError: No snapshot looks like this.
        """
        if not 0 < total <= SNAPSHOT_BYTES_MAX or offset + len(chunk) > total:
            raise RemoteProtocolError(f"a chunk at {offset} of a snapshot of {total} bytes")
        if (index, total) != (self.index, self.total):
            self.index, self.total, self.offset = index, total, 0
            self.parts.clear()
        if offset == self.offset and len(chunk):
            self.parts.append(chunk)
            self.offset += len(chunk)
        return self.offset == self.total

    def data(self) -> bytes:
        """Return the whole snapshot and forget it."""
        data = b"".join(self.parts)
        self.index = self.total = self.offset = 0
        self.parts.clear()
        return data
