"""The machine's clock and randomness."""

from __future__ import annotations

import time

import pytest
import trio.testing

from remoting.clock import TrioClock
from remoting.rng import SystemRng


async def test_clock_waits_on_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    clock = TrioClock()
    before = clock.monotonic()
    await clock.sleep(1000)
    assert clock.monotonic() - before == pytest.approx(1000)
    assert abs(clock.wall_ms() - time.time() * 1000) < 60_000


def test_rng_gives_what_was_asked_for() -> None:
    rng = SystemRng()
    assert len(rng.randbytes(17)) == 17
    assert 0 <= rng.random() < 1
    assert {rng.randrange(2) for _ in range(200)} == {0, 1}
