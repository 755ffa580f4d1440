"""Whether this member's date agrees with the dates of most voters.

Every entry carries a store time that never decreases, so one leader whose date is a year ahead
would stamp the group a year ahead permanently: nothing expires by age any more, idle producers are
forgotten at once. So the voters send the leader their dates with every answer to a heartbeat. A
leader whose date is too far from the median of them transfers its leadership, does not campaign for
a while, and until then stamps by the median. One wrong date among three is never the median.

Two dates cannot outvote each other, of two voters or of three while one is away: there the log
decides. Store time was right when its newest entry was written, so of two dates that contradict
each other the earlier one counts, unless it is before that. A group that is behind for a while
expires nothing and delivers late; one that is ahead stays ahead. A single voter has nothing
to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from dledger.raft.peers import Roster
from remoting.seams import Clock

log = structlog.get_logger(__name__)

SKEW_MAX_MS: Final = 60_000
"""A member whose date is further from the median of the voters' dates does not lead.

Dates that NTP keeps differ by milliseconds; leases and delays of users are seconds.
"""

DATE_VALID_S: Final = 5.0
"""An older date does not count: it may have been corrected since."""

NO_CAMPAIGN_S: Final = 30.0
"""How long a member whose date was wrong does not campaign; later it may, if there is no leader."""

AGREED_S: Final = 60.0
"""How long the agreed date counts when no dates arrive any more; no leader leads for as long
without a majority."""

OLDEST_DATE_MS: Final = 1_000_000_000_000
"""In September 2001. A smaller number is no date: versions without clocks sent an index there."""


@dataclass(eq=False)
class Clocks:
    """The dates of the voters, as differences from this member's own."""

    clock: Clock
    roster: Roster
    newest_ms: Callable[[], int] = lambda: 0
    """Returns the store time of the newest entry."""
    _dates: dict[str, tuple[int | None, float]] = field(default_factory=dict, init=False)
    """The date of each voter, None when it sent none, and when on the clock that never jumps.

    So a jump of this member's own date shows at once, not with the next heartbeat.
    """
    _no_campaign_until_s: float = field(default=0.0, init=False)
    _agreed: tuple[int, float] | None = field(default=None, init=False)
    """The newest date that a majority agreed on, and when on the clock that never jumps."""

    def begin_term(self) -> None:
        """Forget the dates that arrived before this leader's term."""
        self._dates.clear()
        self._agreed = None

    def record(self, name: str, wall_ms: int) -> None:
        """Record the date in the heartbeat reply of *name*, if its version sends one."""
        date_ms = wall_ms if wall_ms >= OLDEST_DATE_MS else None
        self._dates[name] = (date_ms, self.clock.monotonic())

    def _offsets_ms(self) -> dict[str, int]:
        """Return how far the date of each voter that sent one lately is ahead of this member's."""
        wall_ms, now_s = self.clock.wall_ms(), self.clock.monotonic()
        offsets = {}
        for name in self.roster.other_voters:
            date_ms, then_s = self._dates.get(name, (None, now_s - DATE_VALID_S))
            passed_s = now_s - then_s
            if passed_s < DATE_VALID_S:
                there_ms = wall_ms if date_ms is None else date_ms + int(1000 * passed_s)
                offsets[name] = there_ms - wall_ms
        return offsets

    @property
    def are_known(self) -> bool:
        """Whether the dates of a majority of the voters, this member included, are known."""
        return self._is_majority(self._offsets_ms())

    def _is_majority(self, offsets: dict[str, int]) -> bool:
        return 2 * (1 + len(offsets)) > self.roster.voters

    def ahead_ms(self) -> int:
        """Return how far the median date of the voters is ahead of this member's; 0 when unknown.

        Of two medians that agree it is the nearer one; of two that contradict each other the
        earlier one, unless the log is newer than that.
        """
        offsets = self._offsets_ms()
        return self._ahead_ms(offsets) if self._is_majority(offsets) else 0

    def _ahead_ms(self, offsets: dict[str, int]) -> int:
        dates = sorted([0, *offsets.values()])
        earlier, later = dates[(len(dates) - 1) // 2], dates[len(dates) // 2]
        if later - earlier <= SKEW_MAX_MS:
            return min(earlier, later, key=abs)
        written_ms = self.newest_ms() - self.clock.wall_ms()
        return earlier if earlier >= written_ms - SKEW_MAX_MS else later

    def store_time_ms(self) -> int:
        """Return the store time of an entry: this member's date, unless that is far off."""
        wall_ms, now_s, offsets = self.clock.wall_ms(), self.clock.monotonic(), self._offsets_ms()
        if self._is_majority(offsets):
            ahead_ms = self._ahead_ms(offsets)
            date_ms = wall_ms + (ahead_ms if abs(ahead_ms) > SKEW_MAX_MS else 0)
            self._agreed = (date_ms, now_s)
            return date_ms
        if self._agreed is None or now_s - self._agreed[1] >= AGREED_S:
            return wall_ms
        date_ms = self._agreed[0] + int(1000 * (now_s - self._agreed[1]))
        return date_ms if abs(date_ms - wall_ms) > SKEW_MAX_MS else wall_ms

    def are_off(self) -> bool:
        """Whether this member's date is too far from that of most voters for it to lead."""
        ahead_ms = self.ahead_ms()
        if abs(ahead_ms) <= SKEW_MAX_MS:
            return False
        log.error("clock_is_off", behind_the_majority_ms=ahead_ms, bound_ms=SKEW_MAX_MS)
        self._no_campaign_until_s = self.clock.monotonic() + NO_CAMPAIGN_S
        return True

    def nearest(self) -> str | None:
        """Return the voter whose date is nearest to the median; None when no date is known."""
        median_ms, offsets = self.ahead_ms(), self._offsets_ms()
        return min(sorted(offsets), key=lambda name: abs(offsets[name] - median_ms), default=None)

    def may_campaign(self) -> bool:
        """Whether this member's date was not found wrong lately."""
        return self.clock.monotonic() >= self._no_campaign_until_s


@dataclass(frozen=True, slots=True)
class VotersClock:
    """This member's clock with the date that entries are stamped with: see `Clocks.store_time_ms`.

    Code that waits for a date, or compares one with a store time, uses this one.
    """

    clock: Clock
    clocks: Clocks

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        return self.clock.monotonic()

    def wall_ms(self) -> int:
        """Return the date in milliseconds, corrected when it is far from that of most voters."""
        return self.clocks.store_time_ms()

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds*."""
        await self.clock.sleep(seconds)

    def time_out(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Cancel the block after *seconds*."""
        return self.clock.time_out(seconds)
