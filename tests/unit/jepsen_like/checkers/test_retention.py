"""What retention may remove, and what may be in the holes that it leaves."""

import msgspec
import pytest

from dledger.jepsen_like.checkers import delayed, retention, transactions
from dledger.jepsen_like.checkers.retention import Keeps, mistake_in
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import (
    NEVER,
    Decision,
    F,
    FloorMove,
    History,
    ReplicaRead,
    RunHeader,
)
from tests.harness.judged import judged
from tests.harness.rows import row

HOUR_MS = 3_600_000
HOUR_NS = HOUR_MS * 1_000_000
SEGMENT = 1_000
BY_SIZE = Keeps(keep_bytes=2_500, segment_bytes=SEGMENT)
BY_AGE = Keeps(keep_ms=2 * HOUR_MS, segment_bytes=SEGMENT)


def by_size(position: int, end: int) -> FloorMove:
    return FloorMove(5, "n0", 7, cause="size", position=position, end_position=end)


def by_age(age_ms: int, at_ns: int) -> FloorMove:
    return FloorMove(at_ns, "n0", 7, cause="age", newest_ms=100, stored_ms=100 + age_ms)


def history(*rows: FloorMove, begins: tuple[int, ...] = (), at_ns: int = 9) -> History:
    found = History(RunHeader("r"), floors=list(rows))
    for number, begin in enumerate(begins):
        found.replica_reads.append(ReplicaRead(at_ns, f"n{number}", "t", 0, begin, ()))
    return found


def verdict(found: History, keeps: Keeps) -> Verdict:
    return judged(retention.NAME, found, keeps=keeps)


@pytest.mark.parametrize(
    ("position", "end", "is_entitled"),
    [(1_000, 3_500, True), (1_000, 3_499, False), (2_000, 4_999, True), (2_000, 4_400, False)],
)
def test_retention_by_size_keeps_its_bytes(position: int, end: int, is_entitled: bool) -> None:
    found = verdict(history(by_size(position, end), begins=(0,)), BY_SIZE)
    assert found.is_valid is is_entitled
    if not is_entitled:
        (violation,) = found.violations
        assert violation.name == retention.NOT_ENTITLED
        assert f"{end - position} bytes are left" in violation.detail


def test_retention_by_size_takes_whole_segments() -> None:
    assert not mistake_in(by_size(1_000, 3_900), BY_SIZE)
    assert "whole segments" in mistake_in(by_size(1_001, 3_900), BY_SIZE)


@pytest.mark.parametrize(
    ("age_ms", "at_ns", "is_entitled"),
    [
        (2 * HOUR_MS, 2 * HOUR_NS, True),
        (2 * HOUR_MS - 1, 2 * HOUR_NS, False),
        (2 * HOUR_MS, 2 * HOUR_NS - 1, False),  # nothing of the run can be that old
    ],
)
def test_retention_by_age_keeps_its_hours(age_ms: int, at_ns: int, is_entitled: bool) -> None:
    found = verdict(history(by_age(age_ms, at_ns), begins=(0,)), BY_AGE)
    assert [v.name for v in found.violations] == [] if is_entitled else [retention.NOT_ENTITLED]


def test_wrong_dates_make_messages_old_by_the_log() -> None:
    wrong = msgspec.structs.replace(BY_AGE, date_error_ns=None)
    assert not mistake_in(by_age(2 * HOUR_MS, 1), wrong)
    assert "kept are 7200000 ms" in mistake_in(by_age(2 * HOUR_MS - 1, 1), wrong)
    jumped = msgspec.structs.replace(BY_AGE, date_error_ns=HOUR_NS)
    assert not mistake_in(by_age(2 * HOUR_MS, HOUR_NS), jumped)
    assert "nothing is older" in mistake_in(by_age(2 * HOUR_MS, HOUR_NS - 1), jumped)


@pytest.mark.parametrize("cause", ["forced", "", "soon"])
def test_a_cause_that_no_setting_has_is_named(cause: str) -> None:
    move = msgspec.structs.replace(by_size(1_000, 9_000), cause=cause)
    assert repr(cause) in mistake_in(move, BY_SIZE)
    assert mistake_in(by_size(1_000, 9_000), BY_AGE) == "for its size, which has no limit"


