"""Registrations that were refused lately, for operators: in the log once, and for as long as the
broker goes on trying in what ``dledger cluster`` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REFUSED_MAX: Final = 64
"""Addresses that are remembered; a stranger with more of them pushes out the oldest."""

REMEMBERED_MS: Final = 120_000
"""A broker that goes on trying asks again sooner than this."""

SHOWN_CHARACTERS: Final = 120
"""Length up to which a name that a stranger chose is shown."""


@dataclass(frozen=True, slots=True)
class _Refused:
    reason: str
    last_ms: int


class RefusedRegistrations:
    """Broker name and address to why it was refused last.

    Attributes:
        total: Refusals so far.
    """

    def __init__(self) -> None:
        self._refused: dict[tuple[str, str], _Refused] = {}
        self.total = 0

    def note(self, broker_name: str, broker_addr: str, reason: str, now_ms: int) -> bool:
        """Remember a refusal; tell whether it is news for the log."""
        self.total += 1
        key = (broker_name[:SHOWN_CHARACTERS], broker_addr[:SHOWN_CHARACTERS])
        before = self._refused.pop(key, None)
        self._refused[key] = _Refused(reason[: 4 * SHOWN_CHARACTERS], now_ms)
        while len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        return before is None or before.reason != self._refused[key].reason

    def forget(self, broker_name: str, broker_addr: str) -> None:
        """A registration was taken: nothing is refused any more."""
        self._refused.pop((broker_name, broker_addr), None)

    def expire(self, now_ms: int) -> None:
        """Forget those that have stopped trying."""
        for key, refused in list(self._refused.items()):
            if now_ms - refused.last_ms > REMEMBERED_MS:
                del self._refused[key]

    def __len__(self) -> int:
        return len(self._refused)

    def reasons(self) -> list[str]:
        """Return one sentence for each address that is refused."""
        return [
            f"{address} is refused as {name}: {refused.reason}"
            for (name, address), refused in self._refused.items()
        ]
