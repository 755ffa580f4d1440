"""A clock that a module's mark or a fixture asks for is the clock of the run."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

DAY_S = 86_400.0

pytestmark = pytest.mark.usefixtures("autojump_clock")


@pytest.fixture
async def slept_s(autojump_clock: MockClock) -> float:
    await trio.sleep(DAY_S)
    return autojump_clock.current_time()


async def test_virtual_time_by_mark() -> None:
    await trio.sleep(DAY_S)
    assert trio.current_time() == DAY_S


async def test_virtual_time_by_fixture(slept_s: float) -> None:
    assert trio.current_time() == slept_s == DAY_S


def test_virtual_time_leaves_other_tests_alone(autojump_clock: MockClock) -> None:
    assert autojump_clock.current_time() == 0
