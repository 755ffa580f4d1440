"""Which queues of a topic each consumer of a group owns, kept in step with members and route.

Every consumer computes its own part alone, from the same two lists: all queues of the topic and
all client ids of the group, both sorted. So all consumers of a group must use the same strategy;
nothing checks that. Results are those of RocketMQ's Java client: both may share a group.

A consumer computes again when it starts, when a broker reports a change of members, when a route
changes, and every 20 seconds, because any of these may be missed. An answer that is missing changes
nothing: a consumer keeps what it has.

Members are asked of every broker, because brokers do not exchange them. One that has just started
does not know all of them yet; one that was cut off from a consumer may not have noticed its end.
So a consumer counts as a member when half of the answers name it.

Spec: docs/internals/protocol/remoting.md, sections 8.5 and 8.6;
docs/internals/protocol/semantics.md, section 6.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, TypeVar

import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError, NoRouteError
from dledger.client.core.route import MessageQueue, TopicRoute
from dledger.commitlog.errors import MQError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.bodies import ConsumerIdList
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import ConsumerGroupHeader

_log = get_logger(__name__)

VIRTUAL_NODES: Final = 10
"""Places of one node; RocketMQ's number, so that both come to the same result."""


def ring_hash(text: str) -> int:
    """Return the place of *text* on the ring: the first four bytes of its MD5, big-endian."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class HashRing:
    """Finds the node that is next on the ring, clockwise."""

    def __init__(self, nodes: Iterable[str], virtual_nodes: int = VIRTUAL_NODES) -> None:
        """Put *nodes* on the ring, each at its places ``node-0``, ``node-1`` …"""
        ring = {
            ring_hash(f"{node}-{number}"): node for node in nodes for number in range(virtual_nodes)
        }
        self._places = sorted(ring)
        self._nodes = [ring[place] for place in self._places]

    def node_of(self, key: str) -> str | None:
        """Return the node at the place of *key* or the next one behind it; None without nodes."""
        if not self._places:
            return None
        return self._nodes[bisect_left(self._places, ring_hash(key)) % len(self._places)]


T = TypeVar("T")

ROOM_SEPARATOR = "@"
"""Between location and name in a broker name."""


class AllocateMessageQueueStrategy(Protocol):
    """How the queues of one topic are dealt out to the consumers of a group."""

    @property
    def name(self) -> str:
        """RocketMQ's name of the strategy."""

    def allocate(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        """Return the queues that are *client_id*'s; none when it is not among *clients*.

        Args:
            group: The consumer group.
            client_id: The client that asks.
            queues: All queues of the topic, sorted.
            clients: Ids of all consumers of the group, sorted.
        """


@dataclass(frozen=True, slots=True)
class Averagely:
    """Contiguous blocks; the first consumers get one queue more when it does not come out even."""

    name: str = "AVG"

    def allocate(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        """See `AllocateMessageQueueStrategy`."""
        if client_id not in clients:
            return []
        index = clients.index(client_id)
        size, larger = divmod(len(queues), len(clients))
        start = index * size + min(index, larger)
        return list(queues[start : start + size + (index < larger)])


@dataclass(frozen=True, slots=True)
class AveragelyByCircle:
    """Dealt out like cards: queue *i* goes to consumer *i* modulo their number."""

    name: str = "AVG_BY_CIRCLE"

    def allocate(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        """See `AllocateMessageQueueStrategy`."""
        if client_id not in clients:
            return []
        return list(queues[clients.index(client_id) :: len(clients)])


@dataclass(frozen=True, slots=True)
class ByConfig:
    """The queues that this consumer is configured with, whatever the others do.

    Attributes:
        queues: All that is its own, of any topic.
    """

    queues: Collection[MessageQueue] = ()
    name: str = "CONFIG"

    def allocate(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        """See `AllocateMessageQueueStrategy`; queues that do not exist are left out."""
        wanted = set(self.queues)
        return [queue for queue in queues if queue in wanted]


@dataclass(frozen=True, slots=True)
class ByMachineRoom:
    """Only queues on brokers at certain locations, called ``room@name``, dealt out evenly.

    The rest that does not come out even is taken from the end: one more for each of the first.

    Attributes:
        rooms: The locations this group consumes from.
    """

    rooms: Collection[str] = ()
    name: str = "MACHINE_ROOM"

    def allocate(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        """See `AllocateMessageQueueStrategy`."""
        if client_id not in clients:
            return []
        index = clients.index(client_id)
        near = [queue for queue in queues if room_of(queue.broker_name) in self.rooms]
        size, larger = divmod(len(near), len(clients))
        own = near[index * size : (index + 1) * size]
        if index < larger:
            own.append(near[len(clients) * size + index])
        return own


def room_of(broker_name: str) -> str | None:
    """Return the location in a broker name, None where it has no such form."""
    parts = broker_name.split(ROOM_SEPARATOR)
    return parts[0] if len(parts) == 2 and parts[1] else None


@dataclass(frozen=True, slots=True)
class NearbyMachineRoom:
    """Queues of a location go to its consumers; those of a location without any, to all.

    Attributes:
        within: How the queues of one location are dealt out.
        room_of_queue: Where a queue's broker stands.
        room_of_client: Where a consumer runs, by its id.
    """

    within: AllocateMessageQueueStrategy
    room_of_queue: Callable[[MessageQueue], str]
    room_of_client: Callable[[str], str]

    @property
    def name(self) -> str:
        """RocketMQ's name of the strategy."""
        return f"MACHINE_ROOM_NEARBY-{self.within.name}"

    def allocate(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        """See `AllocateMessageQueueStrategy`."""
        if client_id not in clients:
            return []
        queues_in = _grouped(queues, self.room_of_queue)
        clients_in = _grouped(clients, self.room_of_client)
        here = self.room_of_client(client_id)
        own = self.within.allocate(group, client_id, queues_in.pop(here, []), clients_in[here])
        for room in sorted(queues_in.keys() - clients_in.keys()):
            own += self.within.allocate(group, client_id, queues_in[room], clients)
        return own


def _grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """By a ring of hashes: when a consumer comes or goes, few queues change hands.

    Attributes:
        virtual_nodes: Places of each consumer on the ring.
    """

    virtual_nodes: int = VIRTUAL_NODES
    name: str = "CONSISTENT_HASH"

    def allocate(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        """See `AllocateMessageQueueStrategy`."""
        if client_id not in clients:
            return []
        ring = HashRing(clients, self.virtual_nodes)
        return [queue for queue in queues if ring.node_of(queue_text(queue)) == client_id]


def queue_text(queue: MessageQueue) -> str:
    """Return a queue as Java writes it; the ring hashes that."""
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, "
        f"queueId={queue.queue_id}]"
    )


ASK_TIMEOUT_S: Final = 1.0
"""For all brokers together: one that is silent must not hold up a rebalance."""


def known_members(answers: Sequence[Iterable[str]]) -> list[str]:
    """Return the client ids that at least half of *answers* hold, sorted."""
    counts = Counter(client_id for answer in answers for client_id in set(answer))
    return sorted(client_id for client_id, count in counts.items() if 2 * count >= len(answers))


async def ask_members(instance: ClientInstance, group: str, route: TopicRoute) -> list[str] | None:
    """Return the members of *group*, sorted, by the brokers of *route*; None without an answer.

    Cancellation: Nothing was changed anywhere.
    """
    header = dict(ConsumerGroupHeader(group).encode())
    answers: list[list[str]] = []

    async def ask(address: str) -> None:
        try:
            answer = await instance.ask(
                address,
                RequestCode.GET_CONSUMER_LIST_BY_GROUP,
                dict(header),
                timeout_s=ASK_TIMEOUT_S,
            )
            if answer.code == ResponseCode.SUCCESS:
                answers.append(ConsumerIdList.decode(answer.body).consumer_id_list)
            elif answer.code == ResponseCode.SYSTEM_ERROR:
                answers.append([])  # it knows no member of this group
        except MQError as error:
            _log.debug("members_not_told", group=group, address=address, error=str(error))

    addresses = _addresses_in(route)
    with trio.move_on_after(ASK_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for address in sorted(addresses):
                nursery.start_soon(ask, address)
    return known_members(answers) if answers else None


def _addresses_in(route: TopicRoute) -> frozenset[str]:
    return frozenset(a for brokers in route.addresses.values() for a in brokers.values())


_Members: TypeAlias = dict[frozenset[str], list[str] | None]
"""Addresses of brokers → the members of the group that they know."""


REBALANCE_PERIOD_S: Final = 20.0
"""RocketMQ's."""
AGAIN_S: Final = 1.0
"""While something is not known yet: this consumer to the brokers, or a topic to the NameServers.
Doubles each time, up to the period."""
SETTLE_S: Final = 0.05
"""After a rebalance, before the next: each broker reports one and the same change."""


@dataclass(slots=True)
class RebalanceCounters:
    """What has happened so far.

    Attributes:
        changes: Topics of which other queues were given out than before.
        unknown: Rebalances without an answer, or those that did not find this consumer itself.
    """

    rounds: int = 0
    changes: int = 0
    unknown: int = 0


@dataclass(eq=False, repr=False)
class Rebalance:
    """Decides which queues are this consumer's, and applies it when it changes.

    *strategy*: how queues are dealt out; None: everybody has all of them.
    *apply*: called with a topic and all its queues that are this consumer's now.
    """

    _instance: ClientInstance
    _group: str
    strategy: AllocateMessageQueueStrategy | None
    topics: Callable[[], Iterable[str]]
    apply: Callable[[str, frozenset[MessageQueue]], Awaitable[None]]

    def __post_init__(self) -> None:
        self._wanted = trio.Event()
        self._given: dict[str, frozenset[MessageQueue]] = {}
        self._is_stopped = False
        self.counters = RebalanceCounters()

    def wake(self) -> None:
        """Look again now. Cheap, and may be called from anywhere on the event loop."""
        self._wanted.set()

    def stop(self) -> None:
        """Give nothing to anybody any more. Idempotent."""
        self._is_stopped = True

    async def run(self) -> None:
        """Rebalance until cancelled. Cancellation: What is owned stays owned."""
        again_s = AGAIN_S
        is_told = True
        while True:
            self._wanted = trio.Event()
            is_complete = await self.rebalance()
            await self._instance.clock.sleep(SETTLE_S)
            # The leader reports a change; others may report the same a moment later.
            is_certain = is_complete and not is_told
            with trio.move_on_after(REBALANCE_PERIOD_S if is_certain else again_s) as pause:
                await self._wanted.wait()
            is_told = not pause.cancelled_caught
            is_late = pause.cancelled_caught and not is_complete
            again_s = min(2 * again_s, REBALANCE_PERIOD_S) if is_late else AGAIN_S

    async def rebalance(self) -> bool:
        """Rebalance every topic once; return whether all there is to know was known."""
        self.counters.rounds += 1
        topics = list(self.topics())
        for topic in [topic for topic in self._given if topic not in topics]:
            await self._give(topic, frozenset())
            del self._given[topic]
        # Topics of the same brokers have the same members: one question does for all of them.
        members: _Members = {}
        complete = [await self._rebalance_topic(topic, members) for topic in topics]
        return all(complete)

    async def _rebalance_topic(self, topic: str, members: _Members) -> bool:
        try:
            route = await self._instance.route(topic)
        except NoRouteError:
            return False  # a retry topic is made by the group's first pull, others by a message
        except ClientError as error:
            _log.info("no_route", topic=topic, error=str(error))
            return False
        queues = sorted(route.subscribe_queues)
        if self.strategy is None:
            await self._give(topic, frozenset(queues))
            return True
        brokers = _addresses_in(route)
        if brokers not in members:
            members[brokers] = await self._members(route)
        clients = members[brokers]
        if clients is None:
            self.counters.unknown += 1
            return False
        own = self.strategy.allocate(self._group, self._instance.client_id, queues, clients)
        await self._give(topic, frozenset(own))
        return True

    async def _members(self, route: TopicRoute) -> list[str] | None:
        """Return the members of the group; None: no answer, or this consumer is not in it yet."""
        clients = await ask_members(self._instance, self._group, route)
        if clients is not None and self._instance.client_id not in clients:
            await self._instance.heartbeats.send()
            clients = await ask_members(self._instance, self._group, route)
        if clients is None or self._instance.client_id not in clients:
            return None
        return clients

    async def _give(self, topic: str, queues: frozenset[MessageQueue]) -> None:
        if self._is_stopped:
            return
        if self._given.get(topic, frozenset()) != queues:
            self.counters.changes += 1
            _log.info(
                "queues_given",
                group=self._group,
                topic=topic,
                queues=len(queues),
                client_id=self._instance.client_id,
            )
        self._given[topic] = queues
        await self.apply(topic, queues)
