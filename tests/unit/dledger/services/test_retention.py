"""Which segments are deleted, what the record about it holds, and when a request asks for it.

Hours of the local day, over the changes to summer time and back.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import structlog.testing
from msgspec.structs import replace

from dledger.commitlog.errors import CorruptEntryError
from dledger.commitlog.mark import Anchor
from dledger.commitlog.record import checked_body
from dledger.commitlog.seams import utc
from dledger.group_api import Proposed
from dledger.remoting.machine import local_offset_ms
from dledger.services.retention import HOUR_MS, RetentionService, is_in_hours
from dledger.settings.config import load_config
from dledger.settings.tables import StoreTable
from dledger.state.state_record import (
    AGE,
    FORCED,
    REQUEST,
    SIZE,
    FloorChange,
    FloorReason,
    decode_change,
)
from dledger.state.tables import StateTables
from dledger.testing.doubles import ManualClock
from tests.harness.fake_group import Term
from tests.harness.present import present

SEGMENT_BYTES = 100
ENTRY_BYTES = 20
ENTRIES = 25


class Log:
    """Entries of one size, all of them stored at one time."""

    def __init__(self, stored_ms: int = 1) -> None:
        self.stored_ms = stored_ms
        self.damaged: set[int] = set()
        self.first_index = 1
        self.first_position = 0
        self.last_index = ENTRIES
        self.end_position = ENTRIES * ENTRY_BYTES

    def position_at(self, index: int) -> int:
        return (index - 1) * ENTRY_BYTES

    def anchor_at(self, index: int) -> Anchor:
        if index - 1 in self.damaged:
            raise CorruptEntryError(f"entry {index - 1} is damaged and waits for its repair")
        return Anchor(index, self.position_at(index), 1, 1, prev_store_time_ms=self.stored_ms)

    def index_of(self, position: int) -> int:
        return position // ENTRY_BYTES + 1


class Group:
    """Takes what is submitted, and applies the floor."""

    def __init__(self) -> None:
        self.state = StateTables()
        self.leadership = Term(1)
        self.changes: list[FloorChange] = []

    async def submit(self, batch: Any, settled: Any) -> Proposed:
        (run,) = batch.runs
        change = decode_change(run.queue_id, checked_body(batch.records, 0)[0])
        assert isinstance(change, FloorChange)
        self.changes.append(change)
        self.state.floor = change.floor
        for each in settled:
            each(Proposed("stored"))
        return Proposed("stored")


class Kept:
    """A retention service, the log it reads and the disk that it is on."""

    def __init__(self, clock: ManualClock, *, used: float = 0.0, age_hours: int = 0) -> None:
        hour_now = clock.wall_ms() // HOUR_MS % 24
        self.group = Group()
        self.log = Log(clock.wall_ms() - age_hours * HOUR_MS)
        self.used = used
        self.saved_index = ENTRIES
        self.service = RetentionService(
            self.group,  # type: ignore[arg-type]  # what the service asks of it is there
            lambda: self.log,
            StoreTable(
                mapped_file_size_commit_log=SEGMENT_BYTES,
                file_reserved_time=1,
                delete_when=((hour_now + 5) % 24,),
            ),
            clock=clock,
            saved_index=lambda: self.saved_index,
            disk_ratio=lambda: self.used,
        )

    def settle(self, **changes: Any) -> None:
        self.service.settings = dataclasses.replace(self.service.settings, **changes)

    def remove_files(self) -> None:
        """As a checkpoint does with what stands before the floor."""
        floor = self.group.state.floor
        self.log.first_index, self.log.first_position = floor.first_index, floor.position


async def test_expired_segments_wait_for_their_hour_unless_asked_for(clock: ManualClock) -> None:
    kept = Kept(clock, age_hours=2)
    assert await kept.service.check() is None
    kept.service.expire_soon("root at 10.0.0.1")
    floor = present(await kept.service.check())
    assert floor.position == 4 * SEGMENT_BYTES
    (change,) = kept.group.changes
    assert change.reason is not None
    assert (change.reason.cause, change.reason.asked_by) == ("request", "root at 10.0.0.1")
    # Asked once is done once.
    assert await kept.service.check() is None


async def test_a_damaged_last_entry_lets_its_segment_go_with_the_next(clock: ManualClock) -> None:
    kept = Kept(clock, age_hours=2)
    kept.log.damaged = {5, 20}
    kept.service.expire_soon("")
    floor = present(await kept.service.check())
    assert floor.position == 3 * SEGMENT_BYTES
    kept.remove_files()
    kept.log.damaged = {20}
    kept.service.expire_soon("")
    assert await kept.service.check() is None


async def test_segments_wait_for_a_checkpoint_that_covers_them(clock: ManualClock) -> None:
    kept = Kept(clock, age_hours=2)
    for saved_index, segments in ((12, 2), (ENTRIES, 4)):
        kept.saved_index = saved_index
        kept.service.expire_soon("")
        assert present(await kept.service.check()).position == segments * SEGMENT_BYTES
        kept.remove_files()


async def test_unexpired_segments_stay_on_request(clock: ManualClock) -> None:
    kept = Kept(clock)
    kept.service.expire_soon("root at 10.0.0.1")
    assert await kept.service.check() is None


@pytest.mark.parametrize(("used", "goes"), [(0.5, False), (0.8, True)])
async def test_a_filling_disk_lets_what_has_expired_go_at_any_hour(
    clock: ManualClock, used: float, goes: bool
) -> None:
    kept = Kept(clock, used=used, age_hours=2)
    assert (await kept.service.check() is not None) == goes


async def test_full_disk_takes_nothing_unexpired(clock: ManualClock) -> None:
    store = load_config().store
    kept = Kept(clock, used=0.99)
    kept.settle(
        file_reserved_time=store.file_reserved_time,
        delete_when=tuple(range(24)),
        keep_bytes=store.keep_bytes,
        clean_file_forcibly_enable=store.clean_file_forcibly_enable,
        disk_space_clean_forcibly_ratio=store.disk_space_clean_forcibly_ratio,
    )
    assert await kept.service.check() is None
    assert kept.group.changes == []


async def test_force_removes_segment_by_segment(clock: ManualClock) -> None:
    kept = Kept(clock, used=0.9)
    kept.settle(clean_file_forcibly_enable=True)
    kept.service.asked_by["forced"] = "ops at 10.0.0.9"
    with structlog.testing.capture_logs() as lines:
        floor = await kept.service.check()
    assert floor is not None
    assert floor.position == SEGMENT_BYTES
    (line,) = lines
    assert (line["event"], line["log_level"], line["cause"]) == ("floor_moved", "warning", "forced")
    assert await kept.service.check() is None, "its space is not free yet"
    kept.remove_files()
    floor = present(await kept.service.check())
    assert floor.position == 2 * SEGMENT_BYTES
    kept.remove_files()
    kept.used = 0.84
    assert await kept.service.check() is None
    assert kept.service.given_up_bytes == {
        "age": 0, "request": 0, "size": 0, "forced": 2 * SEGMENT_BYTES,
    }  # fmt: skip
    reason = present(kept.group.changes[-1].reason)
    assert (reason.disk_used_permille, reason.force_permille) == (900, 850)
    assert reason.asked_by == "ops at 10.0.0.9"


async def test_expired_segments_go_before_any_goes_by_force(clock: ManualClock) -> None:
    kept = Kept(clock, used=0.9, age_hours=2)
    kept.settle(clean_file_forcibly_enable=True)
    await kept.service.check()
    assert [change.reason and change.reason.cause for change in kept.group.changes] == ["age"]


def entitlement_error(floor: Anchor, reason: FloorReason | None) -> str | None:
    """Return what is wrong with a move of the floor, or None when its reason covers it. Pure."""
    if reason is None:
        return "the record gives no reason"
    if reason.cause in (AGE, REQUEST):
        expired_before_ms = reason.decided_ms - reason.reserved_hours * HOUR_MS
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


@pytest.mark.parametrize(
    ("cause", "age_hours", "settings"),
    [
        ("age", 2, {"delete_when": tuple(range(24))}),
        ("size", 0, {"keep_bytes": 150}),
        ("forced", 0, {"clean_file_forcibly_enable": True, "disk_space_clean_forcibly_ratio": 40}),
    ],
)
async def test_the_record_holds_what_a_judge_of_the_move_needs(
    clock: ManualClock, cause: str, age_hours: int, settings: dict[str, Any]
) -> None:
    kept = Kept(clock, used=0.5, age_hours=age_hours)
    kept.settle(**settings)
    await kept.service.check()
    (change,) = kept.group.changes
    reason = present(change.reason)
    assert reason.cause == cause
    assert reason.decided_ms == clock.wall_ms()
    assert reason.keep_bytes == kept.service.settings.keep_bytes
    assert reason.end_position == kept.log.end_position
    assert reason.disk_used_permille == 500
    is_forcible = kept.service.settings.clean_file_forcibly_enable
    assert reason.force_permille == (400 if is_forcible else 0)
    assert entitlement_error(change.floor, reason) is None
    # The same move, one segment further than the cause goes, or for a cause that is not there.
    assert entitlement_error(change.floor, None) is not None
    assert entitlement_error(change.floor, replace(reason, cause="other")) is not None
    worse = {
        "age": replace(reason, reserved_hours=3),
        "size": replace(reason, keep_bytes=500),
        "forced": replace(reason, disk_used_permille=399),
    }[cause]
    assert entitlement_error(change.floor, worse) is not None


@pytest.mark.parametrize("cause", ["size", "forced"])
def test_disabled_cause_removes_nothing(cause: str) -> None:
    off = FloorReason(
        cause=cause, decided_ms=1, end_position=10**9, reserved_hours=1, keep_bytes=0,
        disk_used_permille=1000, force_permille=0,
    )  # fmt: skip
    assert entitlement_error(Anchor(2, 100, 1, 1, 1), off) is not None


BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN, fold: int = 0) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)
    return int(moment.timestamp() * 1000)


def berlin(wall_ms: int) -> int:
    offset = present(datetime.fromtimestamp(wall_ms / 1000, BERLIN).utcoffset())
    return int(offset.total_seconds() * 1000)


def hours_of_day(day: str, hour: int) -> list[float]:
    """Return the times of a local day, in hours since its midnight, that count as *hour*."""
    midnight = at(f"{day}T00:00")
    quarters = range(midnight, midnight + 26 * HOUR_MS, HOUR_MS // 4)
    return [
        (now - midnight) / HOUR_MS
        for now in quarters
        if is_in_hours(now, (hour,), berlin)
        and datetime.fromtimestamp(now / 1000, BERLIN).date().isoformat() == day
    ]


def test_four_in_the_morning_is_local() -> None:
    def shanghai(_: int) -> int:
        return 8 * HOUR_MS

    four = at("2026-03-01T04:30", ZoneInfo("Asia/Shanghai"))
    assert is_in_hours(four, (4,), shanghai)
    assert not is_in_hours(four, (4,), utc)
    assert not is_in_hours(four + 8 * HOUR_MS, (4,), shanghai)


def test_an_ordinary_day_has_the_hour_once() -> None:
    assert hours_of_day("2026-03-28", 2) == [2.0, 2.25, 2.5, 2.75]


def test_an_hour_that_summer_time_leaves_out_is_the_one_after_it() -> None:
    assert hours_of_day("2026-03-29", 2) == [2.0, 2.25, 2.5, 2.75]  # shown as three
    assert hours_of_day("2026-03-29", 3) == [2.0, 2.25, 2.5, 2.75]
    assert hours_of_day("2026-03-29", 4) == [3.0, 3.25, 3.5, 3.75]


def test_an_hour_that_comes_twice_counts_twice() -> None:
    assert hours_of_day("2026-10-25", 2) == [2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75]
    assert hours_of_day("2026-10-25", 3) == [4.0, 4.25, 4.5, 4.75]


@pytest.fixture
def in_berlin() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "CET-1CEST,M3.5.0,M10.5.0/3"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
def test_local_time_offset_is_read_from_the_machine() -> None:
    assert local_offset_ms(at("2026-01-15T12:00")) == HOUR_MS
    assert local_offset_ms(at("2026-07-15T12:00")) == 2 * HOUR_MS
