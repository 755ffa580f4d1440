"""Arrays come back from few bytes as they were, whatever they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.jepsen_like.history.operation import CLIENT_BITS, NEVER
from dledger.spark_jobs.engines.shares import narrowed, widened

RNG = np.random.default_rng(5)
WORDS = RNG.integers(-(1 << 63), (1 << 63) - 1, 1_000)
CLIENTS = RNG.integers(0, 100, 1_000)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=200))
def test_any_array_comes_back(words: list[int]) -> None:
    array = np.array(words, dtype=np.int64)
    assert widened(narrowed(array)).tolist() == words


@pytest.mark.parametrize(
    ("array", "bytes_max"),
    [
        (np.zeros(0, np.int64), 0),
        (np.arange(7, 7 + 1_000), 24),
        (np.cumsum(RNG.integers(0, 200, 1_000)), 1_030),
        (np.cumsum(RNG.integers(-30_000, 30_000, 1_000)), 2_030),
        (1 << 60 | np.cumsum(RNG.integers(0, 1 << 32, 1_000)), 4_030),
        ((CLIENTS << CLIENT_BITS) + np.arange(1_000), 5_100),
        (np.where(CLIENTS < 50, NEVER, np.arange(1_000)), 8_030),
        (WORDS, 8_030),
    ],
)
def test_an_array_takes_as_few_bytes_as_its_steps(array: np.ndarray, bytes_max: int) -> None:
    data = narrowed(array.astype(np.int64))
    assert len(data) <= bytes_max
    assert widened(data).tolist() == array.tolist()


@pytest.mark.parametrize("span", [(1 << bits) + more for bits in (8, 16, 32) for more in (-1, 0)])
def test_steps_at_the_limit_of_a_width_come_back(span: int) -> None:
    words = [0, 0, span, span]
    assert widened(narrowed(np.array(words))).tolist() == words
