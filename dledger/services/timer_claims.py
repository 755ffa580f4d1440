"""Which waiting messages an entry in flight decides about: one decides, the first.

Delivery, recall and rolling of one message exclude each other. What is applied shows which wait;
what this leader has proposed since stands here, so that no second decision is proposed. An earlier
leader's are decided: leadership begins when all there can be of them is applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dledger.group_api import BrokerGroup

LOOKED_THROUGH_AT: Final = 8192
"""Claims from which those that are decided are looked for and dropped."""


class TimerClaims:
    """Offsets of the timer queue with a decision on its way, of the present term."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._term = -1
        self._claimed: set[int] = set()
        self._look_at = LOOKED_THROUGH_AT

    def __len__(self) -> int:
        return len(self._claimed)

    def claim(self, offset: int) -> bool:
        """Take the right to decide about *offset*; false when it waits no more, or another has it.

        Keep it until the decision is applied or certainly never will be.
        """
        self._of_this_reign()
        if offset in self._claimed or offset not in self._group.state.timers:
            return False
        if len(self._claimed) >= self._look_at:
            timers = self._group.state.timers
            self._claimed = {claimed for claimed in self._claimed if claimed in timers}
            self._look_at = max(LOOKED_THROUGH_AT, 2 * len(self._claimed))
        self._claimed.add(offset)
        return True

    def is_claimed(self, offset: int) -> bool:
        """Whether a decision about *offset* is on its way."""
        self._of_this_reign()
        return offset in self._claimed

    def give_back(self, offsets: Iterable[int]) -> None:
        """The decision about *offsets* certainly is not stored, or is applied."""
        self._claimed.difference_update(offsets)

    def _of_this_reign(self) -> None:
        if self._group.term != self._term:
            self._term = self._group.term
            self._claimed.clear()
