"""Topic administration: 17, 18, 21, 202, 215, 305 and 351.

Spec: docs/internals/protocol/remoting.md, section 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from msgspec import structs
from msgspec.structs import replace

from dledger.broker_errors import ConfirmationNeededError
from dledger.filters.expiry import EXPIRES_ATTRIBUTE, expires
from dledger.group_api import BrokerGroup, store_time_at
from dledger.processors.answers import (
    RefusedError,
    asked_by,
    bad_request,
    check_topic_name,
    is_confirmed,
    nothing_to_change,
    propose_change,
    require_leader,
    require_readable,
)
from dledger.processors.handles import Limit, handles
from dledger.registration import data_version, encoded_topic, wire_topic
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Answered, Handled
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.bodies import MAX_QUEUE_NUMS, out_of_bounds
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.fastjson import member
from dledger.remoting.protocol.headers import CreateTopicHeader, TopicHeader
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.own_fields import GivenUp
from dledger.remoting.protocol.topic_names import is_reserved
from dledger.remoting.seams import Clock
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.retention import (
    RETENTION_ATTRIBUTE,
    has_messages,
    lost_to_topic,
    retention_ms,
)
from dledger.settings.parts import BrokerSettings
from dledger.state.state_record import TopicsChange
from dledger.state.topics import TopicConfig
from dledger.waiting import joined_in_turns

_log = structlog.get_logger(__name__)

TYPE_ATTRIBUTE: Final = "message.type"
MESSAGE_TYPES: Final = ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED")
"""RocketMQ 5's; a proxy lets a topic of one type have messages of that type alone."""


def _names(command: RemotingCommand) -> list[str]:
    topics = bodies.TopicConfigList.decode(command.body).topic_config_list
    return [topic.topic_name for topic in topics]


