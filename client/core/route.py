"""Where a topic's queues are and which broker leads each group. Pure state.

A route names the leader as broker id 0, but lags: brokers register again after an election, and
clients poll. A "not leader" answer is fresher and carries the term, so it wins until the route
itself changes or the address fails.

Spec: docs/internals/protocol/remoting.md, section 5.1; producers use only brokers that have an id 0
(a leader).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dledger.remoting.protocol.bodies import TopicRouteData

LEADER_ID: Final = 0
"""Broker id of the one node of a group that takes writes."""
PERM_READ: Final = 4
PERM_WRITE: Final = 2
DEFAULT_TOPIC: Final = "TBW102"
"""Its route has where an unknown topic would be created."""


class MessageQueue:
    """One queue of a topic. Equal by content; the hash is computed once, it keys hot tables."""

    __slots__ = ("_hash", "broker_name", "queue_id", "topic")

    def __init__(self, topic: str, broker_name: str, queue_id: int) -> None:
        self.topic = topic
        self.broker_name = broker_name
        self.queue_id = queue_id
        self._hash = hash((topic, broker_name, queue_id))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MessageQueue):
            return NotImplemented
        return (
            self.queue_id == other.queue_id
            and self.topic == other.topic
            and self.broker_name == other.broker_name
        )

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: MessageQueue) -> bool:
        return (self.topic, self.broker_name, self.queue_id) < (
            other.topic,
            other.broker_name,
            other.queue_id,
        )

    def __repr__(self) -> str:
        return f"MessageQueue({self.topic!r}, {self.broker_name!r}, {self.queue_id})"


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """What is known about one topic.

    Attributes:
        topic: Its name.
        publish_queues: Queues of writable brokers that have a leader, in broker and queue order.
        subscribe_queues: Queues of readable brokers, with or without a leader.
        addresses: Broker name → broker id → ``host:port`` of every broker of the route.
        order_conf: The topic's ordered-queue configuration, if the NameServers hold one.
        clusters: The clusters of these brokers, sorted.
        writable_queues: Queues of writable brokers, with or without a leader, in the same order.
    """

    topic: str
    publish_queues: tuple[MessageQueue, ...]
    subscribe_queues: tuple[MessageQueue, ...]
    addresses: dict[str, dict[int, str]] = field(default_factory=dict)
    order_conf: str | None = None
    clusters: tuple[str, ...] = ()
    writable_queues: tuple[MessageQueue, ...] = ()

    @classmethod
    def from_data(cls, topic: str, data: TopicRouteData) -> TopicRoute:
        """Build the route of *topic* from a NameServer's answer."""
        addresses = {
            broker.broker_name: {int(k): v for k, v in broker.broker_addrs.items()}
            for broker in data.broker_datas
        }
        writable: list[MessageQueue] = []
        subscribe: list[MessageQueue] = []
        for queue in sorted(data.queue_datas, key=lambda q: q.broker_name):
            brokers = addresses.get(queue.broker_name)
            if not brokers:
                continue
            most = max(queue.read_queue_nums, queue.write_queue_nums)
            queues = [MessageQueue(topic, queue.broker_name, i) for i in range(most)]
            if queue.perm & PERM_READ:
                subscribe.extend(queues[: queue.read_queue_nums])
            if queue.perm & PERM_WRITE:
                writable.extend(queues[: queue.write_queue_nums])
        publish = [queue for queue in writable if LEADER_ID in addresses[queue.broker_name]]
        clusters = tuple(sorted({broker.cluster for broker in data.broker_datas}))
        return cls(
            topic,
            tuple(publish),
            tuple(subscribe),
            addresses,
            data.order_topic_conf,
            clusters,
            tuple(writable),
        )

    def borrowed(self, topic: str, default_queue_nums: int) -> TopicRoute:
        """Return what *topic* would look like if a broker of this route created it.

        Args:
            topic: A topic that does not exist yet; this is the default topic's route.
            default_queue_nums: Most queues per broker a new topic gets.
        """
        publish = tuple(
            MessageQueue(topic, q.broker_name, q.queue_id)
            for q in self.publish_queues
            if q.queue_id < default_queue_nums
        )
        return TopicRoute(topic, publish, (), self.addresses, clusters=self.clusters)

    def leader_address(self, broker_name: str) -> str | None:
        """Return the address registered as id 0, or None while the group has no leader."""
        return self.addresses.get(broker_name, {}).get(LEADER_ID)

    def broker_names(self) -> list[str]:
        """Return the names of all brokers of the route, sorted."""
        return sorted(self.addresses)


