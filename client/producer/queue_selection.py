"""Which queue the next message goes to: round robin, away from brokers that just failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import NoRouteError
from dledger.client.core.message import check_topic
from dledger.client.core.route import MessageQueue, TopicRoute

LATENCY_MAX_MS = (50, 100, 550, 1800, 3000, 5000, 15000)
"""Latency steps of RocketMQ ≥ 5.1.4."""

NOT_AVAILABLE_MS = (0, 0, 2000, 5000, 6000, 10000, 30000)
"""How long a broker is avoided after a send that took at least the step of the same place."""

ISOLATION_LATENCY_MS = 10000
"""What a failed send counts as."""

LEADER_POLL_S: Final = 0.1
"""Between two questions for the route of a topic whose group elects a leader: an election takes a
few of these, and a NameServer answers far more than ten questions a second."""


def not_available_ms(latency_ms: float) -> int:
    """Return for how long a broker is avoided after a send that took *latency_ms*."""
    for step in range(len(LATENCY_MAX_MS) - 1, -1, -1):
        if latency_ms >= LATENCY_MAX_MS[step]:
            return NOT_AVAILABLE_MS[step]
    return 0


class LatencyFaultTable:
    """Broker name → until when it is better left alone."""

    def __init__(self) -> None:
        self._available_at: dict[str, float] = {}

    def note(
        self, broker_name: str, latency_ms: float, now: float, *, isolate: bool = False
    ) -> None:
        """Record how long a send took."""
        pause_ms = not_available_ms(ISOLATION_LATENCY_MS if isolate else latency_ms)
        if pause_ms == 0:
            self._available_at.pop(broker_name, None)
        else:
            self._available_at[broker_name] = now + pause_ms / 1000

    def available(self, broker_name: str, now: float) -> bool:
        """Tell whether the broker is not being avoided at *now*."""
        return now >= self._available_at.get(broker_name, now)

    def least_bad(self, broker_names: Sequence[str]) -> str:
        """Return the broker that becomes available first; ties go to the earlier in the list."""
        return min(broker_names, key=lambda name: self._available_at.get(name, 0.0))

    def __len__(self) -> int:
        return len(self._available_at)


class QueueSelector:
    """Round robin over the queues of one topic."""

    __slots__ = ("_counter",)

    def __init__(self, start: int = 0) -> None:
        """Start at queue *start* modulo the number of queues (random, so clients spread)."""
        self._counter = start

    def select(self, queues: Sequence[MessageQueue]) -> MessageQueue:
        """Return the next queue in turn. *queues* is not empty."""
        self._counter = counter = self._counter + 1
        return queues[counter % len(queues)]

    def select_avoiding(
        self,
        queues: Sequence[MessageQueue],
        *,
        last_broker: str | None = None,
        faults: LatencyFaultTable | None = None,
        now: float = 0.0,
    ) -> MessageQueue:
        """Return the next queue in turn that is not on a broker to avoid.

        Args:
            last_broker: The broker that just failed this message; chosen only if all queues are its
                own.
            faults: Brokers to avoid for longer; None: latency fault tolerance is off.
        """
        count = len(queues)
        for _ in range(count):
            queue = self.select(queues)
            if queue.broker_name == last_broker:
                continue
            if faults is None or faults.available(queue.broker_name, now):
                return queue
        if faults is not None:
            names = [q.broker_name for q in queues if q.broker_name != last_broker]
            if names:
                best = faults.least_bad(names)
                for _ in range(count):
                    queue = self.select(queues)
                    if queue.broker_name == best:
                        return queue
        return self.select(queues)


class PublishTopic:
    """The queues messages of one topic can go to, from one version of its route.

    Attributes:
        queues: The queues.
        brokers: How many broker groups have one.
        selector: Whose turn it is.
    """

    __slots__ = ("brokers", "name", "queues", "route", "selector")

    def __init__(self, name: str, route: TopicRoute, start: int) -> None:
        self.name = name.encode()
        self.route = route
        self.queues = route.publish_queues
        self.brokers = len({queue.broker_name for queue in self.queues})
        self.selector = QueueSelector(start)


class PublishTopics:
    """The topics of one producer, as their routes are now, and the brokers to avoid."""

    def __init__(self, instance: ClientInstance, *, latency_fault_enable: bool) -> None:
        """Prepare."""
        self._instance = instance
        self._clock = instance.clock
        self._topics: dict[str, PublishTopic] = {}
        self._route_version = -1
        self._ask_at: dict[str, float] = {}
        self._faults = LatencyFaultTable() if latency_fault_enable else None

    def known(self, name: str) -> PublishTopic | None:
        """Return the topic as the newest route has it; None: find it first. Asks no server."""
        instance = self._instance
        if self._route_version != instance.routes.version:
            self._route_version = instance.routes.version
            for known, topic in list(self._topics.items()):
                route = instance.routes.known_publish(known)
                if route is None:  # forgotten: no NameServer lists it
                    del self._topics[known]
                elif route is not topic.route and route.publish_queues:
                    self._put(known, route)
        return self._topics.get(name)

    async def find(self, name: str, timeout_s: float) -> PublishTopic:
        """Return the topic; a NameServer is asked for one that is not known.

        Args:
            timeout_s: For how long at most a leader is waited for.

        Raises:
            MessageIllegalError: No topic has such a name.
            NoRouteError, NoNameServerError: It does not exist, has no queue on a broker with a
                leader within *timeout_s*, or no NameServer answers.
        """
        topic = self.known(name)
        if topic is not None:
            return topic
        check_topic(name)
        until = self._clock.monotonic() + timeout_s
        route = await self._instance.routes.publish(name)
        while not route.publish_queues:
            now = self._clock.monotonic()
            if now >= until:
                self._ask_at.pop(name, None)
                raise NoRouteError(
                    f"no broker with a leader took messages of {name} within {timeout_s:g} s; "
                    "nothing was sent"
                )
            route = await self._ask_again(name, route, min(LEADER_POLL_S, until - now))
        self._ask_at.pop(name, None)
        return self._put(name, route)

    async def _ask_again(self, name: str, route: TopicRoute, pause_s: float) -> TopicRoute:
        """Return the route as it is now, asked for now or, by another sender, since a pause."""
        routes, now = self._instance.routes, self._clock.monotonic()
        if now >= self._ask_at.get(name, now):
            self._ask_at[name] = now + LEADER_POLL_S
            return await routes.publish(name, fresh=True)
        await self._clock.sleep(pause_s)
        return routes.known_publish(name) or route

    def next_queue(self, topic: PublishTopic) -> MessageQueue:
        """Return the next queue of *topic* in turn, away from brokers to avoid."""
        if self._faults:
            return topic.selector.select_avoiding(
                topic.queues, faults=self._faults, now=self._clock.monotonic()
            )
        return topic.selector.select(topic.queues)

    def elsewhere(self, queue: MessageQueue) -> MessageQueue | None:
        """Return a queue of the same topic on another broker; None when there is none."""
        topic = self._topics.get(queue.topic)
        if topic is None or topic.brokers < 2:
            return None
        other = topic.selector.select_avoiding(
            topic.queues,
            last_broker=queue.broker_name,
            faults=self._faults,
            now=self._clock.monotonic(),
        )
        return other if other.broker_name != queue.broker_name else None

    def note_send(self, broker_name: str, began_s: float, *, failed: bool) -> None:
        """Record how long a request that ends now took, and whether it failed."""
        if self._faults is not None:
            now_s = self._clock.monotonic()
            self._faults.note(broker_name, (now_s - began_s) * 1000, now_s, isolate=failed)

    def _put(self, name: str, route: TopicRoute) -> PublishTopic:
        old = self._topics.get(name)
        start = (
            self._instance.rng.randrange(len(route.publish_queues))
            if old is None
            else old.selector._counter
        )
        topic = self._topics[name] = PublishTopic(name, route, start)
        return topic
