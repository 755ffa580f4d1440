"""The score: which test found a planted bug, and the counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dledger.jepsen_like.checkers.verdict import Violation
from tests.mutants.hunt import ASSERTION, HISTORY, INVARIANT, Hunted, judge_of
from tests.mutants.patches import Patch, read_patches
from tests.mutants.score import (
    UNIT_TEST,
    Score,
    compared,
    facts_of,
    hunted_on,
    make_scores,
    read_scores,
    rows_of,
    slowest,
)

PATCHES: dict[int, Patch] = {number: read_patches()[number] for number in (21, 22, 23)}


def hunted(number: int, *judges: str, counts: bool = True) -> Hunted:
    return Hunted(number, found=bool(judges), counts=counts, judges=judges, cpu_s=2.5)


@pytest.mark.parametrize(
    ("checker", "name", "judge"),
    [
        ("queue_log", "duplicate", HISTORY),
        ("push_group", "crash of a member", HISTORY),
        ("invariants", "two_leaders", INVARIANT),
        ("liveness", "liveness", INVARIANT),
        ("harness", "run broke", INVARIANT),
        ("invariants", "crash", ASSERTION),
    ],
)
def test_judge_of_names_the_kind_of_judge(checker: str, name: str, judge: str) -> None:
    assert judge_of(Violation(name, "q", "text", checker=checker)) == judge


def test_facts_count_each_judge_once_for_a_bug() -> None:
    scores = {
        21: Score(21, hunted(21, HISTORY, INVARIANT), hunted(21), False, 60.0),
        22: Score(22, hunted(22), hunted(22, ASSERTION), True, 60.0),
        23: Score(23, hunted(23, HISTORY, counts=False), hunted(23), None, 60.0),
    }
    facts = facts_of(scores, PATCHES)
    assert facts["planted"] == facts["hunted"] == 3
    assert facts["found"] == facts["found_by_simulator"] == 2
    assert (facts["by_history_checker"], facts["by_invariant"]) == (1, 1)
    assert (facts["by_assertion"], facts["by_unit_test"], facts["unit_tests_run_for"]) == (1, 1, 2)
    assert (facts["with_own_workload"], facts["with_soak_workload"]) == (1, 1)
    assert facts["soak_workload_run_for"] == 3
    assert facts["not_found"] == [23]
    assert [row["judges"] for row in rows_of(scores, PATCHES)] == [
        f"{HISTORY}, {INVARIANT}",
        f"{ASSERTION}, {UNIT_TEST}",
        "none",
    ]


def test_a_record_gives_the_newest_result_of_each_bug(tmp_path: Path) -> None:
    record = tmp_path / "scores.jsonl"
    assert read_scores(record) == {}
    lines = [Score(21, hunted(21), hunted(21)), Score(21, hunted(21, HISTORY), hunted(21))]
    record.write_text("".join(msgspec.json.encode(line).decode() + "\n" for line in lines))
    assert read_scores(record)[21].judges == {HISTORY}


def test_slowest_are_those_not_found_then_those_found_last() -> None:
    def score(number: int, cpu_s: float, *judges: str) -> Score:
        soak = msgspec.structs.replace(hunted(number, *judges), cpu_s=float(cpu_s))
        return Score(number, hunted(number), soak)

    scores = {
        each.number: each for each in (score(1, 9, HISTORY), score(2, 8), score(3, 7, HISTORY))
    }
    assert slowest(scores, 2) == [2, 1]


def test_compared_sums_the_cpu_seconds_of_each_order() -> None:
    facts = compared([hunted(21), hunted(22, HISTORY)], [hunted(21, HISTORY), hunted(22, HISTORY)])
    assert (facts["plain_found"], facts["guided_found"]) == (1, 2)
    assert facts["plain_cpu_s"] == facts["guided_cpu_s"] == 5.0
    assert [row["number"] for row in facts["mutants"]] == [21, 22]


def test_a_score_without_a_soak_counts_none() -> None:
    facts = facts_of({21: Score(21, hunted(21, HISTORY))}, PATCHES)
    assert (facts["hunted"], facts["found"], facts["soak_workload_run_for"]) == (1, 1, 0)
    assert slowest({21: Score(21, hunted(21, HISTORY))}, 10) == []


def test_a_hunt_that_goes_on_adds_what_was_spent_before() -> None:
    before = msgspec.structs.replace(hunted(21), seeds=3)
    found = msgspec.structs.replace(hunted(21, HISTORY), seeds=2, seed=5)
    assert hunted_on(before, found) == msgspec.structs.replace(found, seeds=5, cpu_s=5.0)


def test_what_was_found_is_not_hunted_again(tmp_path: Path) -> None:
    record, reported = tmp_path / "scores.jsonl", list[str]()
    known = {
        21: Score(21, None, hunted(21, HISTORY), None, 2.0),
        22: Score(22, hunted(22, INVARIANT), hunted(22), None, 2.0),
    }
    kept = make_scores(
        [21, 22], known, record, 2.0, 1, 1, soak=True, brief=True, units=False, tell=reported.append
    )
    assert (kept, reported, record.exists()) == (known, [], False)
