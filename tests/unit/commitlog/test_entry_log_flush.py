"""Entry log on a disk that is full, slow or fails: rolls, reserves and flushes."""

import threading

import pytest

from dledger.commitlog.allocator import Allocator
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import DiskFullError, FlushFailedError, InvariantBroken, LogBusyError
from dledger.testing.crash_disk import CrashDisk, disk_full, failing_flush
from tests.harness.entry_frames import next_frame
from tests.harness.entry_logs import SEGMENT, fill, open_log, segment_content
from tests.harness.present import present


@pytest.fixture
def disk() -> CrashDisk:
    return CrashDisk()


@pytest.fixture
def log(disk: CrashDisk) -> EntryLog:
    return open_log(disk)


@pytest.mark.parametrize("part", ["commitlog", "entryindex"])
def test_a_full_disk_at_a_roll_leaves_the_log_as_it_was(
    part: str, disk: CrashDisk, log: EntryLog
) -> None:
    disk.fault = disk_full(path_part=part)
    with pytest.raises(DiskFullError):
        fill(log, 100)
    kept, end = log.last_index, log.end_position
    disk.fault = lambda kind, path: None
    log.flush()
    again = open_log(disk.power_cut(lambda: False))
    assert (again.last_index, again.end_position) == (kept, end)
    fill(log, 20)
    assert log.last_index == kept + 20


def test_a_full_disk_at_a_roll_leaves_no_blank_behind(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 9, 40)
    end = log.end_position
    disk.fault = disk_full(path_part="commitlog")
    with pytest.raises(DiskFullError):
        log.append(next_frame(log, 700))
    assert not any(segment_content(disk, 0)[end:])


def test_half_a_frame_that_a_full_disk_left_is_wiped(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 3)
    end = log.end_position
    disk.fault = disk_full(kind="write", path_part="entryindex")
    with pytest.raises(DiskFullError):
        log.append(next_frame(log))
    assert not any(segment_content(disk, 0)[end:])
    disk.fault = lambda kind, path: None
    fill(log, 1)
    assert log.last_index == 4


def test_a_reserve_carries_the_log_over_a_roll_on_a_full_disk(
    disk: CrashDisk, log: EntryLog
) -> None:
    fill(log, 3)
    assert log.allocator.needs_reserve
    assert not log.allocator.has_reserve
    log.allocator.reserve_next()
    assert log.allocator.has_reserve
    assert not log.allocator.needs_reserve
    disk.fault = disk_full()
    fill(log, 1, SEGMENT - 400)
    assert log.end_position > SEGMENT
    assert not log.allocator.has_reserve
    with pytest.raises(DiskFullError):
        log.allocator.reserve_next()


def test_roll_waits_for_a_reserve_under_way(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 3)
    seen: list[int] = []

    def meanwhile(kind: str, path: str) -> None:
        if kind == "create" and "commitlog" in path:
            disk.fault = lambda kind, path: None
            log.allocator.reserve_next()
            with pytest.raises(LogBusyError, match="being allocated"):
                log.append(next_frame(log, SEGMENT - 400))
            log.append(next_frame(log))
            seen.append(log.last_index)

    disk.fault = meanwhile
    log.allocator.reserve_next()
    assert seen == [4]
    log.append(next_frame(log, SEGMENT - 400))
    assert log.last_index == 5


def test_entries_are_durable_after_their_flush(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 20)
    ticket = present(log.begin_flush())
    fill(log, 1)
    assert log.durable_index == 0
    with pytest.raises(InvariantBroken):
        log.complete_flush(ticket)
    ticket.run()
    assert log.complete_flush(ticket)
    assert log.durable_index == 20
    assert open_log(disk.power_cut(lambda: False)).last_index >= 20
    log.flush()
    assert log.durable_index == 21
    assert log.begin_flush() is None


def test_a_later_ticket_covers_an_unfinished_earlier_one(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 9, 40)
    assert log.begin_flush() is not None
    fill(log, 9, 40)
    second = present(log.begin_flush())
    assert log.end_position > SEGMENT
    second.run()
    assert log.complete_flush(second)
    assert log.durable_index == 18
    assert open_log(disk.power_cut(lambda: False)).last_index == 18


