"""Histories of clients with quotas: a clean one is valid, each anomaly is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers import quotas
from dledger.jepsen_like.checkers.quotas import Act, Row
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    QUOTA_EXCEEDED,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
)
from tests.harness.judged import judged

S = 1_000_000_000
MS = 1_000_000
Rows = dict[int, Operation]


def row(op_id: int, f: F, at_s: float, took_s: float = 0.001, **fields: Any) -> Operation:
    call = round(at_s * S)
    outcome = fields.pop("outcome", Outcome.OK)
    ret = NEVER if outcome == Outcome.INFO else call + round(took_s * S)
    fields = {"topic": "T", "group": "a", "txn": 0, **fields}
    return Operation(op_id, op_id, 1, NOTHING, f, outcome, call, ret, **fields)


def put(op_id: int, at_s: float, messages: int, size_bytes: int = 0, **more: Any) -> Operation:
    fields = {"status": Act.PUT, "cnt": messages, "off": size_bytes, **more}
    return row(op_id, F.QUOTA, at_s, **fields)


def send(op_id: int, at_s: float, took_s: float = 0.001, **more: Any) -> Operation:
    fields = {"status": Row.SEND, "queue": 0, "value": 1000 + op_id, "cnt": 1, "min_off": 100}
    return row(op_id, F.LIMITED, at_s, took_s, **(fields | more))


def refused(op_id: int, at_s: float, took_s: float = 1.0, **more: Any) -> Operation:
    return send(op_id, at_s, took_s, outcome=Outcome.FAIL, err=QUOTA_EXCEEDED, **more)


def found(op_id: int, value: int, off: int, queue: int = 0) -> Operation:
    fields = {"status": Row.FOUND, "value": value, "off": off, "queue": queue}
    return row(op_id, F.LIMITED, 90.0, **fields)


def burst() -> list[Operation]:
    """At two a second, from full: two at once, two late, one refused."""
    return [
        send(10, 2.0),
        send(11, 2.0),
        send(12, 2.0, 0.501),
        send(13, 2.0, 1.001),
        refused(14, 2.0),
    ]


def clean() -> Rows:
    """Two a second for client a; four a second from 10 s on; none for b, which has no quota."""
    rows = [
        put(0, 1.0, 2),
        *burst(),
        send(20, 2.5, outcome=Outcome.INFO),
        put(30, 10.0, 4),
        *(send(31 + number, 11.0) for number in range(4)),
        *(send(40 + number, 12.0, group="b") for number in range(8)),
        row(60, F.QUOTA, 80.0, group="", status=Act.LISTED),
        row(61, F.QUOTA, 80.0, status=Act.LISTED, cnt=4, off=0),
        *(
            found(100 + number, 1000 + op_id, number)
            for number, op_id in enumerate((10, 11, 12, 13, 31, 32, 33, 34, *range(40, 48)))
        ),
        row(200, F.LIMITED, 91.0, status=Row.END, cnt=1),
    ]
    return {op.op_id: op for op in rows}


def verdict(rows: Rows, **settings: Any) -> Any:
    history = History(RunHeader("r"), [rows[key] for key in sorted(rows)])
    return judged(quotas.NAME, history, **{"settled": True, **settings})


def change(rows: Rows, op_id: int, **fields: Any) -> None:
    rows[op_id] = msgspec.structs.replace(rows[op_id], **fields)


def add(rows: Rows, *more: Operation) -> None:
    rows |= {op.op_id: op for op in more}


def names(rows: Rows, **settings: Any) -> list[str]:
    return [violation.name for violation in verdict(rows, **settings).violations]


def test_a_clean_history_of_quotas_is_valid() -> None:
    judgement = verdict(clean())
    assert (judgement.validity, judgement.violations) == ("valid", ())
    assert judgement.counts == {"clients": 2, "changes": 2, "acknowledged": 8, "refused": 1}


def early_answer(rows: Rows) -> None:
    change(rows, 13, ret_ns=rows[13].call_ns + 900 * MS)


def one_more(rows: Rows) -> None:
    add(rows, send(15, 2.1, 0.89), found(120, 1015, 30))


def batch_as_one(rows: Rows) -> None:
    change(rows, 10, cnt=2, value=5000)
    add(rows, found(120, 5000, 30), found(121, 5001, 31))


def change_without_effect(rows: Rows) -> None:
    change(rows, 30, cnt=1)
    change(rows, 61, cnt=1)


def refused_at_the_beginning(rows: Rows) -> None:
    add(rows, refused(8, 1.5))


def refused_again_after_a_rest(rows: Rows) -> None:
    add(rows, refused(21, 6.0), refused(22, 6.1))


def refused_by_what_was_raised(rows: Rows) -> None:
    add(rows, *(send(21 + number, 9.7, took) for number, took in enumerate((0, 0, 0.501, 1.001))))
    add(rows, *(found(120 + number, 1021 + number, 30 + number) for number in range(4)))
    add(rows, refused(39, 10.1))


def refused_without_quota(rows: Rows) -> None:
    add(rows, refused(49, 12.5, group="b"))


def refused_by_the_quota_of_another(rows: Rows) -> None:
    change(rows, 14, group="b", txn=3)


def refused_by_what_another_process_counted(rows: Rows) -> None:
    change(rows, 14, txn=1)
    change(rows, 20, txn=0)


def refused_before_its_second(rows: Rows) -> None:
    change(rows, 14, ret_ns=rows[14].call_ns + 10 * MS)


def refused_is_stored(rows: Rows) -> None:
    add(rows, found(120, 1014, 30))


def acknowledged_is_lost(rows: Rows) -> None:
    del rows[100]


def stored_twice(rows: Rows) -> None:
    add(rows, found(120, 1010, 30))


def forgotten(rows: Rows) -> None:
    del rows[61]


def old_in_the_end(rows: Rows) -> None:
    change(rows, 61, cnt=2)


def deleted_is_there(rows: Rows) -> None:
    change(rows, 30, status=Act.DELETE, cnt=0, off=NOTHING)


@pytest.mark.parametrize(
    ("plant", "name", "operation"),
    [
        (early_answer, quotas.ABOVE, 13),
        (one_more, quotas.ABOVE, 10),
        (batch_as_one, quotas.ABOVE, 10),
        (change_without_effect, quotas.ABOVE, 31),
        (refused_at_the_beginning, quotas.UNSPENT, 8),
        (refused_again_after_a_rest, quotas.UNSPENT, 21),
        (refused_by_what_was_raised, quotas.UNSPENT, 39),
        (refused_without_quota, quotas.UNSPENT, 49),
        (refused_by_the_quota_of_another, quotas.UNSPENT, 14),
        (refused_by_what_another_process_counted, quotas.UNSPENT, 14),
        (refused_before_its_second, quotas.HASTY, 14),
        (refused_is_stored, quotas.STORED, 14),
        (acknowledged_is_lost, quotas.LOST, 10),
        (stored_twice, quotas.TWICE, 10),
        (forgotten, quotas.OTHERWISE, 30),
        (old_in_the_end, quotas.OTHERWISE, 30),
        (deleted_is_there, quotas.OTHERWISE, 30),
    ],
)
def test_a_planted_anomaly_of_quotas_is_found(
    plant: Callable[[Rows], None], name: str, operation: int
) -> None:
    rows = clean()
    plant(rows)
    judgement = verdict(rows)
    assert judgement.validity == "invalid"
    assert name in [violation.name for violation in judgement.violations]
    assert operation in [op for v in judgement.violations for op in v.operations]


def test_more_bytes_than_the_quota_allows_are_found() -> None:
    rows = {op.op_id: op for op in (put(0, 1.0, 0, 150), send(1, 2.0), send(2, 2.0, 0.2))}
    assert names(rows, settled=False) == [quotas.ABOVE]
    change(rows, 2, ret_ns=rows[2].call_ns + 400 * MS)
    assert names(rows, settled=False) == []


def test_a_new_process_begins_with_one_burst() -> None:
    rows = {op.op_id: op for op in (put(0, 1.0, 2), *burst())}
    add(rows, *(send(20 + number, 3.1, txn=1) for number in range(2)))
    assert names(rows, settled=False) == []
    add(rows, send(22, 3.1, txn=1))
    assert names(rows, settled=False) == [quotas.ABOVE]


def test_sends_while_a_quota_changes_are_not_above_it() -> None:
    rows = {op.op_id: op for op in (put(0, 1.0, 20), put(1, 3.0, 2))}
    add(rows, *(send(10 + number, 2.9995, 0.003) for number in range(15)))
    assert names(rows, settled=False) == []


def test_a_refusal_may_be_due_to_sends_of_unknown_outcome() -> None:
    rows = {op.op_id: op for op in (put(0, 1.0, 2), refused(9, 9.0))}
    add(rows, *(send(1 + number, 2.0, outcome=Outcome.INFO) for number in range(3)))
    assert names(rows, settled=False) == [quotas.UNSPENT]
    add(rows, send(4, 2.0, outcome=Outcome.INFO))
    assert names(rows, settled=False) == []


def test_a_leader_that_was_deposed_refuses_by_an_old_quota() -> None:
    """It knows the newer one when it has acknowledged something that came behind it."""
    rows = {op.op_id: op for op in (put(0, 1.0, 2), *burst(), put(20, 2.2, 40, txn=1))}
    add(rows, refused(21, 2.3))
    assert names(rows, settled=False) == []
    add(rows, send(19, 2.25))
    assert names(rows, settled=False) == [quotas.UNSPENT]


def test_a_lower_quota_begins_without_debts_or_burst() -> None:
    rows = {op.op_id: op for op in (put(0, 1.0, 20), put(9, 3.0, 2), send(10, 3.1))}
    add(rows, send(11, 3.1, 0.501), refused(12, 3.1))
    assert names(rows, settled=False) == []
    del rows[11]
    assert names(rows, settled=False) == [quotas.UNSPENT]


def test_after_an_unknown_change_nothing_of_a_client_is_judged() -> None:
    rows = clean()
    refused_again_after_a_rest(rows)
    change_without_effect(rows)
    forgotten(rows)
    add(rows, put(19, 2.2, 7, outcome=Outcome.INFO))
    assert names(rows) == []


def test_a_clock_that_runs_fast_lets_more_pass() -> None:
    rows = clean()
    early_answer(rows)
    assert names(rows, pace_error_ns=200 * MS) == []


def test_a_request_larger_than_two_seconds_of_the_quota_may_pass() -> None:
    rows = {op.op_id: op for op in (put(0, 1.0, 2), send(1, 2.0, 1.001, cnt=9))}
    add(rows, refused(2, 4.0))
    assert names(rows, settled=False) == []


def test_what_was_acknowledged_is_lost_only_when_all_was_read() -> None:
    rows = clean()
    acknowledged_is_lost(rows)
    assert names(rows, settled=False) == []
    change(rows, 200, cnt=0)
    assert names(rows) == []


def test_quotas_without_sends_prove_nothing() -> None:
    judgement = verdict({0: put(0, 1.0, 2), 60: row(60, F.QUOTA, 80.0, group="")}, settled=False)
    assert judgement.validity == "unknown"
