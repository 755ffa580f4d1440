"""Memory for the unfinished frames of all peers, bounded together.

A member may send 32 MiB in one frame. So many members as there are could each hold that much of one
that does not end; one `FrameRoom` bounds the sum. A connection takes room for a whole frame before
it reads on in it, and is not read while there is none. Small frames (votes, heartbeats) take none,
so they never wait behind large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from commitlog.errors import RemoteProtocolError
from dledger.raft.wire import FRAME_BYTES_MAX, PREFIX_BYTES, PeerFrameDecoder
from remoting.frame_room import FREE_FRAME_BYTES, FrameRoom, FrameTicket
from remoting.seams import Clock

UNFINISHED_BYTES: Final = 48 << 20
"""Unfinished frames of all peers: one of the largest, and an ordinary append of every other member.
A member gets large frames from one other at a time: its leader, or the one that repairs it."""


def peer_frame_room() -> FrameRoom:
    """Return an empty room for the frames of peers."""
    return FrameRoom(UNFINISHED_BYTES, FRAME_BYTES_MAX + PREFIX_BYTES)


class FrameMemory:
    """What one connection holds of the room.

    Args:
        room: Of all connections.
        address: The host that its peer calls from.
        end: Ends the connection; called once when its frame gives way to another one.
    """

    def __init__(
        self, room: FrameRoom, address: str, end: Callable[[], None], *, clock: Clock
    ) -> None:
        self._room = room
        self._end = end
        self._clock = clock
        self._ticket = FrameTicket(address, self._give_way)
        self._ticket.is_proven = True  # who is not a member holds a hello at most
        self.has_given_way = False

    async def note(self, decoder: PeerFrameDecoder, size: int, whole_frames: int) -> None:
        """Note that *size* bytes came, which completed frames or not; wait while there is no room.

        A checkpoint only when it waits.

        Raises:
            RemoteProtocolError: Its unfinished frame has given way to another one.
        """
        now_s = self._clock.monotonic()
        if self._ticket.held_bytes:
            if whole_frames:
                self._room.leave(self._ticket, now_s)
            else:
                self._room.progress(self._ticket, size, now_s)
        wanted = decoder.unfinished_bytes
        if wanted > FREE_FRAME_BYTES and not self._ticket.held_bytes:
            await self._take(wanted, decoder.pending_bytes, now_s)

    async def _take(self, wanted: int, pending: int, now_s: float) -> None:
        granted = trio.Event()
        self._ticket.granted = granted.set
        if self._room.take(self._ticket, wanted, pending, now_s):
            return
        while not granted.is_set():
            with self._clock.time_out(self._room.look_every_s):
                await granted.wait()
            self._room.relieve(self._clock.monotonic())

    def leave(self) -> None:
        """Give back what the connection holds; it has ended. Idempotent."""
        self._room.leave(self._ticket, self._clock.monotonic())
        self._ticket.give_way = self._ticket.granted = _nothing

    def check(self) -> None:
        """Tell a connection that gave way from one that was ended for another reason.

        Raises:
            RemoteProtocolError: It has given way.
        """
        if self.has_given_way:
            raise RemoteProtocolError("an unfinished frame gave way to those of other members")

    def _give_way(self) -> None:
        self.has_given_way = True
        self._end()


def _nothing() -> None:
    """Stand in for the callbacks of a connection that has ended."""
