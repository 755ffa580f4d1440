"""Route answers are encoded once per topic and dialect, and never outlive the route."""

from __future__ import annotations

import pytest

from namesrv.name_server import RouteCache, route_dialect
from remoting.protocol.bodies import BrokerData, TopicRouteData
from remoting.protocol.fastjson import Dialect


class Routes:
    def __init__(self) -> None:
        self.addr = "h:1"
        self.built: list[str] = []

    def build(self, topic: str) -> TopicRouteData | None:
        self.built.append(topic)
        if topic == "absent":
            return None
        return TopicRouteData(broker_datas=[BrokerData("c", "b", {0: self.addr})])


def test_an_answer_is_encoded_once_per_dialect() -> None:
    routes = Routes()
    cache = RouteCache(routes.build)
    first = cache.body("T", Dialect.STANDARD)
    assert first is not None
    assert b'{"0":"h:1"}' in first
    assert cache.body("T", Dialect.STANDARD) is first
    other = cache.body("T", Dialect.FASTJSON)
    assert other is not None
    assert b'{0:"h:1"}' in other
    assert cache.body("T", Dialect.FASTJSON) is other
    assert routes.built == ["T", "T"]


@pytest.mark.parametrize("everything", [True, False])
def test_changed_route_is_encoded_in_both_dialects(everything: bool) -> None:
    routes = Routes()
    cache = RouteCache(routes.build)
    for dialect in Dialect:
        cache.body("T", dialect)
    routes.addr = "h:2"
    if everything:
        cache.clear()
    else:
        cache.invalidate(iter(["T", "unknown"]))
    for dialect in Dialect:
        body = cache.body("T", dialect)
        assert body is not None
        assert b"h:2" in body


def test_unserved_topics_are_not_cached() -> None:
    routes = Routes()
    cache = RouteCache(routes.build)
    assert cache.body("absent", Dialect.STANDARD) is None
    assert cache.body("absent", Dialect.STANDARD) is None
    assert routes.built == ["absent", "absent"]
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("version", "standard_only", "dialect"),
    [
        (400, False, Dialect.FASTJSON),
        (401, False, Dialect.STANDARD),
        (63, True, Dialect.STANDARD),
        (0, False, Dialect.FASTJSON),
    ],
)
def test_the_dialect_follows_the_client(
    version: int, standard_only: bool, dialect: Dialect
) -> None:
    assert route_dialect(version, accept_standard_json_only=standard_only) is dialect
