"""Every service, every way a leader goes wrong, ten moments each: real processes, content.

All services are used at the same time, round after round, while the leader is in trouble again and
again. A moment counts for a service when a round overlaps it and finds all that must be there. A
service without enough moments fails, and so does one that is in the list and not here.

``DLEDGER_MATRIX_SEED`` chooses the moments.
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import structlog
import trio

from tests.harness.fast_part import gate_part
from tests.matrix import consuming, operating, sending, timed
from tests.matrix.ground import Ground, ground
from tests.matrix.row import ROWS

pytestmark = pytest.mark.slow

MODULES = (consuming, operating, sending, timed)
SERVICES = {
    *("several groups", "client manager", "push consumption", "groups and rebalance"),
    *("orderly consumption", "retry and dead letter", "delayed messages", "transactions"),
    *("filtering", "query", "idempotent producer", "retention", "access", "flow control"),
    *("request-reply, batch, compression, trace", "follower reads", "hooks and statistics"),
    *("fast port", "runtime configuration", "announced", "test kit"),
}
FAULTS = {
    "killed": Ground.kill_leader,
    "paused": Ground.pause_leader,
    "cut one way": Ground.cut_one_way,
}
MOMENTS = 10
ROUND_WITHIN_S = 180.0
"""A group whose leader changes again and again settles 30 s after the last time."""
REST_S = 0.2
"""Between two rounds of a row: all of them share two processors with five brokers."""

Span = tuple[float, float]


def test_every_service_has_a_row() -> None:
    assert set(ROWS) == SERVICES


def moments_of(rounds: list[Span], troubles: list[Span]) -> int:
    """Return in how many troubles some round went on."""
    return sum(any(begin < over and end > at for begin, end in rounds) for at, over in troubles)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Only the table is printed: clients have much to tell about leaders in trouble."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("fault", gate_part(FAULTS, 1))
async def test_every_service_survives(fault: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("DLEDGER_MATRIX_SEED", "1"))
    print(f"DLEDGER_MATRIX_SEED={seed} make matrix")
    rng = Random(f"{seed} {fault}")
    rounds: dict[str, list[Span]] = {name: [] for name in ROWS}
    troubles: list[Span] = []
    over, ready = trio.Event(), {name: trio.Event() for name in ROWS}

    async def use(name: str) -> None:
        async with ROWS[name](there) as play:
            number = 0
            ready[name].set()
            while not over.is_set():
                began = time.monotonic()
                try:
                    with trio.fail_after(ROUND_WITHIN_S):
                        await play(number)
                except Exception as error:
                    error.add_note(f"{name}, round {number}, leader {fault}")
                    raise
                rounds[name].append((began, time.monotonic()))
                number += 1
                await trio.sleep(REST_S)

    async with ground(tmp_path, seed) as there, trio.open_nursery() as nursery:
        for name in ROWS:
            nursery.start_soon(use, name)
        for event in ready.values():
            await event.wait()
        for number in range(MOMENTS):
            await trio.sleep(0.5 + 1.5 * rng.random())
            at = time.monotonic()
            await FAULTS[fault](there, number)
            troubles.append((at, time.monotonic()))
        over.set()
    cells = {name: moments_of(spans, troubles) for name, spans in rounds.items()}
    for name, count in cells.items():
        print(f"{name:45} {fault:12} {count:3} moments, {len(rounds[name]):4} rounds")
    short = {name: count for name, count in cells.items() if count < MOMENTS}
    assert not short, f"too few moments: {short}"
