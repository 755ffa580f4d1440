"""Why messages were given up: what stands beside a floor in the record that moves it.

The record is in the replicated log, so every member and every checker can judge afterwards
whether the move was entitled: the cause, the settings in force, and what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from commitlog.mark import Anchor

AGE: Final = "age"
"""Older than `fileReservedTime`, at an hour of `deleteWhen` or on a filling disk."""
REQUEST: Final = "request"
"""Older than `fileReservedTime`, at once because a request asked for it."""
SIZE: Final = "size"
"""More than `keep_bytes`."""
FORCED: Final = "forced"
"""Not expired: the leader's disk was fuller than `diskSpaceCleanForciblyRatio` allows."""

CAUSES: Final = (AGE, REQUEST, SIZE, FORCED)

_HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorReason:
    """Cause of a move of the floor, and the settings in force on the leader that moved it.

    Attributes:
        cause: One of `CAUSES`. It covers all that the move gives up: what is older than the
            newest message given up was older, and further from the end, as well.
        decided_ms: Wall time of the leader.
        end_position: Where its log ended.
        reserved_hours: `fileReservedTime`.
        keep_bytes: `store.keep_bytes`; 0: no limit.
        disk_used_permille: Used part of the leader's disk.
        force_permille: From where on unexpired segments go; 0: never.
        asked_by: The requester: of a request, or for the setting that the cause comes from, where
            it was changed while the broker ran. Empty: its configuration.
    """

    cause: str
    decided_ms: int
    end_position: int
    reserved_hours: int
    keep_bytes: int
    disk_used_permille: int
    force_permille: int
    asked_by: str = ""

    def to_state(self) -> dict[str, Any]:
        """Return it as it stands in the record."""
        return asdict(self)


_FIELDS: Final = tuple(field.name for field in fields(FloorReason))


def floor_reason(value: Mapping[str, Any] | None) -> FloorReason | None:
    """Return the reason in a record; None in one of an earlier version, which has none.

    Raises:
        KeyError, TypeError: A field is missing.
    """
    return None if value is None else FloorReason(**{name: value[name] for name in _FIELDS})


def entitlement_error(floor: Anchor, reason: FloorReason | None) -> str | None:
    """Return what is wrong with a move of the floor, or None when its reason covers it. Pure."""
    if reason is None:
        return "the record gives no reason"
    if reason.cause in (AGE, REQUEST):
        expired_before_ms = reason.decided_ms - reason.reserved_hours * _HOUR_MS
        if floor.prev_store_time_ms < expired_before_ms:
            return None
        return (
            f"messages up to {floor.prev_store_time_ms} ms were given up for their age; expired is"
            f" what was stored before {expired_before_ms} ms"
        )
    if reason.cause == SIZE:
        left_bytes = reason.end_position - floor.position
        if 0 < reason.keep_bytes <= left_bytes:
            return None
        return f"{left_bytes} bytes were left, keep_bytes was {reason.keep_bytes}"
    if reason.cause == FORCED:
        if 0 < reason.force_permille <= reason.disk_used_permille:
            return None
        return (
            f"the disk was at {reason.disk_used_permille} per mille; unexpired messages go from"
            f" {reason.force_permille} on (0: never)"
        )
    return f"unknown cause {reason.cause!r}"
