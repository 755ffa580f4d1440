"""One seed is one run: the same events in any interpreter, whatever its hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.extent import EXTENT
from tests.harness.fast_part import gate_part
from tests.simulation.first_scenario import play

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def play_elsewhere(seeds: Sequence[int], hash_seed: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.first_scenario", *map(str, seeds)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=100 * len(seeds),
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_nothing_lost(result: dict[str, Any]) -> None:
    assert result["lost"] == []
    assert result["acknowledged"] >= 200
    assert result["read"] >= result["acknowledged"]
    assert result["sometimes"]["leader_change"] >= 1


def test_two_interpreters_have_the_same_events() -> None:
    (first,), (second,) = play_elsewhere([1], "0"), play_elsewhere([1], "1")
    assert first == second
    assert_nothing_lost(first)


def test_another_seed_is_another_run() -> None:
    first, second = play(2), play(3)
    assert first["digest"] != second["digest"]
    for result in (first, second):
        assert_nothing_lost(result)


def test_a_run_leaves_nothing_behind_that_changes_the_next() -> None:
    play(4)
    assert play(2)["digest"] == play(2)["digest"]


@pytest.mark.parametrize("block", gate_part(range(4), 1))
def test_many_seeds_are_repeatable_and_lose_nothing(block: int) -> None:
    first_seed = 100 + block * EXTENT
    seeds = range(first_seed, first_seed + EXTENT)
    here, there = play_elsewhere(seeds, "0"), play_elsewhere(seeds, "4711")
    for seed, first, second in zip(seeds, here, there, strict=True):
        assert first == second, f"seed {seed}"
        assert_nothing_lost(first)
