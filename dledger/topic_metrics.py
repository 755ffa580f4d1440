"""What a broker shows of topics and consumer groups: what came and went, and what waits.

Read off tables that exist anyway; only the age of a waiting message takes reads of files, and these
are bounded.

Spec: docs/operate/metrics.md; names and labels are RocketMQ's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from dledger.commitlog.errors import StoreError
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.group_api import BrokerGroup, store_time_at
from dledger.processors.topics import TYPE_ATTRIBUTE
from dledger.remoting.metrics import Family, Sample
from dledger.remoting.protocol.topic_names import DLQ_PREFIX, HALF_TOPIC, RETRY_PREFIX, is_reserved
from dledger.remoting.seams import Clock
from dledger.services.throughput import MAX_COUNTERS, Traffic
from dledger.state.topics import TopicConfig

MAX_SERIES: Final = MAX_COUNTERS
"""Of one metric with topics, groups or clients in its labels: about 1 MB of text. How many more
there would be is a metric, too."""

LOOKS_PER_PIECE: Final = 5_000
"""Queues or clients looked at in one go: a few milliseconds, far below a heartbeat."""

MAX_STORE_TIMES: Final = 500
"""Messages whose store time is read for one page, two small reads each; those of the page before
are known, so that a page after the next has those that were left out."""

NORMAL: Final = "normal"

TYPES_WHERE_THEY_WAIT: Final = {
    SCHEDULE_TOPIC: "delay",
    TIMER_TOPIC: "delay",
    HALF_TOPIC: "transaction",
}
"""Type of the messages in topics of the broker's own."""

DECLARED_TYPES: Final = {"FIFO": "fifo", "DELAY": "delay", "TRANSACTION": "transaction"}
"""Values of `TYPE_ATTRIBUTE` that say of which type all messages of a topic are."""

SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"


T = TypeVar("T")
Samples = Iterable[Sample | None]


