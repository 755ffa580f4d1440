"""One direction between two processes: how it behaves now, and which frames it has kept."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from jepsen_like.plans.link_fault import HEALTHY, LinkFault

HELD_FRAMES: Final = 32
"""Frames of old connections a link keeps per channel; older ones are lost."""

HELD_BYTES: Final = 8 << 20
"""And so many bytes of them, so that frames at their cap do not fill the memory."""


class Held(NamedTuple):
    """A frame kept for a later connection than *connection*."""

    connection: int
    frame: bytes


class HeldFrames:
    """Frames of old connections of one channel, oldest first. Too many: the oldest are lost."""

    __slots__ = ("_bytes", "_frames")

    def __init__(self) -> None:
        self._frames: deque[Held] = deque()
        self._bytes = 0

    def keep(self, connection: int, frame: bytes) -> None:
        """Keep *frame*, which was sent over *connection*."""
        self._frames.append(Held(connection, frame))
        self._bytes += len(frame)
        while len(self._frames) > HELD_FRAMES or self._bytes > HELD_BYTES:
            self._drop()

    def has_for(self, connection: int) -> bool:
        """Whether the oldest frame may arrive on *connection*, a later one than its own."""
        return bool(self._frames) and self._frames[0].connection < connection

    def take(self) -> bytes:
        """Return the oldest frame, which is kept no longer."""
        return self._drop().frame

    def _drop(self) -> Held:
        held = self._frames.popleft()
        self._bytes -= len(held.frame)
        return held


class Link:
    """What happens from *source* to *target*.

    Attributes:
        busy_until_s: When the bytes a limited link has taken are through.
        is_quick: What comes may go on at once: it is whole, and nothing slows it or looks at it.
    """

    __slots__ = ("_held", "busy_until_s", "fault", "is_cut", "is_quick", "source", "target")

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.fault = HEALTHY
        self.is_cut = False
        self.busy_until_s = 0.0
        self.is_quick = True
        self._held: dict[str, HeldFrames] = {}

    def set(self, fault: LinkFault) -> None:
        """Behave like *fault* from now on."""
        self.fault = fault
        if not fault.bytes_per_s:
            self.busy_until_s = 0.0
        self._judge()

    def cut(self) -> None:
        """Let nothing through."""
        self.is_cut = True
        self._judge()

    def mend(self) -> None:
        """Let everything through again."""
        self.is_cut = False
        self._judge()

    def held(self, channel: str) -> HeldFrames:
        """Return the frames kept for later connections of *channel*."""
        return self._held.setdefault(channel, HeldFrames())

    def longest_wait_s(self) -> float:
        """Return how long what is under way may still take, as the link behaves now."""
        fault = self.fault
        if fault.bytes_per_s:
            return float("inf")
        late_s = fault.spread_s if fault.duplicate or fault.reorder else 0.0
        return fault.delay_s + max(fault.jitter_s, late_s)

    def _judge(self) -> None:
        fault = self.fault
        slows = fault.delay_s or fault.jitter_s or fault.bytes_per_s
        self.is_quick = not (self.is_cut or slows) and fault.is_plain
