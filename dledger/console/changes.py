"""The changes that were asked for through this console: by whom, of what, and how it went."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import structlog

CHANGES_KEPT: Final = 500
"""Shown on the page; the log has all of them."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """One change that was asked for.

    Attributes:
        number: Counts from 1 since the console began.
        at_ms: When it ended.
        who: The account and the address it came from.
        what: What was to be done, in a few words.
        is_done: It was carried out; otherwise it was refused, or its outcome is not known.
        remark: What came of it.
    """

    number: int
    at_ms: int
    who: str
    what: str
    is_done: bool
    remark: str


class ChangeLog:
    """Logs each change, and keeps the newest for the page."""

    def __init__(self) -> None:
        self.newest: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self._count = 0

    def record(self, at_ms: int, who: str, what: str, *, is_done: bool, remark: str) -> Change:
        """Log a change and return it."""
        self._count += 1
        change = Change(self._count, at_ms, who, what, is_done, remark)
        self.newest.appendleft(change)
        log = logger.info if is_done else logger.warning
        log("console_change", who=who, what=what, is_done=is_done, remark=remark)
        return change

    def find(self, number: str | None) -> Change | None:
        """Return a change by its number as a page's address has it; None: there is none."""
        return next((each for each in self.newest if str(each.number) == number), None)
