"""A poll that waits must be answered when a message comes, a receive find what becomes free."""

from typing import Any

import pytest
from msgspec.structs import replace

from dledger.jepsen_like.checkers import polls, pop
from dledger.jepsen_like.checkers.fault_record import FaultRecord, with_stalls
from dledger.jepsen_like.checkers.pop_ends import MS_NS
from dledger.jepsen_like.checkers.waits import (
    POLL_IN_VAIN,
    RECEIVE_IN_VAIN,
    poll_violations,
    receive_violations,
)
from dledger.jepsen_like.history.columns import ops_table
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome
from tests.harness.rows import row

QUIET = FaultRecord(())


def row_ms(op_id: int, f: F, call: int, ret: int, off: int, **more: Any) -> Operation:
    """Return a row with stamps in milliseconds."""
    fields = {"process": op_id, "topic": "T", "off": off, **more}
    return row(op_id, f, call * MS_NS, ret * MS_NS, **fields)


def poll(op_id: int, call: int, ret: int, off: int = 5, **more: Any) -> Operation:
    return row_ms(op_id, F.PULL, call, ret, off, group="g", **more)


SEND = row_ms(0, F.SEND, 90, 100, 5, value=7)
POLLS = (poll(1, 50, 2_050), poll(2, 60, 1_100, cnt=1))


def polls_in_vain(*rows: Operation, record: FaultRecord = QUIET) -> set[int]:
    def sends_of(queue: tuple[str, int]) -> Any:
        mine = [op for op in rows if op.f == F.SEND and (op.topic, op.queue) == queue]
        return ops_table("run", mine)

    sends = ops_table("run", [op for op in rows if op.f == F.SEND])
    every = poll_violations(polls.polls_of(rows), sends_of, with_stalls(record, sends))
    assert {violation.name for violation in every} <= {POLL_IN_VAIN}
    assert all(violation.operations[0] == 0 for violation in every)
    return {violation.operations[1] for violation in every}


def test_polls_that_waited_beside_a_message_are_named() -> None:
    assert polls_in_vain(SEND, *POLLS) == {1, 2}
    behind = replace(SEND, off=6)
    assert polls_in_vain(behind, *POLLS) == {1, 2}


@pytest.mark.parametrize(
    "rows",
    [
        POLLS,
        (SEND, POLLS[0]),  # a single one
        (SEND, poll(1, 50, 1_049), poll(2, 60, 1_059)),  # they hardly lasted
        (SEND, poll(1, 50, 1_090), poll(2, 60, 1_095)),  # the message was hardly there
        (replace(SEND, off=4), *POLLS),
        (replace(SEND, queue=1), *POLLS),
        (replace(SEND, due_ns=5), *POLLS),
        (replace(SEND, off=NOTHING), *POLLS),
        (replace(SEND, outcome=Outcome.INFO, ret_ns=NEVER), *POLLS),
        (SEND, *POLLS, row_ms(3, F.SEND, 200, 451, 9, queue=1)),  # the machine was busy
        (SEND, *(replace(op, group="") for op in POLLS)),  # of no subscribed consumer
        (SEND, *(replace(op, outcome=Outcome.INFO, ret_ns=NEVER) for op in POLLS)),
        (SEND, *POLLS, *(poll(at, 3_000, 5_000, 9) for at in range(3, 201))),  # one of a hundred
    ],
)
def test_polls_that_may_have_had_nothing_are_not_named(rows: tuple[Operation, ...]) -> None:
    assert polls_in_vain(*rows) == set()


def test_polls_beside_a_fault_are_not_judged() -> None:
    assert (
        polls_in_vain(SEND, *POLLS, record=FaultRecord(((1_000 * MS_NS, 3_000 * MS_NS),))) == set()
    )
    assert polls_in_vain(SEND, *POLLS, record=FaultRecord(((3_000 * MS_NS, 4_000 * MS_NS),))) == {
        1,
        2,
    }


def test_polls_are_judged_with_their_waits() -> None:
    waits = poll_violations(polls.polls_of(POLLS), lambda _: ops_table("run", [SEND]), QUIET)
    verdict = polls.check_history((SEND, *POLLS), waits)
    assert [violation.name for violation in verdict.violations] == [POLL_IN_VAIN, POLL_IN_VAIN]


# -- receives by POP ---------------------------------------------------------------------------


def received(op_id: int, call: int, ret: int, off: int = 0, **more: Any) -> Operation:
    return row_ms(op_id, F.RECEIVE, call, ret, off, **{"group": "g", "status": 100, **more})


def in_vain(op_id: int, call: int, ret: int, **more: Any) -> Operation:
    fields = {"outcome": Outcome.FAIL, "err": "NothingThere", **more}
    return received(op_id, call, ret, NOTHING, **fields)


