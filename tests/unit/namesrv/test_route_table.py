"""The route tables: every registration rule by name, and the one way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from dledger.namesrv import route_table
from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.errors import RegistrationRefusedError
from dledger.namesrv.registration import (
    HOLDER_SILENCE_MS,
    MAX_BROKERS_PER_CONNECTION,
    BrokerKey,
)
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.protocol.bodies import QueueData, TopicConfig
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


def test_a_registered_leader_is_in_the_route_of_its_topics() -> None:
    table = RouteInfoManager()
    result = table.register_broker(registration(), 0)
    assert (result.master_addr, result.ha_server_addr) == ("", "")
    route = table.route("T1")
    assert route is not None
    assert route.queue_datas == [
        QueueData(
            broker_name="broker-a",
            read_queue_nums=4,
            write_queue_nums=4,
            perm=6,
            topic_sys_flag=0,
        )
    ]
    assert [(b.cluster, b.broker_name, b.broker_addrs) for b in route.broker_datas] == [
        (CLUSTER, "broker-a", {0: A})
    ]
    assert table.route("T3") is None


def test_rule_2_an_address_under_a_new_id_loses_the_old_one() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    table.register_broker(registration(B, 1), 0)
    table.register_broker(registration(A, 2, data_version=version(state=2)), 1)
    assert addrs_of(table, "T1") == {2: A, 1: B}


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


def test_rule_3_a_deposed_leader_cannot_take_id_0_back() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, data_version=version(state=6)), 0)
    table.register_broker(registration(B, 1, data_version=version(state=6)), 0)
    before = addrs_of(table, "T1")
    stale = registration(B, 0, data_version=version(state=5), table=topics("T9", "T8"))
    result = table.register_broker(stale, 1)
    assert result.superseded
    assert (result.master_addr, result.ha_server_addr) == ("", "")
    assert addrs_of(table, "T1") == before == {0: A, 1: B}
    assert table.route("T9") is None
    assert table.broker_live_table[BrokerKey(CLUSTER, B)].last_update_ms == 0


def test_rule_3_a_higher_state_version_takes_the_id() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, data_version=version(state=6)), 0)
    table.register_broker(registration(B, 0, data_version=version(state=7)), 1)
    assert addrs_of(table, "T1") == {0: B}


def test_rule_3_equal_claims_do_not_alternate() -> None:
    table = RouteInfoManager()
    for now_ms in range(0, 300_000, 30_000):
        first = table.register_broker(registration(A, 0), now_ms)
        second = table.register_broker(registration(B, 0), now_ms + 15_000)
        assert not first.superseded
        assert second.superseded
        assert addrs_of(table, "T1") == {0: A}


def test_rule_3_silent_holder_gives_the_id_away() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    assert not table.register_broker(registration(B, 0), HOLDER_SILENCE_MS + 1).superseded
    assert addrs_of(table, "T1") == {0: B}


def test_rule_4_topic_of_an_unknown_id_is_refused() -> None:
    table = RouteInfoManager()
    with pytest.raises(RegistrationRefusedError, match=r"^register broker failed$"):
        table.register_broker(registration(table=topics("T1")), 0)
    assert is_empty(table)
    table.register_broker(registration(A, 1), 0)
    with pytest.raises(RegistrationRefusedError):
        table.register_broker(registration(A, 0, table=topics("T1")), 0)
    assert table.broker_addr_table["broker-a"].broker_addrs == {1: A}


def test_rule_4_a_known_id_may_add_a_single_topic() -> None:
    table = RouteInfoManager(NamesrvTable(delete_topic_with_broker_registration=True))
    table.register_broker(registration(), 0)
    table.register_broker(registration(table=topics("T3"), data_version=version(2)), 1)
    assert table.all_topics() == ["T1", "T2", "T3"]


def test_rule_5_a_follower_does_not_change_topics() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    table.register_broker(
        registration(B, 1, table=topics("T1", "T9", queues=16), data_version=version(9)), 0
    )
    assert table.all_topics() == ["T1", "T2"]
    assert table.topic_queue_table["T1"]["broker-a"].read_queue_nums == 4


def test_rule_5_topics_change_only_with_the_data_version() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(), 0)
    table.register_broker(registration(table=topics("T1", "T3", queues=8)), 1)
    assert table.all_topics() == ["T1", "T2"]
    table.register_broker(
        registration(table=topics("T1", "T3", queues=8), data_version=version(2)), 2
    )
    assert table.all_topics() == ["T1", "T2", "T3"]
    assert table.topic_queue_table["T1"]["broker-a"].write_queue_nums == 8


def test_rule_5_new_leader_brings_its_topics() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    table.register_broker(registration(B, 1, table=topics("T1", "T2", "T3")), 0)
    assert table.all_topics() == ["T1", "T2"]
    elected = version(state=1)
    table.register_broker(
        registration(B, 0, table=topics("T1", "T2", "T3"), data_version=elected), 1
    )
    assert table.all_topics() == ["T1", "T2", "T3"]


@pytest.mark.parametrize("is_supported", [False, True])
def test_differences_of_one_that_may_act_as_leader(is_supported: bool) -> None:
    """Its topics were passed over while another led: what changed in them is not all of them."""
    table = RouteInfoManager(NamesrvTable(support_acting_master=is_supported))
    table.register_broker(registration(A, 0, acting=True, table=topics("T1", "T2")), 0)
    table.register_broker(registration(B, 1, acting=True, table=topics("T1", "T2", "T3")), 0)
    table.unregister_broker(CLUSTER, "broker-a", A)
    newer = registration(
        B, 1, acting=True, table=topics("T4", "T5"), data_version=version(counter=9)
    )
    result = table.register_broker(replace(newer, since=version()), 1)
    assert result.needs_all == is_supported
    assert table.route("T4") is None


def test_a_new_leader_registers_all_topics_first() -> None:
    """What it registered as a follower did not count: differences from there are not all."""
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    table.register_broker(registration(B, 1, table=topics("T1", "T2", "T3")), 0)
    elected = registration(B, 0, table=topics("T4", "T5"), data_version=version(2, state=1))
    assert table.register_broker(replace(elected, since=version()), 1).needs_all
    assert table.all_topics() == ["T1", "T2"]


def test_acting_masters_switched_over_change_the_route() -> None:
    """The answer that is kept for clients has the switch in it."""
    changed: list[str] = []
    table = RouteInfoManager(on_route_change=changed.extend)
    table.register_broker(registration(A, 0, acting=True, table=topics("T1", "T2")), 0)
    changed.clear()
    table.register_broker(registration(A, 0, acting=True, table=topics("T1", "T2")), 1)
    assert not changed
    table.register_broker(registration(A, 0, acting=False, table=topics("T1", "T2")), 2)
    assert sorted(changed) == ["T1", "T2"]


def test_rule_5_acting_master_stands_as_id_0() -> None:
    table = RouteInfoManager(NamesrvTable(support_acting_master=True))
    table.register_broker(registration(B, 1, acting=True), 0)
    table.register_broker(registration(C, 2, acting=True, table=topics("T8", "T9")), 0)
    assert table.all_topics() == ["T1", "T2"]
    assert addrs_of(table, "T1") == {0: B, 2: C}
    route = table.route("T1")
    assert route is not None
    assert route.queue_datas[0].perm == 4
    table.register_broker(registration(A, 0, acting=True), 1)
    assert addrs_of(table, "T1") == {0: A, 1: B, 2: C}
    route = table.route("T1")
    assert route is not None
    assert route.queue_datas[0].perm == 6


def test_rule_6_follower_gets_the_leaders_addresses() -> None:
    table = RouteInfoManager()
    assert table.register_broker(registration(B, 1), 0).master_addr == ""
    table.register_broker(registration(A, 0), 0)
    result = table.register_broker(registration(B, 1), 0)
    assert (result.master_addr, result.ha_server_addr) == (A, "10.0.0.1:10912")


def test_a_broker_name_of_another_cluster_is_refused() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    with pytest.raises(RegistrationRefusedError, match="belongs to cluster DefaultCluster"):
        table.register_broker(registration(B, 0, cluster="other"), 0)
    assert addrs_of(table, "T1") == {0: A}
    assert set(table.cluster_addr_table) == {CLUSTER}


def test_address_moves_to_its_new_broker_name() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, "old", filters=("f:1",)), 0)
    table.register_broker(registration(A, 0, "new", table=topics("T3", "T4")), 1)
    assert table.all_topics() == ["T3", "T4"]
    assert set(table.broker_addr_table) == {"new"}
    assert table.cluster_addr_table == {CLUSTER: {"new"}}
    assert table.filter_server_table == {}


def test_the_same_private_address_in_two_clusters_is_two_brokers() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(A, 0, "a", cluster="c1"), 0)
    table.register_broker(registration(A, 0, "b", cluster="c2"), 0)
    assert len(table.broker_live_table) == 2
    assert table.unregister_broker("c1", "a", A)
    assert set(table.broker_addr_table) == {"b"}


def test_registration_deletes_topics_when_asked() -> None:
    table = RouteInfoManager(NamesrvTable(delete_topic_with_broker_registration=True))
    table.register_broker(registration(A, 0), 0)
    table.register_broker(registration(B, 0, "broker-b"), 0)
    table.register_broker(registration(table=topics("T2", "T3"), data_version=version(2)), 1)
    assert table.all_topics() == ["T1", "T2", "T3"]
    assert set(table.topic_queue_table["T1"]) == {"broker-b"}


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
