"""The queue checker by hand: what proves nothing, what is undecided, and rare shapes of a loss."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.kernel.facts import REPORTED_MAX
from dledger.jepsen_like.checkers.kernel.tables import MemorySource
from dledger.jepsen_like.checkers.verdict import Verdict, merge
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    F,
    History,
    Level,
    Operation,
    Outcome,
    RunHeader,
)
from tests.harness.judged import judged
from tests.harness.queue_histories import TOPIC, random_history
from tests.harness.rows import row


def check_history(operations: list[Operation]) -> Verdict:
    return judged(queue_log.NAME, operations)


def queue_row(op_id: int, f: F, call: int, ret: int, **fields: Any) -> Operation:
    return row(op_id, f, call, ret, **{"process": op_id, "topic": TOPIC, **fields})


def send(op_id: int, off: int, call: int, ret: int, *, outcome: Outcome = Outcome.OK) -> Operation:
    off = off if outcome is Outcome.OK else NOTHING
    return queue_row(op_id, F.SEND, call, ret, outcome=outcome, off=off, value=100 + op_id)


def pull(op_id: int, off: int, values: tuple[int, ...], end: int, call: int, ret: int) -> Operation:
    fields = {"off": off, "cnt": len(values), "max_off": end, "min_off": 0, "values": values}
    return queue_row(op_id, F.PULL, call, ret, **fields)


def max_offset(op_id: int, end: int, call: int, ret: int) -> Operation:
    return queue_row(op_id, F.MAX_OFFSET, call, ret, max_off=end)


INFO, FAIL = Outcome.INFO, Outcome.FAIL


def transaction(value: int, end_ret: int) -> list[Operation]:
    fields = {"process": 1, "value": value, "txn": 1}
    end = queue_row(11, F.END_TRANSACTION, 20, end_ret, decision=Decision.COMMIT, **fields)
    return [queue_row(10, F.HALF, 0, 10, **fields), end]


ABSENT = {
    "a transaction": ([*transaction(100, 30), max_offset(2, 0, 40, 50)], (2, 11)),
    "a transaction and a send": (
        [*transaction(99, 30), send(0, 0, 40, 50), max_offset(2, 1, 60, 70)],
        (2, 11),
    ),
}


@pytest.mark.parametrize("name", ABSENT)
def test_an_acknowledged_send_that_a_read_proves_absent(name: str) -> None:
    operations, witnesses = ABSENT[name]
    verdict = check_history(operations)
    assert [(v.name, v.operations) for v in verdict.violations] == [
        (queue_log.STALE_READ, witnesses)
    ]


def test_send_refused_then_stored_is_no_aborted_read() -> None:
    refused, stored = send(0, 0, 0, 10, outcome=FAIL), send(1, 0, 20, 30)
    stored.value = refused.value
    read = pull(2, 0, (refused.value,), 1, 40, 50)
    assert check_history([refused, stored, read]).is_valid
    unknown = send(1, 0, 20, 30, outcome=INFO)
    unknown.value = refused.value
    assert check_history([refused, unknown, read]).is_valid
    stale = max_offset(3, 0, 60, 70)
    assert check_history([refused, stored, read, stale]).validity == "invalid"


def test_a_value_sent_twice_may_be_there_twice() -> None:
    rows = [send(0, 0, 0, 10), send(1, 1, 20, 30), pull(2, 0, (100, 100), 2, 40, 50)]
    rows[1].value = 100
    (verdict,) = [v for v in check_everything(of_rows(rows)) if v.checker == queue_log.NAME]
    assert verdict.validity == "unknown"
    assert "several sends" in verdict.reason
    rows[2].values = (100, 100, 100)
    rows[2].cnt = rows[2].max_off = 3
    rows.append(send(5, 0, 0, 10, outcome=INFO))
    (verdict,) = [v for v in check_everything(of_rows(rows)) if v.checker == queue_log.NAME]
    assert {v.name for v in verdict.violations} == {queue_log.DUPLICATE}


def of_rows(rows: list[Operation]) -> History:
    return History(RunHeader("r"), rows)


def test_an_empty_pull_below_its_own_end_contradicts_itself() -> None:
    rows = [send(0, 0, 0, 10), pull(1, 0, (), 1, 20, 30)]
    verdict = check_history(rows)
    assert [(v.name, v.operations) for v in verdict.violations] == [
        (queue_log.SELF_CONTRADICTION, (1,))
    ]
    rows[1].min_off = 1  # it was removed
    assert check_history(rows).is_valid
    rows[1].min_off, rows[1].off = 0, 1
    assert check_history(rows).is_valid


def test_a_local_read_proves_values_and_no_times() -> None:
    behind = pull(1, 0, (), 0, 20, 30)
    behind.level = Level.LOCAL
    assert check_history([send(0, 0, 0, 10), behind]).is_valid
    wrong = pull(2, 0, (777,), 1, 20, 30)
    wrong.level = Level.LOCAL
    assert check_history([send(0, 0, 0, 10), wrong]).validity == "invalid"


def test_values_of_a_pull_without_an_answer_prove_nothing() -> None:
    pending = pull(1, 0, (777,), 1, 20, NEVER)
    pending.outcome = INFO
    assert check_history([send(0, 0, 0, 10), pending]).is_valid


def test_nothing_to_check_is_unknown_and_never_valid() -> None:
    assert check_history([]).validity == "unknown"
    assert check_history([send(0, 0, 0, 10, outcome=INFO)]).validity == "unknown"
    good = check_history([send(0, 0, 0, 10)])
    assert merge([good, check_history([])]).validity == "unknown"
    assert merge([]).validity == "unknown"
    assert merge([good]).validity == "valid"


def test_many_violations_are_reported_a_few_at_a_time() -> None:
    operations = [send(at, 999 - at, at * 10, at * 10 + 5) for at in range(1000)]
    verdict = check_history(operations)
    assert 1 <= len(verdict.violations) <= REPORTED_MAX


def test_one_offset_acknowledged_twice_fills_no_other() -> None:
    rows = [send(0, 1, 0, 10), send(1, 1, 5, 20)]
    rows[1].value = rows[0].value
    expected = [queue_log.OF_NO_SEND]
    assert [violation.name for violation in check_history(rows).violations] == expected


def test_values_sent_twice_are_judged() -> None:
    """Such a queue may be undecided, and no checker breaks over it."""
    for seed in range(300):
        rng = random.Random(seed)
        rows = random_history(rng, 7)
        sends = [op for op in rows if op.f == F.SEND]
        if len(sends) < 2:
            continue
        first, again = rng.sample(sends, 2)
        for op in rows:
            op.values = tuple(first.value if v == again.value else v for v in op.values)
        again.value = first.value
        verdict = check_everything(History(RunHeader(""), rows))[0]
        assert verdict.checker == queue_log.NAME, f"seed {seed}: {verdict.reason}"
        assert "Error" not in verdict.reason, f"seed {seed}"


def test_kernel_that_breaks_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("no such offset")

    monkeypatch.setattr(MemorySource, "queues", broken)
    (verdict,) = check_everything(History(RunHeader(""), [send(0, 0, 0, 10)]))
    assert (verdict.validity, verdict.reason) == ("unknown", "IndexError: no such offset")
