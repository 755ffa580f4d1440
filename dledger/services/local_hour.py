"""Hours of the day as the machine's clock on the wall shows them, summer time included."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from commitlog.seams import UtcOffset

HOUR_MS: Final = 3_600_000
DAY_HOURS: Final = 24


def is_in_hours(wall_ms: int, hours: Collection[int], offset_ms: UtcOffset) -> bool:
    """Tell whether it is one of *hours* of the local day. Pure, but for *offset_ms*.

    An hour that a change to summer time leaves out counts as the hour after it, so that no day
    is without it. One that comes twice when summer time ends counts both times.
    """
    hour = _hour(wall_ms, offset_ms)
    if hour in hours:
        return True
    left_out = (_hour(wall_ms - HOUR_MS, offset_ms) + 1) % DAY_HOURS
    while left_out != hour and (hour - left_out) % DAY_HOURS < DAY_HOURS // 2:
        if left_out in hours:
            return True
        left_out = (left_out + 1) % DAY_HOURS
    return False


def _hour(wall_ms: int, offset_ms: UtcOffset) -> int:
    return (wall_ms + offset_ms(wall_ms)) // HOUR_MS % DAY_HOURS