def test_queues_begin_where_a_floor_lets_them() -> None:
    rows = (by_size(1_000, 3_500), FloorMove(5, "n0", 7, "t", 0, 4, "size"))
    assert verdict(history(*rows, begins=(0, 4)), BY_SIZE).is_valid
    found = verdict(history(*rows, begins=(5, 4, 6)), BY_SIZE)
    assert [(v.name, v.subject) for v in found.violations] == [(retention.REMOVED, "t/0")] * 2
    assert "n0 has it from offset 5 on; retention let it begin at 4" in found.violations[0].detail
    other = FloorMove(5, "n0", 7, "t", 1, 9, "size")  # of another queue
    assert not verdict(history(rows[0], other, begins=(1,)), BY_SIZE).is_valid


def test_without_retention_every_queue_begins_at_offset_0() -> None:
    nothing = Keeps()
    assert verdict(history(begins=(0, 0)), nothing).is_valid
    for rows in ((), (FloorMove(9, "n0"),)):
        found = verdict(history(*rows, begins=(0, 2)), nothing)
        assert [v.name for v in found.violations] == [retention.REMOVED]
    assert judged_names(history(begins=(2,)), None) == set()


@pytest.mark.parametrize("keeps", [BY_SIZE, BY_AGE])
def test_history_without_floors_let_nothing_go(keeps: Keeps) -> None:
    found = verdict(history(begins=(0, 2), at_ns=2 * HOUR_NS), keeps)
    assert [v.name for v in found.violations] == [retention.REMOVED]
    assert verdict(history(begins=(0, 0)), keeps).is_valid


def judged_names(found: History, keeps: Keeps | None) -> set[str]:
    from dledger.jepsen_like.checkers.all_checks import Settings, check_everything

    return {v.checker for v in check_everything(found, Settings(settled=True, keeps=keeps))} & {
        retention.NAME
    }


QUEUE = ("t", 0)


def cut_history(*, holes_left: int, due_ns: int = 20) -> History:
    """Four offsets are removed; sends name all but *holes_left*; a delayed message is missing."""
    found = History(RunHeader("r"))
    for off in range(4 - holes_left):
        found.operations.append(row(off, F.SEND, 1, 2 + off, off=off, value=100 + off))
    late = row(8, F.SEND, 1, 9, value=200, due_ns=due_ns)
    found.operations += [late, row(9, F.MAX_OFFSET, 40, 50, max_off=4)]
    found.replica_reads = [ReplicaRead(99, node, *QUEUE, 4, ()) for node in "ab"]
    return found


@pytest.mark.parametrize(
    ("holes_left", "due_ns", "is_lost"),
    [(0, 20, True), (1, 20, False), (1, 50, False), (1, 51, True), (2, 20, False)],
)
def test_a_delayed_message_may_be_in_a_hole(holes_left: int, due_ns: int, is_lost: bool) -> None:
    found = judged(delayed.NAME, cut_history(holes_left=holes_left, due_ns=due_ns))
    names = [(v.name, v.operations) for v in found.violations]
    assert names == ([(delayed.NOT_DELIVERED, (8,))] if is_lost else [])


def test_a_replica_that_is_cut_less_holds_what_others_removed() -> None:
    history = cut_history(holes_left=1)
    history.replica_reads[1] = ReplicaRead(99, "b", *QUEUE, 0, (100, 101, 102, 103))
    found = judged(delayed.NAME, history)
    assert [v.name for v in found.violations] == [delayed.NOT_DELIVERED]


@pytest.mark.parametrize(("seen_ns", "is_lost"), [(29, True), (30, False), (NEVER - 1, False)])
def test_a_commit_fits_a_hole_of_its_time_only(seen_ns: int, is_lost: bool) -> None:
    """The one hole was filled before *seen_ns*; the commit was called at 30."""
    history = cut_history(holes_left=1)
    del history.operations[3:]
    half = row(20, F.HALF, 5, 6, value=300, txn=1)
    commit = row(21, F.END_TRANSACTION, 30, 35, value=300, txn=1, decision=Decision.COMMIT)
    end = row(22, F.MAX_OFFSET, min(20, seen_ns), seen_ns, max_off=4)
    history.operations += [half, commit, end]
    found = judged(transactions.NAME, history)
    expected = [(transactions.COMMIT_LOST, (20, 21))] if is_lost else []
    assert [(v.name, v.operations) for v in found.violations] == expected
