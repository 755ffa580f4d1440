"""What a request of a broker must be allowed to do: the rules that handlers declare.

RocketMQ's ACL 1.0 checks ten request codes and admits every other one with a right signature. Here
every handler declares a rule. Where a request names a message by its position in the log, the
account needs the right to that message's topic: otherwise a signature would be enough to read, or
to have copied into a retry topic, what another rule forbids.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from commitlog.errors import CorruptRecordError, OffsetOutOfRangeError
from commitlog.properties import decode_properties
from commitlog.record import decode_record
from dledger.group_api import BrokerGroup
from dledger.state.names import (
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    STATE_TOPIC,
    TRACE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from remoting.access.accounts import Permission, Right, Rule, group_right, topic_right
from remoting.errors import BadRequestError
from remoting.protocol.bodies import HeartbeatData, LockBatchRequestBody
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand

TopicAt: TypeAlias = Callable[[int], str | None]
"""Position in the log → topic of the message there; None when there is none."""


@dataclass(frozen=True, slots=True)
class Places:
    """What some rules need of the broker.

    Attributes:
        topic_at: Topic of the message at a position of the log.
        reply_topic: The cluster's topic for replies; a replier needs no right to it.
    """

    topic_at: TopicAt
    reply_topic: str


RuleOf: TypeAlias = Rule | Callable[[Places], Rule]
"""A rule, or what makes it for one broker."""

PUB: Final = Permission.PUB
SUB: Final = Permission.SUB
ANY: Final = Permission.PUB | Permission.SUB

INNER_TOPICS: Final = frozenset(
    {STATE_TOPIC, SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC}
)
"""They hold messages of other topics, or the broker's own state: no default grants them."""

_V2: Final = frozenset(
    {
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    }
)


def topic_of_message_at(group: BrokerGroup) -> TopicAt:
    """Return a function that finds the topic of an applied message.

    The topic of a message that waits is the one it goes to.
    """

    def topic_at(offset: int) -> str | None:
        if not 0 <= offset < group.state.applied_end_position:
            return None
        try:
            record = decode_record(group.log.record_at(offset))
        except (OffsetOutOfRangeError, CorruptRecordError):
            return None
        if record.topic in (HALF_TOPIC, SCHEDULE_TOPIC):
            return decode_properties(record.properties).get("REAL_TOPIC", record.topic)
        return record.topic

    return topic_at


def _topic(topic: str, permission: Permission) -> Right:
    return topic_right(topic, permission, by_line=topic in INNER_TOPICS)


def _text(command: RemotingCommand, name: str) -> str:
    value = command.ext.get(name)
    if value is None:
        raise BadRequestError(f"the custom field {name} is null")
    if not isinstance(value, str):
        raise BadRequestError(f"the custom field {name} is not text")
    return value


def needs(permission: Permission, *, topic: str = "", group: str = "") -> Rule:
    """Return the rule: the rights to the topic and the group that two ext fields name."""

    def rights(command: RemotingCommand) -> Iterator[Right]:
        if topic:
            yield _topic(_text(command, topic), permission)
        if group:
            yield group_right(_text(command, group))

    return Rule(rights=rights)


def _send(command: RemotingCommand) -> Iterable[Right]:
    topic = _text(command, "b" if command.code in _V2 else "topic")
    return () if topic == TRACE_TOPIC else (_topic(topic, PUB),)


def replies(places: Places) -> Rule:
    """Return the rule of a reply: the right to its topic, unless that is the cluster's own."""
    free_topic = places.reply_topic

    def rights(command: RemotingCommand) -> Iterable[Right]:
        topic = _text(command, "b" if command.code in _V2 else "topic")
        return () if topic == free_topic else (_topic(topic, PUB),)

    return Rule(rights=rights)


def _send_records(command: RemotingCommand) -> Iterator[Right]:
    runs = command.ext.get("runs")
    if not isinstance(runs, list):
        raise BadRequestError("runs must be a list")
    for topic in {run[0] if isinstance(run, list) and run else None for run in runs}:
        if not isinstance(topic, str):
            raise BadRequestError("a run is [topic, queue id, count]")
        if topic != TRACE_TOPIC:
            yield _topic(topic, PUB)


def _heartbeat(command: RemotingCommand) -> Iterator[Right]:
    for consumer in HeartbeatData.decode(command.body).consumer_data_set:
        yield group_right(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            yield _topic(subscription.topic, SUB)


def _unregister(command: RemotingCommand) -> Iterable[Right]:
    return (
        (group_right(_text(command, "consumerGroup")),) if command.ext.get("consumerGroup") else ()
    )


def _lock(command: RemotingCommand) -> Iterable[Right]:
    return (group_right(LockBatchRequestBody.decode(command.body).consumer_group),)


def message_at(field: str, permission: Permission) -> Callable[[Places], Rule]:
    """Return a rule: the right to the topic of the message at the position that *field* names."""
    return lambda places: Rule(rights=_message_at(places.topic_at, field, permission))


def _message_at(
    topic_at: TopicAt, field: str, permission: Permission
) -> Callable[[RemotingCommand], Iterable[Right]]:
    def rights(command: RemotingCommand) -> Iterable[Right]:
        try:
            offset = int(command.ext.get(field, ""))
        except (TypeError, ValueError):
            raise BadRequestError(f"the custom field {field} is not a number") from None
        topic = topic_at(offset)
        return () if topic is None else (_topic(topic, permission),)

    return rights


def sends_back(places: Places) -> Rule:
    """Return the rule of a message that is sent back: its group, and the message's topic."""
    to_message = _message_at(places.topic_at, "offset", SUB)

    def rights(command: RemotingCommand) -> Iterator[Right]:
        yield group_right(_text(command, "group"))
        yield from to_message(command)

    return Rule(rights=rights)


SENDS: Final = Rule(rights=_send)
"""The right to the topic; traces are written by every account."""
SENDS_RECORDS: Final = Rule(rights=_send_records)
"""The right to the topic of each run."""
HEARTBEAT: Final = Rule(rights=_heartbeat)
"""The rights to the groups and topics that the client subscribes to."""
UNREGISTERS: Final = Rule(rights=_unregister)
"""The right to the consumer group, if there is one."""
LOCKS: Final = Rule(rights=_lock)
"""The right to the consumer group in the body."""
CONSUMES: Final = needs(SUB, topic="topic", group="consumerGroup")
"""The rights to read the topic for the group."""
