"""A poll that waits must be answered when a message comes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dledger.jepsen_like.checkers import polls
from dledger.jepsen_like.checkers.fault_record import FaultRecord, with_stalls
from dledger.jepsen_like.checkers.poll_waits import IN_VAIN, violations
from dledger.jepsen_like.history.columns import ops_table
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

QUIET = FaultRecord(())
MS_NS = 1_000_000


def row(op_id: int, f: F, call: int, ret: int, off: int, **more: Any) -> Operation:
    """Return a row with stamps in milliseconds."""
    fields = {"topic": "T", "queue": 0, "off": off, **more}
    outcome = fields.pop("outcome", Outcome.OK)
    end = NEVER if outcome == Outcome.INFO else ret * MS_NS
    return Operation(op_id, op_id, op_id, NOTHING, f, outcome, call * MS_NS, end, **fields)


def poll(op_id: int, call: int, ret: int, off: int = 5, **more: Any) -> Operation:
    return row(op_id, F.PULL, call, ret, off, group="g", **more)


SEND = row(0, F.SEND, 90, 100, 5, value=7)
WAITS = (poll(1, 50, 2_050), poll(2, 60, 1_100, cnt=1))


def found(*rows: Operation, record: FaultRecord = QUIET) -> set[int]:
    def sends_of(queue: tuple[str, int]) -> Any:
        mine = [op for op in rows if op.f == F.SEND and (op.topic, op.queue) == queue]
        return ops_table("run", mine)

    sends = ops_table("run", [op for op in rows if op.f == F.SEND])
    every = violations(polls.polls_of(rows), sends_of, with_stalls(record, sends))
    assert {violation.name for violation in every} <= {IN_VAIN}
    assert all(violation.operations[0] == 0 for violation in every)
    return {violation.operations[1] for violation in every}


def test_polls_that_waited_beside_a_message_are_named() -> None:
    assert found(SEND, *WAITS) == {1, 2}
    behind = replace(SEND, off=6)
    assert found(behind, *WAITS) == {1, 2}


@pytest.mark.parametrize(
    "rows",
    [
        WAITS,
        (SEND, WAITS[0]),  # a single one
        (SEND, poll(1, 50, 1_049), poll(2, 60, 1_059)),  # they hardly lasted
        (SEND, poll(1, 50, 1_090), poll(2, 60, 1_095)),  # the message was hardly there
        (replace(SEND, off=4), *WAITS),
        (replace(SEND, queue=1), *WAITS),
        (replace(SEND, due_ns=5), *WAITS),
        (replace(SEND, off=NOTHING), *WAITS),
        (replace(SEND, outcome=Outcome.INFO, ret_ns=NEVER), *WAITS),
        (SEND, *WAITS, row(3, F.SEND, 200, 451, 9, queue=1)),  # the machine was busy
        (SEND, *(replace(op, group="") for op in WAITS)),  # of no subscribed consumer
        (SEND, *(replace(op, outcome=Outcome.INFO, ret_ns=NEVER) for op in WAITS)),
        (SEND, *WAITS, *(poll(at, 3_000, 5_000, 9) for at in range(3, 201))),  # one of a hundred
    ],
)
def test_polls_that_may_have_had_nothing_are_not_named(rows: tuple[Operation, ...]) -> None:
    assert found(*rows) == set()


def test_polls_beside_a_fault_are_not_judged() -> None:
    assert found(SEND, *WAITS, record=FaultRecord(((1_000 * MS_NS, 3_000 * MS_NS),))) == set()
    assert found(SEND, *WAITS, record=FaultRecord(((3_000 * MS_NS, 4_000 * MS_NS),))) == {1, 2}


def test_polls_are_judged_with_their_waits() -> None:
    waits = violations(polls.polls_of(WAITS), lambda _: ops_table("run", [SEND]), QUIET)
    verdict = polls.check_history((SEND, *WAITS), waits)
    assert [violation.name for violation in verdict.violations] == [IN_VAIN, IN_VAIN]
