"""Consumer groups: their configuration (200, 201, 207, 225, 352) and progress (208, 303, 317).

Spec: docs/internals/protocol/remoting.md, section 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from msgspec import Raw

from dledger.commitlog.errors import OffsetOutOfRangeError
from dledger.group_api import BrokerGroup, store_time_at
from dledger.processors.answers import (
    RefusedError,
    bad_request,
    check_group_name,
    nothing_to_change,
    propose_change,
    require_leader,
    until_stored,
)
from dledger.processors.client_table import ClientTable
from dledger.processors.handles import Limit, handles
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Answered, Handled
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.bodies import (
    ConsumeStats,
    ConsumeStatsList,
    MessageQueue,
    OffsetWrapper,
    QueryConsumeTimeSpanBody,
    QueueTimeSpan,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.fastjson import member
from dledger.remoting.protocol.headers import (
    DeleteSubscriptionGroupHeader,
    GetBrokerConsumeStatsHeader,
    GetConsumeStatsHeader,
    GroupHeader,
    GroupTopicHeader,
)
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.own_fields import NOT_MADE_FIELD
from dledger.remoting.protocol.topic_names import RETRY_PREFIX, STATE_TOPIC
from dledger.remoting.seams import Clock
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.settings.parts import BrokerSettings
from dledger.state.state_record import SubscriptionGroupsChange
from dledger.state.topics import SUBSCRIPTION_GROUPS_QUEUE, SubscriptionGroupConfig, TopicConfig
from dledger.waiting import joined_in_turns

MAX_GROUPS_PER_REQUEST: Final = 10_000
"""Groups of one request: they become one record of about 4 MB."""

MAX_RETRY_QUEUES: Final = 65_536
"""As many as a topic may have: they are the queues of the group's retry topic."""

_SAME_NAMES: Final = (
    "group_name",
    "consume_enable",
    "consume_from_min_enable",
    "consume_broadcast_enable",
    "consume_message_orderly",
    "retry_queue_nums",
    "retry_max_times",
    "broker_id",
    "which_broker_when_consume_slowly",
    "notify_consumer_ids_changed_enable",
    "group_sys_flag",
    "consume_timeout_minute",
)


def wire_group(config: SubscriptionGroupConfig) -> bodies.SubscriptionGroupConfig:
    """Return a group as remoting bodies show it."""
    policy = bodies.GroupRetryPolicy()
    if config.retry_policy is not None:
        policy = bodies.GroupRetryPolicy(**config.retry_policy)
    return bodies.SubscriptionGroupConfig(
        **{name: getattr(config, name) for name in _SAME_NAMES},
        attributes=dict(config.attributes),
        group_retry_policy=policy,
    )


def group_of(body: bodies.SubscriptionGroupConfig) -> SubscriptionGroupConfig:
    """Return a group as the state keeps it.

    Raises RefusedError: a name or a number that cannot be.
    """
    check_group_name(body.group_name)
    if body.retry_queue_nums > MAX_RETRY_QUEUES:
        raise bad_request(f"retryQueueNums {body.retry_queue_nums} is more than {MAX_RETRY_QUEUES}")
    policy: dict[str, Any] | None = None
    if body.group_retry_policy != bodies.GroupRetryPolicy():
        given = body.group_retry_policy
        policy = {
            "type": given.type,
            "exponential_retry_policy": given.exponential_retry_policy,
            "customized_retry_policy": given.customized_retry_policy,
        }
    return SubscriptionGroupConfig(
        **{name: getattr(body, name) for name in _SAME_NAMES},
        attributes=dict(body.attributes),
        retry_policy=policy,
    )


def _names(command: RemotingCommand) -> list[str]:
    groups = bodies.SubscriptionGroupConfigList.decode(command.body).group_config_list
    return [group.group_name for group in groups]


