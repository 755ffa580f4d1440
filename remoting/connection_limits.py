"""What one connection may hold: its limits, and its share of the memory of all connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from remoting.frame_room import FREE_FRAME_BYTES, FrameTicket
from remoting.memory_budget import Holder, MemoryBudget
from remoting.protocol.frame import MAX_FRAME_BYTES

COUNT_EVERY_BYTES: Final = 256 * 1024
"""Unsent answers are counted against the budget again when this much has been added."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection.

    Attributes:
        max_frame_bytes: Larger frames end the connection, as in RocketMQ.
        max_in_flight: Requests of the peer that are open; more are answered SYSTEM_BUSY.
        max_in_flight_bytes: Their bodies together, likewise.
        max_pending_calls: Requests of ours that wait for an answer; more are refused here.
        write_buffer_bytes: Unsent answers at which reading stops until half is sent.
        max_write_buffer_bytes: Unsent bytes, from answers that come late, at which the peer is
            given up: it asks and does not read.
        write_timeout_s: A peer that takes nothing for so long is closed.
        frame_timeout_s: A frame must be complete so long after it began.
        idle_timeout_s: Nothing either way for so long ends the connection (RocketMQ's 120 s).
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    max_in_flight: int = 16_384
    max_in_flight_bytes: int = 64 * 1024 * 1024
    max_pending_calls: int = 65_536
    write_buffer_bytes: int = 4 * 1024 * 1024
    max_write_buffer_bytes: int = 256 * 1024 * 1024
    write_timeout_s: float = 30.0
    frame_timeout_s: float = 60.0
    idle_timeout_s: float = 120.0


DEFAULT_LIMITS: Final = ConnectionLimits()


class MemoryShare:
    """What one connection holds of a daemon's `MemoryBudget`.

    Attributes:
        budget: Memory that all connections of the daemon share; None: there are only the limits.
        ticket: The space of an unfinished frame.
        look_at_bytes: Unsent bytes at which the connection is to be counted again.
    """

    __slots__ = ("_counted_bytes", "_limits", "budget", "look_at_bytes", "ticket")

    def __init__(
        self,
        budget: MemoryBudget | None,
        limits: ConnectionLimits,
        peer_host: str,
        give_way: Callable[[], None],
    ) -> None:
        """Make a share of which nothing is used.

        Args:
            give_way: Ends the connection because of its unfinished frame.
        """
        self.budget = budget
        self.ticket = FrameTicket(peer_host, give_way)
        self.look_at_bytes = limits.max_write_buffer_bytes
        if budget is not None:
            self.look_at_bytes = min(self.look_at_bytes, COUNT_EVERY_BYTES)
        self._limits = limits
        self._counted_bytes = 0

    def count(self, holder: Holder, held_bytes: int) -> None:
        """Note that the connection *holder* holds *held_bytes* now."""
        before = self._counted_bytes
        if held_bytes != before and self.budget is not None:
            self._counted_bytes = held_bytes
            self.look_at_bytes = min(
                self._limits.max_write_buffer_bytes, holder.unsent_bytes + COUNT_EVERY_BYTES
            )
            self.budget.count(holder, before, held_bytes, trio.current_time())

    def note_refused(self) -> None:
        """Count a request that is refused because the budget is met."""
        if self.budget is not None:
            self.budget.refused += 1

    def needs_room(self, needed_bytes: int, pending_bytes: int) -> bool:
        """Whether a frame of which *needed_bytes* are still to come must have space first."""
        return (
            self.budget is not None
            and not self.ticket.held_bytes
            and needed_bytes + pending_bytes > FREE_FRAME_BYTES
        )

    def ask_for_room(self, needed_bytes: int, pending_bytes: int) -> trio.Event | None:
        """Take space for a whole frame; return what to wait for, None when there is space."""
        assert self.budget is not None
        granted = trio.Event()
        self.ticket.granted = granted.set
        whole_bytes, now_s = pending_bytes + needed_bytes, trio.current_time()
        if self.budget.frames.take(self.ticket, whole_bytes, pending_bytes, now_s):
            return None
        return granted

    async def wait_for_room(self, granted: trio.Event) -> None:
        """Wait for the space that was asked for; frames that are late make space meanwhile.

        Cancellation: The space is still asked for.
        """
        assert self.budget is not None
        frames = self.budget.frames
        while not granted.is_set():
            with trio.move_on_after(frames.look_every_s):
                await granted.wait()
            frames.relieve(trio.current_time())

    def note_frame_bytes(self, whole_frames: int, size_bytes: int, now_s: float) -> None:
        """Note bytes of a frame that has space; it gives that back when the frame is whole."""
        assert self.budget is not None
        if whole_frames:
            self.budget.frames.leave(self.ticket, now_s)
        else:
            self.budget.frames.progress(self.ticket, size_bytes, now_s)

    def end(self, now_s: float) -> None:
        """Give back the space of an unfinished frame: the connection has ended."""
        if self.budget is not None:
            self.budget.frames.leave(self.ticket, now_s)
        self.ticket.give_way = self.ticket.granted = _nothing  # a cycle less for the collector


def _nothing() -> None:
    """Stand in for what is no longer to be called."""
