"""Places for connections: which one is accepted, and which one gives way. Pure: decides, never
waits.

A new connection always gets in as long as an idler one is there. First go connections that never
sent a whole, valid request, the oldest of the address that has most of them; then those that have
been silent longest, of the address that has most. A connection with requests in work, with held
pulls or with a heartbeat within two minutes is not idle. Where all are busy some places are left,
for administration and registrations.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

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
    """The places of one server.

    Attributes:
        given_way: Connections ended for a new connection, since the start.
        refused: New connections refused, since the start.
    """

    def __init__(self, max_connections: int, reserved: int) -> None:
        """Make places, all free.

        Args:
            reserved: Of *max_connections*, those for administration only.
        """
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
            made_room = self._end_unproven(now_s) or (is_full and self._end_idlest(now_s))
            if is_full and not made_room:
                return self._admit_to_reserve(arrived, now_s)
            if not made_room and self._unproven_count >= self._max_new:
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
