"""What a broker shows of consumer groups: what they were given, and how far they are behind."""

import pytest

from dledger import topic_metrics
from dledger.state.pop import Out, PopRow
from dledger.testing.doubles import ManualClock
from tests.harness.watched_broker import Watched, commit, pull


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
