"""Asynchronous tests run on virtual time, and their fixtures with them, unless they are marked."""

import pytest
import trio
from trio.testing import MockClock

DAY_S = 86_400.0


@pytest.fixture
async def slept_s() -> float:
    began = trio.current_time()
    await trio.sleep(DAY_S)
    return trio.current_time() - began


async def test_virtual_time_by_default(slept_s: float) -> None:
    assert trio.current_time() == slept_s == DAY_S


async def test_virtual_time_of_the_tests_own(mock_clock: MockClock) -> None:
    mock_clock.jump(DAY_S)
    assert trio.current_time() == DAY_S


@pytest.mark.real_time
async def test_virtual_time_gives_way_to_real_time() -> None:
    assert not isinstance(trio.lowlevel.current_clock(), MockClock)
