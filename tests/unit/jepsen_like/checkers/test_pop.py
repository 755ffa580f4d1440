"""Histories of receivers: clean ones are valid, and each anomaly is found and named."""

from typing import Any

import pytest

from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.pop import (
    AGAIN,
    EARLY,
    IN_ORDER_SUFFIX,
    LOST,
    OLD_RECEIPT,
    OTHER,
    OUT_OF_ORDER,
    TWICE,
    WENT_BACK,
    check_history,
)
from dledger.jepsen_like.checkers.pop_ends import (
    GIVEN_UP_ACKED,
    GIVEN_UP_AGAIN,
    GIVEN_UP_AT,
    GIVEN_UP_TWICE,
    GOOD_RECEIPT,
    MS_NS,
    NO_END,
    STALE,
)
from dledger.jepsen_like.history.operation import NOTHING, F, History, Operation, Outcome, RunHeader
from tests.harness.rows import row

SPAN = 100
"""Invisible time, ms."""


def row_ms(op_id: int, f: F, call: int, ret: int, off: int = 0, **more: Any) -> Operation:
    """Return a row with stamps in milliseconds."""
    fields: dict[str, Any] = {
        "topic": "T", "off": off, "group": "g", "cnt": 1 if f == F.RECEIVE else 0, "txn": 7,
        "status": SPAN if f != F.ACK else NOTHING, **more,
    }  # fmt: skip
    return row(op_id, f, call * MS_NS, ret * MS_NS, **fields)


def received(op_id: int, call: int, ret: int, off: int = 0, **more: Any) -> Operation:
    return row_ms(op_id, F.RECEIVE, call, ret, off, **more)


def names(*rows: Operation, clock_error_ms: int = 0) -> set[str]:
    verdict = check_history(rows, clock_error_ns=clock_error_ms * MS_NS)
    return {violation.name for violation in verdict.violations}


CLEAN = (
    received(0, 0, 1),
    received(1, 0, 1, 1),
    row_ms(2, F.ACK, 5, 6, 1),
    received(3, 100, 101, cnt=2, txn=8),
    row_ms(4, F.CHANGE_TIME, 110, 111, txn=8, min_off=9, status=500),
    row_ms(5, F.ACK, 112, 113, txn=8, outcome=Outcome.FAIL),
    received(6, 609, 610, cnt=3, txn=10),
    row_ms(7, F.ACK, 611, 612, txn=10),
    received(8, 700, 701, NOTHING, min_off=0, max_off=2),
)


def test_clean_history_is_valid() -> None:
    verdict = check_history(CLEAN)
    assert (verdict.validity, verdict.violations) == ("valid", ())
    assert verdict.counts == {
        "received": 4, "again": 2, "acknowledged": 2, "changed": 1, "refused": 1, "given_up": 0,
    }  # fmt: skip


def test_message_at_the_place_of_another_one_is_named() -> None:
    rows = [received(0, 0, 1, 3, value=5), received(1, 0, 1, 4, value=6)]
    seen = {5: {("T", 0, 2)}, 6: {("T", 0, 4), ("T", 1, 9)}}
    (violation,) = check_history(rows, seen=seen).violations
    assert (violation.name, violation.operations) == (OTHER, (0,))


def test_received_message_is_that_of_its_queue() -> None:
    send = row_ms(0, F.SEND, 0, 1, 2, value=5, cnt=0, status=NOTHING, txn=NOTHING, group="")
    rows = [send, received(1, 2, 3, 2, value=5), received(2, 2, 3, 7, value=5, group="other")]
    verdicts = {each.checker: each for each in check_everything(History(RunHeader(""), rows))}
    assert [(one.name, one.operations) for one in verdicts["pop"].violations] == [(OTHER, (2,))]


