"""What a broker shows of itself, over the fake group.

What a broker shows of consumer groups: what they were given, and how far they are behind.
"""

import re
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from dledger import topic_metrics
from dledger.broker_metrics import READY_LAG_ENTRIES, LeaderChanges, Readiness
from dledger.client.connect import connect
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC, encode_properties
from dledger.group_api import BrokerGroup
from dledger.namesrv.route_table import RouteInfoManager
from dledger.namesrv.server import NamesrvMetrics
from dledger.processors.topics import MESSAGE_TYPES, TYPE_ATTRIBUTE
from dledger.proxy.metrics import CallMetrics, ProxyMetrics
from dledger.proxy.service import MessagingService
from dledger.remoting.metrics import ServerMetrics
from dledger.remoting.protocol.bodies import (
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    ProducerData,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.topic_names import HALF_TOPIC
from dledger.state.pop import Out, PopRow
from dledger.state.state_record import TopicsChange
from dledger.state.topics import TopicConfig
from dledger.testing.doubles import ManualClock
from dledger.topic_metrics import message_type
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, CLUSTER, FakeConnection
from tests.harness.half_messages import COMMIT, ROLLBACK, begin, end
from tests.harness.metrics_page import COMMON, MetricsPage
from tests.harness.shipped_files import ROOT
from tests.harness.watched_broker import STATUS, Watched, commit, pull


def beat(broker: Broker, client_id: str, connection: FakeConnection, **more: Any) -> None:
    body = HeartbeatData(client_id=client_id, **more).encode()
    broker.call(RequestCode.HEART_BEAT, {}, body, connection=connection)
    broker.group.settle()


def declare_type(broker: Broker, topic: str, declared: str) -> None:
    config = TopicConfig(topic, 1, 1, attributes={TYPE_ATTRIBUTE: declared} if declared else {})
    broker.group.store(TopicsChange((config,)))


def test_what_comes_in_is_counted_by_topic(watched: Watched) -> None:
    group = watched.broker.group
    watched.broker.make_topic("T", 2)
    group.put("T", 0, b"x" * 100, b"y" * 100)
    group.put("T", 1, b"z" * 100)
    page = watched.page()
    assert page.kinds["rocketmq_messages_in_total"] == "counter"
    assert page.of("rocketmq_messages_in_total", "topic", "is_system")[("T", "false")] == 3
    stored = sum(
        int(item.units["size"].sum())
        for entry in group.applied
        for item in entry.units
        if item.topic == "T"
    )
    assert stored > 300
    assert page.of("rocketmq_throughput_in_total", "topic")[("T",)] == stored
    assert page.labels("rocketmq_messages_in_total")[-1] == {
        "cluster": CLUSTER, "node_type": "broker", "node_id": BROKER, "topic": "T",
        "message_type": "normal", "is_system": "false",
    }  # fmt: skip


def test_message_type_is_that_of_the_topic(watched: Watched) -> None:
    for topic, declared in {"N": "", "F": "FIFO", "M": "MIXED"}.items():
        declare_type(watched.broker, topic, declared)
    for topic in ("N", "F", "M", SCHEDULE_TOPIC, HALF_TOPIC):
        watched.broker.group.put(topic, 0, b"x", b"y")
    page = watched.page()
    for metric in ("rocketmq_messages_in_total", "rocketmq_throughput_in_total"):
        assert page.of(metric, "topic", "message_type", "is_system").keys() >= {
            ("N", "normal", "false"),
            ("F", "fifo", "false"),
            ("M", "normal", "false"),
            (SCHEDULE_TOPIC, "delay", "true"),
            (HALF_TOPIC, "transaction", "true"),
        }


def test_another_message_type_of_a_topic_keeps_its_count(watched: Watched) -> None:
    watched.broker.make_topic("T", 1)
    watched.broker.group.put("T", 0, b"x", b"y")
    labels = ("topic", "message_type")
    assert watched.page().of("rocketmq_messages_in_total", *labels)[("T", "normal")] == 2
    declare_type(watched.broker, "T", "FIFO")
    watched.broker.group.put("T", 0, b"z")
    counted = watched.page().of("rocketmq_messages_in_total", *labels)
    assert {kind: n for (topic, kind), n in counted.items() if topic == "T"} == {"fifo": 3}


def test_message_types_are_the_four_of_rocketmq() -> None:
    declared = {
        value: message_type("T", TopicConfig("T", attributes={TYPE_ATTRIBUTE: value}))
        for value in (*MESSAGE_TYPES, "SOMETHING_NEW")
    }
    assert declared == {
        "UNSPECIFIED": "normal", "NORMAL": "normal", "FIFO": "fifo", "DELAY": "delay",
        "TRANSACTION": "transaction", "MIXED": "normal", "SOMETHING_NEW": "normal",
    }  # fmt: skip
    assert (message_type("T", None), message_type(TIMER_TOPIC, None)) == ("normal", "delay")


def test_connections_are_counted_by_kind(watched: Watched) -> None:
    broker = watched.broker
    one, two = FakeConnection(("10.0.0.1", 1)), FakeConnection(("10.0.0.2", 2))
    producers = [ProducerData("p"), ProducerData("q")]
    consumers = [
        ConsumerData(
            "g",
            consume_type=ConsumeType.CONSUME_PASSIVELY,
            subscription_data_set=[SubscriptionData("T")],
        )
    ]
    beat(broker, "c1", one, producer_data_set=producers, consumer_data_set=consumers)
    beat(broker, "c2", two, producer_data_set=producers[:1], consumer_data_set=consumers)
    page = watched.page()
    assert page.value("rocketmq_producer_connections") == 2
    assert page.value("rocketmq_consumer_connections") == 2
    (labels,) = page.labels("rocketmq_consumer_connections")
    assert {label: labels[label] for label in labels if label not in COMMON} == {
        "consumer_group": "g", "language": "python", "version": "407", "protocol_type": "remoting",
        "consume_mode": "push", "is_system": "false",
    }  # fmt: skip


def test_raft_metrics_carry_the_members_name(watched: Watched) -> None:
    watched.leaders.role_changed()
    watched.broker.group.service_counts.set_aside["timer"] += 1
    page = watched.page()
    assert {
        name: page.value(name)
        for name in page.kinds
        if name.startswith("dledger_") and len(page.labels(name)) == 1
    } == {
        "dledger_is_leader": 1, "dledger_term": 1, "dledger_last_index": 12,
        "dledger_commit_index": 11, "dledger_applied_index": 0, "dledger_leader_changes_total": 1,
        "dledger_peer_contradictions_total": 2, "dledger_log_truncations_total": 1,
        "dledger_snapshots_installed_total": 0, "dledger_peer_lag_entries": 2,
        "dledger_doubtful": 0, "dledger_damaged": 1, "dledger_pending_bytes": 300,
        "dledger_event_loop_stall_seconds_max": 0, "dledger_event_loop_stalls_total": 0,
        "dledger_registrations_refused": 1, "dledger_store_time_ahead_ms": -20,
        "dledger_clock_off_ms": 3, "dledger_held_pulls": 0,
        "dledger_transactions_given_up_total": 0, "dledger_expired_messages_total": 0,
        "dledger_disk_used_ratio": 0, "dledger_disk_full": 0, "dledger_listener_failures_total": 0,
        "dledger_connections": 0, "dledger_connections_refused_total": 0,
        "dledger_requests_refused_memory_total": 0, "dledger_request_memory_bytes": 0,
        "dledger_unfinished_frame_bytes": 0, "dledger_access_refused_total": 0,
    }  # fmt: skip
    assert page.of("dledger_messages_set_aside_total", "service") == {
        ("delay_levels",): 0,
        ("timer",): 1,
        ("transactions",): 0,
        ("retries",): 0,
    }
    assert page.of("dledger_service_restarts_total", "service")["retention",] == 0
    assert page.of("dledger_peer_connected", "peer", "member") == {("n1", "n0"): 1, ("n2", "n0"): 0}
    assert page.labels("dledger_peer_lag_entries")[0]["peer"] == "n1"
    assert page.of("dledger_retention_bytes_total", "cause") == {("age",): 7, ("forced",): 0}


def test_storage_metrics_are_size_and_age(watched: Watched) -> None:
    broker = watched.broker
    assert isinstance(broker.clock, ManualClock)
    assert "rocketmq_storage_message_reserve_time" not in watched.page().kinds
    broker.make_topic("T", 1)
    broker.clock.now_s += 90
    page = watched.page()
    assert page.value("rocketmq_storage_size") == broker.group.log.end_position
    assert page.value("rocketmq_storage_message_reserve_time") == 90_000
    assert page.value("rocketmq_storage_dispatch_behind_bytes") == 0
    assert page.value("rocketmq_storage_flush_behind_bytes") == broker.group.log.end_position


def test_a_log_that_is_being_refilled_is_not_looked_at(watched: Watched) -> None:
    watched.broker.make_topic("T", 1)
    watched.broker.group.readable = False
    assert "rocketmq_storage_size" not in watched.page().kinds


def test_topics_groups_and_open_requests_are_counted(watched: Watched) -> None:
    before = watched.page()
    watched.broker.make_topic("T", 1)
    watched.broker.processors.limiters["send"].try_acquire()
    page = watched.page()
    assert page.value("rocketmq_topic_number") == before.value("rocketmq_topic_number") + 1
    assert page.value("rocketmq_broker_permission") == 6
    assert page.of("rocketmq_processor_watermark", "processor") == {
        ("send",): 1,
        ("pull",): 0,
        ("pop",): 0,
        ("reply",): 0,
        ("client",): 0,
        ("admin",): 0,
    }


def test_series_beyond_the_limit_are_left_out_and_counted(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_metrics, "MAX_SERIES", 3)
    watched.broker.make_topic("T", 1)
    commit(watched.broker, *((f"g{number}", "T", 0, 0) for number in range(5)))
    page = watched.page()
    shown = page.of("rocketmq_consumer_lag_messages", "consumer_group")
    assert sorted(shown) == [("g0",), ("g1",), ("g2",)]
    assert page.of("dledger_metrics_left_out_series", "metric") == {
        ("rocketmq_messages_in_total",): 0,
        ("rocketmq_throughput_in_total",): 0,
        ("rocketmq_messages_out_total",): 0,
        ("rocketmq_throughput_out_total",): 0,
        ("rocketmq_send_to_dlq_messages_total",): 0,
        ("rocketmq_consumer_lag_messages",): 2,
        ("rocketmq_consumer_lag_latency",): 0,
        ("rocketmq_producer_connections",): 0,
        ("rocketmq_consumer_connections",): 0,
    }


def test_sizes_of_messages_are_counted_in_buckets(watched: Watched) -> None:
    broker = watched.broker
    broker.make_topic("T", 1)
    before = watched.page().of("rocketmq_message_size_bucket", "le")
    broker.group.put("T", 0, b"x" * 2_000)
    after = watched.page().of("rocketmq_message_size_bucket", "le")
    assert {le: after[le] - before[le] for le in after} == {
        ("1024",): 0, ("4096",): 1, ("524288",): 1, ("1048576",): 1, ("2097152",): 1,
        ("4194304",): 1, ("+Inf",): 1,
    }  # fmt: skip


def test_a_broker_is_ready_once_it_is_level_with_its_group(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, status = broker.group.state, {**STATUS, "leader": None, "commit_index": 5}
    monkeypatch.setattr(broker.group, "status", lambda: status)
    readiness = Readiness(broker.group)
    state.applied_index = 4
    assert readiness.not_ready() == [
        "no leader is known",
        "1 committed entries are not applied yet",
    ]
    status["leader"] = "n0"
    state.applied_index = 5
    assert readiness.not_ready() == []
    status["commit_index"] = 5 + READY_LAG_ENTRIES
    assert readiness.not_ready() == []
    status["commit_index"] = 6 + READY_LAG_ENTRIES
    assert readiness.not_ready() == ["1001 committed entries are not applied yet"]
    status["commit_index"] = 5
    broker.group.readable = False
    assert readiness.not_ready() == ["a snapshot is filled in: the log is not complete"]


def test_metrics_of_many_queues_come_in_pieces(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_metrics, "LOOKS_PER_PIECE", 8)
    for name in ("T", "U", "V"):
        watched.broker.make_topic(name, 8)
    commit(watched.broker, *(("g", name, 0, 0) for name in ("T", "U", "V")))
    text, pieces = [], 0
    for piece in watched.metrics.pieces():
        text.append(piece)
        is_lag = "rocketmq_consumer_lag_messages{" in piece
        pieces += is_lag
        if is_lag and 'consumer_group="g"' in piece and 'topic="T"' in piece:
            commit(watched.broker, ("h", "T", 0, 0))
            del watched.broker.group.state.topics["V"]
    page = MetricsPage.read("".join(text))
    assert pieces == 2
    assert sorted(page.of("rocketmq_consumer_lag_messages", "topic")) == [("T",), ("U",)]


def test_what_was_deleted_is_not_shown_any_more(watched: Watched) -> None:
    watched.broker.make_topic("T", 1)
    watched.broker.group.put("T", 0, b"x")
    assert ("T",) in watched.page().of("rocketmq_messages_in_total", "topic")
    del watched.broker.group.state.topics["T"]
    assert ("T",) not in watched.page().of("rocketmq_messages_in_total", "topic")


def test_names_of_clients_cannot_break_the_page(watched: Watched) -> None:
    watched.traffic.count_given("T", 'g"} 1\n', 1, 1)
    watched.broker.make_topic("T", 1)
    ((shown,),) = watched.page().of("rocketmq_messages_out_total", "consumer_group")
    assert shown == r"g\"} 1\n"


def test_transactions_are_counted_when_they_are_decided(watched: Watched) -> None:
    broker = watched.broker
    halves = [begin(broker) for _ in range(4)]
    end(broker, halves[0], COMMIT)
    end(broker, halves[1], ROLLBACK)
    end(broker, halves[1], ROLLBACK)  # sent twice, decided once
    assert broker.group.state.transactions.open.keys() == {2, 3}
    page = watched.page()
    assert page.value("rocketmq_half_messages") == 2
    assert page.value("rocketmq_commit_messages_total") == 1
    assert page.value("rocketmq_rollback_messages_total") == 1
    assert page.value("dledger_transactions_given_up_total") == 0
    broker.group.step_down()
    page = watched.page()
    assert "rocketmq_half_messages" not in page.kinds
    assert page.value("rocketmq_commit_messages_total") == 1


def test_timer_shows_how_many_messages_it_holds(watched: Watched) -> None:
    broker = watched.broker
    broker.make_topic("T", 1)
    assert watched.page().value("rocketmq_timing_messages") == 0
    timed = encode_properties({"TIMER_DELAY_MS": "1500", "UNIQ_KEY": "K"}).decode()
    fields = dict(
        zip("abcdefghi", ["p", "T", "TBW102", "4", "0", "0", "1", "0", timed], strict=True)
    )
    assert broker.call(RequestCode.SEND_MESSAGE_V2, fields, b"later").code == 0
    assert watched.page().value("rocketmq_timing_messages") == 1


def test_guide_lists_exactly_the_metrics(watched: Watched) -> None:
    broker = watched.broker
    broker.make_topic("T", 1)
    broker.make_topic("%DLQ%g", 1)
    broker.group.put("T", 0, b"x")
    broker.group.put("%DLQ%g", 0, b"x")
    pull(broker, "T", "g")
    commit(broker, ("g", "T", 0, 0))
    consumers = [ConsumerData("g", subscription_data_set=[SubscriptionData("T")])]
    producers = [ProducerData("p")]
    beat(broker, "c", broker.connection, producer_data_set=producers, consumer_data_set=consumers)
    guide = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    tables = "".join(line for line in guide.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`((?:rocketmq|dledger)_[a-z_]+)`", tables))
    watched.port.ends.note("h:1", "idle", 0.0)
    routes = RouteInfoManager()
    watched.latency.answered(RequestCode.SEND_MESSAGE_V2, 0, 0.002)
    of_broker = watched.page().kinds.keys()
    namesrv = NamesrvMetrics(routes, ServerMetrics([watched.port], None), "ns:9876")
    of_namesrv = MetricsPage.read("".join(namesrv.pieces())).kinds.keys()
    calls = CallMetrics(ManualClock())
    with calls.counted("SendMessage"):
        pass
    service = MessagingService(connect("127.0.0.1:1"), ("127.0.0.1", 8081))
    proxy = ProxyMetrics(service, calls, "127.0.0.1:8081")
    of_proxy = MetricsPage.read("".join(proxy.pieces())).kinds.keys()
    assert named == of_broker | of_namesrv | of_proxy


@dataclass
class Roles:
    """A group of which only the status is asked."""

    now: dict[str, Any] = field(default_factory=dict)

    def status(self) -> dict[str, Any]:
        return self.now


def test_a_leader_counts_once_and_again_in_another_term() -> None:
    roles = Roles()
    changes = LeaderChanges(cast(BrokerGroup, roles))
    seen = []
    for term, leader in [
        (0, None), (1, None), (1, "n0"), (1, "n0"), (2, None), (2, "n1"), (3, "n1"), (3, None),
        (3, "n1"),
    ]:  # fmt: skip
        roles.now = {"term": term, "leader": leader}
        changes.role_changed()
        seen.append(changes.total)
    assert seen == [0, 0, 1, 1, 1, 2, 3, 3, 3]


def test_what_a_group_is_given_is_counted_with_its_bytes(watched: Watched) -> None:
    broker = watched.broker
    broker.make_topic("T", 1)
    broker.group.put("T", 0, b"x" * 100, b"y" * 100)
    pull(broker, "T", "g")
    pull(broker, "T", "g", offset=1)
    page = watched.page()
    labels = ("topic", "consumer_group", "is_retry", "is_system")
    assert page.of("rocketmq_messages_out_total", *labels) == {("T", "g", "false", "false"): 3}
    taken = page.of("rocketmq_throughput_in_total", "topic")[("T",)]
    assert page.value("rocketmq_throughput_out_total") == taken * 1.5


def test_lag_counts_what_is_kept_and_not_consumed(watched: Watched) -> None:
    broker = watched.broker
    broker.make_topic("T", 2)
    broker.make_topic("%RETRY%g", 1)
    broker.group.put("T", 0, *[b"x"] * 5)
    broker.group.put("T", 1, *[b"x"] * 4)
    broker.group.put("%RETRY%g", 0, b"x")
    commit(broker, ("g", "T", 0, 4), ("g", "%RETRY%g", 0, 0), ("g", "gone", 0, 1))
    broker.group.state.queues[("T", 1)].min_offset = 3
    broker.processors.offsets.commit("g", "T", 0, 5)  # it is not stored
    labels = ("topic", "consumer_group", "is_retry")
    assert watched.page().of("rocketmq_consumer_lag_messages", *labels) == {
        ("T", "g", "false"): 2,
        ("%RETRY%g", "g", "true"): 1,
    }


def test_group_ahead_of_a_new_topic_has_no_lag(watched: Watched) -> None:
    watched.broker.make_topic("T", 1)
    watched.broker.group.put("T", 0, b"x")
    commit(watched.broker, ("g", "T", 0, 70))
    assert watched.page().value("rocketmq_consumer_lag_messages") == 0


def test_follower_exports_no_lag(watched: Watched) -> None:
    watched.broker.make_topic("T", 1)
    commit(watched.broker, ("g", "T", 0, 0))
    assert "rocketmq_consumer_lag_messages" in watched.page().kinds
    watched.broker.group.step_down()
    page = watched.page()
    assert "rocketmq_consumer_lag_messages" not in page.kinds
    assert "dledger_peer_lag_entries" not in page.kinds
    assert page.value("dledger_is_leader") == 0


def test_lag_latency_is_the_age_of_the_first_waiting_message(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = watched.broker
    assert isinstance(broker.clock, ManualClock)
    broker.make_topic("T", 2)
    for queue_id in (0, 1):
        broker.group.put("T", queue_id, b"x")
    commit(broker, ("g", "T", 0, 1), ("g", "T", 1, 0))
    broker.clock.now_s += 30
    assert watched.page().of("rocketmq_consumer_lag_latency", "consumer_group") == {("g",): 30_000}
    # What was read is not read again.
    monkeypatch.setattr(topic_metrics, "store_time_at", None)
    broker.clock.now_s += 1
    assert watched.page().value("rocketmq_consumer_lag_latency") == 31_000
    commit(broker, ("g", "T", 1, 1))
    assert watched.page().value("rocketmq_consumer_lag_latency") == 0


def test_lag_latency_reads_no_more_messages_than_allowed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_metrics, "MAX_STORE_TIMES", 2)
    broker = watched.broker
    broker.make_topic("T", 3)
    for queue_id in range(3):
        broker.group.put("T", queue_id, b"x")
    commit(broker, *(("g", "T", queue_id, 0) for queue_id in range(3)))

    def left_out() -> float:
        page = watched.page()
        return page.of("dledger_metrics_left_out_series", "metric")[
            "rocketmq_consumer_lag_latency",
        ]

    assert left_out() == 1
    assert left_out() == 0


def test_messages_out_by_pop_are_in_flight_and_not_ready(watched: Watched) -> None:
    broker = watched.broker
    broker.make_topic("T", 1)
    for _ in range(3):
        broker.group.put("T", 0, b"x")
    commit(broker, ("g", "T", 0, 0))
    row = PopRow(0, 2)
    row.put(0, Out(1, 1, 0, 60_000))
    row.put(1, Out(1, 1, 0, 60_000))
    broker.group.state.pops["g", "T", 0] = row
    page = watched.page()
    assert page.value("rocketmq_consumer_lag_messages") == 3
    assert page.value("rocketmq_consumer_inflight_messages") == 2
    assert page.value("rocketmq_consumer_ready_messages") == 1


def test_dead_letters_are_counted_by_group(watched: Watched) -> None:
    broker = watched.broker
    broker.make_topic("%DLQ%g", 1)
    broker.group.put("%DLQ%g", 0, b"x")
    page = watched.page()
    assert page.of("rocketmq_send_to_dlq_messages_total", "consumer_group") == {("g",): 1}
