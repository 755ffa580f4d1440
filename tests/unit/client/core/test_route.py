"""Routes as clients use them."""

from __future__ import annotations

from dataclasses import replace

from dledger.client.core.route import MessageQueue, RouteTable, TopicRoute, parse_address_list
from dledger.remoting.protocol.bodies import BrokerData, QueueData, TopicRouteData


def _data(*groups: tuple[str, dict[int, str], int]) -> TopicRouteData:
    return TopicRouteData(
        queue_datas=[
            QueueData(broker_name=name, read_queue_nums=3, write_queue_nums=2, perm=perm)
            for name, _, perm in groups
        ],
        broker_datas=[
            BrokerData(cluster="c", broker_name=name, broker_addrs=addresses)
            for name, addresses, _ in groups
        ],
    )


def test_only_groups_with_a_leader_are_published_to() -> None:
    route = TopicRoute.from_data(
        "T", _data(("b", {0: "b:1", 1: "b:2"}, 6), ("a", {1: "a:2"}, 6), ("c", {0: "c:1"}, 4))
    )
    assert route.publish_queues == (MessageQueue("T", "b", 0), MessageQueue("T", "b", 1))
    assert {q.broker_name for q in route.subscribe_queues} == {"a", "b", "c"}
    assert len(route.subscribe_queues) == 9
    assert route.leader_address("b") == "b:1"
    assert route.leader_address("a") is None
    assert route.leader_address("z") is None


def test_a_group_without_addresses_is_passed_over() -> None:
    data = _data(("a", {0: "a:1"}, 6))
    data.broker_datas = []
    assert TopicRoute.from_data("T", data).subscribe_queues == ()


def test_a_borrowed_route_has_the_queues_a_new_topic_would_get() -> None:
    default = TopicRoute.from_data("TBW102", _data(("a", {0: "a:1"}, 7)))
    route = default.borrowed("new", 1)
    assert route.publish_queues == (MessageQueue("new", "a", 0),)
    assert route.subscribe_queues == ()


def test_the_table_keeps_the_queue_objects_in_use() -> None:
    table = RouteTable()
    assert table.put(TopicRoute.from_data("T", _data(("a", {0: "a:1"}, 6))))
    first = table.get("T")
    assert first is not None
    assert not table.put(TopicRoute.from_data("T", _data(("a", {0: "a:1"}, 6))))
    assert table.put(TopicRoute.from_data("T", _data(("a", {0: "a:2"}, 6))))
    second = table.get("T")
    assert second is not None
    assert second.publish_queues[0] is first.publish_queues[0]
    assert table.addresses("a") == ["a:2"]
    assert list(table.brokers()) == [("a", 0, "a:2")]
    table.forget("T")
    assert table.topics() == []


def test_route_table_keeps_all_of_a_changed_route() -> None:
    table = RouteTable()
    table.put(TopicRoute.from_data("T", _data(("a", {0: "a:1"}, 6))))
    changed = TopicRoute.from_data("T", _data(("a", {0: "a:2"}, 6)))
    changed = replace(changed, order_conf="a:4")
    assert table.put(changed)
    assert table.get("T") == changed
    assert changed.clusters == ("c",)
    assert not table.put(changed), "equal routes are no news"


def test_queues_are_equal_by_content_and_ordered() -> None:
    assert MessageQueue("T", "a", 1) == MessageQueue("T", "a", 1)
    assert MessageQueue("T", "a", 1) != MessageQueue("T", "a", 2)
    assert hash(MessageQueue("T", "a", 1)) == hash(MessageQueue("T", "a", 1))
    assert sorted([MessageQueue("T", "b", 0), MessageQueue("T", "a", 9)])[0].broker_name == "a"
    assert MessageQueue("T", "a", 1) != "T"


def test_address_lists_come_in_several_spellings() -> None:
    assert parse_address_list("a:1; b:2,a:1;;") == ["a:1", "b:2"]
    assert parse_address_list(["a:1", " b:2 "]) == ["a:1", "b:2"]
