"""A leader is killed again and again under load: nothing acknowledged is lost, nothing doubled.

Real processes, sockets, files and signals.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.log_verify import open_segments
from dledger.cli.topic_command import create_topic
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientConfig
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from tests.harness.eventually import look_until
from tests.harness.leader_kill import kill_leaders, read_all
from tests.harness.local_settings import SMALL_FILES
from tests.harness.replica_folders import equal_bytes

pytestmark = [pytest.mark.slow, pytest.mark.hunt]

KILLS, KILLS_BY_HINTS = int(os.environ.get("LEADER_KILLS", "10")), 5
"""`make leader-kills` sets more."""
SENDERS = 48 if KILLS <= 20 else 64
DELAY_S = {1: 1.0, 2: 5.0}
CALM_SHARE = 1 / 10
"""What is left of the rate before the first kill when a leader is killed every few seconds."""


@dataclass
class Recorder:
    """What clients were answered."""

    acknowledged: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Key of a message to the queue and offset in its acknowledgement."""
    delayed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Key of an acknowledged delayed message to its level and the wall time before it was sent."""
    delayed_unknown: set[str] = field(default_factory=set)
    ack_times: list[float] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    stop: trio.Event = field(default_factory=trio.Event)

    def calm_rate(self) -> float:
        """Return the sends per second before the first kill."""
        calm = [at for at in self.ack_times if at < self.kills[0]]
        return len(calm) / (self.kills[0] - min(calm))

    def gaps_s(self) -> list[float]:
        """Return the seconds from each kill to the next acknowledgement of a later send."""
        return [min(t for t in self.ack_times if t > kill) - kill for kill in self.kills]


async def send_all_the_time(producer: Producer, topic: str, number: int, record: Recorder) -> None:
    sent = 0
    while not record.stop.is_set():
        key = f"{number}-{sent}"
        sent += 1
        began = time.monotonic()
        result = await producer.send(Message(topic, key.encode().ljust(256, b".")))
        record.acknowledged[key] = (result.message_queue.queue_id, result.queue_offset)
        record.ack_times.append(began)


async def send_delayed(producer: Producer, record: Recorder) -> None:
    sent = 0
    while not record.stop.is_set():
        level = 1 + sent % 2
        key = f"delayed-{sent}"
        sent += 1
        before_ms = time.time_ns() // 1_000_000
        try:
            await producer.send(Message("delayed", key.encode(), delay_level=level))
        except MQError as error:
            if error.outcome != "not_stored":
                record.delayed_unknown.add(key)
        else:
            record.delayed[key] = (level, before_ms)
        await trio.sleep(0.02)


def key_of(message: MessageExt) -> str:
    return bytes(message.body).rstrip(b".").decode()


def commit_logs_are_equal(cluster: LocalCluster, statuses: dict[str, dict[str, object]]) -> None:
    """Compare the members' segments byte by byte up to the least commit position."""
    ends = [int(str(status["end_position"])) for status in statuses.values()]
    logs = []
    for node in cluster.brokers.values():
        assert node.store_path is not None
        logs.append(open_segments(node.store_path / "commitlog"))
    for other in logs[1:]:
        assert equal_bytes(logs[0], other, min(ends)) is None


