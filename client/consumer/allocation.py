"""Which queues of a topic are whose in a consumer group. Pure.

Every consumer computes its own part alone, from the same two lists: all queues of the topic and
all client ids of the group, both sorted. So all consumers of a group must use the same strategy;
nothing checks that. Results are those of RocketMQ's Java client: both may share a group.

Spec: docs/internals/protocol/semantics.md, section 6.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from client.core.route import MessageQueue

VIRTUAL_NODES: Final = 10
"""Places of one node; RocketMQ's number, so that both come to the same result."""


def ring_hash(text: str) -> int:
    """Return the place of *text* on the ring: the first four bytes of its MD5, big-endian."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class HashRing:
    """Finds the node that is next on the ring, clockwise."""

    def __init__(self, nodes: Iterable[str], virtual_nodes: int = VIRTUAL_NODES) -> None:
        """Put *nodes* on the ring, each at its places ``node-0``, ``node-1`` …

        Of two nodes at one place the later one has it.
        """
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
"""Between machine room and name in a broker name."""


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
            client_id: Who asks.
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
    """What this consumer was told, whatever the others do.

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
    """Only queues on brokers of certain rooms, which are called ``room@name``, dealt out evenly.

    The rest that does not come out even is taken from the end: one more for each of the first.

    Attributes:
        rooms: The rooms this group consumes from.
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
    """Return the machine room in a broker name, None where it has no such form."""
    parts = broker_name.split(ROOM_SEPARATOR)
    return parts[0] if len(parts) == 2 and parts[1] else None


@dataclass(frozen=True, slots=True)
class NearbyMachineRoom:
    """Queues of a room go to the consumers of that room; those of a room without any, to all.

    Attributes:
        within: How the queues of one room are dealt out.
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
