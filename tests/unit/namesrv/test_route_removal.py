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
    registration,
    topics,
    version,
)

# The one way out


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


# Filter servers


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
