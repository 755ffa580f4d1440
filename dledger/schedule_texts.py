"""What people read of a repeated schedule: its state, and instants in its own time zone. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dledger.remoting.protocol.schedule_bodies import ScheduleInfo


def state_text(info: ScheduleInfo) -> str:
    """Return active, paused, ended, or held with the reason."""
    if info.paused:
        return "paused"
    if info.held:
        return f"held: {info.held}"
    return "active" if info.next_ms else "ended"


def instant_text(instant_ms: int, zone: str) -> str | None:
    """Return an instant in a time zone, in UTC where that is not known here; None for 0."""
    if not instant_ms:
        return None
    unit = "milliseconds" if instant_ms % 1000 else "seconds"
    try:
        info: tzinfo = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        info = UTC
    return datetime.fromtimestamp(instant_ms / 1000, info).isoformat(timespec=unit)