def test_an_end_far_away_is_judged_at_once() -> None:
    end = received(1, 2, 3, NOTHING, min_off=0, max_off=1 << 62, cnt=3)
    found = check_history([received(0, 0, 1), end]).violations
    assert {violation.name for violation in found} == {LOST, NO_END}


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ((received(9, 200, 201, cnt=2, txn=20),), TWICE),
        ((received(9, 607, 608, cnt=4, txn=20),), WENT_BACK),
        ((received(9, 620, 630, cnt=4, txn=20),), AGAIN),
        ((received(9, 620, 630, cnt=4, txn=20),), EARLY),
        ((row_ms(9, F.ACK, 102, 103, txn=7),), OLD_RECEIPT),
        ((row_ms(9, F.CHANGE_TIME, 615, 616, txn=9, min_off=30),), OLD_RECEIPT),
        ((received(9, 900, 901, NOTHING, min_off=0, max_off=3),), LOST),
        ((received(9, 900, 901, cnt=4, txn=20, value=5),), OTHER),
    ],
)
def test_planted_anomaly_is_named(rows: tuple[Operation, ...], name: str) -> None:
    assert name in names(*CLEAN, *rows)


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ((received(0, 0, 50), received(1, 0, 50, txn=8)), TWICE),
        ((received(0, 0, 50), received(1, 0, 50, cnt=2, txn=8)), EARLY),
        ((received(0, 0, 1), row_ms(2, F.ACK, 90, 120), received(1, 80, 110, cnt=2, txn=8)), AGAIN),
        ((received(0, 0, 1), row_ms(2, F.ACK, 40, 190), received(1, 50, 190, cnt=2, txn=8)), AGAIN),
        (
            (received(0, 0, 1), *(row_ms(at, F.CHANGE_TIME, 10, 20, min_off=at) for at in (8, 9))),
            OLD_RECEIPT,
        ),
    ],
)
def test_anomaly_whose_operations_overlap_is_named(rows: tuple[Operation, ...], name: str) -> None:
    assert names(*rows) == {name}


def test_time_is_counted_from_the_call() -> None:
    assert names(received(0, 0, 50), received(1, 60, 99, cnt=2, txn=8)) == {EARLY}
    assert names(received(0, 0, 50), received(1, 60, 100, cnt=2, txn=8)) == set()
    early = (received(0, 0, 50), received(1, 60, 95, cnt=2, txn=8))
    assert names(*early, clock_error_ms=5) == set()


def test_change_of_unknown_outcome_may_shorten_the_time() -> None:
    change = row_ms(1, F.CHANGE_TIME, 10, 0, min_off=NOTHING, status=20, outcome=Outcome.INFO)
    rows = (received(0, 0, 1), change, received(2, 30, 31, cnt=2, txn=8))
    assert names(*rows) == set()
    assert names(rows[0], rows[2]) == {EARLY}
    longer = row_ms(1, F.CHANGE_TIME, 10, 0, min_off=NOTHING, status=900, outcome=Outcome.INFO)
    assert names(rows[0], longer, received(2, 101, 102, cnt=2, txn=8)) == set()


def test_order_is_kept_until_the_one_ahead_is_over() -> None:
    group = "g" + IN_ORDER_SUFFIX
    ahead = received(0, 10, 31, group=group)

    def later(call: int, ret: int, **more: Any) -> Operation:
        return received(1, call, ret, 1, **{"group": group, "process": 2, **more})

    assert names(received(0, 10, 11), received(1, 0, 9, 1)) == set(), "any order will do"
    for call, ret in ((0, 9), (0, 20), (10, 31), (30, 40), (32, 109)):
        assert names(ahead, later(call, ret)) == {OUT_OF_ORDER}
        for outcome in (Outcome.OK, Outcome.INFO):
            ack = row_ms(3, F.ACK, ret, 200, group=group, outcome=outcome)
            assert names(ahead, ack, later(call, ret)) == set()
    assert names(ahead, later(10, 31, process=1)) == set(), "one answer has both"
    assert names(ahead, later(0, 110)) == set(), "it may have been given up"
    again = received(2, 120, 121, cnt=2, txn=8, group=group)
    assert names(ahead, again, later(0, 110)) == {OUT_OF_ORDER}
    assert names(ahead, again, later(0, 219)) == {OUT_OF_ORDER}
    assert names(ahead, again, later(120, 121, process=1)) == set()
    assert names(ahead, again, later(0, 220)) == set()


def test_held_receive_begins_when_the_attempt_before_is_over() -> None:
    held = received(1, 60, 101, cnt=2, txn=8)
    assert names(received(0, 0, 1), held, received(2, 170, 199, cnt=3, txn=9)) == {EARLY}
    assert names(received(0, 0, 1), held, received(2, 170, 200, cnt=3, txn=9)) == set()
    shorter = row_ms(3, F.CHANGE_TIME, 10, 11, min_off=9, status=30)
    rows = (received(0, 0, 1), shorter, held, received(2, 150, 160, cnt=3, txn=9))
    assert names(*rows) == set()


@pytest.mark.parametrize("f", [F.ACK, F.CHANGE_TIME])
def test_receipt_that_was_replaced_is_refused(f: F) -> None:
    change = row_ms(1, F.CHANGE_TIME, 10, 11, min_off=9, status=900)
    rows = (received(0, 0, 1), change)
    assert names(*rows, row_ms(2, f, 12, 13, txn=7, min_off=10)) == {OLD_RECEIPT}
    assert names(*rows, row_ms(2, f, 12, 13, txn=9, min_off=10)) == set()
    assert names(*rows, row_ms(2, f, 10, 13, txn=7, min_off=10)) == {OLD_RECEIPT}
    refused = row_ms(2, f, 12, 13, txn=7, err=STALE, outcome=Outcome.FAIL)
    assert names(*rows, refused) == set()


