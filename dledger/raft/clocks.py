"""Whether this member's date agrees with the dates of most voters.

Every entry carries a store time that never goes back, so one leader whose date is a year ahead
would stamp the group a year ahead for good: nothing expires by age any more, idle producers are
forgotten at once. So the voters tell the leader their dates with every answer to a heartbeat. A
leader that is too far from the middle one of them gives its leadership up, does not stand for a
while, and until then stamps by that one. One wrong date among three is never the middle one.

Two dates cannot outvote each other, of two voters or of three while one is away: there the log
decides. Store time was right when its newest entry was written, so of two dates that contradict
each other the earlier one counts, unless it lies before that. A group that is behind for a while
expires nothing and delivers late; one that is ahead is ahead for good. A single voter has nothing
to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from dledger.raft.roster import Roster
from remoting.seams import Clock

log = structlog.get_logger(__name__)

SKEW_MAX_MS: Final = 60_000
"""Further from the middle of the voters' dates a member does not lead.

Dates that NTP keeps differ by milliseconds; leases and delays of users are seconds.
"""

HEARD_S: Final = 5.0
"""A date that was told longer ago says nothing: it may have been put right since."""

STANDS_ASIDE_S: Final = 30.0
"""A member whose date was wrong does not stand for so long; then it may, if nobody else leads."""

AGREED_S: Final = 60.0
"""For so long what was agreed on still counts when dates are not heard any more; no leader leads
for as long without a majority."""

OLDEST_DATE_MS: Final = 1_000_000_000_000
"""In September 2001. A smaller number is no date: versions without clocks told an index there."""


@dataclass(eq=False)
class Clocks:
    """The dates of the voters, as differences from this member's own."""

    clock: Clock
    roster: Roster
    newest_ms: Callable[[], int] = lambda: 0
    """Returns the store time of the newest entry."""
    _told: dict[str, tuple[int | None, float]] = field(default_factory=dict, init=False)
    """What date it was there, None when that was not told, and when on the clock that never jumps.

    So a jump of this member's own date shows at once, not with the next heartbeat.
    """
    _aside_until_s: float = field(default=0.0, init=False)
    _agreed: tuple[int, float] | None = field(default=None, init=False)
    """The newest date that a majority was heard for, and when on the clock that never jumps."""

    def begin(self) -> None:
        """Forget what was told before this reign."""
        self._told.clear()
        self._agreed = None

    def note(self, name: str, wall_ms: int) -> None:
        """*name* answers a heartbeat, and tells its date if it knows how to."""
        date_ms = wall_ms if wall_ms >= OLDEST_DATE_MS else None
        self._told[name] = (date_ms, self.clock.monotonic())

    def _heard(self) -> dict[str, int]:
        """Return who has told its date lately, and how far that is ahead of this member's."""
        wall_ms, now_s = self.clock.wall_ms(), self.clock.monotonic()
        heard = {}
        for name in self.roster.other_voters:
            date_ms, then_s = self._told.get(name, (None, now_s - HEARD_S))
            passed_s = now_s - then_s
            if passed_s < HEARD_S:
                there_ms = wall_ms if date_ms is None else date_ms + int(1000 * passed_s)
                heard[name] = there_ms - wall_ms
        return heard

    @property
    def are_known(self) -> bool:
        """Whether a majority of the voters, this member included, has told its date."""
        return self._is_majority(self._heard())

    def _is_majority(self, heard: dict[str, int]) -> bool:
        return 2 * (1 + len(heard)) > self.roster.voters

    def ahead_ms(self) -> int:
        """Return how far the middle date of the voters is ahead of this member's; 0 when unknown.

        Of two in the middle that agree it is the nearer one; of two that contradict each other the
        earlier one, unless the log is newer than that.
        """
        heard = self._heard()
        return self._ahead_ms(heard) if self._is_majority(heard) else 0

    def _ahead_ms(self, heard: dict[str, int]) -> int:
        dates = sorted([0, *heard.values()])
        earlier, later = dates[(len(dates) - 1) // 2], dates[len(dates) // 2]
        if later - earlier <= SKEW_MAX_MS:
            return min(earlier, later, key=abs)
        written_ms = self.newest_ms() - self.clock.wall_ms()
        return earlier if earlier >= written_ms - SKEW_MAX_MS else later

    def store_time_ms(self) -> int:
        """Return what an entry is stamped with: this member's date, unless that is far off."""
        wall_ms, now_s, heard = self.clock.wall_ms(), self.clock.monotonic(), self._heard()
        if self._is_majority(heard):
            ahead_ms = self._ahead_ms(heard)
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
        self._aside_until_s = self.clock.monotonic() + STANDS_ASIDE_S
        return True

    def nearest(self) -> str | None:
        """Return the voter whose date is nearest to the middle one; None when none told it."""
        middle_ms, heard = self.ahead_ms(), self._heard()
        return min(sorted(heard), key=lambda name: abs(heard[name] - middle_ms), default=None)

    def may_stand(self) -> bool:
        """Whether this member's date was not found wrong just now."""
        return self.clock.monotonic() >= self._aside_until_s


@dataclass(frozen=True, slots=True)
class VotersClock:
    """This member's clock with the date that entries are stamped with: see `Clocks.store_time_ms`.

    What waits for a date, or compares one with a store time, takes this one.
    """

    clock: Clock
    clocks: Clocks

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return self.clock.monotonic()

    def wall_ms(self) -> int:
        """Return the date in milliseconds, put right when it is far from that of most voters."""
        return self.clocks.store_time_ms()

    async def sleep(self, seconds: float) -> None:
        """Sleep for *seconds*."""
        await self.clock.sleep(seconds)

    def time_out(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Cancel the block after *seconds*."""
        return self.clock.time_out(seconds)