class RouteTable:
    """All routes a client has, and the addresses of every broker in them."""

    def __init__(self) -> None:
        self._routes: dict[str, TopicRoute] = {}

    def get(self, topic: str) -> TopicRoute | None:
        """Return the last known route of *topic*."""
        return self._routes.get(topic)

    def put(self, route: TopicRoute) -> bool:
        """Store *route*; return whether it differs from what was known."""
        old = self._routes.get(route.topic)
        if old is not None:
            if old == route:
                return False
            known = {queue: queue for queue in (*old.publish_queues, *old.subscribe_queues)}
            route = replace(
                route,
                publish_queues=tuple(known.get(q, q) for q in route.publish_queues),
                subscribe_queues=tuple(known.get(q, q) for q in route.subscribe_queues),
            )
        self._routes[route.topic] = route
        return True

    def forget(self, topic: str) -> None:
        """Drop a topic that is not used any more."""
        self._routes.pop(topic, None)

    def topics(self) -> list[str]:
        """Return the topics with a route."""
        return list(self._routes)

    def addresses(self, broker_name: str) -> list[str]:
        """Return every known address of a broker group, by broker id, without repeats."""
        found: dict[str, None] = {}
        for route in self._routes.values():
            brokers = route.addresses.get(broker_name)
            if brokers:
                for broker_id in sorted(brokers):
                    found[brokers[broker_id]] = None
        return list(found)

    def brokers(self) -> Iterator[tuple[str, int, str]]:
        """Yield (broker name, broker id, address) of every broker of every route, once each."""
        seen: set[tuple[str, int, str]] = set()
        for route in self._routes.values():
            for name, brokers in route.addresses.items():
                for broker_id, address in brokers.items():
                    item = (name, broker_id, address)
                    if item not in seen:
                        seen.add(item)
                        yield item


@dataclass(slots=True)
class _Group:
    term: int = -1
    hinted: str | None = None
    routed: str | None = None
    newest: str = ""


class LeaderTable:
    """Broker name → address of the leader.

    *on_moved*: called with the address of a former leader when another one is known.
    """

    def __init__(self, on_moved: Callable[[str], None] = lambda _former: None) -> None:
        self._groups: dict[str, _Group] = {}
        self._on_moved = on_moved

    def address(self, broker_name: str) -> str | None:
        """Return the address to send to, or None when no leader is known."""
        group = self._groups.get(broker_name)
        if group is None:
            return None
        return group.hinted or group.routed

    def term(self, broker_name: str) -> int:
        """Return the highest term received, -1 before any."""
        group = self._groups.get(broker_name)
        return -1 if group is None else group.term

    def learn(
        self, broker_name: str, address: str, term: int, *, told_by: str | None = None
    ) -> bool:
        """Take a hint; return whether it was news or a confirmation, False for a stale one.

        A hint of a lower term than one already received is from a node that was stopped, unless the
        very node we took for the leader sends it: then the group has been set up again.

        Args:
            broker_name: The group.
            address: The leader named.
            term: In which term.
            told_by: Address of the node that named it.
        """
        group = self._groups.setdefault(broker_name, _Group())
        if term < group.term and (told_by is None or told_by != group.hinted):
            return False
        group.term = term
        group.hinted = address
        self._note(group, address)
        return True

    def _note(self, group: _Group, leader: str) -> None:
        former, group.newest = group.newest, leader
        if former not in ("", leader):
            self._on_moved(former)

    def take_route(self, broker_name: str, address: str | None) -> None:
        """Take what a fresh route has; it overrides a hint only where it changed."""
        group = self._groups.setdefault(broker_name, _Group())
        if address == group.routed:
            return
        group.routed = address
        if address is not None:
            group.hinted = None
            self._note(group, address)

    def suspect(self, broker_name: str, address: str) -> bool:
        """Drop the hint to an address that failed; return whether there was one."""
        group = self._groups.get(broker_name)
        if group is None or group.hinted != address:
            return False
        group.hinted = None
        return True


def parse_address_list(text: str | Iterable[str]) -> list[str]:
    """Return the ``host:port`` entries of a list separated by ``;`` or ``,``."""
    parts = text.replace(",", ";").split(";") if isinstance(text, str) else text
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