FIRST = received(0, 0, 10, cnt=1, txn=1)
AGAIN = received(9, 5_000, 5_010, cnt=2, txn=2)
WAITS = (in_vain(1, 100, 2_105), in_vain(2, 1_000, 3_001))
"""The message is free from 110 ms on, and is handed out again at 5 s."""


def found(*rows: Operation, record: FaultRecord = QUIET, clock_error_ms: int = 0) -> set[int]:
    every = receive_violations(rows, record, clock_error_ns=clock_error_ms * MS_NS)
    assert {violation.name for violation in every} <= {RECEIVE_IN_VAIN}
    assert all(violation.operations[0] == 0 for violation in every)
    return {violation.operations[1] for violation in every}


def test_receives_that_waited_beside_a_free_message_are_named() -> None:
    assert found(FIRST, *WAITS, AGAIN) == {1, 2}
    verdict = pop.check_history((FIRST, *WAITS, AGAIN), record=QUIET)
    assert {violation.name for violation in verdict.violations} == {RECEIVE_IN_VAIN}
    assert pop.check_history((FIRST, *WAITS, AGAIN)).is_valid


@pytest.mark.parametrize(
    "rows",
    [
        (FIRST, *WAITS),  # it may have been given up, or handed out to an unknown client
        (FIRST, *WAITS, received(9, 5_000, 5_010, cnt=3)),  # one that no row has was between
        (FIRST, *WAITS, received(9, 2_000, 5_010, cnt=2)),  # it may have been theirs by then
        (FIRST, WAITS[0], AGAIN),  # a single one
        (FIRST, in_vain(1, 100, 1_099), in_vain(2, 1_000, 1_999), AGAIN),  # they hardly lasted
        (FIRST, in_vain(1, 100, 1_109), in_vain(2, 0, 1_109), AGAIN),  # it was hardly free
        (FIRST, *(replace(op, outcome=Outcome.INFO, ret_ns=NEVER) for op in WAITS), AGAIN),
        (FIRST, *WAITS, row_ms(3, F.CHANGE_TIME, 50, 60, 0, group="g", status=4_000), AGAIN),
        (
            FIRST,
            *WAITS,
            row_ms(3, F.CHANGE_TIME, 50, 60, 0, group="g", status=100, outcome=Outcome.INFO),
            AGAIN,
        ),
        (FIRST, in_vain(1, 100, 2_105, group="h"), in_vain(2, 1_000, 3_001, group="h"), AGAIN),
        (FIRST, in_vain(1, 100, 2_105, topic="S"), in_vain(2, 1_000, 3_001, topic="S"), AGAIN),
    ],
)
def test_receives_that_may_have_had_nothing_are_not_named(rows: tuple[Operation, ...]) -> None:
    assert found(*rows) == set()


def test_another_message_is_no_excuse() -> None:
    other = [received(3, 200, 1_900, 7, cnt=1), received(4, 200, 1_900, 8, cnt=1)]
    other[1].process = other[0].process
    rows = (FIRST, *other, AGAIN)
    assert found(*rows) == set(), "two messages of one answer"
    assert found(*rows, received(5, 1_000, 2_000, 9, cnt=1)) == {3, 5}


def test_message_that_is_received_late_was_waited_for_in_vain() -> None:
    late = received(3, 50, 1_110, cnt=2, txn=2)
    other = [replace(op, off=1) for op in (FIRST, replace(late, op_id=4, process=4))]
    assert found(FIRST, late) == set(), "a single one"
    assert found(FIRST, late, *other) == {3, 4}
    assert found(FIRST, replace(late, ret_ns=late.ret_ns - 1), *other) == set()
    assert found(FIRST, late, *other, clock_error_ms=1) == set()


def test_groups_that_receive_in_order_are_not_judged() -> None:
    rows = [replace(op, group="g-in-order") for op in (FIRST, *WAITS, AGAIN)]
    assert found(*rows) == set()


def test_a_fault_excuses_receives_that_it_met() -> None:
    fault = FaultRecord(((2_000 * MS_NS, 2_001 * MS_NS),))
    assert found(FIRST, *WAITS, AGAIN, record=fault) == set()
    later = FaultRecord(((4_000 * MS_NS, 9_000 * MS_NS),))
    assert found(FIRST, *WAITS, AGAIN, record=later) == {1, 2}


def test_clocks_that_differ_free_a_message_later() -> None:
    assert found(FIRST, *WAITS, AGAIN, clock_error_ms=900) == {1, 2}
    assert found(FIRST, *WAITS, AGAIN, clock_error_ms=1_000) == set()


def test_one_receive_of_a_hundred_may_wait_in_vain() -> None:
    others = [in_vain(10 + at, 10_000 + at, 12_001 + at) for at in range(198)]
    assert found(FIRST, *WAITS, AGAIN, *others) == set()
    assert found(FIRST, *WAITS, AGAIN, *others[:-1]) == {1, 2}
