"""Round robin and latency fault tolerance."""

import pytest

from dledger.client.core.route import MessageQueue
from dledger.client.producer.queue_selection import (
    LatencyFaultTable,
    QueueSelector,
    not_available_ms,
)

QUEUES = [MessageQueue("T", name, i) for name in ("a", "b") for i in range(2)]


@pytest.mark.parametrize(
    ("latency_ms", "pause_ms"),
    [
        (0, 0),
        (50, 0),
        (549, 0),
        (550, 2000),
        (1800, 5000),
        (3000, 6000),
        (5000, 10000),
        (14999, 10000),
        (15000, 30000),
        (99999, 30000),
    ],
)
def test_slow_brokers_are_left_alone_for_longer(latency_ms: int, pause_ms: int) -> None:
    assert not_available_ms(latency_ms) == pause_ms


def test_the_last_broker_is_taken_when_there_is_no_other() -> None:
    assert QueueSelector().select_avoiding(QUEUES[:2], last_broker="a").broker_name == "a"


def test_a_failed_broker_is_avoided_until_its_time_is_over() -> None:
    faults = LatencyFaultTable()
    faults.note("a", 1, 100.0, isolate=True)
    selector = QueueSelector()
    during = {
        selector.select_avoiding(QUEUES, faults=faults, now=109.9).broker_name for _ in range(8)
    }
    after = {
        selector.select_avoiding(QUEUES, faults=faults, now=110.0).broker_name for _ in range(8)
    }
    assert during == {"b"}
    assert after == {"a", "b"}


def test_when_all_are_bad_the_least_bad_is_taken() -> None:
    faults = LatencyFaultTable()
    faults.note("a", 1, 100.0, isolate=True)
    faults.note("b", 600, 100.0)
    assert QueueSelector().select_avoiding(QUEUES, faults=faults, now=101.0).broker_name == "b"


def test_a_quick_send_clears_the_fault() -> None:
    faults = LatencyFaultTable()
    faults.note("a", 1, 100.0, isolate=True)
    faults.note("a", 10, 100.0)
    assert len(faults) == 0
    assert faults.available("a", 100.0)
