"""Delays, timers and transactions together, beside a model of what was answered.

Rounds of hostile steps, each followed by quiet: then each message that was answered as stored is in
its topic once and was not early, and what was recalled or rolled back is nowhere. Time is virtual.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from dledger.commitlog.damage import check_entries
from dledger.services import schedule, stored_record, timer, transaction_check
from tests.harness.beside import beside
from tests.harness.deferred_messages import Deferred
from tests.harness.extent import EXTENT

DRAWN_LIMITS = (
    (schedule, "MAX_DELIVERIES_PER_ENTRY", (1, 2, 128)),
    (timer, "MAX_DELIVERIES_PER_ENTRY", (1, 3, 128)),
    (timer, "ROLLED_OFFSETS", (1, 5, 128)),
    (timer, "LONGEST_SLEEP_S", (1.0, 60.0)),
    (timer, "STALE_MAX", (0, 100_000)),
    (transaction_check, "CHECKS_PER_ENTRY", (1, 2, 128)),
    (transaction_check, "STALE_PLANS", (0, 1024)),
)


async def play(folder: Path, seed: int, rounds: int, patch: pytest.MonkeyPatch) -> Deferred:
    """Play one seed."""
    rng = random.Random(-1 - seed)
    for module, name, values in DRAWN_LIMITS:
        patch.setattr(module, name, rng.choice(values))
    world = Deferred(folder, seed)
    damaged = SimpleNamespace(suspects=[1])

    def check(*given: Any) -> Any:
        return damaged if world.is_damaged else check_entries(*given)

    patch.setattr(stored_record, "check_entries", check)
    try:
        async with beside(world.serve, world.pump):
            for _ in range(rounds):
                for _ in range(rng.choice([15, 60, 150])):
                    world.step()
                    await trio.sleep(rng.choice([0, 0, 0.001, 0.03, 0.3, 1.5]))
                await world.quiet()
    finally:
        world.group.close()
    return world


@pytest.mark.parametrize("seed", range(2 * EXTENT))
async def test_deferred_messages_come_once_while_storing_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    seed: int,
) -> None:
    world = await play(tmp_path, seed, 3, monkeypatch)
    assert any(message.copies for message in world.messages.values())
