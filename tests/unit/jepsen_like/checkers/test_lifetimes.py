"""Histories of messages with a time to live: a clean one is valid, each anomaly is found."""

from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers import lifetimes
from dledger.jepsen_like.history.operation import NOTHING, F, History, Operation, Outcome, RunHeader
from tests.harness.judged import judged
from tests.harness.rows import row

S = 1_000_000_000
Rows = dict[int, Operation]


def row_s(op_id: int, f: F, at_s: float, **fields: Any) -> Operation:
    call = round(at_s * S)
    return row(op_id, f, call, call + 1_000_000, **fields)


def pull(op_id: int, at_s: float, off: int, found: int) -> Operation:
    """Pull from *off* on; the value at an offset is that of the send with this number."""
    return row_s(op_id, F.LIVING, at_s, off=off, max_off=found + 1, value=1000 + found)


def clean() -> Rows:
    """Sends of 0: without an end; 1: for 2 s; 2: for 5 s, its answer is lost; 3: without an end."""
    rows = [
        row_s(0, F.PERISHABLE, 1.0, value=1000, off=0),
        row_s(1, F.PERISHABLE, 1.1, value=1001, cnt=2000, off=1),
        row_s(2, F.PERISHABLE, 1.2, value=1002, cnt=5000, outcome=Outcome.INFO),
        row_s(3, F.PERISHABLE, 1.3, value=1003, off=3),
        pull(10, 2.0, 0, 0),
        pull(11, 2.1, 1, 1),
        pull(12, 2.2, 2, 2),
        pull(13, 9.0, 0, 0),
        pull(14, 9.1, 1, 3),
        row_s(20, F.LIVING, 2.0, value=1001, group="g"),
        row_s(21, F.LIVING, 9.0, group="g"),
    ]
    return {op.op_id: op for op in rows}


def verdict(rows: Rows, **settings: Any) -> Any:
    history = History(RunHeader("r"), [rows[key] for key in sorted(rows)])
    return judged(lifetimes.NAME, history, settled=True, **settings)


def changed(op_id: int, **fields: Any) -> Rows:
    rows = clean()
    return rows | {op_id: msgspec.structs.replace(rows[op_id], **fields)}


def test_a_clean_history_of_perishable_messages_is_valid() -> None:
    found = verdict(clean())
    assert (found.validity, found.violations) == ("valid", ())
    assert found.counts == {"sends": 4, "reads": 7, "found": 6}


@pytest.mark.parametrize(
    ("rows", "name", "ids"),
    [
        pytest.param(clean() | {15: pull(15, 4.0, 1, 1)}, lifetimes.EXPIRED, (1, 15), id="late"),
        pytest.param(
            clean() | {15: pull(15, 9.0, 2, 2)}, lifetimes.EXPIRED, (2, 15), id="late, unknown"
        ),
        pytest.param(changed(21, value=1001), lifetimes.EXPIRED, (1, 21), id="late, received"),
        pytest.param(changed(12, off=1), lifetimes.PASSED, (1, 12), id="passed within its time"),
        pytest.param(changed(12, max_off=4), lifetimes.PASSED, (3, 12), id="passed without an end"),
        pytest.param(changed(14, value=NOTHING, max_off=3), lifetimes.LOST, (3,), id="lost"),
    ],
)
def test_a_planted_anomaly_of_times_to_live_is_found(
    rows: Rows, name: str, ids: tuple[int, ...]
) -> None:
    assert [(each.name, each.operations) for each in verdict(rows).violations] == [(name, ids)]


def test_what_clocks_may_hide_proves_nothing() -> None:
    rows = changed(12, off=1) | {15: pull(15, 4.0, 1, 1)}
    assert len(verdict(rows).violations) == 2
    assert verdict(rows, clock_error_ns=3 * S).violations == ()


def test_reads_between_both_bounds_prove_nothing() -> None:
    send = clean()[1]
    bounds = {"call_ns": send.ret_ns + 2 * S, "ret_ns": send.call_ns + 2 * S}
    assert verdict(changed(11, **bounds)).violations == ()
    assert verdict(changed(14, **bounds)).violations == ()
