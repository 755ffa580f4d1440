"""Histories of repeated schedules: a clean one is valid, and each anomaly is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers import schedules
from dledger.jepsen_like.checkers.fault_record import HEALED, SERVED
from dledger.jepsen_like.checkers.schedules import Act
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    SCHEDULE_ABSENT,
    Event,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
)
from tests.harness.judged import judged

S = 1_000_000_000
ZERO_MS = 1_700_000_000_000
"""The history begins at this date."""
ELECTION_NS = S
Rows = dict[int, Operation]


def row(op_id: int, f: F, at_s: float, **fields: Any) -> Operation:
    call = round(at_s * S)
    outcome = fields.pop("outcome", Outcome.OK)
    ret = NEVER if outcome == Outcome.INFO else call + 1000
    fields = {"topic": "T", "group": "beat", **fields}
    return Operation(op_id, op_id, 1, NOTHING, f, outcome, call, ret, **fields)


def ms(at_s: float) -> int:
    return ZERO_MS + round(1000 * at_s)


def put(op_id: int, at_s: float, act: Act = Act.PUT, **more: Any) -> Operation:
    """Put a schedule of each second, from the next whole one on."""
    return step(
        op_id,
        at_s,
        act,
        **{"off": 1000, "min_off": ms(int(at_s) + 1), "due_ns": -ZERO_MS * 1_000_000, **more},
    )


def step(op_id: int, at_s: float, act: Act, **more: Any) -> Operation:
    return row(op_id, F.SCHEDULE, at_s, status=act, **{"txn": 1, **more})


def fired(op_id: int, due_s: float, at: int, of: int, **more: Any) -> Operation:
    seen_s = more.pop("seen_s", due_s + 0.01)
    fields = {"queue": 0, "off": at, "txn": of, "min_off": ms(due_s), "max_off": ms(due_s), **more}
    return row(op_id, F.FIRED, seen_s, **fields)


def clean() -> Rows:
    """Each second a message: from 1 to 30 of a put, to 60 of another, and none in a pause."""
    rows = [put(1, 0.5), put(2, 30.5, Act.MESSAGE, min_off=ms(1), queue=0)]
    rows += [step(3, 60.5, Act.PAUSE), step(4, 70.5, Act.RESUME), step(5, 90.5, Act.REMOVE)]
    dues = [due for due in range(1, 91) if not 60 < due < 71]
    for at, due in enumerate(dues):
        rows.append(fired(100 + due, due, at, 1 if due < 31 else 2))
    rows.append(put(6, 91.5, txn=6))
    rows += [fired(200 + due, due, due, 6, queue=1) for due in range(92, 100)]
    rows.append(row(300, F.SCHEDULE, 100, topic="", group="", status=Act.LISTED))
    rows.append(
        row(301, F.SCHEDULE, 100.1, topic="", status=Act.LISTED, cnt=8, max_off=ms(99), queue=0)
    )
    rows.append(row(400, F.FIRED, 101, topic="", group="", cnt=1))
    return {op.op_id: op for op in rows}


def history(rows: Rows, *events: Event) -> History:
    served = Event(-40 * S, -40 * S, SERVED), Event(-40 * S, -40 * S, HEALED)
    return History(RunHeader("r"), list(rows.values()), events=[*served, *events])


def verdict(rows: Rows, *events: Event, clock_error_ns: int = 10_000_000) -> Any:
    return judged(
        schedules.NAME,
        history(rows, *events),
        clock_error_ns=clock_error_ns,
        election_ns=ELECTION_NS,
    )


def test_a_clean_history_of_schedules_is_valid() -> None:
    found = verdict(clean())
    assert found.violations == ()
    assert found.validity == "valid"
    assert found.counts == {
        "steps": 6,
        "schedules": 2,
        "messages": 88,
        "demanded": 73,
        "certain": 60,
    }


def change(rows: Rows, op_id: int, **fields: Any) -> None:
    rows[op_id] = msgspec.structs.replace(rows[op_id], **fields)


def twice(rows: Rows) -> None:
    rows[500] = fired(500, 20, 900, 1)


def no_instant(rows: Rows) -> None:
    change(rows, 120, min_off=ms(20.5))


def before_its_begin(rows: Rows) -> None:
    change(rows, 6, cnt=1, min_off=ms(93))


def behind_its_end(rows: Rows) -> None:
    change(rows, 6, max_off=ms(98))


def stranger(rows: Rows) -> None:
    change(rows, 120, txn=77)


def refused_put(rows: Rows) -> None:
    change(rows, 2, outcome=Outcome.FAIL)


def early(rows: Rows) -> None:
    rows[120] = fired(120, 20, 19, 1, seen_s=19.9)


def early_by_its_leader(rows: Rows) -> None:
    change(rows, 120, max_off=ms(19.9))


def overtaken(rows: Rows) -> None:
    change(rows, 120, max_off=ms(21))


def from_before(rows: Rows) -> None:
    rows[500] = fired(500, 90, 900, 6)


def behind_its_removal(rows: Rows) -> None:
    rows[500] = fired(500, 91, 900, 2)


def in_a_pause(rows: Rows) -> None:
    rows[500] = fired(500, 65, 900, 2, cnt=4)


def of_the_old_message(rows: Rows) -> None:
    change(rows, 140, txn=1)


def elsewhere(rows: Rows) -> None:
    change(rows, 140, queue=1, off=900)


def missing(rows: Rows) -> None:
    del rows[120]
    change(rows, 121, cnt=1)


def silent(rows: Rows) -> None:
    for due in range(40, 61):
        del rows[100 + due]


def miscounted(rows: Rows) -> None:
    change(rows, 120, cnt=1)


def not_listed(rows: Rows) -> None:
    del rows[301]


def unknown_to_its_group(rows: Rows) -> None:
    rows[500] = step(500, 25.5, Act.AGAIN, outcome=Outcome.FAIL, err=SCHEDULE_ABSENT)


def removed_and_listed(rows: Rows) -> None:
    rows[302] = step(302, 99.5, Act.REMOVE, txn=6)


def listed_as_paused(rows: Rows) -> None:
    change(rows, 301, queue=1)


def listed_with_less(rows: Rows) -> None:
    change(rows, 301, cnt=7)


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (twice, schedules.TWICE),
        (no_instant, schedules.NO_INSTANT),
        (before_its_begin, schedules.NO_INSTANT),
        (behind_its_end, schedules.NO_INSTANT),
        (stranger, schedules.STRANGER),
        (refused_put, schedules.STRANGER),
        (early, schedules.EARLY),
        (early_by_its_leader, schedules.EARLY),
        (overtaken, schedules.OVERTAKEN),
        (from_before, schedules.BEFORE),
        (behind_its_removal, schedules.REMOVED),
        (in_a_pause, schedules.PAUSED),
        (of_the_old_message, schedules.REPLACED),
        (elsewhere, schedules.ELSEWHERE),
        (missing, schedules.SKIPPED),
        (silent, schedules.SILENT),
        (miscounted, schedules.MISCOUNTED),
        (not_listed, schedules.ABSENT),
        (unknown_to_its_group, schedules.ABSENT),
        (removed_and_listed, schedules.THERE),
        (listed_as_paused, schedules.STANDS_OTHERWISE),
        (listed_with_less, schedules.STANDS_OTHERWISE),
    ],
)
def test_a_planted_anomaly_of_schedules_is_found(plant: Callable[[Rows], None], name: str) -> None:
    rows = clean()
    plant(rows)
    found = verdict(dict(sorted(rows.items())))
    assert name in {violation.name for violation in found.violations}


FAULT = Event(35 * S, 50 * S, "kill")


def test_instants_of_a_fault_may_be_missed_but_the_newest() -> None:
    rows = clean()
    for due in range(36, 55):
        del rows[100 + due]
    change(rows, 155, cnt=19)
    assert verdict(rows, FAULT).violations == ()
    change(rows, 155, cnt=18)
    assert {v.name for v in verdict(rows, FAULT).violations} == {schedules.MISCOUNTED}


def test_an_instant_within_the_clock_error_proves_nothing() -> None:
    rows = clean()
    in_a_pause(rows)
    missing(rows)
    assert verdict(rows, clock_error_ns=6 * S).violations == ()


@pytest.mark.parametrize("act", [Act.PUT, Act.REMOVE, Act.PAUSE])
def test_a_step_of_unknown_outcome_proves_nothing(act: Act) -> None:
    rows = {key: op for key, op in clean().items() if key < 160 or key >= 300}
    rows = {key: op for key, op in rows.items() if key not in (3, 4, 5, 6, 301)}
    rows[7] = put(7, 40.5, act, outcome=Outcome.INFO, min_off=NOTHING)
    del rows[150]
    assert verdict(dict(sorted(rows.items()))).violations == ()


def test_messages_of_an_unknown_put_are_of_one_grid() -> None:
    rows = clean()
    change(rows, 6, outcome=Outcome.INFO, ret_ns=NEVER, min_off=NOTHING)
    assert verdict(rows).violations == ()
    change(rows, 296, min_off=ms(95.5))
    assert {v.name for v in verdict(rows).violations} == {schedules.NO_INSTANT}


def test_a_reading_that_begins_later_demands_nothing() -> None:
    rows = clean()
    missing(rows)
    not_listed(rows)
    change(rows, 400, cnt=0)
    assert verdict(rows).violations == ()
