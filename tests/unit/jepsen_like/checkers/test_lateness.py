"""A delayed message has a latest time: due, a bound, and the time in which something was wrong."""

from __future__ import annotations

import random

import pytest

from dledger.jepsen_like.checkers import delayed
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.fault_record import SERVED, FaultRecord, recovers_within_ns
from dledger.jepsen_like.history.operation import (
    NOTHING,
    Event,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
)
from tests.oracles.lateness import MS, late_pairs

S = 1_000_000_000


def row(op_id: int, f: F, at_ms: int, for_ms: int = 1) -> Operation:
    at = at_ms * MS
    return Operation(op_id, op_id, 1, NOTHING, f, Outcome.OK, at, at + for_ms * MS, "t", 0)


def history_at(missed_s: int, *events: Event) -> History:
    """A message that is due at 11 s, and a read at *missed_s* that does not find it."""
    send, missed, seen = row(0, F.SEND, 0), row(1, F.MAX_OFFSET, 1000 * missed_s), row(2, F.PULL, 0)
    send.value, send.due_ns, send.ret_ns = 100, 10 * S, 1 * S
    missed.max_off = 0
    seen.call_ns = seen.ret_ns = missed.ret_ns + 200 * S
    seen.off, seen.cnt, seen.values = 0, 1, (100,)
    served_ns = seen.ret_ns + S
    return History(RunHeader("r"), [send, missed, seen], [*events, Event(served_ns, 0, SERVED)])


def late(history: History, bound_s: int | None = 5) -> list[tuple[int, ...]]:
    bound_ns = None if bound_s is None else bound_s * S
    found = check_everything(history, settled=False, late_quiet_max_ns=bound_ns)
    (verdict,) = (verdict for verdict in found if verdict.checker == delayed.NAME)
    assert {violation.name for violation in verdict.violations} <= {delayed.LATE}
    return [violation.operations for violation in verdict.violations]


def test_lateness_without_a_fault_counts_from_the_due_time() -> None:
    assert late(history_at(17)) == [(0, 1)]
    assert late(history_at(16)) == []
    assert late(history_at(17), None) == []


def test_lateness_leaves_out_what_a_fault_takes() -> None:
    fault = Event(12 * S, 20 * S, "kill", "leader", "n0")
    well_s = 20 + recovers_within_ns("kill") // S
    assert late(history_at(well_s + 4, fault)) == []
    assert late(history_at(well_s + 5, fault)) == [(0, 1)]


def test_lateness_is_not_judged_without_a_record_of_faults() -> None:
    history = history_at(17)
    history.events = []
    assert late(history) == []


@pytest.mark.parametrize("seed", range(200))
def test_random_lateness_is_that_of_every_pair(seed: int) -> None:
    rng = random.Random(f"late {seed}")
    rows: list[Operation] = []
    for op_id in range(rng.randrange(2, 30)):
        op = row(op_id, rng.choice((F.SEND, F.PULL, F.MAX_OFFSET)), rng.randrange(300), 5)
        if op.f == F.SEND:
            op.value, op.due_ns = op_id, op.call_ns + rng.randrange(50) * MS
        elif op.f == F.PULL:
            op.off, op.values = rng.randrange(9), (rng.randrange(op_id + 1),)
            op.cnt = 1
        else:
            op.max_off = rng.randrange(9)
        rows.append(op)
    troubles: list[tuple[int, int]] = []
    at_ms = 0
    while rng.random() < 0.7:
        begin_ms = at_ms + rng.randrange(100)
        at_ms = begin_ms + rng.randrange(1, 80)
        troubles.append((begin_ms * MS, at_ms * MS))
    bound_ms = rng.randrange(40)
    expected = late_pairs(rows, troubles, bound_ms)
    verdict = delayed.check_history(
        History(RunHeader("r"), rows),
        drained=False,
        late_quiet_max_ns=bound_ms * MS,
        record=FaultRecord(tuple(troubles)),
    )
    found = [v.operations for v in verdict.violations if v.name == delayed.LATE]
    assert set(found) <= expected
    sends = {send for send, _ in expected}
    assert {send for send, _ in found} == sends or len(found) == delayed.REPORTED_MAX
