"""The subscriptions of one consumer, with versions that brokers compare."""

from __future__ import annotations

from collections.abc import Iterator

from client.consumer.subscription_expression import SUB_ALL, SubscriptionExpression
from remoting.protocol.bodies import SubscriptionData
from remoting.seams import Clock


class Subscriptions:
    """Topic → what is wanted of it. A change has a version above all before it."""

    def __init__(self, clock: Clock) -> None:
        """Begin with none; versions are dates, as in RocketMQ's clients."""
        self._clock = clock
        self._wanted: dict[str, tuple[SubscriptionExpression, int]] = {}
        self._newest = 0

    def __iter__(self) -> Iterator[str]:
        """Yield the topics."""
        return iter(list(self._wanted))

    def __len__(self) -> int:
        return len(self._wanted)

    def get(self, topic: str) -> SubscriptionExpression | None:
        """Return what is wanted of *topic*; None: nothing."""
        found = self._wanted.get(topic)
        return None if found is None else found[0]

    def put(self, topic: str, expression: str | SubscriptionExpression = SUB_ALL) -> None:
        """Want *expression* of *topic* from now on.

        Raises:
            SubscriptionIllegalError: A text that is no expression over tags.
        """
        if isinstance(expression, str):
            expression = SubscriptionExpression.by_tag(expression)
        self._newest = max(self._clock.wall_ms(), self._newest + 1)
        self._wanted[topic] = (expression, self._newest)

    def remove(self, topic: str) -> bool:
        """Want nothing of *topic*; return whether something was wanted."""
        return self._wanted.pop(topic, None) is not None

    def data(self) -> list[SubscriptionData]:
        """Return what a heartbeat says of them."""
        return [
            expression.subscription_data(topic, version)
            for topic, (expression, version) in self._wanted.items()
        ]
