"""A broker over the fake group whose metrics are looked at, and what changes them."""

from typing import Any

from dledger.broker_metrics import BrokerMetrics, LeaderChanges
from dledger.remoting.access.gate import LocalAdmin
from dledger.remoting.metrics import RpcLatency, ServerMetrics
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.server import RemotingServer
from dledger.remoting.tcp import TcpNetwork
from dledger.services.throughput import Traffic
from dledger.state.state_record import ConsumerOffsetsChange
from tests.harness import pulls
from tests.harness.broker import Broker
from tests.harness.metrics_page import MetricsPage

STATUS = {
    "role": "leader",
    "term": 1,
    "leader": "n0",
    "last_index": 12,
    "stable_index": 0,
    "commit_index": 11,
    "doubtful": False,
    "damaged": True,
    "pending_bytes": 300,
    "contradictions": 2,
    "truncations": 1,
    "installs": 0,
    "registration_refused": {"ns:9876": "it belongs to another group"},
    "store_time_ahead_ms": -20,
    "clock_off_ms": 3,
    "peers": {
        "n1": {"connected": True, "match_index": 10},
        "n2": {"connected": False, "match_index": None},
    },
}


class Watched:
    """A broker whose metrics are looked at."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        group = broker.group
        self.traffic = Traffic(lambda: group.leadership is not None)
        broker.processors.throughput.traffic = self.traffic
        self.leaders = LeaderChanges(group)
        self.port = RemotingServer(TcpNetwork(), ProcessorTable())
        self.latency = RpcLatency()
        self.metrics = BrokerMetrics(
            group,
            broker.processors,
            broker.settings,
            self.traffic,
            self.leaders,
            {"age": 7, "forced": 0},
            "n0",
            broker.clock,
            ServerMetrics([self.port], LocalAdmin(()), self.latency),
        )
        self._counted = 0

    def page(self) -> MetricsPage:
        applied = self.broker.group.applied
        for entry in applied[self._counted :]:
            self.traffic.on_units(entry.units)
        self._counted = len(applied)
        return MetricsPage.read("".join(self.metrics.pieces()))


def pull(broker: Broker, topic: str, group: str, queue_id: int = 0, offset: int = 0) -> None:
    place: dict[str, Any] = {"topic": topic, "queueId": queue_id, "queueOffset": offset}
    answer = pulls.pull(broker, consumerGroup=group, **place)
    assert answer.code == 0, answer.remark


def commit(broker: Broker, *offsets: tuple[str, str, int, int]) -> None:
    broker.group.store(ConsumerOffsetsChange.of(offsets))
