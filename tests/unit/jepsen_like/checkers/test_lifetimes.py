"""Histories of messages with a time to live: a clean one is valid, each anomaly is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers import lifetimes
from dledger.jepsen_like.checkers.lifetimes import Read, Sent
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
)
from tests.harness.judged import judged

S = 1_000_000_000
Rows = dict[int, Operation]


def row(op_id: int, f: F, at_s: float, **fields: Any) -> Operation:
    call = round(at_s * S)
    outcome = fields.pop("outcome", Outcome.OK)
    ret = NEVER if outcome == Outcome.INFO else fields.pop("ret_ns", call + 1_000_000)
    fields = {"topic": "T", "queue": 0, **fields}
    return Operation(op_id, op_id, 1, NOTHING, f, outcome, call, ret, **fields)


def send(op_id: int, at_s: float, ttl_ms: int, **more: Any) -> Operation:
    return row(op_id, F.PERISHABLE, at_s, value=1000 + op_id, cnt=ttl_ms, **more)


def read(op_id: int, at_s: float, to: int, *found: int, **more: Any) -> list[Operation]:
    """Read offsets 0 up to *to*; a value is at the offset that its last digit names."""
    head = row(op_id, F.LIVING, at_s, **{"status": Read.LIVING, "off": 0, "max_off": to, **more})
    rows = [
        row(op_id + at, F.LIVING, at_s, status=Read.MESSAGE, txn=op_id, value=value, off=value % 10)
        for at, value in enumerate(found, 1)
    ]
    return [head, *rows]


def clean() -> Rows:
    """Sends of 0: without an end; 1: for 2 s; 2: for 5 s, its answer is lost; 3: refused."""
    rows = [
        send(0, 1.0, 0, off=0),
        send(1, 1.1, 2000, off=1),
        send(2, 1.2, 5000, outcome=Outcome.INFO),
        send(3, 1.3, 0, outcome=Outcome.FAIL),
        *read(10, 2.0, 3, 1000, 1001, 1002),
        *read(20, 4.0, 3, 1000, 1002),
        *read(30, 9.0, 3, 1000),
        *read(40, 10.0, 3, 1000, 1001, 1002, status=Read.ALL, cnt=1),
    ]
    return {op.op_id: op for op in rows}


def verdict(rows: Rows, **settings: Any) -> Any:
    history = History(RunHeader("r"), [rows[key] for key in sorted(rows)])
    return judged(lifetimes.NAME, history, settled=True, **settings)


def change(rows: Rows, op_id: int, **fields: Any) -> None:
    rows[op_id] = msgspec.structs.replace(rows[op_id], **fields)


def test_a_clean_history_of_perishable_messages_is_valid() -> None:
    found = verdict(clean())
    assert (found.validity, found.violations) == ("valid", ())
    assert found.counts == {"sends": 4, "reads": 3, "seen": 3, "received": 0, "judged": 9}


def late(rows: Rows) -> None:
    rows |= {op.op_id: op for op in read(20, 4.0, 3, 1000, 1001, 1002)}


def late_of_an_unknown_send(rows: Rows) -> None:
    rows |= {op.op_id: op for op in read(30, 9.0, 3, 1000, 1002)}


def passed(rows: Rows) -> None:
    del rows[12]


def passed_without_an_end(rows: Rows) -> None:
    del rows[31]


def lost(rows: Rows) -> None:
    for op_id in (11, 21, 31, 41):
        del rows[op_id]


def twice(rows: Rows) -> None:
    rows[44] = row(44, F.LIVING, 10, status=Read.MESSAGE, txn=40, value=1000, off=3)


def stranger(rows: Rows) -> None:
    del rows[2]


def refused(rows: Rows) -> None:
    rows[44] = row(44, F.LIVING, 10, status=Read.MESSAGE, txn=40, value=1003, off=3)


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (late, lifetimes.EXPIRED),
        (late_of_an_unknown_send, lifetimes.EXPIRED),
        (passed, lifetimes.PASSED),
        (passed_without_an_end, lifetimes.PASSED),
        (lost, lifetimes.LOST),
        (twice, lifetimes.TWICE),
        (stranger, lifetimes.STRANGER),
        (refused, lifetimes.REFUSED),
    ],
)
def test_a_planted_anomaly_of_times_to_live_is_found(
    plant: Callable[[Rows], None], name: str
) -> None:
    rows = clean()
    plant(rows)
    assert {violation.name for violation in verdict(rows).violations} == {name}


def test_what_clocks_may_hide_proves_nothing() -> None:
    rows = clean()
    late(rows)
    passed(rows)
    assert verdict(rows, clock_error_ns=3 * S).violations == ()


def test_reads_between_both_bounds_prove_nothing() -> None:
    rows = clean()
    change(rows, 20, call_ns=rows[1].ret_ns + 2 * S - 1, ret_ns=rows[1].call_ns + 2 * S + 1)
    assert verdict(rows).violations == ()
    late(rows)
    change(rows, 20, call_ns=rows[1].ret_ns + 2 * S - 1, ret_ns=rows[1].call_ns + 2 * S + 1)
    assert verdict(rows).violations == ()


def test_a_last_read_that_begins_later_misses_nothing() -> None:
    rows = clean()
    lost(rows)
    change(rows, 40, cnt=0)
    assert verdict(rows).violations == ()


# -- delays, transactions, tags, receives, copies ------------------------------------------


def receive(op_id: int, at_s: float, *found: tuple[int, int], **more: Any) -> list[Operation]:
    """Receive values, each with how often it was handed out."""
    head = row(op_id, F.LIVING, at_s, **{"status": Read.RECEIVED, "group": "g", **more})
    rows = [
        row(
            op_id + at, F.LIVING, at_s,
            status=Read.MESSAGE, txn=op_id, value=value, off=value % 10, cnt=times,
        )
        for at, (value, times) in enumerate(found, 1)
    ]  # fmt: skip
    return [head, *rows]


def many() -> Rows:
    """Sends of 0: delayed by 3 s, for 2 s; 1: committed at 4.0, for 2 s; 2: another tag;
    3: rolled back.

    A group receives 0 and 1 in time, 0 again after its time, and 2; copies of 0 and 1 are read.
    """
    copies = {"topic": "%RETRY%g"}
    rows = [
        send(0, 1.0, 2000, min_off=1, status=Sent.DELAYED, due_ns=4 * S),
        send(1, 1.1, 2000, min_off=1, status=Sent.COMMITTED, due_ns=4 * S, ret_ns=round(4.1 * S)),
        send(2, 1.2, 0, min_off=0, status=Sent.PLAIN),
        send(3, 1.3, 0, min_off=0, status=Sent.COMMITTED, outcome=Outcome.FAIL),
        *read(10, 3.2, 0),
        *receive(20, 4.5, (1000, 1), (1001, 1)),
        *read(30, 5.0, 3, 1000, 1001, min_off=1),
        *read(40, 5.0, 3, 1002, min_off=0),
        *receive(50, 7.0, (1000, 2), (1002, 1)),
        *read(60, 9.0, 3, 1002),
        *read(70, 10.0, 3, 1000, 1001, 1002, status=Read.ALL, cnt=1),
        *[replaced(op, **copies) for op in read(80, 10.0, 2, 1000, 1001, status=Read.ALL, cnt=1)],
        *[replaced(op, **copies) for op in read(90, 11.0, 2, 1000, 1001)],
        *receive(100, 12.0, cnt=1),
    ]
    return {op.op_id: op for op in rows}


replaced = msgspec.structs.replace


def test_a_clean_history_of_all_ways_is_valid() -> None:
    found = verdict(many())
    assert (found.validity, found.violations) == ("valid", ())
    assert found.counts == {"sends": 4, "reads": 5, "seen": 3, "received": 4, "judged": 11}


def received_late(rows: Rows) -> None:
    change(rows, 51, cnt=1)


def received_late_after_a_commit(rows: Rows) -> None:
    rows[53] = row(53, F.LIVING, 7, status=Read.MESSAGE, txn=50, value=1001, off=1, cnt=1)


def passed_behind_a_delay(rows: Rows) -> None:
    del rows[31]


def passed_behind_a_commit(rows: Rows) -> None:
    del rows[32]


def passed_by_tag(rows: Rows) -> None:
    del rows[41]


def other_tag(rows: Rows) -> None:
    rows[33] = row(33, F.LIVING, 5, status=Read.MESSAGE, txn=30, value=1002, off=2)


def copy_passed(rows: Rows) -> None:
    del rows[91]


def unreceived(rows: Rows) -> None:
    del rows[52]


def early(rows: Rows) -> None:
    rows[12] = row(12, F.LIVING, 3.2, status=Read.MESSAGE, txn=10, value=1000, off=0)


def before_its_commit(rows: Rows) -> None:
    rows[12] = row(12, F.LIVING, 3.2, status=Read.MESSAGE, txn=10, value=1001, off=1)


def rolled_back(rows: Rows) -> None:
    rows[74] = row(74, F.LIVING, 10, status=Read.MESSAGE, txn=70, value=1003, off=3)


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (received_late, lifetimes.EXPIRED),
        (received_late_after_a_commit, lifetimes.EXPIRED),
        (passed_behind_a_delay, lifetimes.PASSED),
        (passed_behind_a_commit, lifetimes.PASSED),
        (passed_by_tag, lifetimes.PASSED),
        (other_tag, lifetimes.OTHER_TAG),
        (copy_passed, lifetimes.COPY_PASSED),
        (unreceived, lifetimes.UNRECEIVED),
        (early, lifetimes.EARLY),
        (before_its_commit, lifetimes.EARLY),
        (rolled_back, lifetimes.REFUSED),
    ],
)
def test_a_planted_anomaly_of_all_ways_is_found(plant: Callable[[Rows], None], name: str) -> None:
    rows = many()
    plant(rows)
    assert {violation.name for violation in verdict(rows).violations} == {name}


def test_dates_may_be_wrong_twice_for_a_delayed_message() -> None:
    """It may be stored as much too early as it expires too early."""
    rows = many()
    change(rows, 30, ret_ns=5 * S)
    del rows[31]
    assert verdict(rows, clock_error_ns=round(0.49 * S)).violations
    assert verdict(rows, clock_error_ns=round(0.51 * S)).violations == ()


def test_a_message_that_comes_again_by_pop_may_have_expired() -> None:
    rows = many()
    rows[51] = replaced(rows[51], cnt=3)
    assert verdict(rows).violations == ()


@pytest.mark.parametrize(
    "fields", [{"cnt": 0}, {"group": "other"}, {"topic": "U"}], ids=["not whole", "none", "topic"]
)
def test_what_a_group_has_not_worked_off_is_not_demanded(fields: dict[str, Any]) -> None:
    rows = many()
    unreceived(rows)
    rows[100] = replaced(rows[100], **fields)
    found = {violation.name for violation in verdict(rows).violations}
    assert found == ({lifetimes.UNRECEIVED} if "group" in fields else set())


def test_what_a_group_gave_up_is_not_demanded() -> None:
    rows = many()
    unreceived(rows)
    for op in read(110, 13.0, 3, 1002, status=Read.ALL, cnt=1, topic="%DLQ%g"):
        rows[op.op_id] = replaced(op, topic="%DLQ%g")
    assert verdict(rows).violations == ()
