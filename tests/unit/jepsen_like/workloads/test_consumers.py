"""Consumers that stand still and their doubles never commit one offset twice."""

from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio

from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.history.operation import F, Operation, Outcome
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream
from dledger.jepsen_like.workloads import consumers
from dledger.jepsen_like.workloads.consumers import Consumers

QUEUE = MessageQueue("t", "b", 0)
MESSAGES = 5


class Clients:
    """A queue of five messages, and everything that is committed of it, in order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.queues = [QUEUE]
        self.is_over = False
        self.commits: list[tuple[str, int]] = []

    def new_process(self) -> int:
        return 1

    def rng_of(self, role: str, index: int) -> SimRng:
        return rng_stream(self.seed, role, index)

    @contextmanager
    def acting(self) -> Iterator[None]:
        yield

    async def pause(self, rng: object) -> bool:
        await trio.sleep(0.1)
        return not self.is_over

    def is_awaited(self, moment: object) -> bool:
        return False

    def _row(self, f: F, off: int, count: int = 0) -> Operation:
        return Operation(0, 0, 1, -1, f, Outcome.OK, 0, 1, "t", 0, off=off, cnt=count)

    async def commit(self, consumer: Any, process: int, queue: object, offset: int) -> Operation:
        self.commits.append((consumer.instance, offset))
        return self._row(F.COMMIT, offset)

    async def fetch_commit(self, consumer: Any, process: int, queue: object) -> Operation:
        return self._row(F.FETCH_COMMIT, self.commits[-1][1] if self.commits else -1)

    async def pull(
        self, consumer: Any, process: int, queue: object, offset: int, wait_s: float, group: str
    ) -> tuple[Operation, int]:
        return self._row(F.PULL, offset, MESSAGES - offset), MESSAGES


@asynccontextmanager
async def _opened(instance: str, group: str) -> Any:
    class Opened:
        def __init__(self) -> None:
            self.instance, self.group = instance, group

    yield Opened()


@pytest.mark.parametrize("seed", range(20))
async def test_what_one_has_in_hand_its_double_leaves_to_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "PullConsumer", _opened)
    clients: Any = Clients(seed)
    made = Consumers(clients)
    instance: Any = "first"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.act, instance, 0)
        await trio.sleep(0.15)  # one step
        made.hold()
        await trio.sleep(1)
        before = list(clients.commits)
        instance = "double"
        nursery.start_soon(made.double, instance, 0)
        await trio.sleep(20)
        assert not [who for who, _ in clients.commits[len(before) :] if who == "first"]
        in_hand = made.release()
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert made.release() == 0, "it may be called again"
    woken = [offset for who, offset in clients.commits if who == "first"][: in_hand or None]
    assert in_hand in (0, 1)
    assert in_hand == 0 or woken == [MESSAGES]
    offsets = [offset for _, offset in clients.commits]
    assert offsets == [MESSAGES], "the member that has it in hand, and no other"
