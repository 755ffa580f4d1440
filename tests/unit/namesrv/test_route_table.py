"""The route tables: every registration rule by name, and the one way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from namesrv import route_table
from namesrv.config import NamesrvTable
from namesrv.errors import RegistrationRefusedError
from namesrv.registration import (
    HOLDER_SILENCE_MS,
    MAX_BROKERS_PER_CONNECTION,
    BrokerKey,
    Registration,
)
from namesrv.route_table import RouteInfoManager
from remoting.protocol.bodies import DataVersion, QueueData, TopicConfig

CLUSTER = "DefaultCluster"
A, B, C = "10.0.0.1:10911", "10.0.0.2:10911", "10.0.0.3:10911"


def topics(*names: str, queues: int = 4, perm: int = 6, flags: int = 0) -> dict[str, TopicConfig]:
    return {
        name: TopicConfig(
            topic_name=name,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=perm,
            topic_sys_flag=flags,
        )
        for name in names
    }


def version(counter: int = 1, state: int = 0) -> DataVersion:
    return DataVersion(state_version=state, timestamp=1_000, counter=counter)


def registration(
    addr: str = A,
    broker_id: int = 0,
    name: str = "broker-a",
    *,
    cluster: str = CLUSTER,
    table: Mapping[str, TopicConfig] | None = None,
    data_version: DataVersion | None = None,
    timeout_ms: int | None = None,
    filters: tuple[str, ...] = (),
    connection: int | None = 1,
    acting: bool | None = None,
    identity: str = "",
    members: Iterable[str] = (),
    proof: str = "",
) -> Registration:
    return Registration(
        cluster_name=cluster,
        broker_name=name,
        broker_addr=addr,
        broker_id=broker_id,
        topics=topics("T1", "T2") if table is None else table,
        data_version=data_version or version(),
        ha_server_addr=addr.replace("10911", "10912"),
        heartbeat_timeout_ms=timeout_ms,
        enable_acting_master=acting,
        filter_servers=filters,
        connection=connection,
        identity=identity,
        members=frozenset(members),
        proof=proof,
    )


def addrs_of(table: RouteInfoManager, topic: str, name: str = "broker-a") -> dict[int, str]:
    route = table.route(topic)
    assert route is not None
    return next(dict(b.broker_addrs) for b in route.broker_datas if b.broker_name == name)


def is_empty(table: RouteInfoManager) -> bool:
    return not (
        table.topic_queue_table
        or table.broker_addr_table
        or table.cluster_addr_table
        or table.broker_live_table
        or table.filter_server_table
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
    monkeypatch.setattr("namesrv.registration.MAX_BROKERS", 1)
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
    assert table.wipe_write_perm("nobody") == 0


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
    table.wipe_write_perm("nobody")
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
        broker_name="nobody", read_queue_nums=1, write_queue_nums=1, perm=6, topic_sys_flag=0
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
