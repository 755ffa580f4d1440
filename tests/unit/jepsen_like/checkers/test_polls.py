"""Polls of subscribed consumers, and delayed messages that come late, by hand."""

from dledger.jepsen_like.checkers import delayed, polls
from dledger.jepsen_like.history.operation import F, History, Level, Operation, Outcome, RunHeader
from tests.harness.rows import row

OK = Outcome.OK


def poll(
    op_id: int, off: int, count: int, *, process: int = 1, low: int = -1, end: int = -1
) -> Operation:
    values = tuple(range(100 + off, 100 + off + count))
    return row(
        op_id, F.PULL, op_id * 10, op_id * 10 + 5, process=process, off=off, cnt=count, max_off=end,
        min_off=low, values=values, group="g",
    )  # fmt: skip


def fetch(op_id: int, off: int) -> Operation:
    return row(op_id, F.FETCH_COMMIT, op_id * 10, op_id * 10 + 5, off=off, cnt=1, group="g")


def found(*rows: Operation) -> list[tuple[str, tuple[int, ...]]]:
    return [(v.name, v.operations) for v in polls.check_history(rows).violations]


def test_a_consumer_goes_on_where_it_was() -> None:
    assert found(poll(0, 3, 2), poll(1, 5, 0), poll(2, 5, 1)) == []
    assert found(poll(0, 3, 2), poll(1, 4, 1)) == [(polls.WENT_BACK, (0, 1))]
    assert found(poll(0, 3, 2), poll(1, 6, 1)) == [(polls.SKIPPED, (0, 1))]


def test_consumer_begins_at_its_commit_or_anywhere() -> None:
    assert found(fetch(0, 4), poll(1, 4, 1)) == []
    assert found(fetch(0, 4), poll(1, 5, 1)) == [(polls.SKIPPED, (0, 1))]
    assert found(fetch(0, 4), poll(1, 3, 1)) == [(polls.WENT_BACK, (0, 1))]
    assert found(fetch(0, -1), poll(1, 9, 1)) == []


def test_fetch_allows_to_go_on_and_to_begin_again() -> None:
    before = [poll(0, 3, 4), fetch(1, 4)]
    assert found(*before, poll(2, 7, 1)) == []
    assert found(*before, poll(2, 4, 1)) == []
    assert found(*before, poll(2, 5, 1)) == [(polls.WENT_BACK, (1, 2))]


def test_offset_out_of_range_moves_to_the_answered_bound() -> None:
    assert found(poll(0, 3, 0, low=8), poll(1, 8, 1)) == []
    assert found(poll(0, 30, 0, end=8), poll(1, 8, 1)) == []
    assert found(poll(0, 3, 0, low=8), poll(1, 9, 1)) == [(polls.SKIPPED, (0, 1))]


def test_another_process_and_polls_that_overlap_prove_nothing() -> None:
    assert found(poll(0, 3, 2), poll(1, 9, 1, process=2)) == []
    long = poll(0, 3, 2)
    long.ret_ns = 100
    assert found(long, poll(1, 9, 1), poll(2, 1, 1)) == []


def test_a_pull_without_a_group_is_no_poll() -> None:
    pull = poll(0, 3, 2)
    pull.group = ""
    assert polls.check_history([pull]).validity == "unknown"


def test_late_read_counts_from_send_return_to_read_call() -> None:
    send = row(0, F.SEND, 0, 10, process=0, value=100, due_ns=1_000)
    missed = row(1, F.MAX_OFFSET, 1_110, 1_120, max_off=0)
    other = row(2, F.MAX_OFFSET, 1_500, 1_520, max_off=1)
    seen = row(3, F.PULL, 1_600, 1_610, off=0, cnt=1, max_off=1, values=(100,))
    history = History(RunHeader("late"), [send, other, missed, seen])

    def late(late_max_ns: int | None) -> list[tuple[int, ...]]:
        verdict = delayed.check_history(history, drained=False, late_max_ns=late_max_ns)
        assert {violation.name for violation in verdict.violations} <= {delayed.LATE}
        return [violation.operations for violation in verdict.violations]

    assert late(99) == [(0, 1)]
    assert late(100) == []
    assert late(None) == []
    missed.level = Level.LOCAL
    assert late(99) == []


def test_fetch_alone_does_not_place_a_consumer() -> None:
    asked = fetch(0, 3)
    asked.cnt = 0
    assert found(asked, poll(1, 7, 2)) == []
    assert found(asked, poll(1, 7, 2), poll(2, 12, 1)) == [(polls.SKIPPED, (1, 2))]
