"""Histories of messages with a time to live: a clean one is valid, each anomaly is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jepsen_like.checkers import lifetimes
from jepsen_like.checkers.lifetimes import Read
from jepsen_like.history.operation import NEVER, NOTHING, F, History, Operation, Outcome, RunHeader
from tests.harness.judged import judged

S = 1_000_000_000
Rows = dict[int, Operation]


def row(op_id: int, f: F, at_s: float, **fields: Any) -> Operation:
    call = round(at_s * S)
    outcome = fields.pop("outcome", Outcome.OK)
    ret = NEVER if outcome == Outcome.INFO else call + 1_000_000
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
    assert found.counts == {"sends": 4, "reads": 3, "seen": 3, "judged": 9}


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
