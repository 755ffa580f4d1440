"""Why a peer is refused, and which refusals are worth a line in the log.

A peer that does not fit dials again several times a second, for as long as it does not fit.
"""

from __future__ import annotations

from typing import Final

from commitlog.errors import RemoteProtocolError

REPEAT_S: Final = 60.0
"""The same reason gets a line so often."""

REASONS_MAX: Final = 64
"""Reasons remembered. The oldest gives way to a new one, and gets a line again when it comes."""


class NotAMemberError(RemoteProtocolError):
    """The sender may not say this: it is no member, or not yet, or not any more.

    Nothing was changed; its connection is closed.
    """


class ContradictionError(RemoteProtocolError):
    """A peer's words contradict what this member knows to be true.

    Which of the two is wrong cannot be known here, so nothing was changed and nothing is promised
    to that peer: its connection is closed, and the contradiction is counted and logged as an error.
    """


class Refusals:
    """Counts refusals by reason."""

    def __init__(self) -> None:
        self._lines: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def note(self, reason: str, now_s: float) -> int | None:
        """Take note of a refusal.

        Returns:
            How often it happened since the last line about it, this time included, when it is time
            for a line; else None.
        """
        last_s = self._lines.get(reason)
        if last_s is not None and now_s - last_s < REPEAT_S:
            self._silent[reason] += 1
            return None
        times = 1 + self._silent.get(reason, 0)
        self._lines.pop(reason, None)  # it goes to the end: the oldest line stands first
        if len(self._lines) >= REASONS_MAX:
            oldest = next(iter(self._lines))
            del self._lines[oldest], self._silent[oldest]
        self._lines[reason], self._silent[reason] = now_s, 0
        return times
