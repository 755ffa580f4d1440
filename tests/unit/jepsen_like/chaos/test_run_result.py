"""What programs are told of a run: counts, what was lost, how long fail-overs took."""

from __future__ import annotations

from collections import Counter

from jepsen_like.chaos.run_result import (
    counts_by_outcome,
    failover_ms,
    percentile,
    result_of,
    too_little,
)
from jepsen_like.checkers.verdict import Verdict, Violation
from jepsen_like.history.operation import NEVER, Event, F, History, Operation, Outcome, RunHeader

MS = 1_000_000


def send(op_id: int, call_ms: int, ret_ms: int, outcome: Outcome = Outcome.OK) -> Operation:
    ret_ns = NEVER if outcome is Outcome.INFO else ret_ms * MS
    return Operation(op_id, op_id, 1, -1, F.SEND, outcome, call_ms * MS, ret_ns, "orders", 0)


def history(*events: Event, sends: tuple[Operation, ...] = ()) -> History:
    return History(RunHeader("r"), list(sends), list(events))


def leads(at_ms: int, node: str) -> Event:
    return Event(at_ms * MS, at_ms * MS, "role", node=node, detail="leader term 1")


def lost(at_ms: int, node: str, detail: str = "") -> Event:
    return Event(at_ms * MS, at_ms * MS, "kill", "leader", node, detail)


def test_fail_over_ends_at_a_new_acknowledged_send() -> None:
    sends = (
        send(0, 90, 400),
        send(1, 150, 160, Outcome.FAIL),
        send(2, 200, 900),
        send(3, 300, 350),
    )
    times = failover_ms(history(leads(0, "n0"), lost(100, "n0"), sends=sends))
    assert times == [250.0]  # not the one that was called before


def test_the_loss_of_a_follower_is_no_fail_over() -> None:
    sends = (send(2, 200, 210),)
    assert failover_ms(history(leads(0, "n0"), lost(100, "n1"), sends=sends)) == []
    assert failover_ms(history(leads(0, "n0"), lost(100, "n0", "skipped: x"), sends=sends)) == []


def test_operations_are_counted_by_kind_and_outcome() -> None:
    rows = [send(0, 0, 1), send(1, 0, 1), send(2, 0, 1, Outcome.INFO)]
    assert counts_by_outcome(rows) == {"send": {"ok": 2, "info": 1, "fail": 0}}


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([4.0, 3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(list(map(float, range(100))), 99) == 98.0


def test_checker_names_few_losses_and_their_number() -> None:
    found = Violation(
        "acknowledged message lost", "orders/0", "value 7 is not there (40 like it)", (1,), "t"
    )
    verdict = Verdict("all", "invalid", (found,))
    told = result_of(history(lost(1, "n0")), [verdict], verdict, Counter(kill=1, skipped=3))
    assert (told["verdict"], told["lost"], told["duplicated"]) == ("invalid", 40, 0)
    assert (told["faults_done"], told["fault_kinds"], told["aimed_at_leader"]) == (1, 1, 1)
    assert told["faults"] == {"kill": 1}


def test_a_run_in_which_too_little_happened_is_no_proof() -> None:
    enough = {"faults_done": 9, "aimed_at_leader": 2, "failovers": 1, "acknowledged_sends": 5_000}
    assert too_little(enough) == []
    quiet = {"faults_done": 1, "aimed_at_leader": 0, "failovers": 0, "acknowledged_sends": 7}
    assert too_little(quiet) == [
        "1 fault in all",
        "none of them at the leader",
        "no fail-over",
        "7 acknowledged sends",
    ]
