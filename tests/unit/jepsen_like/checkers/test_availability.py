"""Answers while nothing is wrong: what is demanded, and when."""

from itertools import count

import pytest

from dledger.jepsen_like.checkers import availability
from dledger.jepsen_like.checkers.availability import DAMAGED_ERROR, SILENT_MAX_NS
from dledger.jepsen_like.checkers.fault_record import (
    ELECTION_NS,
    ELECTIONS_AFTER,
    HEALED,
    ROLE,
    SERVED,
    record_of,
    recovers_within_ns,
)
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.columns import ops_table
from dledger.jepsen_like.history.operation import (
    NEVER,
    Event,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
)
from dledger.jepsen_like.plans.plan import Kind
from tests.harness.present import present
from tests.harness.rows import row

S = 1_000_000_000
KILL_BOUND_S = recovers_within_ns("kill") // S


def history_of(rows: list[Operation], *events: Event) -> History:
    return History(RunHeader("r"), rows, list(events))


def judged(history: History) -> Verdict | None:
    record = record_of(history.events)
    rows = ops_table("r", history.operations)
    return None if record is None else availability.check_table(rows, record)


def names(history: History) -> list[tuple[str, tuple[int, ...]]]:
    verdict = present(judged(history))
    return [(violation.name, violation.operations) for violation in verdict.violations]


class Rows:
    """Rows by time in seconds."""

    def __init__(self) -> None:
        self.rows: list[Operation] = []
        self._ids = count()

    def add(
        self, at_s: float, outcome: Outcome = Outcome.OK, f: F = F.SEND, err: str = ""
    ) -> Operation:
        at = int(at_s * S)
        op = row(next(self._ids), f, at, at + 1, outcome=outcome, err=err)
        self.rows.append(op)
        return op


def served(at_s: float) -> Event:
    return Event(int(at_s * S), int(at_s * S), SERVED)


def fault(begin_s: float, end_s: float, kind: str = "kill") -> Event:
    return Event(int(begin_s * S), int(end_s * S), kind, "leader", "n0")


def test_a_history_without_the_mark_is_not_judged() -> None:
    rows = Rows()
    rows.add(0, Outcome.INFO)
    rows.add(1, Outcome.INFO)
    assert judged(history_of(rows.rows)) is None
    assert judged(history_of(rows.rows, fault(0, 1), Event(2, 2, HEALED))) is None
    assert judged(history_of([], served(0))) is None


@pytest.mark.parametrize(("at_s", "counts"), [(90.0, True), (120.0, False), (99.0, False)])
def test_unknown_outcomes_count_away_from_faults(at_s: float, counts: bool) -> None:
    rows = Rows()
    rows.add(0)
    first, second = rows.add(at_s, Outcome.INFO), rows.add(at_s + 0.5, Outcome.INFO)
    history = history_of(rows.rows, fault(118, 130), served(200))
    expected = [(availability.UNDECIDED, (first.op_id, second.op_id))] if counts else []
    assert names(history) == expected


def test_one_unknown_outcome_in_a_hundred_is_allowed() -> None:
    rows = Rows()
    for at in range(300):
        rows.add(at, Outcome.INFO if at in (7, 8, 9) else Outcome.OK)
    assert names(history_of(rows.rows, served(-100))) == []
    rows.rows[10].outcome, rows.rows[10].ret_ns = Outcome.INFO, NEVER
    assert names(history_of(rows.rows, served(-100))) == [(availability.UNDECIDED, (7, 8))]


def test_a_damaged_answer_is_counted_and_named() -> None:
    rows = Rows()
    rows.add(0)
    rows.add(105, Outcome.FAIL, F.PULL, DAMAGED_ERROR)
    bad = rows.add(60, Outcome.FAIL, F.PULL, DAMAGED_ERROR)
    history = history_of(rows.rows, fault(100, 101), served(102))
    verdict = present(judged(history))
    assert verdict.counts["damaged"] == 2
    assert names(history) == [(availability.DAMAGED, (bad.op_id,))]


@pytest.mark.parametrize("err", ["BrokerBusyError", "MessageIllegalError"])
def test_sends_refused_one_after_the_other_are_silence(err: str) -> None:
    rows = Rows()
    rows.add(0)
    begin_s = 50 + KILL_BOUND_S
    step_s = SILENT_MAX_NS / S / 2 + 0.1
    for place in range(3):
        rows.add(begin_s + place * step_s, Outcome.FAIL, F.SEND, err)
    history = history_of(rows.rows, fault(40, 50), served(1000))
    is_silent = err == "BrokerBusyError"
    assert names(history) == ([(availability.SILENT, (1, 3))] if is_silent else [])
    rows.add(begin_s + step_s)
    assert names(history) == []


def test_the_bound_after_a_fault_depends_on_its_kind() -> None:
    assert set(ELECTIONS_AFTER) <= {kind.value for kind in Kind}
    events = [fault(0, 10, "reset"), served(1000)]
    record = present(record_of(events))
    assert record.quiet(0, 500 * S) == [(10 * S + recovers_within_ns("reset"), 500 * S)]
    events[0].kind = "wipe"
    record = present(record_of(events))
    assert record.quiet_ns(0, 500 * S) == 490 * S - recovers_within_ns("wipe")
    events[0].kind = ROLE
    record = present(record_of(events))
    assert record.quiet_ns(0, 500 * S) == 500 * S


def test_all_troubles_end_an_election_after_members_serve() -> None:
    record = present(record_of([fault(0, 9), Event(9 * S, 9 * S, HEALED), served(11)]))
    assert record.troubles == ((0, 11 * S + ELECTION_NS),)
