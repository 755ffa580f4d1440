"""How often services of this broker met what they cannot process, or failed; for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

SET_ASIDE_BY: Final = ("delay_levels", "timer", "transactions", "retries")
SERVICES: Final = ("delay_levels", "timer", "transactions", "consumer_offsets", "retention")
"""Their counters are there from the start, at 0: an alert can watch them."""


def _from_zero(names: tuple[str, ...]) -> Callable[[], Counter[str]]:
    return lambda: Counter(dict.fromkeys(names, 0))


@dataclass(slots=True, eq=False)
class ServiceCounts:
    """Counters since the start, by the name of the service."""

    set_aside: Counter[str] = field(default_factory=_from_zero(SET_ASIDE_BY))
    """Messages put into the dead letters of services."""
    restarts: Counter[str] = field(default_factory=_from_zero(SERVICES))
    """Unexpected failures; the service begins again after each."""
    listener_failures: int = 0
    """Failures of those that are called after each applied entry."""
