"""Histories of exactly-once steps: clean ones are valid, and each anomaly is found and named."""

from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers.steps import (
    AHEAD,
    IN_PARTS,
    LOST,
    NOT_STORED,
    OVERLAP,
    REFUSED,
    STRANGER,
    TWICE,
    check_history,
)
from dledger.jepsen_like.checkers.verdict import REPORTED_MAX
from dledger.jepsen_like.history.operation import F, Operation, Outcome
from tests.harness.rows import row


def group_row(op_id: int, f: F, **fields: Any) -> Operation:
    return row(op_id, f, op_id, op_id + 1, **{"topic": "T", "group": "g", **fields})


def step(op_id: int, off: int, to: int, outcome: Outcome = Outcome.OK, **more: Any) -> Operation:
    fields = {"off": off, "min_off": off, "max_off": to, **more}
    return group_row(op_id, F.STEP, outcome=outcome, **fields)


def output(op_id: int, of: int, off: int, **more: Any) -> Operation:
    return group_row(op_id, F.STEP_FOUND, txn=of, off=off, **more)


def head(op_id: int, committed: int, *, is_whole: bool = True, **more: Any) -> Operation:
    return group_row(op_id, F.STEP_FOUND, max_off=committed, cnt=int(is_whole), **more)


CLEAN = (
    step(0, 0, 2),
    step(1, 0, 3, Outcome.FAIL),
    step(2, 2, 4, Outcome.INFO),
    step(3, 2, 3, Outcome.INFO),
    step(4, 4, 5),
    step(5, 0, 1, queue=1),
    output(20, 0, 0),
    output(21, 0, 1),
    output(22, 2, 2),
    output(23, 2, 3),
    output(24, 4, 4),
    output(25, 5, 0, queue=1),
    head(30, 5),
    head(31, 1, queue=1),
)
"""One overtaken, one whose answer was lost and that is stored, one that is not, and two queues."""


def names(*rows: Operation) -> set[str]:
    return {violation.name for violation in check_history(rows).violations}


def without(*op_ids: int) -> tuple[Operation, ...]:
    return tuple(op for op in CLEAN if op.op_id not in op_ids)


def test_clean_history_is_valid() -> None:
    verdict = check_history(CLEAN)
    assert (verdict.validity, verdict.violations) == ("valid", ())
    assert verdict.counts == {"steps": 6, "stored": 3, "overtaken": 1, "outputs": 6}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ((*without(22, 23), head(40, 5)), {LOST}),
        ((*CLEAN, output(40, 0, 1)), {TWICE}),
        ((*CLEAN, step(6, 5, 6, Outcome.INFO), output(40, 6, 5)), {AHEAD}),
        (without(21), {IN_PARTS, LOST}),
        (without(23), {IN_PARTS, LOST}),
        (without(24), {NOT_STORED, LOST}),
        ((*without(24, 30), head(40, 4)), {NOT_STORED}),
        ((*CLEAN, output(40, 1, 2)), {REFUSED, OVERLAP, TWICE}),
        ((*without(22, 23), output(40, 3, 2), output(41, 1, 3)), {STRANGER, REFUSED, OVERLAP}),
        ((*CLEAN, output(40, 3, 2)), {OVERLAP, TWICE}),
        ((*CLEAN, step(6, 1, 2, Outcome.OK), output(40, 6, 1)), {OVERLAP, TWICE}),
        ((*CLEAN, output(40, 77, 4)), {STRANGER, TWICE}),
        ((*CLEAN, output(40, 5, 4)), {STRANGER, TWICE}),
    ],
)
def test_an_anomaly_is_found(rows: tuple[Operation, ...], found: set[str]) -> None:
    assert names(*rows) == found


def test_ends_far_away_are_judged_at_once() -> None:
    far = 1 << 62
    rows = (step(0, 0, far), step(1, far, far + 2, min_off=far + 1), output(2, 0, 0), head(3, far))
    assert names(*rows) == {LOST, IN_PARTS, NOT_STORED}


def test_what_retention_took_before_a_step_is_not_lost() -> None:
    skipping = step(0, 0, 6, min_off=4)
    rows = (skipping, step(1, 2, 3, Outcome.INFO), output(2, 0, 4), output(3, 0, 5), head(4, 8))
    found = [v.detail.split(",")[0] for v in check_history(rows).violations if v.name == LOST]
    assert found == ["offset 6", "offset 7"]


def test_steps_overlap_behind_a_longer_one() -> None:
    rows = (step(0, 0, 9), step(1, 2, 3), step(2, 8, 10))
    pairs = {each.operations for each in check_history(rows).violations if each.name == OVERLAP}
    assert pairs == {(0, 1), (0, 2)}


TWO_QUEUES = (
    step(0, 0, 2, Outcome.INFO, txn=0),
    step(1, 0, 1, Outcome.INFO, txn=0, queue=1),
    output(10, 0, 0),
    output(11, 0, 1),
    output(12, 1, 0, queue=1),
    head(20, 2),
    head(21, 1, queue=1),
)


def test_step_over_two_queues_is_stored_in_both_or_neither() -> None:
    assert check_history(TWO_QUEUES).validity == "valid"
    neither = (*TWO_QUEUES[:2], head(20, 0), head(21, 0, queue=1))
    assert check_history(neither).validity == "valid"
    in_one = (*TWO_QUEUES[:4], head(20, 2), head(21, 0, queue=1))
    assert names(*in_one) == {IN_PARTS}
    unread = (*TWO_QUEUES[:4], head(20, 2, is_whole=False), head(21, 0, queue=1, is_whole=False))
    assert names(*unread) == set()


def test_messages_that_retention_removed_need_no_output() -> None:
    rows = (step(0, 0, 6, min_off=4), output(10, 0, 4), output(11, 0, 5), head(20, 6))
    assert check_history(rows).validity == "valid"
    refused = msgspec.structs.replace(rows[0], outcome=Outcome.FAIL)
    assert names(refused, head(20, 4)) == {LOST}


def test_outputs_that_retention_removed_are_not_missed() -> None:
    assert names(*without(20, 21, 30), head(40, 5, is_whole=False)) == set()


def test_without_a_final_read_answers_are_compared() -> None:
    assert check_history((step(0, 0, 2), step(1, 2, 4))).validity == "valid"
    assert names(step(0, 0, 2), step(1, 1, 4)) == {OVERLAP}


def test_a_history_without_steps_is_unknown() -> None:
    assert check_history(()).validity == "unknown"


def test_few_violations_of_a_kind_are_named() -> None:
    assert len(check_history((step(0, 0, 0), head(9, 100))).violations) == REPORTED_MAX
