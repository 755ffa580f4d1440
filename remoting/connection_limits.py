"""Limits of connections: what one may hold, which one is accepted, how long requests keep a turn.

`Places` decides which connection gives way to a new one: first those that never sent a whole, valid
request, the oldest of the address that has most of them; then those that have been silent longest,
of the address that has most. A connection with requests in work, with held pulls or with a
heartbeat within two minutes is not idle. Where all are busy some places are left, for
administration and registrations.

A turn of the event loop runs each task that is ready: when thousands of clients ask at the same
moment, it is cut short, so that the heartbeats between members need not wait.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

import trio

from dledger.remoting.log import get_logger
from dledger.remoting.memory_budget import FREE_FRAME_BYTES, FrameTicket, Holder, MemoryBudget
from dledger.remoting.protocol.frame import MAX_FRAME_BYTES

# --------------------------------------------------------------------------------- what it may hold


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


class Silence:
    """How long a peer may send nothing: a little in the middle of a frame, long between two."""

    __slots__ = ("_frame_began_s", "_limits", "last_received_s")

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._frame_began_s: float | None = None
        self.last_received_s = 0.0

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame has begun that is not whole."""
        return self._frame_began_s is not None

    @property
    def reason(self) -> str:
        """Why a connection ends whose silence is over."""
        return "half a frame and then silence" if self.is_in_frame else "idle"

    def ends_s(self, last_sent_s: float) -> float:
        """Return when the connection ends if nothing goes over it; *last_sent_s*: our last byte."""
        if self._frame_began_s is None:
            return max(self.last_received_s, last_sent_s) + self._limits.idle_timeout_s
        return self._frame_began_s + self._limits.frame_timeout_s

    def note_frames(self, now_s: float, has_whole: bool, has_part: bool) -> None:
        """Note what stands in the buffer: whether frames became whole, and whether one began."""
        if not has_part:
            self._frame_began_s = None
        elif has_whole or self._frame_began_s is None:
            self._frame_began_s = now_s

    def read_again(self, now_s: float) -> None:
        """Count from *now_s* on: nothing was read before, so a late frame is not the peer's."""
        if self._frame_began_s is not None:
            self._frame_began_s = now_s


