"""What a handler declares where it stands: request codes, limit, access rule, and whether it reads.

Every handler declares a rule, where RocketMQ's ACL 1.0 checks ten request codes. Where a request
names a message by its position in the log, the account needs the right to that message's topic.

A handler is a method of a processor; `handles` notes the declaration on it and leaves it as it is,
so a request costs nothing more. From the declarations come the switchboard, the table of access
rules, the codes for the broker's own machine, which requests get an audit line, and which handlers
wait for queues and log. A code without a declaration is answered "not supported". A handler raises
what refuses a request: the connection answers with the error.

Spec: docs/internals/protocol/semantics.md, section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

from dledger.commitlog.errors import ConfigError, CorruptRecordError, OffsetOutOfRangeError
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC, decode_properties
from dledger.commitlog.record import decode_record
from dledger.group_api import BrokerGroup
from dledger.processors.answers import require_readable
from dledger.remoting.access.accounts import (
    ADMIN,
    Permission,
    Right,
    Rule,
    group_right,
    topic_right,
)
from dledger.remoting.access.audit import IsAct, SubjectOf, audited, fields_of
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import Handled, Limiter
from dledger.remoting.processor_table import Handler, ProcessorTable
from dledger.remoting.protocol.bodies import HeartbeatData, LockBatchRequestBody
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.own_fields import step_commits_of
from dledger.remoting.protocol.topic_names import HALF_TOPIC, TRACE_TOPIC

# ----------------------------------------------------------------------------- what must be allowed


TopicAt: TypeAlias = Callable[[int], str | None]
"""Position in the log → topic of the message there; None when there is none."""


@dataclass(frozen=True, slots=True)
class Places:
    """What some rules need of the broker."""

    topic_at: TopicAt
    reply_topic: str


RuleOf: TypeAlias = Rule | Callable[[Places], Rule]
"""A rule, or what makes it for one broker."""

PUB: Final = Permission.PUB
SUB: Final = Permission.SUB
ANY: Final = Permission.PUB | Permission.SUB

_V2: Final = frozenset(
    {RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2}
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
        if record.topic in (HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC):
            return decode_properties(record.properties).get("REAL_TOPIC", record.topic)
        return record.topic

    return topic_at


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
            yield topic_right(_text(command, topic), permission)
        if group:
            yield group_right(_text(command, group))

    return Rule(rights=rights)


def _send(command: RemotingCommand) -> Iterable[Right]:
    topic = _text(command, "b" if command.code in _V2 else "topic")
    return () if topic == TRACE_TOPIC else (topic_right(topic, PUB),)


def replies(places: Places) -> Rule:
    """Return the rule of a reply: the right to its topic, unless that is the cluster's own."""
    free_topic = places.reply_topic

    def rights(command: RemotingCommand) -> Iterable[Right]:
        topic = _text(command, "b" if command.code in _V2 else "topic")
        return () if topic == free_topic else (topic_right(topic, PUB),)

    return Rule(rights=rights)


def _send_records(command: RemotingCommand) -> Iterator[Right]:
    runs = command.ext.get("runs")
    if not isinstance(runs, list):
        raise BadRequestError("runs must be a list")
    for topic in {run[0] if isinstance(run, list) and run else None for run in runs}:
        if not isinstance(topic, str):
            raise BadRequestError("a run is [topic, queue id, count]")
        if topic != TRACE_TOPIC:
            yield topic_right(topic, PUB)


def _consume_step(command: RemotingCommand) -> Iterator[Right]:
    yield from _send_records(command)
    yield group_right(_text(command, "consumer_group"))
    for topic in {commit.topic for commit in step_commits_of(command.ext)}:
        yield topic_right(topic, SUB)


