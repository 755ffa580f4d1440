"""How brokers and topics leave the route tables, and what operators change in them."""

from __future__ import annotations

import pytest

from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.protocol.bodies import QueueData
from tests.harness.registrations import (
    CLUSTER,
    A,
    B,
    C,
    addrs_of,
    is_empty,
    registration,
    topics,
    version,
)

# The one way out


def test_scan_removes_what_was_silent_for_longer_than_it_may_be() -> None:
    table = RouteInfoManager(NamesrvTable(broker_expiry_ms=1_000))
    table.register_broker(registration(A, 0), 0)
    table.register_broker(registration(B, 1, timeout_ms=5_000), 0)
    assert table.scan(1_000) == []
    assert [info.key.broker_addr for info in table.scan(1_001)] == [A]
    assert addrs_of(table, "T1") == {1: B}
    assert [info.key.broker_addr for info in table.scan(5_001)] == [B]
    assert is_empty(table)


@pytest.mark.parametrize("how", ["register", "heartbeat", "query"])
def test_every_heartbeat_counts(how: str) -> None:
    table = RouteInfoManager(NamesrvTable(broker_expiry_ms=1_000))
    table.register_broker(registration(), 0)
    if how == "register":
        table.register_broker(registration(), 900)
    elif how == "heartbeat":
        assert table.heartbeat(CLUSTER, A, 900)
    else:
        assert table.query_data_version(CLUSTER, A, version(), 900) == (False, version())
    assert table.scan(1_900) == []
    assert len(table.scan(1_901)) == 1


def test_other_data_version_is_answered_changed() -> None:
    table = RouteInfoManager(NamesrvTable(broker_expiry_ms=1_000))
    assert table.query_data_version(CLUSTER, A, version(), 0) == (True, None)
    assert not table.heartbeat(CLUSTER, A, 0)
    table.register_broker(registration(), 0)
    assert table.query_data_version(CLUSTER, A, version(2), 900) == (True, version())
    assert len(table.scan(1_001)) == 1


def test_unregister_leaves_nothing_in_any_table() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, filters=("f:1",)), 0)
    assert not table.unregister_broker(CLUSTER, "another", A)
    assert table.unregister_broker(CLUSTER, "broker-a", A)
    assert is_empty(table)
    assert not table.unregister_broker(CLUSTER, "broker-a", A)


def test_a_stopping_broker_does_not_take_its_successor_along() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    table.register_broker(registration(B, 0, data_version=version(state=1)), 0)
    assert not table.unregister_broker(CLUSTER, "broker-a", A)
    assert addrs_of(table, "T1") == {0: B}


def test_lost_connection_removes_its_brokers() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, connection=1, filters=("f:1",)), 0)
    table.register_broker(registration(B, 0, "broker-b", connection=1), 0)
    table.register_broker(registration(C, 1, connection=2), 0)
    assert {info.key.broker_addr for info in table.disconnect(1)} == {A, B}
    assert addrs_of(table, "T1") == {1: C}
    assert len(table.disconnect(2)) == 1
    assert is_empty(table)


def test_a_broker_that_came_back_over_a_newer_connection_stays() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, connection=1), 0)
    table.register_broker(registration(A, 0, connection=2), 0)
    assert table.disconnect(1) == []
    assert addrs_of(table, "T1") == {0: A}


def test_a_topic_stays_while_another_broker_has_it() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, "a", connection=1), 0)
    table.register_broker(registration(B, 0, "b", connection=2, table=topics("T2", "T3")), 0)
    table.disconnect(1)
    assert table.all_topics() == ["T2", "T3"]
    assert set(table.topic_queue_table["T2"]) == {"b"}


# Filter servers


def test_filter_servers_are_kept_returned_and_removed() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, filters=("f:1", "f:2")), 0)
    route = table.route("T1")
    assert route is not None
    assert route.filter_server_table == {A: ["f:1", "f:2"]}
    table.register_broker(registration(A, 0, filters=("f:2",)), 1)
    route = table.route("T1")
    assert route is not None
    assert route.filter_server_table == {A: ["f:2"]}
    table.register_broker(registration(A, 0), 2)
    assert table.filter_server_table == {}


# Operators


