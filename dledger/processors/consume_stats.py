"""How far groups are: 208 for one of them, 317 for all of a broker, 303 as times.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from commitlog.errors import MQError, OffsetOutOfRangeError
from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.client_table import ClientTable
from dledger.processors.offsets import store_time_at
from dledger.processors.refusal import RefusedError, not_leader, refusal
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.state.names import RETRY_PREFIX
from dledger.state.topic_config import TopicConfig
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol.bodies import (
    ConsumeStats,
    ConsumeStatsList,
    MessageQueue,
    OffsetWrapper,
    QueryConsumeTimeSpanBody,
    QueueTimeSpan,
)
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import (
    GetBrokerConsumeStatsHeader,
    GetConsumeStatsHeader,
    TopicGroupHeader,
)
from remoting.protocol.outcome import Condition
from remoting.seams import Clock

NO_TIME = 0
"""Where no message tells a time."""

TOPIC_SEPARATOR = ";"


class ConsumeStatsProcessor:
    """Answers 208, 303 and 317, on the leader."""

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        clients: ClientTable[Connection],
        offsets: OffsetCommits,
        settings: BrokerSettings,
        *,
        clock: Clock,
    ) -> None:
        self._group = group
        self._topics = topics
        self._clients = clients
        self._offsets = offsets
        self._settings = settings
        self._clock = clock

    def of_group(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 208: where a group is in each queue, of the topics asked for or all it has."""
        header = GetConsumeStatsHeader.decode(command.ext)
        try:
            self._require_leader()
            asked = [header.topic] if header.topic else []
            asked += [name for name in (header.topic_list or "").split(TOPIC_SEPARATOR) if name]
            stats = self._stats(header.consumer_group, asked)
        except MQError as error:
            return refusal(command, error)
        return response_to(command, 0, None, None, stats.encode())

    def of_broker(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 317: where every group is."""
        return self._of_broker(command, GetBrokerConsumeStatsHeader.decode(command.ext).is_order)

    async def _of_broker(self, command: RemotingCommand, is_order: bool) -> RemotingCommand:
        body = ConsumeStatsList(broker_addr=self._settings.address)
        try:
            self._require_leader()
            groups = sorted({name for name, _ in self._group.state.consumer_offsets})
            for name in groups:
                # A broker may have thousands of groups: others are served in between.
                await trio.lowlevel.checkpoint()
                self._require_leader()
                found = [
                    stats
                    for topic in self._topics_of(name)
                    if topic.order == is_order
                    and (stats := self._stats(name, [topic.topic])).offset_table
                ]
                if found:
                    body.consume_stats_list.append({name: found})
                    body.total_diff += sum(map(_behind, found))
        except MQError as error:
            return refusal(command, error)
        body.total_inflight_diff = 0
        return response_to(command, 0, None, None, body.encode())

    def time_span(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 303: from when to when there are messages, how far a group is, how late."""
        header = TopicGroupHeader.decode(command.ext)
        try:
            self._require_leader()
            config = self._topics.config(header.topic)
            if config is None:
                raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
            spans = [
                self._span(config.topic, header.group, queue_id)
                for queue_id in range(config.write_queue_nums)
            ]
        except MQError as error:
            return refusal(command, error)
        body = QueryConsumeTimeSpanBody(consume_time_span_set=spans)
        return response_to(command, 0, None, None, body.encode())

    # ------------------------------------------------------------------------------ figures

    def _require_leader(self) -> None:
        if self._group.leadership is None:
            raise not_leader(self._group)

    def _topics_of(self, group_name: str) -> list[TopicConfig]:
        """Return the topics a group has offsets of and, while it is online, still wants."""
        names = sorted(
            topic for name, topic in self._group.state.consumer_offsets if name == group_name
        )
        online = self._clients.consumer_group(group_name)
        if online is not None and online.subscriptions:
            names = [
                name
                for name in names
                if name in online.subscriptions or name == RETRY_PREFIX + group_name
            ]
        return [config for name in names if (config := self._topics.config(name)) is not None]

    def _stats(self, group_name: str, asked: Iterable[str]) -> ConsumeStats:
        configs = [config for name in asked if (config := self._topics.config(name)) is not None]
        stats = ConsumeStats()
        for config in configs or ([] if asked else self._topics_of(group_name)):
            for queue_id in range(config.read_queue_nums):
                queue = MessageQueue(config.topic, self._settings.broker_name, queue_id)
                stats.offset_table[queue] = self._progress(config.topic, group_name, queue_id)
        return stats

    def _progress(self, topic: str, group_name: str, queue_id: int) -> OffsetWrapper:
        offset = max(0, self._offsets.offset(group_name, topic, queue_id) or 0)
        return OffsetWrapper(
            broker_offset=self._group.state.max_offset(topic, queue_id),
            consumer_offset=offset,
            pull_offset=offset,
            last_timestamp=self._time(topic, queue_id, offset - 1),
        )

    def _span(self, topic: str, group_name: str, queue_id: int) -> QueueTimeSpan:
        state = self._group.state
        low, high = state.min_offset(topic, queue_id), state.max_offset(topic, queue_id)
        offset = self._offsets.offset(group_name, topic, queue_id) or 0
        first = self._time(topic, queue_id, low)
        next_time = self._time(topic, queue_id, max(offset, low))
        return QueueTimeSpan(
            message_queue=MessageQueue(topic, self._settings.broker_name, queue_id),
            min_time_stamp=first,
            max_time_stamp=self._time(topic, queue_id, high - 1),
            consume_time_stamp=self._time(topic, queue_id, offset - 1) if offset > 0 else first,
            delay_time=max(0, self._clock.wall_ms() - next_time) if next_time != NO_TIME else 0,
        )

    def _time(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the store time of a message, `NO_TIME` where there is none."""
        bounds = self._group.state.queues.get((topic, queue_id))
        if bounds is None or not bounds.min_offset <= offset < bounds.max_offset:
            return NO_TIME
        try:
            return store_time_at(self._group, topic, queue_id, offset)
        except OffsetOutOfRangeError:
            return NO_TIME


def _behind(stats: ConsumeStats) -> int:
    return sum(
        progress.broker_offset - progress.consumer_offset
        for progress in stats.offset_table.values()
    )
