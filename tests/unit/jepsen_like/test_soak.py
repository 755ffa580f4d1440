"""The determinism gate counts what it compared, and fails on any difference."""

import msgspec
import pytest

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.soak import Gate, Totals
from dledger.jepsen_like.worker import Report

REPORT = Report(
    seed=7,
    simulated_s=300.0,
    cpu_s=1.0,
    violations=[],
    validity="valid",
    digest="ab",
    operations={"send_ok": 3},
    faults={"kill": 1},
    sometimes={"leader_change": 1},
)


def compared(**changes: object) -> Gate:
    gate = Gate()
    gate.compare(REPORT, msgspec.structs.replace(REPORT, **changes))
    return gate


def test_equal_runs_with_a_change_of_leader_count() -> None:
    assert compared() == Gate(counted=1, played=1, simulated_s=300.0)


@pytest.mark.parametrize("changes", [{"digest": "ac"}, {"operations": {"send_ok": 2}}])
def test_difference_is_reported_with_its_seed(changes: dict[str, object]) -> None:
    gate = compared(**changes)
    assert (gate.differing, gate.counted) == ([7], 0)


def test_runs_that_broke_have_no_digest_and_are_never_equal() -> None:
    gate = Gate()
    broken = msgspec.structs.replace(REPORT, digest="")
    gate.compare(broken, broken)
    assert gate.differing == [7]


@pytest.mark.parametrize("lacking", [{"sometimes": {}}, {"faults": {}}])
def test_a_run_in_which_nothing_happened_is_not_counted(lacking: dict[str, object]) -> None:
    gate, quiet = Gate(), msgspec.structs.replace(REPORT, **lacking)
    gate.compare(quiet, quiet)
    assert (gate.played, gate.counted, gate.differing) == (1, 0, [])


def test_violation_is_reported() -> None:
    lost = Violation("lost", "orders/0", "offset 3 is absent")
    gate, bad = Gate(), msgspec.structs.replace(REPORT, validity="invalid", violations=[lost])
    gate.compare(bad, bad)
    assert (gate.invalid, gate.counted) == ({7: "lost: offset 3 is absent"}, 0)


def test_a_run_that_is_not_decided_is_reported_with_its_reason() -> None:
    gate, late = Gate(), msgspec.structs.replace(REPORT, validity="unknown", reason="too long")
    gate.compare(late, late)
    assert (gate.invalid, gate.counted) == ({7: "too long"}, 0)


def test_totals_name_checkers_that_judged_nothing() -> None:
    totals = Totals()
    totals.add(msgspec.structs.replace(REPORT, checked=["queue_log", "replicas", "polls"]))
    assert totals.without_verdict == [
        *("consumer_offsets", "total_queue", "availability", "final_reads", "contents")
    ]
    totals.add(
        msgspec.structs.replace(
            REPORT,
            checked=["total_queue", "consumer_offsets", "availability", "final_reads", "contents"],
        )
    )
    assert totals.without_verdict == []
    assert totals.as_json()["verdicts"]["polls"] == 1
