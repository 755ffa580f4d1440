"""A reason for a move of the floor."""

from typing import Final

from dledger.state.state_record import FloorReason

EXPIRED: Final = FloorReason(
    cause="age",
    decided_ms=1_700_000_300_000,
    end_position=9_000,
    reserved_hours=72,
    keep_bytes=0,
    disk_used_permille=912,
    force_permille=0,
)
