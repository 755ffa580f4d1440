"""What happened in a run, as one number: a digest over every event.

Two runs of one seed must give the same digest in any interpreter with any hash seed.
"""

from __future__ import annotations

import struct
from collections import Counter
from enum import IntEnum
from hashlib import blake2b
from typing import Final

from dledger.jepsen_like.simulation.virtual_time import VirtualTime

_EVENT: Final = struct.Struct("<dBHqq")
_CHUNK_BYTES: Final = 1 << 14


class Event(IntEnum):
    """Kinds of events."""

    START = 1
    STARTED = 2
    FAILED = 3
    KILL = 4
    PAUSE = 5
    RESUME = 6
    POWER_CUT = 7
    STOP = 8
    ENDED = 9
    WIPE = 10
    CONNECT = 11
    FRAME = 12
    LOST = 13
    RESET = 14
    WRITE = 15
    FLUSH = 16
    REPLACE = 17
    ROLE = 18
    APPLIED = 19
    DISK_FAULT = 20
    LINK_FAULT = 21
    CLOCK_FAULT = 22
    CLIENT = 23
    NOTE = 24


class Trace:
    """The events of a run."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._digest = blake2b(digest_size=16)
        self._pending = bytearray()
        self.counts: Counter[int] = Counter()
        self.sometimes: Counter[str] = Counter()

    def note(self, event: int, node: int, first: int = 0, second: int = 0) -> None:
        """Take one event in, of a node (0: the world), with two numbers that describe it."""
        now_s = self._time.now_s
        self.counts[event] += 1
        pending = self._pending
        pending += _EVENT.pack(now_s, event, node, first, second)
        if len(pending) >= _CHUNK_BYTES:
            self._digest.update(pending)
            pending.clear()

    @property
    def digest(self) -> str:
        """Digest over all events so far, in hex."""
        self._digest.update(self._pending)
        self._pending.clear()
        return self._digest.hexdigest()