@dataclass(eq=False, repr=False)
class TopicsProcessor:
    """Answers topic administration."""

    _group: BrokerGroup
    _topics: TopicView
    _offsets: OffsetCommits
    _settings: BrokerSettings
    _clock: Clock

    @handles(RequestCode.UPDATE_AND_CREATE_TOPIC, limit=Limit.ADMIN, rule=ADMIN)
    def update_and_create(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 17 when the topic is as asked for, and the NameServers know."""
        require_leader(self._group)
        header = CreateTopicHeader.decode(command.ext)
        config = self._config(header)
        if self._group.state.topic_config(config.topic) == config and not len(self._topics.pending):
            return nothing_to_change(self._group, connection, command)
        requester = self._confirmed_by(connection, command, [config])
        propose_change(
            connection,
            command,
            self._group,
            TopicsChange(put=(config,), asked_by=requester),
            self._topics.pending,
            self._topics.when_known,
        )
        return DEFERRED

    @handles(
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        limit=Limit.ADMIN,
        rule=ADMIN,
        subject=lambda command: {"topics": ",".join(_names(command))},
    )
    def update_and_create_list(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 18: all topics of the list in one entry, or none of them."""
        require_leader(self._group)
        asked = bodies.TopicConfigList.decode(command.body).topic_config_list
        if not asked:
            raise bad_request("no topic is listed")
        configs = {topic.topic_name: self._config(_header(topic)) for topic in asked}
        self._topics.check_room(sum(self._topics.config(name) is None for name in configs))
        configs = {
            name: replace(config, attributes={**topic.attributes, **_kept(config.attributes)})
            for (name, config), topic in zip(configs.items(), asked, strict=True)
        }
        requester = self._confirmed_by(connection, command, configs.values())
        change = TopicsChange(put=tuple(configs.values()), asked_by=requester)
        propose_change(
            connection, command, self._group, change, self._topics.pending, self._topics.when_known
        )
        return DEFERRED

    @handles(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, limit=Limit.ADMIN, rule=SIGNED)
    def system_topics(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 305: the topics every broker has by itself."""
        names = sorted(self._group.state.builtin_topics)
        return response_to(command, body=bodies.TopicList(topic_list=names).encode())

    @handles(RequestCode.DELETE_TOPIC_IN_BROKER, limit=Limit.ADMIN, rule=ADMIN, local=True)
    def delete(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 215 when the topic, its messages and its offsets are removed."""
        require_leader(self._group)
        topic = TopicHeader.decode(command.ext).topic
        if not topic.strip():
            raise bad_request("the specified topic is blank")
        self._refuse_system_topic(topic)
        if self._topics.config(topic) is None and not self._topics.is_deleting(topic):
            return nothing_to_change(self._group, connection, command)
        requester = asked_by(connection)
        _log.warning("topic_deleted", topic=topic, asked_by=requester)
        propose_change(
            connection,
            command,
            self._group,
            TopicsChange(delete=(topic,), asked_by=requester),
            self._topics.pending,
        )
        self._offsets.drop_all(topic=topic)
        return DEFERRED

    @handles(RequestCode.GET_ALL_TOPIC_CONFIG, limit=Limit.ADMIN, rule=SIGNED)
    async def all_topics(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 21: every topic, whatever part was asked for."""
        version = data_version(self._group)
        configs = list(self._group.state.all_topics())
        table = await joined_in_turns(map(encoded_topic, configs), b"{}")
        ext = {"totalTopicNum": str(len(configs))}
        body = bodies.TopicConfigSerializeWrapper(table, version)
        return response_to(command, ext=ext, body=body.encode())

    @handles(RequestCode.GET_TOPIC_CONFIG, limit=Limit.ADMIN, rule=SIGNED)
    def topic_config(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 351: one topic."""
        config = self._existing(TopicHeader.decode(command.ext).topic)
        return response_to(command, body=wire_topic(config).encode())

    @handles(RequestCode.GET_TOPIC_STATS_INFO, limit=Limit.ADMIN, rule=SIGNED, reads=True)
    async def topic_stats(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 202: bounds and newest store time of each queue."""
        config = self._existing(TopicHeader.decode(command.ext).topic)
        table = await joined_in_turns(self._stats(config), b"{}")
        return response_to(command, body=bodies.TopicStatsTable(table).encode())

    def _stats(self, config: TopicConfig) -> Iterator[bytes]:
        for queue_id in range(config.queue_nums):
            require_readable(self._group)
            bounds = self._group.state.queues.get((config.topic, queue_id))
            stats = bodies.TopicOffset()
            if bounds is not None:
                stats.min_offset, stats.max_offset = bounds.min_offset, bounds.max_offset
                if bounds.max_offset > bounds.min_offset:
                    stats.last_update_timestamp = store_time_at(
                        self._group, config.topic, queue_id, bounds.max_offset - 1
                    )
            queue = bodies.MessageQueue(config.topic, self._settings.broker.broker_name, queue_id)
            yield member(queue, stats)

    def _existing(self, topic: str) -> TopicConfig:
        config = self._topics.config(topic)
        if config is None:
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        return config

    def _confirmed_by(
        self, connection: Connection, command: RemotingCommand, configs: Iterable[TopicConfig]
    ) -> str:
        """Return the requester that shortens the retention of topics; empty: none is shortened.

        Raises ConfirmationNeededError: that is not confirmed.
        """
        requester = ""
        for config in configs:
            lost = self._given_up(config)
            if lost is None:
                continue
            if not is_confirmed(command):
                keeps = config.attributes[RETENTION_ATTRIBUTE]
                raise ConfirmationNeededError(
                    lost,
                    f"`dledger topic retention {config.topic} {keeps}ms` shows what would go, and"
                    " does it with --yes",
                )
            requester = asked_by(connection)
            _log.warning("retention_shortened", asked_by=requester, **structs.asdict(lost))
        return requester

    def _given_up(self, config: TopicConfig) -> GivenUp | None:
        """Return what goes because of a shorter retention; None where no less is kept."""
        current, topic = self._topics.config(config.topic), config.topic
        keeps_ms = retention_ms(config.attributes)
        if current is None or keeps_ms is None:
            return None
        kept_ms = retention_ms(current.attributes)
        if kept_ms is not None and kept_ms <= keeps_ms:
            return None
        if not has_messages(self._group, topic, current.queue_nums):
            return None
        change = f"{topic}: {RETENTION_ATTRIBUTE} = {keeps_ms} (now {kept_ms or 'as the log'})"
        return lost_to_topic(self._group, topic, keeps_ms, self._clock.wall_ms(), change)

    def _refuse_system_topic(self, topic: str) -> None:
        if is_reserved(topic) or topic in self._group.state.builtin_topics:
            raise bad_request(f"The topic[{topic}] is conflict with system topic.")

    def _config(self, header: CreateTopicHeader) -> TopicConfig:
        topic = header.topic
        check_topic_name(topic)
        self._refuse_system_topic(topic)
        for name, queues in (
            ("readQueueNums", header.read_queue_nums),
            ("writeQueueNums", header.write_queue_nums),
        ):
            if not 0 < queues <= MAX_QUEUE_NUMS:
                raise bad_request(f"{name} {queues} is not between 1 and {MAX_QUEUE_NUMS}")
        current = self._topics.pending.resolve(topic)
        if current is None:
            self._topics.check_room()
        config = TopicConfig(
            topic,
            header.read_queue_nums,
            header.write_queue_nums,
            header.perm,
            header.topic_filter_type,
            header.topic_sys_flag or 0,
            header.order,
            {
                **_attributes(header.attributes, dict(current.attributes) if current else {}),
                **_kept(current.attributes if current else {}),
            },
        )
        reason = out_of_bounds(config)
        if reason:
            raise bad_request(reason)
        return config


def _header(topic: bodies.TopicConfig) -> CreateTopicHeader:
    return CreateTopicHeader(
        topic=topic.topic_name,
        default_topic="",
        read_queue_nums=topic.read_queue_nums,
        write_queue_nums=topic.write_queue_nums,
        perm=topic.perm,
        topic_filter_type=topic.topic_filter_type,
        topic_sys_flag=topic.topic_sys_flag,
        order=topic.order,
    )


def _kept(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return what no change takes from a topic: that it has messages that expire."""
    return {EXPIRES_ATTRIBUTE: "true"} if expires(attributes) else {}


def _attributes(text: str | None, current: dict[str, str]) -> dict[str, str]:
    """Return *current* changed by ``+key=value,-key``."""
    for item in filter(None, (text or "").split(",")):
        sign, rest = item[0], item[1:]
        key, has_value, value = rest.partition("=")
        if sign == "-" and key:
            current.pop(key, None)
        elif sign == "+" and key and has_value:
            if key == TYPE_ATTRIBUTE and value not in MESSAGE_TYPES:
                raise bad_request(
                    f"{TYPE_ATTRIBUTE} is one of {', '.join(MESSAGE_TYPES)}, not {value[:32]!r}"
                )
            current[key] = value
        else:
            raise bad_request(f"attribute {item!r} is neither +key=value nor -key")
    try:
        retention_ms(current)
    except ValueError as error:
        raise bad_request(str(error)) from error
    return current
