"""What programs are shown of a run: counts, what was lost, how long fail-overs took.

Which workload an operation belongs to.

A run in which a broker logs that another member contradicts it has a finding.
"""

import json
from collections import Counter
from pathlib import Path

from dledger.jepsen_like.chaos.run_result import (
    SHOWN_MAX,
    contradictions,
    failover_ms,
    read_logs,
    result_of,
    too_little,
)
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import (
    Event,
    F,
    History,
    Operation,
    Outcome,
    RunHeader,
)
from dledger.jepsen_like.plans.promised import merge_for
from tests.harness.rows import row

MS = 1_000_000


def send(op_id: int, call_ms: int, ret_ms: int, outcome: Outcome = Outcome.OK) -> Operation:
    return row(op_id, F.SEND, call_ms * MS, ret_ms * MS, outcome=outcome)


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


def test_checker_names_few_losses_and_their_number() -> None:
    found = Violation(
        "acknowledged message lost", "orders/0", "value 7 is not there (40 like it)", (1,), "t"
    )
    verdict = Verdict("all", "invalid", (found,))
    reported = result_of(history(lost(1, "n0")), [verdict], verdict, Counter(kill=1, skipped=3))
    assert (reported["verdict"], reported["lost"], reported["duplicated"]) == ("invalid", 40, 0)
    assert (reported["faults_done"], reported["fault_kinds"], reported["aimed_at_leader"]) == (
        1,
        1,
        1,
    )
    assert reported["faults"] == {"kill": 1}


def test_a_run_in_which_too_little_happened_is_no_proof() -> None:
    enough = {"faults_done": 9, "aimed_at_leader": 2, "failovers": 1, "acknowledged_sends": 5_000}
    assert too_little(enough) == []
    quiet = {"faults_done": 1, "aimed_at_leader": 0, "failovers": 0, "acknowledged_sends": 7}
    assert too_little(quiet) == [
        *("1 fault in all", "none of them at the leader", "no fail-over", "7 acknowledged sends")
    ]


def line(event: str, error: str = "", level: str = "error") -> str:
    facts = {"event": event, "peer_address": ["127.0.0.1", 7], "error": error, "level": level}
    return json.dumps(facts) + "\n"


QUIET = line("peer_refused", "not the peer_contradicts we look for") + line("leads", level="info")


def test_a_contradiction_in_a_log_makes_a_run_invalid(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("n0", "n1", "n2")}
    logs["n0"].write_text(QUIET)
    logs["n1"].write_text(QUIET + line("peer_contradicts", "entry 7 of term 2 is another one"))
    verdicts = [Verdict("total_queue", "valid"), *read_logs(logs)]
    verdict = merge_for(None, verdicts)
    assert verdict.validity == "invalid"
    (found,) = verdict.violations
    assert (found.checker, found.subject) == ("broker_logs", "n1")
    assert found.detail == "entry 7 of term 2 is another one (from ['127.0.0.1', 7])"
    result = result_of(History(RunHeader("r")), verdicts, verdict, Counter())
    assert result["verdict"] == "invalid"
    assert result["verdicts"][1]["violations"][0]["name"] == "members contradict each other"


def test_logs_without_one_say_nothing(tmp_path: Path) -> None:
    log = tmp_path / "n0.log"
    log.write_text(QUIET)
    assert read_logs({"n0": log, "n1": tmp_path / "never started.log"}) == []


def test_many_contradictions_are_shown_in_few_lines() -> None:
    lines = [line("peer_contradicts", f"entry {number}") for number in range(40)]
    found = contradictions("n2", [*lines, lines[0][:-20]])
    assert len(found) == SHOWN_MAX
    assert found[0].detail.startswith("entry 0 ")
    assert found[-1].detail.endswith(f"({42 - SHOWN_MAX} like it)")
