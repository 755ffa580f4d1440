"""Which contenders and loads are measured, and in which order."""

from __future__ import annotations

import pytest

from dledger.output import CliError, ExitCode
from tests.peers.figures import targets
from tests.peers.loads import CASE
from tests.peers.plan import CONTENDER, CONTENDERS, chains_of, estimate_s, kills_of, plan


def test_plan_has_every_contender_once_in_each_round() -> None:
    steps = plan(3, ())
    for number in range(3):
        keys = [step.contender.key for step in steps if step.round == number]
        assert sorted(keys) == sorted(CONTENDER)
    assert all(step.cases == step.contender.cases for step in steps)


def test_plan_begins_each_round_with_another_contender() -> None:
    steps = plan(3, ())
    firsts = [steps[number * len(CONTENDERS)].contender.key for number in range(3)]
    assert firsts == ["nats", "rocketmq", "ours-java"]


def test_plan_kills_a_leader_last() -> None:
    assert all(
        contender.cases.index("kill") == len(contender.cases) - 1
        for contender in CONTENDERS
        if "kill" in contender.cases
    )


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (("nats/64",), {"nats": ("64",)}),
        (("nats-synced",), {"nats-synced": ("1", "64", "512")}),
        (
            ("batches",),
            dict.fromkeys(("rocketmq", "rocketmq-batch-push", "ours-java", "ours"), ("batches",)),
        ),
        (
            ("ours/1", "kill", "ours/1"),
            {
                "nats": ("kill",),
                "rocketmq": ("kill",),
                "ours-java": ("kill",),
                "ours": ("1", "kill"),
            },
        ),
    ],
)
def test_plan_takes_only_what_is_named(
    only: tuple[str, ...], expected: dict[str, tuple[str, ...]]
) -> None:
    assert {step.contender.key: step.cases for step in plan(1, only)} == expected


@pytest.mark.parametrize("name", ["kafka", "65", "nats/batches", "nats-synced/kill", "64/nats", ""])
def test_plan_refuses_a_name_that_measures_nothing(name: str) -> None:
    with pytest.raises(CliError, match="nothing is measured under this name") as error:
        plan(1, ("ours", name))
    assert error.value.exit_code == ExitCode.USAGE


def test_plan_asks_only_for_tools_it_needs() -> None:
    assert chains_of(plan(1, ())) == {"go", "java"}
    assert chains_of(plan(1, ("ours",))) == set()
    assert chains_of(plan(1, ("ours-java", "ours"))) == {"java"}
    assert chains_of(plan(1, ("nats", "ours"))) == {"go"}


def test_kills_are_many_for_our_sdk_and_one_for_others() -> None:
    kills = {contender.key: kills_of(contender, 10) for contender in CONTENDERS}
    assert kills == {key: 10 if key == "ours" else 1 for key in CONTENDER}


def test_estimate_of_the_default_run_is_below_25_minutes() -> None:
    assert 15 * 60 < estimate_s(plan(3, ()), 7.0, 4.0, 10) < 25 * 60
    assert estimate_s(plan(1, ("nats/64",)), 2.0, 1.0, 1) < 20


def test_every_case_of_a_contender_is_one_of_the_loads() -> None:
    assert {case for contender in CONTENDERS for case in contender.cases} == set(CASE)
    assert len(targets([])) == 13