def _heartbeat(command: RemotingCommand) -> Iterator[Right]:
    for consumer in HeartbeatData.decode(command.body).consumer_data_set:
        yield group_right(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            yield topic_right(subscription.topic, SUB)


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
            offset = whole_number(command.ext.get(field, ""))
        except ValueError:
            raise BadRequestError(f"the custom field {field} is not a number") from None
        topic = topic_at(offset)
        return () if topic is None else (topic_right(topic, permission),)

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
CONSUMES_AND_SENDS: Final = Rule(rights=_consume_step)
"""The rights to the topic of each run, to the consumer group, and to each topic that it reads."""
HEARTBEAT: Final = Rule(rights=_heartbeat)
"""The rights to the groups and topics that the client subscribes to."""
UNREGISTERS: Final = Rule(rights=_unregister)
"""The right to the consumer group, if there is one."""
LOCKS: Final = Rule(rights=_lock)
"""The right to the consumer group in the body."""
CONSUMES: Final = needs(SUB, topic="topic", group="consumerGroup")
"""The rights to read the topic for the group."""


# ---------------------------------------------------------------------------------- declared


HandlerT = TypeVar("HandlerT", bound=Callable[..., object])

_DECLARATION: Final = "__handles__"


class Limit(StrEnum):
    """Which requests share a bound of open requests."""

    SEND = "send"
    PULL = "pull"
    POP = "pop"
    REPLY = "reply"
    CLIENT = "client"
    ADMIN = "admin"
    RAFT_CHANGE = "raft change"
    SETTINGS = "settings"


MAX_OPEN: Final[Mapping[Limit, int]] = {
    # Send requests waiting for a majority: above what a group holds pending.
    Limit.SEND: 100_000,
    # Replies that requesters have not confirmed: each keeps its body until then.
    Limit.REPLY: 10_000,
    Limit.CLIENT: 100_000,
    # One for each consumer that waits for messages.
    Limit.POP: 100_000,
    # Everything else that is answered later; these are rare.
    Limit.ADMIN: 1_000,
    # Changes that wait for each other; a person requests one at a time.
    Limit.RAFT_CHANGE: 16,
    Limit.SETTINGS: 16,
}
"""Open requests of a kind, over all connections. A held pull is open until it is answered; the pull
processor bounds those itself, so the bound of pulls comes from its settings."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a handler declares.

    Attributes:
        limit: Which open requests they count with.
        reads: It needs queues and log to be as the tables are; refused while a snapshot is
            refilled, because the tables are ahead of the log then.
        local: It erases data, or changes members or settings of durability and retention. Without
            access control it comes from the broker's own machine, unless `server.open_admin` is on.
        appends: It is decided on what is applied and what is in flight, and reads no message. All
            others see what was committed before they came.
        shows: It is for administrators and changes nothing.
        administers: It is an administrative act although its rule is not that of administrators.
        administers_if: Which of its requests are; None: all or none, as `administers` has it.
        subject: Names in a request what it is about, for the audit line.
    """

    codes: tuple[RequestCode, ...]
    limit: Limit
    rule: RuleOf
    reads: bool
    local: bool
    appends: bool
    shows: bool
    administers: bool
    administers_if: IsAct | None
    subject: SubjectOf

    @property
    def is_administrative(self) -> bool:
        """Whether its requests get an audit line: what is for administrators, unless it shows.

        With `administers_if` only those for which it holds.
        """
        is_act = self.administers or self.administers_if is not None
        return is_act or (self.rule is ADMIN and not self.shows)


def handles(
    *codes: RequestCode,
    limit: Limit,
    rule: RuleOf,
    reads: bool = False,
    local: bool = False,
    appends: bool = False,
    shows: bool = False,
    administers: bool = False,
    administers_if: IsAct | None = None,
    subject: SubjectOf = fields_of,
) -> Callable[[HandlerT], HandlerT]:
    """Declare that a method answers requests with *codes*; `Declaration` explains the rest."""
    declaration = Declaration(
        codes, limit, rule, reads, local, appends, shows, administers, administers_if, subject
    )

    def declare(method: HandlerT) -> HandlerT:
        setattr(method, _DECLARATION, declaration)
        return method

    return declare


def declared(processors: Iterable[type]) -> Iterator[tuple[str, Declaration]]:
    """Yield name and declaration of each handler of these classes."""
    for processor in processors:
        for name, member in vars(processor).items():
            declaration = getattr(member, _DECLARATION, None)
            if declaration is not None:
                yield name, declaration


def codes_of(
    processors: Iterable[type], holds: Callable[[Declaration], bool] = lambda _: True
) -> frozenset[RequestCode]:
    """Return the request codes that these classes answer and whose declaration *holds*."""
    return frozenset(
        code for _, found in declared(processors) if holds(found) for code in found.codes
    )


def rules_of(processors: Iterable[type], places: Places) -> dict[int, Rule]:
    """Return the access rule of each request code that these classes answer."""
    return {
        int(code): declaration.rule
        if isinstance(declaration.rule, Rule)
        else declaration.rule(places)
        for _, declaration in declared(processors)
        for code in declaration.codes
    }


def handlers_of(
    processors: Iterable[object], limiters: Mapping[Limit, Limiter], group: BrokerGroup
) -> dict[RequestCode, tuple[Handler, Limiter]]:
    """Return the switchboard: for each declared code its handler and its limiter.

    Raises ConfigError: two handlers declare the same code.
    """
    handlers: dict[RequestCode, tuple[Handler, Limiter]] = {}
    for processor in processors:
        for name, declaration in declared([type(processor)]):
            handler: Handler = getattr(processor, name)
            if declaration.reads or not declaration.appends:
                handler = _when_ready(group, handler, declaration)
            for code in declaration.codes:
                if code in handlers:
                    raise ConfigError(f"request code {code} has a handler already")
                limiter = limiters[declaration.limit]
                found = handler
                if declaration.is_administrative:
                    found = audited(code, handler, declaration.subject, declaration.administers_if)
                handlers[code] = (found, limiter)
    return handlers


def register(
    table: ProcessorTable, handlers: Mapping[RequestCode, tuple[Handler, Limiter]]
) -> None:
    """Put *handlers* into *table*."""
    for code, (handler, limiter) in handlers.items():
        table.register(code, handler, limiter)


def _when_ready(group: BrokerGroup, handler: Handler, declaration: Declaration) -> Handler:
    reads, applies = declaration.reads, not declaration.appends

    def handle(connection: Connection, command: RemotingCommand) -> Handled:
        if reads:
            require_readable(group)
        if applies:
            # The answer reflects every message that was answered.
            group.catch_up()
        return handler(connection, command)

    return handle