def refused(op_id: int, call: int, ret: int, **more: Any) -> Operation:
    return row_ms(op_id, F.ACK, call, ret, err=STALE, outcome=Outcome.FAIL, **more)


def test_receipt_that_stands_is_accepted() -> None:
    delivery = received(0, 0, 1)
    assert names(delivery, refused(1, 50, 99)) == {GOOD_RECEIPT}
    assert names(delivery, refused(1, 50, 100)) == set()
    assert names(delivery, refused(1, 50, 95), clock_error_ms=5) == set()
    assert names(delivery, refused(1, 50, 60, txn=8)) == set()
    for outcome in (Outcome.OK, Outcome.INFO):
        for f in (F.ACK, F.CHANGE_TIME):
            other = row_ms(2, f, 55, 57, outcome=outcome, min_off=9)
            assert GOOD_RECEIPT not in names(delivery, other, refused(1, 50, 60))
            assert GOOD_RECEIPT not in names(delivery, other, refused(1, 50, 55))
            assert GOOD_RECEIPT in names(delivery, other, refused(1, 50, 54))
    change = row_ms(2, F.CHANGE_TIME, 10, 11, min_off=9, status=900)
    assert names(delivery, change, refused(1, 50, 60, txn=9)) == {GOOD_RECEIPT}
    busy = row_ms(1, F.ACK, 50, 60, err="RequestFailedError", outcome=Outcome.FAIL)
    assert names(delivery, busy) == set()


def given_up(op_id: int, value: int, cnt: int = 2, **more: Any) -> Operation:
    fields = {"topic": "%DLQ%g", "txn": NOTHING, **more}
    return row_ms(op_id, F.GIVEN_UP, 900, 901, NOTHING, value=value, cnt=cnt, max_off=0, **fields)


ENDED = (
    received(0, 0, 1, 0, value=5),
    received(1, 100, 101, 0, value=5, cnt=2, txn=8),
    received(2, 0, 1, 1, value=6),
    row_ms(3, F.ACK, 5, 6, 1),
    given_up(4, 5),
    received(5, 910, 911, NOTHING, min_off=0, max_off=2, cnt=2),
)
"""One message was given up at its second time, the other acknowledged."""


def test_messages_that_have_an_end_are_valid() -> None:
    verdict = check_history(ENDED)
    assert (verdict.validity, verdict.violations) == ("valid", ())
    assert verdict.counts["given_up"] == 1


@pytest.mark.parametrize(
    ("left_out", "rows", "found"),
    [
        ((4,), (), {NO_END}),
        ((3,), (), {NO_END}),
        ((), (given_up(9, 5),), {GIVEN_UP_TWICE}),
        ((), (given_up(9, 6),), {GIVEN_UP_ACKED}),
        ((4,), (given_up(9, 5, 1),), {GIVEN_UP_AT, GIVEN_UP_AGAIN}),
        ((4,), (given_up(9, 5, 3),), {GIVEN_UP_AT}),
        ((), (received(9, 200, 201, 0, value=5, cnt=3, txn=9),), {GIVEN_UP_AGAIN}),
        ((0, 1, 4), (), {LOST}),
        ((0, 1), (), set()),
    ],
)
def test_wrong_end_is_named(
    left_out: tuple[int, ...], rows: tuple[Operation, ...], found: set[str]
) -> None:
    assert names(*(op for op in ENDED if op.op_id not in left_out), *rows) == found


def test_ends_are_not_judged_without_all_dead_letters() -> None:
    head = received(5, 910, 911, NOTHING, min_off=0, max_off=2, cnt=0)
    assert names(*ENDED[:3], head) == set()


def test_ack_of_unknown_outcome_may_be_an_end() -> None:
    unknown = row_ms(3, F.ACK, 5, 6, 1, outcome=Outcome.INFO)
    assert names(*ENDED[:3], unknown, *ENDED[4:]) == set()
    failed = row_ms(3, F.ACK, 5, 6, 1, outcome=Outcome.FAIL)
    assert names(*ENDED[:3], failed, *ENDED[4:]) == {NO_END}


def test_history_without_deliveries_is_unknown() -> None:
    assert check_history([received(0, 0, 1, outcome=Outcome.INFO)]).validity == "unknown"
