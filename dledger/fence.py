"""What a failing service of the leader may do: begin again a little later, and nothing else.

An unexpected error in one service leaves the others, the log and the leadership as they are. It is
logged with its trace and counted; the service runs again in the same leadership after a pause that
doubles. Only what proves that this node's own durable state is wrong goes on to stop the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from commitlog.errors import CorruptStoreError, FlushFailedError, InvariantBroken
from remoting.seams import Clock

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


FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""A service that fails at once each time costs one try a minute."""

CALM_S: Final = 120.0
"""After so long without an error the next pause is the first one again."""

STOPS_NODE: Final = (InvariantBroken, FlushFailedError, CorruptStoreError)
"""What is proved from this node's own durable state."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeaderService:
    """What runs while this node leads: *run*, under its *name* in logs and metrics."""

    name: str
    run: Callable[[], Awaitable[None]]

    async def __call__(self, _leadership: object) -> None:
        """Run in one leadership."""
        await self.run()


async def fenced(
    name: str, run: Callable[[], Awaitable[None]], clock: Clock, counts: ServiceCounts
) -> None:
    """Run a service until it ends or is cancelled; begin again after an unexpected error.

    Args:
        name: In logs and metrics.
        run: May be called again after an error.
    Raises:
        InvariantBroken, FlushFailedError, CorruptStoreError: Out of *run*: the node must stop.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = clock.monotonic()
        try:
            await run()
        except BaseException as error:
            unexpected, rest = split(error)
            if unexpected is None:
                raise
            if clock.monotonic() - began_s >= CALM_S:
                pause_s = FIRST_PAUSE_S
            counts.restarts[name] += 1
            logger.error("service_failed", service=name, again_in_s=pause_s, exc_info=unexpected)
            if rest is not None:
                raise rest from None
        else:
            return
        await clock.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def split(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Return the part of *error* that a fence keeps in, and the part that goes on."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(_is_unexpected)
    return (error, None) if _is_unexpected(error) else (None, error)


def _is_unexpected(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, (*STOPS_NODE, ExceptionGroup))
