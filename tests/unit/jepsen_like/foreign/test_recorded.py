"""Rows of ours as a history of Jepsen's, and back."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.foreign.judged import judge_text
from dledger.jepsen_like.foreign.log import step_of
from dledger.jepsen_like.foreign.recorded import lines, read_text
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from tests.harness.clean_histories import clean_history


def reported(seed: int) -> tuple[list[Operation], str]:
    rows = clean_history(seed).operations
    return rows, "\n".join(lines(rows))


@pytest.mark.parametrize("seed", range(4))
def test_what_was_sent_and_found_comes_back(seed: int) -> None:
    rows, text = reported(seed)
    steps = [step_of(one) for one in read_text(text) if one.f in ("send", "poll")]
    ok = [op for op in rows if op.outcome == Outcome.OK]
    assert {(m.key, m.off, m.value) for step in steps for m in step.polls} == {
        (f"{op.topic}/{op.queue}", off, value)
        for op in ok
        if op.f == F.PULL
        for off, value in enumerate(op.values, op.off)
    }
    assert {(m.key, m.off, m.value) for s in steps if s.attempt.kind == "ok" for m in s.sends} == {
        (f"{op.topic}/{op.queue}", op.off, op.value)
        for op in ok
        if op.f == F.SEND and op.off != NOTHING
    }


def test_a_good_history_is_valid_and_a_changed_value_is_not() -> None:
    rows, text = reported(3)
    verdict = judge_text(text).verdict
    assert (verdict.checker, verdict.validity) == ("kafka", "valid")
    pull = next(op for op in rows if op.f == F.PULL and len(op.values) > 1)
    pull.values = pull.values[1:2] + pull.values[0:1] + pull.values[2:]
    broken = judge_text("\n".join(lines(rows))).verdict
    assert {"inconsistent-offsets", "duplicate"} <= {one.name for one in broken.violations}


def test_a_send_without_an_offset_is_of_unknown_outcome() -> None:
    op = Operation(0, 0, 3, 0, F.SEND, Outcome.OK, 10, 20, "orders", 1, value=7)
    again = Operation(1, 1, 3, 0, F.SEND, Outcome.FAIL, 30, 40, "orders", 1, value=8)
    first, second = read_text("\n".join(lines([op, again])))
    assert (first.kind, second.kind) == ("info", "fail")
    assert first.process != second.process