@dataclass
class Kills:
    """Kills of the leader, and what clients were answered and found; all of one cluster.

    Attributes:
        record: Of the senders and of the delayer.
        by_hints: Of a producer with a client of its own, over the first kills.
        hints: How often that client was led to another broker, or went to look for one.
        sent, hinted, delayed: What is in their topics at the end.
        rate: Acknowledged sends per second.
    """

    folder: Path
    record: Recorder = field(default_factory=Recorder)
    by_hints: Recorder = field(default_factory=Recorder)
    hints: int = 0
    sent: dict[tuple[int, int], MessageExt] = field(default_factory=dict)
    hinted: dict[tuple[int, int], MessageExt] = field(default_factory=dict)
    delayed: dict[tuple[int, int], MessageExt] = field(default_factory=dict)
    statuses: dict[str, dict[str, object]] = field(default_factory=dict)
    rate: float = 0.0

    async def play(self) -> None:
        """Kill the leaders while all clients send, and read everything."""
        async with local_cluster(self.folder, settings=SMALL_FILES) as cluster:
            namesrvs = [cluster.namesrv_address]
            for topic in ("kills", "hinted", "delayed"):
                await create_topic(namesrvs, topic, queues=4)
            async with connect(namesrvs) as client:
                began = time.monotonic()
                async with (
                    Producer(client, "senders", ProducerConfig(send_timeout_s=30)) as producer,
                    Producer(client, "delayers", ProducerConfig(retry_unknown=False)) as delayer,
                    trio.open_nursery() as nursery,
                ):
                    for number in range(SENDERS):
                        nursery.start_soon(
                            send_all_the_time, producer, "kills", number, self.record
                        )
                    nursery.start_soon(send_delayed, delayer, self.record)
                    await self._kill_under_hints(cluster)
                    await kill_leaders(
                        cluster, self.record.kills, KILLS - KILLS_BY_HINTS, led_s=0.8, down_s=0.3
                    )
                    self.record.stop.set()
                self.rate = len(self.record.acknowledged) / (time.monotonic() - began)
                await trio.sleep(max(DELAY_S.values()) + 1.0)
                self.delayed = await look_until(
                    lambda: read_all(client, "delayed"),
                    lambda found: self.record.delayed.keys() <= {key_of(m) for m in found.values()},
                )
                self.sent = await read_all(client, "kills")
                self.hinted = await read_all(client, "hinted")
            # One that does not answer in time is asked again: all three logs are compared.
            found = await look_until(cluster.statuses, lambda found: len(found) == 3)
            self.statuses = {name: dict(status) for name, status in found.items()}
        commit_logs_are_equal(cluster, self.statuses)

    async def _kill_under_hints(self, cluster: LocalCluster) -> None:
        """Kill leaders while a client sends as well that asks for no route by itself."""
        async with (
            connect([cluster.namesrv_address], ClientConfig(route_poll_period_s=3_600.0)) as client,
            Producer(client, "hinted", ProducerConfig(send_timeout_s=60)) as producer,
        ):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(send_all_the_time, producer, "hinted", number, self.by_hints)
                await kill_leaders(
                    cluster, self.record.kills, KILLS_BY_HINTS, led_s=0.8, down_s=0.3
                )
                self.by_hints.kills = list(self.record.kills)
                self.by_hints.stop.set()
            self.hints = client.counters.redirects_by_hint + client.counters.leader_searches


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    """Return what came of the kills."""
    kills = Kills(tmp_path_factory.mktemp("kills"))
    trio.run(kills.play)
    return kills


def test_kills_of_the_leader_lose_and_double_nothing(kills: Kills) -> None:
    record, sent, delayed = kills.record, kills.sent, kills.delayed
    assert len(record.kills) == KILLS
    assert kills.rate >= record.calm_rate() * CALM_SHARE, (kills.rate, record.calm_rate())
    misplaced = [
        key
        for key, place in record.acknowledged.items()
        if place not in sent or key_of(sent[place]) != key
    ]
    assert misplaced == []
    deliveries = Counter(key_of(message) for message in delayed.values())
    assert [key for key in record.delayed if deliveries[key] != 1] == []
    assert [key for key in record.delayed_unknown if deliveries[key] > 1] == []
    assert len(record.delayed) > 10 * KILLS
    early = [
        key_of(message)
        for message in delayed.values()
        if key_of(message) in record.delayed
        and message.record.store_timestamp_ms
        < record.delayed[key_of(message)][1] + 1000 * DELAY_S[record.delayed[key_of(message)][0]]
    ]
    assert early == []
    print(
        f"{len(record.acknowledged)} acknowledged at {kills.rate:.0f}/s, {len(record.delayed)}"
        f" delayed, kill to next acknowledgement at most {max(record.gaps_s()):.2f} s"
    )


def test_one_producer_survives_leader_changes_by_hints(kills: Kills) -> None:
    """Given NameServer addresses only; routes are polled once an hour: no gap can wait for that."""
    record, hinted = kills.by_hints, kills.hinted
    assert len(record.kills) == KILLS_BY_HINTS
    assert kills.hints >= KILLS_BY_HINTS
    assert all(key_of(hinted[place]) == key for key, place in record.acknowledged.items())
