"""A faulty direction of a link, as data: which bytes arrive, and when. No sockets, no clock.

::

    Link         the direction between two processes: its faults, and the frames it has kept back
    FrameEdges   where frames begin in a byte stream that is read in pieces of any size
    Passage      one direction of one connection over a link: bytes in, `Arrival`s out
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from typing import Final, NamedTuple

from dledger.jepsen_like.nemesis.ground import HEALTHY, LinkFault
from dledger.remoting.seams import Rng

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
        """Whether bytes may be sent on at once and then merely be passed to `follow`."""
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


HELD_FRAMES: Final = 32
"""Frames of old connections a link keeps per channel; older ones are lost."""

HELD_BYTES: Final = 8 << 20
"""Bytes of held frames, at most, so that frames at their cap do not fill the memory."""


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
        is_quick: What comes may go on at once: it is whole, and nothing slows it or inspects it.
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


FRAME_BYTES_MAX: Final = 33 << 20
"""Longer frames are never kept to be looked at, bytes: above what either protocol allows."""

_LENGTH: Final = struct.Struct(">I")


class Piece(NamedTuple):
    """Bytes of a stream.

    *is_frame*: they are one whole frame; else a part of one that must pass as it is.
    """

    data: bytes
    is_frame: bool


class FrameEdges:
    """Follows one stream of frames, each behind its length as a big-endian u32.

    Bytes are either *followed*, which only counts, or *cut* into frames, which keeps the begin of
    an unfinished frame back. One may turn into the other anywhere in the stream: a frame whose
    begin was followed goes to its end as it is.

    Invariant: at most one of `_head`, `_left` and `_rest` is not empty.
    """

    __slots__ = ("_head", "_left", "_rest")

    def __init__(self) -> None:
        self._head = b""  # bytes of a length that have passed before it was whole
        self._left = 0  # bytes to come of a frame whose begin has passed
        self._rest = bytearray()  # begin of a frame that waits for its end

    @property
    def has_rest(self) -> bool:
        """Whether the begin of a frame is kept back."""
        return bool(self._rest)

    def release(self) -> bytes:
        """Return what is kept back; it goes on with the next bytes or not at all."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    def follow(self, data: memoryview) -> None:
        """Count bytes that pass as they are. Nothing may be kept back."""
        at, end = self._end_of_begun(data), len(data)
        while end - at >= _LENGTH.size:
            at += _LENGTH.size + int(_LENGTH.unpack_from(data, at)[0])
        if at < end:
            self._head = bytes(data[at:])
        elif at > end:
            self._left = at - end

    def cut(self, data: memoryview) -> list[Piece]:
        """Return the whole frames that *data* completes, and what must pass before or after."""
        pieces = []
        if not self._rest:
            begun = self._end_of_begun(data)
            if begun:
                pieces.append(Piece(bytes(data[:begun]), is_frame=False))
                data = data[begun:]
        self._rest += data
        at, rest = 0, self._rest
        while len(rest) - at >= _LENGTH.size:
            size = _LENGTH.size + int(_LENGTH.unpack_from(rest, at)[0])
            if size > FRAME_BYTES_MAX:
                pieces.append(Piece(bytes(rest[at:]), is_frame=False))
                self._left = max(0, size - (len(rest) - at))
                at = min(len(rest), at + size)
                break
            if at + size > len(rest):
                break
            pieces.append(Piece(bytes(rest[at : at + size]), is_frame=True))
            at += size
        del rest[:at]
        return pieces

    def _end_of_begun(self, data: memoryview) -> int:
        """Return where the first frame begins whose begin has not passed, at most at the end."""
        at, end = self._left, len(data)
        if self._head:
            missing = _LENGTH.size - len(self._head)
            head, self._head = self._head + data[:missing], b""
            if len(head) < _LENGTH.size:
                self._head = head
                return end
            at = missing + int.from_bytes(head, "big")
        self._left = max(0, at - end)
        return min(at, end)