@dataclass(eq=False, repr=False)
class SubscriptionGroupsProcessor:
    """Answers administration of subscription groups; changes go through the log."""

    _group: BrokerGroup
    _topics: TopicView
    _offsets: OffsetCommits

    @handles(
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        limit=Limit.ADMIN,
        rule=ADMIN,
        subject=lambda command: {
            "group": bodies.SubscriptionGroupConfig.decode(command.body).group_name
        },
    )
    def update_and_create(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200 when the group is as asked for."""
        return self._put(
            connection, command, lambda: [bodies.SubscriptionGroupConfig.decode(command.body)]
        )

    @handles(
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        limit=Limit.ADMIN,
        rule=ADMIN,
        subject=lambda command: {"groups": ",".join(_names(command))},
    )
    def update_and_create_list(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 225 when all the groups are as asked for; they change together."""
        return self._put(
            connection,
            command,
            lambda: bodies.SubscriptionGroupConfigList.decode(command.body).group_config_list,
        )

    @handles(RequestCode.DELETE_SUBSCRIPTIONGROUP, limit=Limit.ADMIN, rule=ADMIN, local=True)
    def delete(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 207 when the group is removed, with its consumer offsets if requested."""
        require_leader(self._group)
        header = DeleteSubscriptionGroupHeader.decode(command.ext)
        name = header.group_name
        forget = bool(header.clean_offset or header.remove_offset)
        state = self._group.state
        is_there = name in state.subscription_groups or name in state.request_modes.keys_of[1]
        if not is_there and not forget and not len(self._topics.pending_groups):
            return nothing_to_change(self._group, connection, command)
        change = SubscriptionGroupsChange(delete=(name,), forget=(name,) if forget else ())
        propose_change(connection, command, self._group, change, self._topics.pending_groups)
        if forget:
            self._offsets.drop_all(group=name)
        return DEFERRED

    @handles(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, limit=Limit.ADMIN, rule=SIGNED)
    async def all_groups(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 201: every group, whatever part was asked for."""
        state = self._group.state
        configs = {**state.builtin_groups, **state.subscription_groups}
        version = bodies.DataVersion(
            counter=state.max_offset(STATE_TOPIC, SUBSCRIPTION_GROUPS_QUEUE),
            state_version=self._group.term,
        )
        table = await joined_in_turns(
            (member(name, wire_group(config)) for name, config in configs.items()), b"{}"
        )
        body = bodies.SubscriptionGroupWrapper(table, data_version=version)
        return response_to(
            command,
            ext={"totalGroupNum": str(len(configs))},
            body=body.encode(),
        )

    @handles(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, limit=Limit.ADMIN, rule=SIGNED)
    def group_config(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 352: one group, or what it will be where its first pull may make it; else 26."""
        name = GroupHeader.decode(command.ext).group
        config = self._topics.subscription_group_or_default(name)
        if config is None:
            raise RefusedError(
                Condition.GROUP_NOT_EXIST, f"subscription group [{name}] does not exist"
            )
        not_made = self._topics.subscription_group(name) is None
        ext = {NOT_MADE_FIELD: "true"} if not_made else None
        return response_to(command, ext=ext, body=wire_group(config).encode())

    def _put(
        self,
        connection: Connection,
        command: RemotingCommand,
        asked_for: Callable[[], Sequence[bodies.SubscriptionGroupConfig]],
    ) -> Handled:
        require_leader(self._group)
        configs = {config.group_name: config for config in map(group_of, asked_for())}
        if len(configs) > MAX_GROUPS_PER_REQUEST:
            raise bad_request(
                f"{len(configs)} groups in one request; at most {MAX_GROUPS_PER_REQUEST}"
            )
        pending = self._topics.pending_groups
        state = self._group.state
        news = tuple(
            config
            for name, config in configs.items()
            if len(pending) or state.subscription_groups.get(name) != config
        )
        if not news:
            return nothing_to_change(self._group, connection, command)
        unknown = sum(pending.resolve(config.group_name) is None for config in news)
        self._topics.check_room_for_groups(unknown)
        change = SubscriptionGroupsChange(put=news)
        propose_change(connection, command, self._group, change, pending)
        return DEFERRED


NO_TIME = 0
"""Where there is no message to take a time from."""

TOPIC_SEPARATOR = ";"


@dataclass(eq=False, repr=False)
class ConsumeStatsProcessor:
    """Answers 208, 303 and 317, on the leader."""

    _group: BrokerGroup
    _topics: TopicView
    _clients: ClientTable[Connection]
    _offsets: OffsetCommits
    _settings: BrokerSettings
    _clock: Clock

    @handles(RequestCode.GET_CONSUME_STATS, limit=Limit.ADMIN, rule=SIGNED, reads=True)
    async def of_group(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 208: where a group is in each queue, of the topics asked for or all it has."""
        header = GetConsumeStatsHeader.decode(command.ext)
        require_leader(self._group)
        asked = [header.topic] if header.topic else []
        asked += [name for name in (header.topic_list or "").split(TOPIC_SEPARATOR) if name]
        name = header.consumer_group
        await until_stored(self._group, self._offsets, self._offsets.slots(name))
        # A request may name a topic a hundred thousand times.
        found = [config for each in dict.fromkeys(asked) if (config := self._topics.config(each))]
        topics = found or ([] if asked else self._topics_of(name))
        stats = await self._stats(name, topics, [])
        return response_to(command, body=stats.encode())

    @handles(RequestCode.GET_BROKER_CONSUME_STATS, limit=Limit.ADMIN, rule=SIGNED, reads=True)
    async def of_broker(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 317: where every group is."""
        is_order = GetBrokerConsumeStatsHeader.decode(command.ext).is_order
        require_leader(self._group)
        behind: list[int] = []
        groups: list[bytes] = []
        for name in sorted(self._group.state.consumer_offsets.keys_of[0]):
            stats = []
            for topic in self._topics_of(name):
                if topic.order == is_order:
                    # Groups, and topics of one, may be thousands: others are served in between.
                    await trio.lowlevel.checkpoint()
                    stats.append(await self._stats(name, [topic], behind))
            if stats:
                groups.append(b"{%b}" % member(name, stats))
        table: Any = Raw(b"[%b]" % b",".join(groups))
        body = ConsumeStatsList(table, self._settings.address, total_diff=sum(behind))
        return response_to(command, body=body.encode())

    @handles(RequestCode.QUERY_CONSUME_TIME_SPAN, limit=Limit.ADMIN, rule=SIGNED, reads=True)
    async def time_span(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 303: from when to when there are messages, how far a group is, how late."""
        header = GroupTopicHeader.decode(command.ext)
        require_leader(self._group)
        config = self._topics.config(header.topic)
        if config is None:
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
        slots = self._offsets.slots(header.group, config.topic)
        await until_stored(self._group, self._offsets, slots)
        queues = range(config.write_queue_nums)
        spans = (self._span(config.topic, header.group, queue_id).encode() for queue_id in queues)
        encoded = await joined_in_turns(spans, b"[]")
        return response_to(command, body=QueryConsumeTimeSpanBody(encoded).encode())

    # ------------------------------------------------------------------------------ figures

    def _topics_of(self, group_name: str) -> Iterator[TopicConfig]:
        """Yield the topics a group has offsets of and, while it is online, still wants."""
        names = sorted(
            topic for _, topic in self._group.state.consumer_offsets.keys_with(0, group_name)
        )
        online = self._clients.consumer_group(group_name)
        wanted = {} if online is None else online.subscriptions
        for name in names:
            is_wanted = not wanted or name in wanted or name == RETRY_PREFIX + group_name
            config = self._topics.config(name) if is_wanted else None
            if config is not None:
                yield config

    async def _stats(
        self, group_name: str, configs: Iterable[TopicConfig], behind: list[int]
    ) -> ConsumeStats:
        """Return where the group is, and add to *behind* what is left of each queue."""

        def rows() -> Iterator[bytes]:
            for config in configs:
                for queue_id in range(config.read_queue_nums):
                    progress = self._progress(config.topic, group_name, queue_id)
                    behind.append(progress.broker_offset - progress.consumer_offset)
                    queue = MessageQueue(config.topic, self._settings.broker.broker_name, queue_id)
                    yield member(queue, progress)

        return ConsumeStats(await joined_in_turns(rows(), b"{}"))

    def _progress(self, topic: str, group_name: str, queue_id: int) -> OffsetWrapper:
        require_leader(self._group)
        offset = max(0, self._group.state.consumer_offset(group_name, topic, queue_id) or 0)
        return OffsetWrapper(
            broker_offset=self._group.state.max_offset(topic, queue_id),
            consumer_offset=offset,
            pull_offset=offset,
            last_timestamp=self._time(topic, queue_id, offset - 1),
        )

    def _span(self, topic: str, group_name: str, queue_id: int) -> QueueTimeSpan:
        require_leader(self._group)
        state = self._group.state
        low, high = state.min_offset(topic, queue_id), state.max_offset(topic, queue_id)
        offset = self._group.state.consumer_offset(group_name, topic, queue_id) or 0
        first = self._time(topic, queue_id, low)
        next_time = self._time(topic, queue_id, max(offset, low))
        return QueueTimeSpan(
            message_queue=MessageQueue(topic, self._settings.broker.broker_name, queue_id),
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
