"""One seed is one run: the same events in any interpreter, whatever its hash seed."""

import pytest

from dledger.jepsen_like.soak import gate
from tests.harness.extent import EXTENT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("seeds", "duration_s"), [(1, 60.0), pytest.param(4 * EXTENT, 180.0, marks=pytest.mark.hunt)]
)
async def test_two_interpreters_have_the_same_events(seeds: int, duration_s: float) -> None:
    found = await gate(seeds, duration_s, first_seed=seeds)
    assert (found.differing, found.invalid) == ([], {})
    assert found.counted == seeds, "too few plans with a fault and a change of leader"
