"""Route answers, encoded once per topic and dialect and kept until the route changes.

At most one body per registered topic and dialect is held: topics that are not registered are not
remembered, so questions for made-up names cost no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remoting.protocol.bodies import TopicRouteData
from remoting.protocol.command import STANDARD_JSON_VERSION
from remoting.protocol.fastjson import Dialect


def route_dialect(version: int, *, accept_standard_json_only: bool) -> Dialect:
    """Return the dialect a client can read, by its version and its request."""
    if accept_standard_json_only or version >= STANDARD_JSON_VERSION:
        return Dialect.STANDARD
    return Dialect.FASTJSON


class RouteCache:
    """Encoded routes.

    Args:
        build: Returns a topic's route now, or None.
    """

    def __init__(self, build: Callable[[str], TopicRouteData | None]) -> None:
        self._build = build
        self._bodies: dict[Dialect, dict[str, bytes]] = {dialect: {} for dialect in Dialect}

    def body(self, topic: str, dialect: Dialect) -> bytes | None:
        """Return the encoded route of *topic*, or None when no broker serves it."""
        bodies = self._bodies[dialect]
        body = bodies.get(topic)
        if body is None:
            route = self._build(topic)
            if route is None:
                return None
            body = bodies[topic] = route.encode(dialect)
        return body

    def invalidate(self, topics: Iterable[str]) -> None:
        """Forget topics whose route may have changed."""
        topics = list(topics)
        for bodies in self._bodies.values():
            for topic in topics:
                bodies.pop(topic, None)

    def clear(self) -> None:
        """Forget everything."""
        for bodies in self._bodies.values():
            bodies.clear()

    def __len__(self) -> int:
        return sum(len(bodies) for bodies in self._bodies.values())