class MemoryShare:
    """What one connection holds of a daemon's `MemoryBudget`.

    Attributes:
        budget: Memory that all connections of the daemon share; None: there are only the limits.
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
        """Make a share of which nothing is used."""
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

    def needs_space(self, needed_bytes: int, pending_bytes: int) -> bool:
        """Whether a frame of which *needed_bytes* are still to come must have space first."""
        return (
            self.budget is not None
            and not self.ticket.held_bytes
            and needed_bytes + pending_bytes > FREE_FRAME_BYTES
        )

    def ask_for_space(self, needed_bytes: int, pending_bytes: int) -> trio.Event | None:
        """Take space for a whole frame; return what to wait for, None when there is space."""
        assert self.budget is not None
        granted = trio.Event()
        self.ticket.granted = granted.set
        whole_bytes, now_s = pending_bytes + needed_bytes, trio.current_time()
        if self.budget.frames.take(self.ticket, whole_bytes, pending_bytes, now_s):
            return None
        return granted

    async def wait_for_space(self, granted: trio.Event) -> None:
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


# ---------------------------------------------------------------------------------- why it ended


LINES_PER_WINDOW: Final = 20
"""Warnings of one kind in one window: enough to see the sender. A flood has thousands a second."""

WINDOW_S: Final = 10.0

QUIET_KINDS: Final = frozenset({"ended", "idle", "broken"})
"""What happens to every client: below the level that is shown."""

_log = get_logger(__name__)


class ConnectionEnds:
    """Counts the ends of connections by kind."""

    def __init__(self) -> None:
        """Count from nothing."""
        self.counts: Counter[str] = Counter()
        # Of each kind of warning: when its window began, lines in it, and how many were left out.
        self._window_began_s: dict[str, float] = {}
        self._lines: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def note(self, peer: str, reason: str, now_s: float) -> None:
        """Count an end, and log it unless its kind was logged often enough lately."""
        kind = reason.partition(":")[0]
        if kind.startswith("ended"):
            kind = "ended"
        self.counts[kind] += 1
        if kind in QUIET_KINDS:
            _log.debug("connection_ends", peer=peer, reason=reason)
            return
        if now_s - self._window_began_s.get(kind, -WINDOW_S) >= WINDOW_S:
            self._window_began_s[kind] = now_s
            self._lines[kind] = 0
        if self._lines[kind] >= LINES_PER_WINDOW:
            self._left_out[kind] += 1
            return
        self._lines[kind] += 1
        left_out = {"left_out": count} if (count := self._left_out.pop(kind, 0)) else {}
        _log.warning("connection_ends", peer=peer, reason=reason, **left_out)


GRACE_S: Final = 0.5
"""A new connection keeps its place for so long before it has to have sent something: a few round
trips, or one busy moment of ours."""

SILENT_S: Final = 5.0
"""A connection with a request within this time is not idle: clients send more often."""

UNPROVEN_SHARE: Final = 8
"""One part in this number of the places may be taken by those that never sent a valid request."""

MAX_UNPROVEN: Final = 256
"""And no more than this: each costs 15 kB, and a client that is given time by its machine sends its
first request within the grace."""

NEW_AT_ONCE: Final = 2
"""Within the grace there may be this many times the limit of them, and no more: a flood that comes
faster than the grace ends would take all places, and their memory."""

NEW_MIN: Final = 64
"""But at least this many: all clients of a small server may connect in one moment."""

ENDED_PER_S: Final = 200
"""Connections that are ended for new ones in a second: a flood that comes faster is closed
when it is accepted, which costs a fifth, and what is served goes on."""

CANDIDATES_MAX: Final = 256
"""Idle connections that are found in one pass over all of them."""

LOOK_EVERY_S: Final = 1.0
"""A pass over all connections that found none idle is not repeated for this time."""


class Placed(Protocol):
    """What places see of a connection."""

    peer_address: tuple[str, int]

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""

    @property
    def is_proven(self) -> bool:
        """Whether a whole, valid request came over it."""

    @property
    def last_activity_s(self) -> float:
        """When anything went over it last."""

    def is_busy(self, now_s: float) -> bool:
        """Tell whether requests are open or a heartbeat counts."""

    def give_way(self, reason: str) -> None:
        """End the connection."""


PlacedT = TypeVar("PlacedT", bound=Placed)


class Admission(Enum):
    """What becomes of a new connection."""

    SERVED = "served"
    RESERVE = "reserve"  # for administration and registrations only
    REFUSED = "refused"


class Places(Generic[PlacedT]):
    """The places of one server."""

    def __init__(self, max_connections: int, reserved: int) -> None:
        """Make places, all free."""
        self._max_served = max(1, max_connections - reserved)
        self._max_reserve = max_connections - self._max_served
        self._max_unproven = max(1, min(MAX_UNPROVEN, self._max_served // UNPROVEN_SHARE))
        self._max_new = max(NEW_MIN, NEW_AT_ONCE * self._max_unproven)
        self.given_way = 0
        self.refused = 0
        # Each in order of arrival, with the time of it.
        self._unproven: dict[str, dict[PlacedT, float]] = {}
        self._unproven_count = 0
        self._proven: dict[PlacedT, None] = {}
        self._reserve: dict[PlacedT, float] = {}
        self._candidates: deque[PlacedT] = deque()
        self._next_look_s = 0.0
        self._second_began_s = 0.0
        self._ended_in_second = 0

    @property
    def count(self) -> int:
        """How many places are taken, the reserve included."""
        return self._unproven_count + len(self._proven) + len(self._reserve)

    def admit(self, arrived: PlacedT, now_s: float) -> Admission:
        """Give a place to a new connection, ending another one for it where that is right."""
        served = self._unproven_count + len(self._proven)
        is_full = served >= self._max_served
        if is_full or self._unproven_count >= self._max_unproven:
            if not self._may_end(now_s):
                self.refused += 1
                return Admission.REFUSED
            made_space = self._end_unproven(now_s) or (is_full and self._end_idlest(now_s))
            if is_full and not made_space:
                return self._admit_to_reserve(arrived, now_s)
            if not made_space and self._unproven_count >= self._max_new:
                self.refused += 1
                return Admission.REFUSED
        address = arrived.peer_address[0]
        self._unproven.setdefault(address, {})[arrived] = now_s
        self._unproven_count += 1
        return Admission.SERVED

    def prove(self, connection: PlacedT) -> None:
        """Note that a whole, valid request came over a connection."""
        if self._forget_unproven(connection):
            self._proven[connection] = None

    def leave(self, connection: PlacedT) -> None:
        """Free the place of a connection that has ended. Idempotent."""
        self._forget_unproven(connection)
        self._proven.pop(connection, None)
        self._reserve.pop(connection, None)

    def _may_end(self, now_s: float) -> bool:
        if now_s - self._second_began_s >= 1.0:
            self._second_began_s, self._ended_in_second = now_s, 0
        return self._ended_in_second < ENDED_PER_S

    def _admit_to_reserve(self, arrived: PlacedT, now_s: float) -> Admission:
        if len(self._reserve) >= self._max_reserve:
            oldest = next(iter(self._reserve), None)
            if oldest is None or now_s - self._reserve[oldest] < GRACE_S or oldest.is_busy(now_s):
                self.refused += 1
                return Admission.REFUSED
            self._end(oldest)
        self._reserve[arrived] = now_s
        return Admission.RESERVE

    def _end_unproven(self, now_s: float) -> bool:
        """End the oldest connection that sent no request, of the address with most of them."""
        if not self._unproven:
            return False
        heaviest = max(self._unproven.values(), key=len)
        oldest, since_s = next(iter(heaviest.items()))
        if now_s - since_s < GRACE_S:
            return False
        self._end(oldest)
        return True

    def _end_idlest(self, now_s: float) -> bool:
        """End the one that has been silent longest, of the address that has most places."""
        if not self._candidates and now_s >= self._next_look_s:
            self._look(now_s)
        while self._candidates:
            connection = self._candidates.popleft()
            if connection in self._proven and self._is_idle(connection, now_s):
                self._end(connection)
                return True
        return False

    def _look(self, now_s: float) -> None:
        idle = [connection for connection in self._proven if self._is_idle(connection, now_s)]
        if len(idle) < CANDIDATES_MAX:
            self._next_look_s = now_s + LOOK_EVERY_S
        by_address = Counter(connection.peer_address[0] for connection in self._proven)
        idle.sort(key=lambda one: (-by_address[one.peer_address[0]], one.last_activity_s))
        self._candidates.extend(idle[:CANDIDATES_MAX])

    def _is_idle(self, connection: PlacedT, now_s: float) -> bool:
        return now_s - connection.last_activity_s >= SILENT_S and not connection.is_busy(now_s)

    def _end(self, connection: PlacedT) -> None:
        self.leave(connection)
        self._ended_in_second += 1
        self.given_way += 1
        connection.give_way("its place is needed for a new connection")

    def _forget_unproven(self, connection: PlacedT) -> bool:
        address = connection.peer_address[0]
        same = self._unproven.get(address)
        if same is None or connection not in same:
            return False
        del same[connection]
        self._unproven_count -= 1
        if not same:
            del self._unproven[address]
        return True


TURN_S: Final = 0.02
"""A connection that becomes ready later in a turn is served in the next one: a fifth of the
interval between two heartbeats of members, and some hundred requests."""

TURNS_MAX: Final = 50
"""A request waits for no more turns than these, a second or so, however many others there are."""


class Turn(trio.abc.Instrument):
    """The turn of the event loop that goes on; to be added to its instruments."""

    def __init__(self, now_s: Callable[[], float] = trio.current_time) -> None:
        self._now_s = now_s
        self.ends_s = math.inf

    def after_io_wait(self, timeout: float) -> None:
        """Note that a turn begins."""
        self.ends_s = self._now_s() + TURN_S

    @property
    def is_over(self) -> bool:
        """Whether requests have had their share of the turn."""
        return self._now_s() >= self.ends_s

    async def wait_for_next(self) -> None:
        """Return in a turn that has time left, or after `TURNS_MAX`.

        Cancellation: Takes effect later: what was received before the wait is not lost.
        """
        for _ in range(TURNS_MAX):
            if not self.is_over:
                return
            await trio.lowlevel.cancel_shielded_checkpoint()
