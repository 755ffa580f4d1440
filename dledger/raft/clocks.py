"""Dates of the voters: a member whose date is wrong does not lead.

Every entry carries a store time that never decreases, so one leader whose date is a year ahead
would stamp the group a year ahead permanently: nothing expires by age any more, idle producers are
forgotten at once. So the voters send the leader their dates with every answer to a heartbeat. A
leader whose date is too far from the median of them transfers its leadership, leaves elections to
others for a while unless none of them wins, and until then stamps by the median. One wrong date
among three is never the median.

A leader may know a date that its voter has corrected meanwhile. Then two dates of three may look
wrong although never more than one was. So a date that the voters agreed on goes on with the clock
that never jumps, and another one replaces it once they agree on that for `DATE_VALID_S`.

Two dates cannot outvote each other, of two voters or of three while one is away: there the log
decides. Store time was right when its newest entry was written, so of two dates that contradict
each other the earlier one counts, unless it is before that. A group that is behind for a while
expires nothing and delivers late; one that is ahead stays ahead for long. A single voter has
nothing to compare with.

A store time that is ahead of the date goes on at half speed until the date has reached it: what
waits by store time, a message that is out by POP, waits twice as long at most and not for hours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from dledger.raft.peers import Roster
from dledger.remoting.seams import Clock

log = structlog.get_logger(__name__)

SKEW_MAX_MS: Final = 60_000
"""A member whose date is further from the median of the voters' dates does not lead.

Dates that NTP keeps differ by milliseconds; leases and delays of users are seconds.
"""

DATE_VALID_S: Final = 5.0
"""An older date does not count: it may have been corrected since."""

NO_CAMPAIGN_S: Final = 30.0
"""How long a member whose date was wrong leaves elections to others, see `dledger.raft.candidate`;
later it may campaign, if there is no leader."""

AGREED_S: Final = 60.0
"""How long the agreed date counts when no dates arrive any more; no leader leads for as long
without a majority."""

AHEAD_MS_PER_S: Final = 500
"""What a second adds to a store time that is ahead of the date, which comes nearer by the rest."""

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
    _contradicted_s: float | None = field(default=None, init=False)
    """Since when on that clock a majority agrees on a date that contradicts `_agreed`."""
    _ahead: tuple[int, float] | None = field(default=None, init=False)
    """A store time that is ahead of the date, and when on that clock it was the newest."""

    def begin_term(self) -> None:
        """Forget the dates that arrived before this leader's term."""
        self._dates.clear()
        self._agreed = self._contradicted_s = self._ahead = None

    def record(self, name: str, wall_ms: int) -> None:
        """Record the date in the heartbeat reply of *name*, if its version sends one."""
        date_ms = wall_ms if wall_ms >= OLDEST_DATE_MS else None
        self._dates[name] = (date_ms, self.clock.monotonic())
        self._agree()

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
        """Return how far the agreed date is ahead of this member's; 0 when unknown.

        It is the median date of the voters. Of two medians that agree it is the nearer one; of two
        that contradict each other the earlier one, unless the log is newer than that.
        """
        offsets, continued_ms = self._offsets_ms(), self._continued_ms()
        if not self._is_majority(offsets):
            return 0
        ahead_ms, wall_ms = self._median_ms(offsets), self.clock.wall_ms()
        if continued_ms is None or not self._is_new(wall_ms + ahead_ms, continued_ms):
            return ahead_ms
        return continued_ms - wall_ms

    def _median_ms(self, offsets: dict[str, int]) -> int:
        dates = sorted([0, *offsets.values()])
        earlier, later = dates[(len(dates) - 1) // 2], dates[len(dates) // 2]
        if later - earlier <= SKEW_MAX_MS:
            return min(earlier, later, key=abs)
        written_ms = self.newest_ms() - self.clock.wall_ms()
        return earlier if earlier >= written_ms - SKEW_MAX_MS else later

    def _continued_ms(self) -> int | None:
        """Return the agreed date as it is now by the clock that never jumps; None: too old."""
        if self._agreed is None:
            return None
        passed_s = self.clock.monotonic() - self._agreed[1]
        return None if passed_s >= AGREED_S else self._agreed[0] + int(1000 * passed_s)

    def _is_new(self, date_ms: int, continued_ms: int) -> bool:
        """Return whether a date contradicts the agreed one, and not for long enough to count."""
        if abs(date_ms - continued_ms) <= SKEW_MAX_MS:
            return False
        since_s = self._contradicted_s
        return since_s is None or self.clock.monotonic() - since_s < DATE_VALID_S

    def _agree(self) -> None:
        """Keep the date that most voters share, and since when it contradicts the one before."""
        offsets = self._offsets_ms()
        median_ms = self._median_ms(offsets)
        sharing = sum(abs(each - median_ms) <= SKEW_MAX_MS for each in [0, *offsets.values()])
        if 2 * sharing <= self.roster.voters:
            self._contradicted_s = None
            return
        now_s, date_ms = self.clock.monotonic(), self.clock.wall_ms() + median_ms
        continued_ms = self._continued_ms()
        if continued_ms is None or not self._is_new(date_ms, continued_ms):
            self._agreed, self._contradicted_s = (date_ms, now_s), None
        elif self._contradicted_s is None:
            self._contradicted_s = now_s

    def store_time_ms(self) -> int:
        """Return the store time of an entry that is sealed now: the date, unless that is behind."""
        date_ms, newest_ms, now_s = self.date_ms(), self.newest_ms(), self.clock.monotonic()
        if date_ms >= newest_ms:
            self._ahead = None
            return date_ms
        if self._ahead is not None:
            then_ms, since_s = self._ahead
            store_time_ms = then_ms + int(AHEAD_MS_PER_S * (now_s - since_s))
            if store_time_ms >= newest_ms:
                return store_time_ms
        self._ahead = newest_ms, now_s
        return newest_ms

    def date_ms(self) -> int:
        """Return this member's date, or that of most voters where it is far from it."""
        wall_ms = self.clock.wall_ms()
        if self.are_known:
            date_ms = wall_ms + self.ahead_ms()
        else:
            continued_ms = self._continued_ms()
            date_ms = wall_ms if continued_ms is None else continued_ms
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
