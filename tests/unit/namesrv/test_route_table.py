"""The route tables: every registration rule by name, and the one way out."""

from collections.abc import Iterable

import pytest

from dledger.namesrv import route_table
from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.errors import RegistrationRefusedError
from dledger.namesrv.registration import MAX_BROKERS_PER_CONNECTION, BrokerKey
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.protocol.bodies import QueueData, TopicConfig
from tests.harness.present import present
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

# Registration


def test_fail_over_moves_id_0() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, filters=("f:1",), data_version=version(state=5)), 0)
    table.register_broker(registration(B, 1, data_version=version(state=5)), 0)
    table.register_broker(registration(C, 3, data_version=version(state=5)), 0)
    table.register_broker(registration(B, 0, data_version=version(state=6)), 1)
    assert addrs_of(table, "T1") == {0: B, 3: C}
    assert BrokerKey(CLUSTER, A) not in table.broker_live_table
    assert table.filter_server_table == {}
    table.register_broker(registration(A, 1, data_version=version(state=6)), 2)
    assert addrs_of(table, "T1") == {0: B, 1: A, 3: C}


def test_rule_5_acting_master_stands_as_id_0() -> None:
    table = RouteInfoManager(NamesrvTable(support_acting_master=True))
    table.register_broker(registration(B, 1, acting=True), 0)
    table.register_broker(registration(C, 2, acting=True, table=topics("T8", "T9")), 0)
    assert table.all_topics() == ["T1", "T2"]
    assert addrs_of(table, "T1") == {0: B, 2: C}
    route = present(table.route("T1"))
    assert route.queue_datas[0].perm == 4
    table.register_broker(registration(A, 0, acting=True), 1)
    assert addrs_of(table, "T1") == {0: A, 1: B, 2: C}
    route = present(table.route("T1"))
    assert route.queue_datas[0].perm == 6


@pytest.mark.parametrize("empty", ["name", "addr", "cluster"])
def test_a_nameless_broker_is_refused(empty: str) -> None:
    table = RouteInfoManager()
    with pytest.raises(RegistrationRefusedError, match="must not be empty"):
        table.register_broker(registration(**{empty: ""}), 0)  # type: ignore[arg-type]  # one of three text fields
    assert is_empty(table)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (topics("BAD", queues=65_537), "readQueueNums 65537 is not between 0 and 65536"),
        (topics("BAD", queues=2**31), "readQueueNums 2147483648 is not between 0 and 65536"),
        (topics("BAD", perm=-1), "perm -1 is not between 0 and 15"),
        (topics("BAD", flags=-1), "topicSysFlag -1 is not between 0 and 2147483647"),
        (topics("B\x1b[2J"), "its name cannot be printed"),
        (topics("B" * 256), "a name of 256 characters is not between 1 and 255"),
    ],
)
def test_unreadable_topic_is_left_out(bad: dict[str, TopicConfig], reason: str) -> None:
    table = RouteInfoManager()
    result = table.register_broker(registration(table=topics("T1", "T2") | bad), 0)
    assert result.left_out == ((next(iter(bad)), reason),)
    assert table.all_topics() == ["T1", "T2"]
    assert addrs_of(table, "T1") == {0: A}


def test_unreadable_numbers_are_refused_first() -> None:
    table = RouteInfoManager()
    with pytest.raises(RegistrationRefusedError, match="data version is out of range"):
        table.register_broker(registration(data_version=version(2**63)), 0)
    assert is_empty(table)
    table.register_broker(registration(), 0)
    huge = QueueData(broker_name="broker-a", read_queue_nums=2**40)
    with pytest.raises(RegistrationRefusedError, match="topic T3: readQueueNums 1099511627776"):
        table.register_topic("T3", [huge])
    assert table.route("T3") is None


@pytest.mark.parametrize("timeout_ms", [0, -1, None])
def test_bad_timeout_is_replaced_by_the_nameservers(timeout_ms: int | None) -> None:
    table = RouteInfoManager(NamesrvTable(broker_expiry_ms=1_000))
    table.register_broker(registration(timeout_ms=timeout_ms), 0)
    assert table.scan(1_000) == []
    assert len(table.scan(1_001)) == 1


def test_tables_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_table, "MAX_TOPICS", 3)
    monkeypatch.setattr("dledger.namesrv.registration.MAX_BROKERS", 1)
    table = RouteInfoManager()
    result = table.register_broker(registration(table=topics("1", "2", "3", "4")), 0)
    assert result.left_out == (("4", "there are 3 topics already"),)
    assert table.all_topics() == ["1", "2", "3"]
    result = table.register_broker(
        registration(table=topics("1", "2", "3", queues=8), data_version=version(2)), 1
    )
    assert result.left_out == ()
    assert table.topic_queue_table["3"]["broker-a"].read_queue_nums == 8
    with pytest.raises(RegistrationRefusedError, match="1 brokers already"):
        table.register_broker(registration(B, 1), 0)


def test_one_connection_does_not_fill_the_table_of_brokers() -> None:
    table = RouteInfoManager()
    for number in range(MAX_BROKERS_PER_CONNECTION):
        table.register_broker(registration(f"h:{number}", 0, f"b{number}", connection=1), 0)
    with pytest.raises(RegistrationRefusedError, match="64 brokers are registered over this"):
        table.register_broker(registration("h:64", 0, "b64", connection=1), 0)
    table.register_broker(registration("h:0", 0, "b0", connection=1), 1)
    table.register_broker(registration("h:64", 0, "b64", connection=2), 1)
    assert len(table.broker_live_table) == MAX_BROKERS_PER_CONNECTION + 1


# What changes a route is sent


class Changes:
    def __init__(self) -> None:
        self.topics: set[str] = set()

    def __call__(self, changed: Iterable[str]) -> None:
        self.topics.update(changed)

    def take(self) -> set[str]:
        taken, self.topics = self.topics, set()
        return taken


def test_change_of_a_route_names_its_topics() -> None:
    changes = Changes()
    table = RouteInfoManager(on_route_change=changes)
    table.register_broker(registration(A, 0), 0)
    assert changes.take() == {"T1", "T2"}
    table.register_broker(registration(A, 0), 1)
    table.register_broker(registration(A, 0, data_version=version(2)), 1)
    table.heartbeat(CLUSTER, A, 1)
    assert changes.take() == set()
    table.register_broker(
        registration(A, 0, data_version=version(3), table=topics("T2", "T3", queues=8)), 1
    )
    assert changes.take() == {"T2", "T3"}
    table.register_broker(registration(B, 1, connection=2), 1)
    assert changes.take() == {"T1", "T2", "T3"}
    table.disconnect(2)
    assert changes.take() == {"T1", "T2", "T3"}
    table.register_broker(registration(A, 0, data_version=version(3), filters=("f",)), 1)
    assert changes.take() == {"T1", "T2", "T3"}
    table.wipe_write_perm("broker-a")
    assert changes.take() == {"T1", "T2", "T3"}
    table.delete_topic("T3")
    assert changes.take() == {"T3"}
    table.scan(1_000_000)
    assert changes.take() == {"T1", "T2"}


# -- how brokers and topics leave the route tables, and what operators change in them


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
