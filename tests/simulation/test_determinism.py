"""One seed is one run: the same events in any interpreter, whatever its hash seed."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.soak import gate
from tests.harness.extent import EXTENT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seeds", [1, pytest.param(4 * EXTENT, marks=pytest.mark.hunt)])
async def test_two_interpreters_have_the_same_events(seeds: int) -> None:
    found = await gate(seeds, 60.0, first_seed=seeds)
    assert (found.differing, found.invalid) == ([], {})
    assert found.counted == seeds, "too few plans with a fault and a change of leader"
