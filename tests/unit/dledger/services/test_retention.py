"""Which segments go, and when somebody asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from commitlog.mark import Anchor
from dledger.services.retention import HOUR_MS, RetentionService, RetentionSettings
from dledger.state.tables import StateTables
from tests.harness.fake_group import ManualClock

SEGMENT_BYTES = 100
ENTRY_BYTES = 20
ENTRIES = 25


class Log:
    """Entries of one size, all of them stored before the clock's beginning."""

    first_index = 1
    first_position = 0
    last_index = ENTRIES
    end_position = ENTRIES * ENTRY_BYTES

    def position_at(self, index: int) -> int:
        return (index - 1) * ENTRY_BYTES

    def anchor_at(self, index: int) -> Anchor:
        return Anchor(index, self.position_at(index), 1, 1, prev_store_time_ms=1)


class Group:
    """Takes what is submitted, and moves nothing."""

    def __init__(self) -> None:
        self.state = StateTables()
        self.submitted = 0

    async def submit(self, _batch: Any) -> None:
        self.submitted += 1


def retention(clock: ManualClock, *, disk_ratio: float = 0.0) -> RetentionService:
    hour_now = clock.wall_ms() // HOUR_MS % 24
    return RetentionService(
        Group(),  # type: ignore[arg-type]  # what the service asks of it is there
        Log,
        RetentionSettings(SEGMENT_BYTES, reserved_hours=1, delete_hours=((hour_now + 5) % 24,)),
        clock=clock,
        levels=0,
        saved_index=lambda: ENTRIES,
        disk_ratio=lambda: disk_ratio,
    )


async def test_expired_segments_wait_for_their_hour_unless_asked_for(clock: ManualClock) -> None:
    service = retention(clock)
    assert await service.check() is None
    service.expire_soon()
    floor = await service.check()
    assert floor is not None
    assert floor.position == 4 * SEGMENT_BYTES
    # Asked once is done once.
    assert await service.check() is None


@pytest.mark.parametrize(("disk_ratio", "goes"), [(0.5, False), (0.8, True)])
async def test_a_filling_disk_asks_by_itself(
    clock: ManualClock, disk_ratio: float, goes: bool
) -> None:
    assert (await retention(clock, disk_ratio=disk_ratio).check() is not None) == goes
