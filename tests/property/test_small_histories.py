"""Small histories of one queue: kernel, rows and exhaustive search say the same.

`make small-histories` tries ten million.
"""

from __future__ import annotations

import os
import random

import pytest

from dledger.jepsen_like.history.columns import obs_table, ops_table
from tests.harness.extent import EXTENT
from tests.harness.fast_part import gate_part
from tests.harness.joined_histories import wrong_ones
from tests.harness.queue_histories import is_linearizable, random_history
from tests.harness.queue_tables import check_tables
from tests.oracles.queue_log import check_history

HISTORIES = int(os.environ.get("DLEDGER_SMALL_HISTORIES", 100_000 * EXTENT))
BLOCKS = 20
JOINED = 1_000
"""Histories that are judged at once."""
BY_ROWS = 16
"""Every n-th is judged row by row as well."""
THROUGH_TABLES = 512
"""Every n-th is judged alone as well, through tables of Arrow."""


def compare(rng: random.Random, size_max: int) -> int:
    """Judge `JOINED` histories in every way; return how many are wrong."""
    histories = [random_history(rng, size_max) for _ in range(JOINED)]
    truth = {at for at, history in enumerate(histories) if not is_linearizable(history)}
    found = wrong_ones(histories)
    for at in sorted(found ^ truth):
        rows = "\n".join(map(str, histories[at]))
        pytest.fail(
            f"exhaustive search finds {at not in truth}, the kernel {at not in found}\n{rows}"
        )
    for at in range(0, JOINED, BY_ROWS):
        by_rows = check_history(histories[at]).violations
        assert bool(by_rows) == (at in truth), histories[at]
    for at in range(0, JOINED, THROUGH_TABLES):
        tables = (ops_table("r", histories[at]), obs_table("r", histories[at], ()))
        assert check_tables(*tables)[0].is_valid == (at not in truth), histories[at]
    return len(truth)


def test_joined_histories_get_the_verdict_each_gets_alone() -> None:
    wrong = sum(compare(random.Random(seed), 7) for seed in range(10))
    assert JOINED < wrong < 9 * JOINED


@pytest.mark.slow
@pytest.mark.parametrize("block", gate_part(range(BLOCKS), 4))
def test_many_histories_agree_with_exhaustive_search(block: int) -> None:
    rng = random.Random(1_000 + block)
    for _ in range(HISTORIES // BLOCKS // JOINED):
        compare(rng, 9)