def test_later_ticket_covers_segments_of_the_earlier(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 18, 40)
    assert log.end_position > SEGMENT
    first = log.begin_flush()
    fill(log, 1, 40)
    second = log.begin_flush()
    assert first is not None
    assert second is not None
    second.run()
    assert log.complete_flush(second)
    assert log.durable_index == 19
    assert open_log(disk.power_cut(lambda: False)).last_index == 19


def test_next_ticket_flushes_what_an_overtaken_one_held(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 18, 40)
    assert log.position_at(17) > SEGMENT
    assert log.begin_flush() is not None
    log.truncate_from(18)
    log.flush()
    assert log.durable_index == 17
    assert open_log(disk.power_cut(lambda: False)).last_index == 17


def test_flush_overtaken_by_a_truncation_marks_nothing(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 6, term=1)
    ticket = present(log.begin_flush())
    ticket.run()
    log.truncate_from(4)
    fill(log, 3, term=2)
    assert not log.complete_flush(ticket)
    assert log.durable_index == 0
    log.flush()
    assert log.durable_index == 6
    again = open_log(disk.power_cut(lambda: False))
    assert [again.term_at(i) for i in range(1, 7)] == [1, 1, 1, 2, 2, 2]


def test_ticket_after_a_truncation_is_harmless() -> None:
    log = open_log(CrashDisk())
    fill(log, 30)
    ticket = present(log.begin_flush())
    log.truncate_from(2)
    ticket.run()
    assert not log.complete_flush(ticket)
    log.flush()
    assert log.durable_index == 1


def test_roll_beside_a_reserve_makes_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(CrashDisk())
    fill(log, 3)
    log.allocator.reserve_next()
    looked = Allocator._next_base
    rolled: list[int] = []

    def roll_behind_the_look(self: Allocator) -> int:
        base = looked(self)
        if not rolled:
            rolled.append(base)
            log.append(next_frame(log, SEGMENT - 400))
        return base

    monkeypatch.setattr(Allocator, "_next_base", roll_behind_the_look)
    log.allocator.reserve_next()
    monkeypatch.undo()
    assert rolled == [SEGMENT]
    assert log.end_position > SEGMENT
    log.allocator.reserve_next()
    assert log.allocator.has_reserve


def test_a_cut_waits_for_a_reserve_that_is_under_way(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 3)
    log.append(next_frame(log, SEGMENT - 400))
    allocating, may_go_on = threading.Event(), threading.Event()

    def meanwhile(kind: str, path: str) -> None:
        if kind == "create" and "commitlog" in path:
            allocating.set()
            assert may_go_on.wait(10)

    disk.fault = meanwhile
    reserving = threading.Thread(target=log.allocator.reserve_next)
    reserving.start()
    assert allocating.wait(10)
    cutting = threading.Thread(target=log.truncate_from, args=(3,))
    cutting.start()
    cutting.join(0.1)
    assert (cutting.is_alive(), log.last_index) == (True, 4)
    may_go_on.set()
    reserving.join(10)
    cutting.join(10)
    assert (cutting.is_alive(), log.last_index) == (False, 2)
    fill(log, 3)
    log.append(next_frame(log, SEGMENT - 400))
    assert log.last_index == 6


def test_a_failed_flush_poisons_the_log(disk: CrashDisk, log: EntryLog) -> None:
    frames = fill(log, 3)
    ticket = present(log.begin_flush())
    disk.fault = failing_flush("commitlog")
    with pytest.raises(FlushFailedError):
        ticket.run()
    disk.fault = lambda kind, path: None
    assert not log.allocator.needs_reserve
    for act in (
        lambda: log.complete_flush(ticket),
        lambda: log.append(next_frame(log)),
        lambda: log.truncate_from(2),
        log.flush,
        log.allocator.reserve_next,
    ):
        with pytest.raises(FlushFailedError):
            act()
    assert log.durable_index == 0
    assert log.frame(2) == frames[1]
    log.close()
