"""A broker group that fails in many ways, for tests of consumers on virtual time.

Its members share what is stored. They are busy at times, lose requests before and after they carry
them out, take them late, and are elected and killed in turn.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import trio

from dledger.remoting.handling import Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.unit.client.fake_cluster import Broker, Group, World, open_world

GROUP: Final = "c"
"""The group of all consumers."""

Place = tuple[str, str, int, int]
"""Broker name, topic, queue, offset."""


@dataclass
class Ledger:
    """What has become of each message, and each guarantee that was broken."""

    done: set[Place] = field(default_factory=set)
    consumed: list[Place] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    met: set[str] = field(default_factory=set)

    def committed(self, group: Group, topic: str, queue_id: int, offset: int) -> None:
        """The group commits *offset*: all below is to be dealt with."""
        for below in range(offset):
            if (group.name, topic, queue_id, below) not in self.done:
                self.broken.append(f"{topic}/{queue_id}: {offset} committed, {below} is open")
                return


class FaultyGroup:
    """The members of a group, and what they do to requests."""

    def __init__(self, group: Group, rng: random.Random, ledger: Ledger) -> None:
        self.group = group
        self.ledger = ledger
        self._rng = rng
        self._chance = 0.0
        self._is_busy = False
        # Kinds of requests → until when they are not answered.
        self._deaf: dict[str, float] = {}
        group.on_each(RequestCode.PULL_MESSAGE, partial(self._take, "pull", self._pull))
        group.on_each(
            RequestCode.UPDATE_CONSUMER_OFFSET, partial(self._take, "commit", self._commit)
        )
        group.on_each(
            RequestCode.QUERY_CONSUMER_OFFSET, partial(self._take, "query", Broker._committed)
        )

    async def run(self, until_s: float) -> None:
        """Change the group at random until then, and heal it."""
        rng, group = self._rng, self.group
        self._chance = rng.choice([0.02, 0.1, 0.3])
        while trio.current_time() < until_s:
            await trio.sleep(rng.uniform(0.1, 5.0))
            self._is_busy = rng.random() < 0.3
            if rng.random() < 0.1:
                kind = rng.choice(["pull", "commit", "query"])
                longest_s = rng.choice([1.0, 10.0, 60.0])
                self._deaf[kind] = trio.current_time() + rng.uniform(0.0, longest_s)
            happens = rng.random()
            if happens < 0.2:
                group.leader = None
                await trio.sleep(rng.choice([0.0, 0.3, 2.0, 8.0]))
                group.elect(rng.randrange(len(group.brokers)))
            elif happens < 0.3:
                broker = rng.choice(group.brokers)
                await broker.kill()
                await trio.sleep(rng.choice([0.0, 1.0]))
                await broker.start()
        self._chance = 0.0
        self._is_busy = False
        self._deaf.clear()

    def _take(
        self,
        kind: str,
        carry_out: Callable[[Broker, RemotingCommand], Handled],
        broker: Broker,
        asked: RemotingCommand,
    ) -> Handled:
        rng, met = self._rng, self.ledger.met
        is_deaf = trio.current_time() < self._deaf.get(kind, 0.0)
        if is_deaf or rng.random() < self._chance / 2:
            met.add("lost before")
            return trio.sleep_forever()
        if not broker.leads:
            return broker._not_leader(asked)
        if self._is_busy or rng.random() < self._chance:
            met.add("busy")
            code = rng.choice([1, ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE])
            return response_to(asked, code, "no", {"outcome": "not_stored"})
        if rng.random() < self._chance:
            met.add("late")
            return self._take_late(broker, carry_out, asked)
        answer = carry_out(broker, asked)
        if isinstance(answer, RemotingCommand) and rng.random() < self._chance:
            met.add("lost after")
            return trio.sleep_forever()
        return answer

    async def _take_late(
        self,
        broker: Broker,
        carry_out: Callable[[Broker, RemotingCommand], Handled],
        asked: RemotingCommand,
    ) -> RemotingCommand:
        await trio.sleep(self._rng.uniform(0.05, 4.0))
        if not broker.leads:
            return broker._not_leader(asked)
        answer = carry_out(broker, asked)
        if isinstance(answer, RemotingCommand):
            return answer
        assert isinstance(answer, Awaitable)
        found = await answer
        assert isinstance(found, RemotingCommand)
        return found

    def _pull(self, broker: Broker, asked: RemotingCommand) -> Handled:
        return broker._pull(asked)

    def _commit(self, broker: Broker, asked: RemotingCommand) -> Handled:
        topic, queue_id = asked.ext["topic"], int(asked.ext["queueId"])
        offset = int(asked.ext["commitOffset"])
        self.ledger.committed(self.group, topic, queue_id, offset)
        self.group.committed[GROUP, topic, queue_id] = offset
        return response_to(asked)


SEEDS: Final = 25
"""Seeds that one test plays in turn."""


class Played(Protocol):
    """What a test does with one world: consumers, brokers that fail, and what came of it."""

    ledger: Ledger

    async def run(self) -> None:
        """Play until all is consumed."""


async def play(
    make: Callable[[World, int], Played], seed: int, topics: Mapping[str, int]
) -> set[str]:
    """Play *seed* in one broker group, or two; nothing is broken. Return the faults that were met.

    Args:
        topics: Their queues in each group.
    """
    async with open_world() as world:
        if seed % 3 == 0:
            await world.add_group("h", 1, 11911)
        for group in world.groups.values():
            group.topics |= topics
        played = make(world, seed)
        await played.run()
        broken = played.ledger.broken
        assert not broken, f"seed {seed}: {broken}"
        return played.ledger.met


async def play_many(
    make: Callable[[World, int], Played], first: int, topics: Mapping[str, int]
) -> set[str]:
    """Play `SEEDS` seeds from *first* on, as `play`."""
    every: set[str] = set()
    for seed in range(first, first + SEEDS):
        every |= await play(make, seed, topics)
    return every
