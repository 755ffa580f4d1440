"""Offsets that one client commits, one at a time, with and without a wait for the log.

A commit that was answered once it is stored is what is read until the next one is called, whatever
was committed before it, a larger offset too. One that was answered at once may be lost with its
leader, and is stored within a flush while that leader stays. What got no answer may be stored at
any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.headers import UpdateConsumerOffsetHeader
from dledger.remoting.protocol.outcome import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dledger.jepsen_like.simulation.world import World

ASK_S: Final = 10.0

COMMITS_PER_TURN: Final = 4
PAUSES_S: Final = (0.0, 0.0, 0.5, 3.0, 12.0)
"""Between two commits: shorter and longer than a flush of offsets takes to come."""

OFFSETS: Final = 1 << 20
"""Offsets are drawn below it, so that each is committed once and some are smaller than before."""

FLUSHED_S: Final = 12.0
"""A leader that serves steadily stores within this what it has answered at once: two flushes."""

Leadership = tuple[str, int, int]


@dataclass(slots=True)
class _Slot:
    """What may be committed in one queue.

    Attributes:
        may: What a read may give; None: nothing is committed.
        open: Offsets whose commit got no answer.
        taken: The newest commit, answered at once: its offset, by whom and when.
    """

    may: set[int | None] = field(default_factory=lambda: {None})
    open: set[int | None] = field(default_factory=set)
    taken: tuple[int, Leadership, float] | None = None


class SideCommits:
    """The offsets of one group."""

    def __init__(
        self, world: World, rng: SimRng, group: str, contradicts: Callable[[str], None]
    ) -> None:
        self._world = world
        self._rng = rng
        self._group = group
        self._contradicts = contradicts
        self._slots: dict[MessageQueue, _Slot] = {}

    def forget(self, queue: MessageQueue) -> None:
        """Take note that the topic was deleted since: nothing that was stored is left."""
        slot = self._slots.setdefault(queue, _Slot())
        slot.may, slot.taken = {None}, None

    async def turn(
        self, instance: ClientInstance, consumer: PullConsumer, queue: MessageQueue
    ) -> bool:
        """Read all that was committed of a topic; commit a few offsets of a queue, and read each.

        Returns whether a leader is known.

        Raises:
            ClientError: The cluster is in trouble.
        """
        self._slots.setdefault(queue, _Slot())
        for each in [each for each in self._slots if each.topic == queue.topic]:
            await self.look(consumer, each)
        for _ in range(self._rng.randint(1, COMMITS_PER_TURN)):
            waits = self._rng.random() < 0.5
            if not await self.commit(instance, queue, self._rng.randrange(OFFSETS), waits=waits):
                return False
            await self._world.sleep(self._rng.choice(PAUSES_S))
            await self.look(consumer, queue)
        return True

    async def commit(
        self, instance: ClientInstance, queue: MessageQueue, offset: int, *, waits: bool
    ) -> bool:
        """Commit with one request, whose answer *waits* for the log or not; false: no leader.

        Raises:
            ClientError: It is not known whether it is stored.
        """
        address = instance.leaders.address(queue.broker_name)
        if address is None:
            return False
        slot = self._slots.setdefault(queue, _Slot())
        before = self._leadership(address)
        slot.taken = None
        slot.open.add(offset)
        header = UpdateConsumerOffsetHeader(self._group, queue.topic, queue.queue_id, offset)
        sync = {"sync": "true"} if waits else {}
        answer = await instance.ask(
            address,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            {**header.encode(), **sync},
            timeout_s=ASK_S,
        )
        if answer.code:
            instance.leader_search.note_refusal(queue.broker_name, address, answer)
            if outcome_of(answer) == "not_stored":
                slot.open.discard(offset)
            return False
        slot.open.discard(offset)
        if waits:
            slot.may = {offset}
        else:
            slot.may.add(offset)
            after = self._leadership(address)
            if before is not None and before == after:
                slot.taken = offset, before, self._world.elapsed_s
        return True

    async def look(self, consumer: PullConsumer, queue: MessageQueue) -> None:
        """Read what is stored, and compare.

        Raises:
            ClientError: There is no answer.
        """
        slot = self._slots.setdefault(queue, _Slot())
        taken = slot.taken
        flushed = taken is not None and self._is_flushed(taken)
        stored = await consumer.committed_offset(queue)
        if stored not in slot.may | slot.open:
            self._contradicts(f"{queue} has {stored} committed, may be {slot.may | slot.open}")
        elif taken is not None and flushed and stored not in {taken[0], *slot.open}:
            self._contradicts(f"{queue} has {stored} committed, and {taken[0]} was taken last")

    def _is_flushed(self, taken: tuple[int, Leadership, float]) -> bool:
        """Whether the leader that took an offset has led since, long enough to store it."""
        world, (_, leadership, at_s) = self._world, taken
        steady_s = world.steadiness.served_since_s
        return (
            steady_s is not None
            and self._leadership() == leadership
            and world.last_term == leadership[2]
            and world.elapsed_s - max(steady_s, at_s) > FLUSHED_S
        )

    def _leadership(self, address: str | None = None) -> Leadership | None:
        """Return which member leads, and its term; None when it is not the one at *address*."""
        node = self._world.leader()
        if node is None or node.group is None or address not in (None, node.endpoint):
            return None
        return node.name, node.incarnation, node.group.term
