"""How often services of this broker met what they cannot process, or failed; for the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ServiceCounts:
    """Counters since the start, by the name of the service."""

    set_aside: Counter[str] = field(default_factory=Counter)
    """Messages put into the dead letters of services."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Unexpected failures; the service begins again after each."""
    listener_failures: int = 0
    """Failures of those that are called after each applied entry."""