def test_write_permission_is_wiped_and_given_back() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, "a", table=topics("T1", "T2", perm=7)), 0)
    table.register_broker(registration(B, 0, "b"), 0)
    assert table.wipe_write_perm("a") == 2
    assert {n: q.perm for n, q in table.topic_queue_table["T1"].items()} == {"a": 5, "b": 6}
    table.register_broker(registration(A, 0, "a", table=topics("T1", "T2", perm=7)), 1)
    assert table.topic_queue_table["T1"]["a"].perm == 5
    assert table.add_write_perm("a") == 2
    assert table.topic_queue_table["T1"]["a"].perm == 7
    assert table.wipe_write_perm("absent") == 0


def test_drained_broker_stays_drained() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, "a"), 0)
    table.wipe_write_perm("a")
    # Another member leads, with a newer table and one topic more.
    table.register_broker(
        registration(B, 0, "a", data_version=version(5, 1), table=topics("T1", "T9")), 1
    )
    assert {t: q["a"].perm for t, q in table.topic_queue_table.items()} == dict.fromkeys(
        table.topic_queue_table, 4
    )
    assert "T9" in table.topic_queue_table
    assert table.register_topic("T10", [QueueData(broker_name="a", perm=6)])
    assert table.topic_queue_table["T10"]["a"].perm == 4
    table.add_write_perm("a")
    table.register_broker(
        registration(B, 0, "a", data_version=version(6), table=topics("T1", "T9")), 2
    )
    assert table.topic_queue_table["T9"]["a"].perm == 6
    table.wipe_write_perm("a")
    table.unregister_broker(CLUSTER, "a", B)
    assert table.drained == set()
    table.register_broker(registration(B, 0, "a"), 3)
    assert table.topic_queue_table["T1"]["a"].perm == 6
    table.wipe_write_perm("absent")
    assert table.drained == set()


def test_a_topic_is_deleted_everywhere_or_in_one_cluster() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, "a", cluster="c1"), 0)
    table.register_broker(registration(B, 0, "b", cluster="c2"), 0)
    table.delete_topic("T1", "c1")
    assert set(table.topic_queue_table["T1"]) == {"b"}
    table.delete_topic("T1", "c2")
    table.delete_topic("T2")
    table.delete_topic("T2")
    assert table.all_topics() == []
    table.register_broker(registration(A, 0, "a", cluster="c1"), 1)
    assert table.all_topics() == []


def test_a_topic_is_entered_only_on_registered_brokers() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(), 0)
    here = QueueData(
        broker_name="broker-a", read_queue_nums=1, write_queue_nums=1, perm=6, topic_sys_flag=0
    )
    nowhere = QueueData(
        broker_name="absent", read_queue_nums=1, write_queue_nums=1, perm=6, topic_sys_flag=0
    )
    assert not table.register_topic("T3", [here, nowhere])
    assert not table.register_topic("T3", [])
    assert table.route("T3") is None
    assert table.register_topic("T3", [here])
    assert table.topic_queue_table["T3"] == {"broker-a": here}


def test_lists_for_operators() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, "a", cluster="c1", table=topics("U", "V", flags=1)), 0)
    table.register_broker(registration(B, 0, "b", cluster="c2", table=topics("S", "W", flags=2)), 0)
    table.register_broker(registration(C, 1, "b", cluster="c2"), 0)
    assert table.topics_of_cluster("c1") == ["U", "V"]
    assert table.topics_of_cluster("none") == []
    assert table.system_topics() == (["a", "b", "c1", "c2"], A)
    assert table.unit_topics(unit=True, unit_sub=None) == ["U", "V"]
    assert table.unit_topics(unit=None, unit_sub=True) == ["S", "W"]
    assert table.unit_topics(unit=False, unit_sub=True) == ["S", "W"]
    assert table.unit_topics(unit=True, unit_sub=True) == []
    assert table.member_group("c2", "b").broker_addrs == {0: B, 1: C}
    assert table.member_group("c1", "b").broker_addrs == {}
    info = table.cluster_info()
    assert info.cluster_addr_table == {"c1": ["a"], "c2": ["b"]}
    assert info.broker_addr_table["b"].broker_addrs == {0: B, 1: C}