@dataclass(eq=False, repr=False)
class TopicMetrics:
    """The metrics of one broker that have topics or consumer groups in their labels."""

    _group: BrokerGroup
    _traffic: Traffic
    _clock: Clock

    def __post_init__(self) -> None:
        self._first_waiting: dict[tuple[str, int, int], int] = {}

    def traffic_families(self, left_out: dict[str, int]) -> Iterator[tuple[Family, Samples]]:
        """Yield what came in and went out; *left_out* gets series that are too many, by metric."""
        taken, given = self._traffic.taken, self._traffic.given
        for name, about, is_bytes in (
            ("rocketmq_messages_in_total", "Messages stored while this member led.", False),
            ("rocketmq_throughput_in_total", "Bytes stored while this member led.", True),
        ):
            left_out[name] = len(taken.left_out)
            yield (
                Family(name, "counter", about),
                [
                    (self._taken_labels(topic), count.size_bytes if is_bytes else count.messages)
                    for topic, count in taken.counts.items()
                ],
            )
        for name, about, is_bytes in (
            ("rocketmq_messages_out_total", "Messages this member gave to consumers.", False),
            ("rocketmq_throughput_out_total", "Bytes this member gave to consumers.", True),
        ):
            left_out[name] = len(given.left_out)
            yield (
                Family(name, "counter", about),
                [
                    (self._pair_labels(*pair), count.size_bytes if is_bytes else count.messages)
                    for pair, count in given.counts.items()
                ],
            )

        yield (
            Family("rocketmq_message_size", "histogram", "Bytes of stored messages, by size."),
            self._traffic.sizes.samples({}),
        )
        dead = "rocketmq_send_to_dlq_messages_total"
        left_out[dead] = 0
        yield (
            Family(dead, "counter", "Messages that became dead letters while this member led."),
            [
                (self._pair_labels(topic, topic.removeprefix(DLQ_PREFIX)), count.messages)
                for topic, count in taken.counts.items()
                if topic.startswith(DLQ_PREFIX)
            ],
        )

    def consumer_families(self, left_out: dict[str, int]) -> Iterator[tuple[Family, Samples]]:
        """Yield what waits for groups; *left_out* gets series that are too many, by metric."""
        family = Family(
            "rocketmq_consumer_lag_messages",
            "gauge",
            "Messages a group has not consumed yet, of those that are kept; known to the leader.",
        )
        left_out[family.name] = 0
        if self._group.leadership is None:
            return
        pairs = first_of(self._group.state.consumer_offsets, left_out, family.name)
        yield family, self._lags(pairs, self._lag)
        yield (
            Family(
                "rocketmq_consumer_inflight_messages",
                "gauge",
                "Messages that POP consumers have and have not acknowledged; known to the leader.",
            ),
            self._lags(pairs, self._in_flight),
        )
        yield (
            Family(
                "rocketmq_consumer_ready_messages",
                "gauge",
                "Messages a group has not consumed yet and no POP consumer has.",
            ),
            self._lags(pairs, lambda *of: max(0, self._lag(*of) - self._in_flight(*of))),
        )
        late = "rocketmq_consumer_lag_latency"
        left_out[late] = 0
        yield (
            Family(
                late,
                "gauge",
                "Age in milliseconds of the first message a group has not consumed; 0: none waits.",
            ),
            self._latencies(pairs, left_out, late),
        )

    def _lags(
        self, pairs: Iterable[tuple[str, str]], value: Callable[[str, str, int], int]
    ) -> Samples:
        state, looked = self._group.state, 0
        for group, topic in pairs:
            config = state.topic_config(topic)
            if config is None:
                continue
            yield self._pair_labels(topic, group), value(group, topic, config.read_queue_nums)
            looked += config.read_queue_nums
            if looked >= LOOKS_PER_PIECE:
                looked = 0
                yield None

    def _waiting(self, group: str, topic: str, queues: int) -> Iterator[tuple[int, int, int]]:
        """Yield queue, first offset and number of messages that wait for a group."""
        for queue_id in range(queues):
            bounds = self._group.state.queues.get((topic, queue_id))
            if bounds is not None:
                offset = self._group.state.consumer_offset(group, topic, queue_id) or 0
                first = max(offset, bounds.min_offset)
                if first < bounds.max_offset:
                    yield queue_id, first, bounds.max_offset - first

    def _lag(self, group: str, topic: str, queues: int) -> int:
        return sum(count for _, _, count in self._waiting(group, topic, queues))

    def _in_flight(self, group: str, topic: str, queues: int) -> int:
        rows = self._group.state.pops
        found = (rows.get((group, topic, queue_id)) for queue_id in range(queues))
        return sum(len(row.out) for row in found if row is not None)

    def _latencies(
        self, pairs: Iterable[tuple[str, str]], left_out: dict[str, int], name: str
    ) -> Samples:
        """Yield ages; each queue costs two small reads of files, so only some are looked at."""
        now_ms, looked = self._clock.wall_ms(), 0
        known, self._first_waiting = self._first_waiting, {}
        for group, topic in pairs:
            config = self._group.state.topic_config(topic)
            if config is None:
                continue
            oldest_ms = now_ms
            for queue_id, first, _ in self._waiting(group, topic, config.read_queue_nums):
                stored_ms = known.get((topic, queue_id, first))
                if stored_ms is None:
                    if looked >= MAX_STORE_TIMES:
                        left_out[name] += 1
                        continue
                    looked += 1
                    stored_ms = self._store_time_ms(topic, queue_id, first)
                    yield None
                self._first_waiting[topic, queue_id, first] = stored_ms
                oldest_ms = min(oldest_ms, stored_ms)
            yield self._pair_labels(topic, group), max(0, now_ms - oldest_ms)

    def _store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Return when a message was stored; now when it was removed or cannot be read."""
        try:
            return store_time_at(self._group, topic, queue_id, offset)
        except StoreError:
            return self._clock.wall_ms()

    def _taken_labels(self, topic: str) -> dict[str, str]:
        return {
            "topic": topic,
            "message_type": message_type(topic, self._group.state.topic_config(topic)),
            "is_system": bool_text(self._is_system_topic(topic)),
        }

    def _pair_labels(self, topic: str, group: str) -> dict[str, str]:
        is_system = self._is_system_topic(topic) or self.is_system_group(group)
        return {
            "topic": topic,
            "consumer_group": group,
            "is_retry": bool_text(topic.startswith(RETRY_PREFIX)),
            "is_system": bool_text(is_system),
        }

    def _is_system_topic(self, topic: str) -> bool:
        return is_reserved(topic) or topic in self._group.state.builtin_topics

    def is_system_group(self, group: str) -> bool:
        """Return whether a consumer group is one of the broker's own."""
        return group in self._group.state.builtin_groups or group.startswith(SYSTEM_GROUP_PREFIX)


def message_type(topic: str, config: TopicConfig | None) -> str:
    """Return the type of the messages that a topic takes, as RocketMQ's label has it. Pure."""
    if topic in TYPES_WHERE_THEY_WAIT:
        return TYPES_WHERE_THEY_WAIT[topic]
    declared = "" if config is None else config.attributes.get(TYPE_ATTRIBUTE, "")
    return DECLARED_TYPES.get(declared, NORMAL)


def first_of(keys: Collection[T], left_out: dict[str, int], name: str) -> list[T]:
    """Return as many as are shown of a metric, and note how many are not."""
    left_out[name] = max(0, len(keys) - MAX_SERIES)
    return list(islice(keys, MAX_SERIES))


def bool_text(is_so: bool) -> str:
    """Return a label's value."""
    return "true" if is_so else "false"
