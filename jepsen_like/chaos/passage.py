"""What becomes of the bytes of one direction of one connection, and when: no sockets, no clock."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from jepsen_like.chaos.frame_edges import FrameEdges
from jepsen_like.chaos.link import Link
from remoting.seams import Rng

OLD_FRAME_CHANCE: Final = 0.5
"""How often a frame is followed by one that was kept from an old connection."""


class Arrival(NamedTuple):
    """Bytes that are to be at the other end at a time of the caller's clock."""

    due_s: float
    data: bytes


class Passage:
    """One direction of one connection.

    Attributes:
        link: The link it lies on; others may lie on it too.
        is_broken: A frame was lost that could not be lost in silence: the connection is over.
    """

    __slots__ = (
        "_channel",
        "_edges",
        "_held",
        "_is_fresh",
        "_last_due_s",
        "_number",
        "_rng",
        "_sometimes",
        "is_broken",
        "link",
    )

    def __init__(
        self, link: Link, number: int, channel: str | None, *, rng: Rng, sometimes: Counter[str]
    ) -> None:
        """Args:
        number: Of the connection; later ones have larger numbers.
        channel: What members use the connection for; None for a connection of clients.
        """
        self.link = link
        self.is_broken = False
        self._number = number
        self._channel = channel
        self._held = link.held(channel or "")
        self._rng = rng
        self._sometimes = sometimes
        self._edges = FrameEdges()
        self._is_fresh = True  # nothing has passed yet
        self._last_due_s = 0.0

    @property
    def is_quick(self) -> bool:
        """Whether bytes may be sent on at once and then merely be told to `follow`."""
        return (
            self.link.is_quick and not self._edges.has_rest and not self._held.has_for(self._number)
        )

    def follow(self, data: memoryview) -> None:
        """Take note of bytes that were sent on as they came. Only while `is_quick`."""
        self._is_fresh = False
        self._edges.follow(data)

    def take(self, data: memoryview, now_s: float) -> list[Arrival]:
        """Return what arrives because of *data*. Look at `is_broken` afterwards."""
        arrivals: list[Arrival] = []
        if self.link.fault.is_plain and not self._held.has_for(self._number):
            whole = self._edges.release() + data
            self.follow(memoryview(whole))
            arrivals.append(self._in_turn(whole, now_s))
            return arrivals
        for piece in self._edges.cut(data):
            if piece.is_frame:
                self._take_frame(piece.data, now_s, arrivals)
            else:
                arrivals.append(self._in_turn(piece.data, now_s))
            if self.is_broken:
                break
            self._is_fresh = False
        return arrivals

    def end(self, now_s: float) -> Arrival:
        """Return when the end of the stream arrives, and the bytes before it that were left."""
        return self._in_turn(self._edges.release(), now_s)

    def _take_frame(self, frame: bytes, now_s: float, arrivals: list[Arrival]) -> None:
        link, chance, sometimes = self.link, self._rng.random, self._sometimes
        fault, of_members = link.fault, self._channel is not None
        if fault.loss and chance() < fault.loss:
            sometimes["frame_lost"] += 1
            if not (fault.silent and of_members):
                sometimes["resets"] += 1
                self.is_broken = True
            return
        if not of_members or self._is_fresh:  # without its hello no connection stands
            arrivals.append(self._in_turn(frame, now_s))
            return
        if fault.hold and chance() < fault.hold:
            sometimes["frame_held"] += 1
            self._held.keep(self._number, frame)
            return
        if fault.corrupt and len(frame) > 4 and chance() < fault.corrupt:
            sometimes["frame_corrupted"] += 1
            frame = self._corrupted(frame)
        if fault.duplicate and chance() < fault.duplicate:
            sometimes["frame_doubled"] += 1
            arrivals.append(self._late(frame, now_s))
        if fault.reorder and chance() < fault.reorder:
            sometimes["frame_overtaken"] += 1
            arrivals.append(self._late(frame, now_s))
            return
        arrivals.append(self._in_turn(frame, now_s))
        if self._held.has_for(self._number) and chance() < OLD_FRAME_CHANCE:
            sometimes["frame_from_old_connection"] += 1
            arrivals.append(self._in_turn(self._held.take(), now_s))

    def _corrupted(self, frame: bytes) -> bytes:
        bad = bytearray(frame)
        bad[4 + self._rng.randrange(len(bad) - 4)] ^= 1 << self._rng.randrange(8)
        return bytes(bad)

    def _in_turn(self, data: bytes, now_s: float) -> Arrival:
        """Return when *data* arrives behind all before it."""
        link, fault = self.link, self.link.fault
        if fault.bytes_per_s:
            now_s = max(link.busy_until_s, now_s) + len(data) / fault.bytes_per_s
            link.busy_until_s = now_s
        due_s = now_s + fault.delay_s
        if fault.jitter_s:
            due_s += self._rng.random() * fault.jitter_s
        self._last_due_s = max(due_s, self._last_due_s)
        return Arrival(self._last_due_s, data)

    def _late(self, data: bytes, now_s: float) -> Arrival:
        """Return when *data* arrives that others may overtake."""
        fault = self.link.fault
        return Arrival(now_s + fault.delay_s + self._rng.random() * fault.spread_s, data)

    def hurry(self, latest_s: float) -> None:
        """Let nothing more wait for bytes that were due after *latest_s* and now come by then."""
        self._last_due_s = min(self._last_due_s, latest_s)
