"""Repeated schedules: PUT_SCHEDULE (51120), DELETE (51121), PAUSE (51122), LIST (51123).

A change is decided on what is applied and in flight, and answered when it is applied. One that
changes nothing is answered at once, so a request may be repeated.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import cbor2

from dledger.broker_errors import TableFullError
from dledger.broker_settings import BrokerSettings
from dledger.commitlog.errors import LocalProtocolError
from dledger.commitlog.properties import (
    PROPERTY_DELAY,
    PROPERTY_EXPIRE_AFTER_MS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELETE_UNIQ_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQ_KEY,
    SCHEDULE_DUE_MS,
    SCHEDULE_MISSED,
    SCHEDULE_NAME,
    encode_properties,
    has_owned,
)
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    RefusedError,
    asked_by,
    check_sendable,
    nothing_to_change,
    propose_change,
    require_leader,
    when_current,
)
from dledger.processors.destination import body_refused, check_accepts, check_room
from dledger.processors.handles import Limit, changes_schedule, handles, puts_schedule
from dledger.remoting.access.accounts import ADMIN
from dledger.remoting.access.audit import Subject, fields_of
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.processor import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.schedule_bodies import (
    COMING_SHOWN,
    DRY_RUN_FIELD,
    NAME_FIELD,
    PAUSED_FIELD,
    ComingInstants,
    ScheduleBody,
    ScheduleInfo,
    ScheduleList,
)
from dledger.remoting.seams import Clock
from dledger.services.pending_configs import TopicView
from dledger.services.repeated_messages import SCHEDULE_BYTES_MAX, SCHEDULES_MAX, ScheduleView
from dledger.services.schedule_times import LAST_MS, coming_instants
from dledger.state.schedules import ANY_QUEUE, Schedule, ScheduleConfig, SchedulesChange
from dledger.state.topics import name_problem

NAME_CHARS_MAX: Final = 127
"""Of a name: it stands in each message."""

_NOT_TAKEN: Final = (
    PROPERTY_DELAY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_DELETE_UNIQ_KEY,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_EXPIRE_AFTER_MS,
    PROPERTY_UNIQ_KEY,
    SCHEDULE_NAME,
    SCHEDULE_DUE_MS,
    SCHEDULE_MISSED,
)
"""Properties that would have no effect, or that the broker writes itself."""


def _subject(command: RemotingCommand) -> Subject:
    is_dry = command.ext.get(DRY_RUN_FIELD) == "true"
    return {**fields_of(command), **({DRY_RUN_FIELD: "true"} if is_dry else {})}


class SchedulesProcessor:
    """Answers requests about schedules; changes go through the log."""

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        view: ScheduleView,
        settings: BrokerSettings,
        clock: Clock,
    ) -> None:
        self._group = group
        self._topics = topics
        self._view = view
        self._settings = settings
        self._clock = clock

    @handles(
        RequestCode.PUT_SCHEDULE,
        limit=Limit.ADMIN,
        rule=puts_schedule,
        administers=True,
        subject=_subject,
    )
    def put(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51120 when the schedule is as asked for; or check it and store nothing."""
        require_leader(self._group)
        config = self._config(command)
        name, now_ms = config.name, self._clock.wall_ms()
        current = self._view.pending.resolve(name)
        if current is None:
            self._check_space()
        change = SchedulesChange((config,), now_ms, asked_by=asked_by(connection))
        coming = self._coming(config, current, now_ms)
        answer = response_to(command, 0, None, None, ComingInstants(coming_ms=coming).encode())
        if command.ext.get(DRY_RUN_FIELD) == "true":
            return answer
        if current == config and not self._view.pending.is_changing(name):
            return when_current(self._group, connection, command, lambda: answer)
        propose_change(
            connection,
            command,
            self._group,
            change,
            lambda: [self._view.pending.put(name, config)],
            stored=lambda: answer,
        )
        return DEFERRED

    @handles(
        RequestCode.DELETE_SCHEDULE, limit=Limit.ADMIN, rule=changes_schedule, administers=True
    )
    def delete(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51121 when there is no such schedule: no message of it comes any more."""
        require_leader(self._group)
        name = _named(command)
        pending = self._view.pending
        if pending.resolve(name) is None and not pending.is_changing(name):
            return self._absent(connection, command, name)
        change = SchedulesChange(delete=(name,), asked_by=asked_by(connection))
        propose_change(
            connection, command, self._group, change, lambda: [self._view.pending.delete(name)]
        )
        return DEFERRED

    @handles(RequestCode.PAUSE_SCHEDULE, limit=Limit.ADMIN, rule=changes_schedule, administers=True)
    def pause(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51122 when the schedule rests, or goes on."""
        require_leader(self._group)
        name, paused = _named(command), command.ext.get(PAUSED_FIELD)
        if paused not in ("true", "false"):
            raise RefusedError(Condition.BAD_REQUEST, f"{PAUSED_FIELD} is neither true nor false")
        pending = self._view.pending
        current = pending.resolve(name)
        if current is None:
            return self._absent(connection, command, name)
        config = replace(current, paused=paused == "true")
        if current == config and not pending.is_changing(name):
            return nothing_to_change(self._group, connection, command)
        change = SchedulesChange((config,), self._clock.wall_ms(), asked_by=asked_by(connection))
        propose_change(
            connection, command, self._group, change, lambda: [pending.put(name, config)]
        )
        return DEFERRED

    def _absent(self, connection: Connection, command: RemotingCommand, name: str) -> Handled:
        """Refuse a change of a schedule that is not there, once this node is known to lead."""

        def refuse() -> RemotingCommand:
            raise _no_schedule(name)

        return when_current(self._group, connection, command, refuse)

    @handles(RequestCode.LIST_SCHEDULES, limit=Limit.ADMIN, rule=ADMIN, shows=True)
    def show(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51123: all schedules without their bodies, or the one that is named with it."""
        name = command.ext.get(NAME_FIELD)

        def read() -> RemotingCommand:
            rows = self._group.state.schedules
            if name:
                found = [self._info(rows[name], with_body=True)] if name in rows else []
            else:
                found = [self._info(row, with_body=False) for _, row in sorted(rows.items())]
            return response_to(command, 0, None, None, ScheduleList(schedules=found).encode())

        return when_current(self._group, connection, command, read)

    # -- what is asked for ------------------------------------------------------------------

    def _config(self, command: RemotingCommand) -> ScheduleConfig:
        """Return the schedule that a request describes, and whose messages could be stored.

        Raises:
            RefusedError: It cannot be, or there is no such topic or queue; nothing was changed.
        """
        check_accepts(self._settings)
        asked = ScheduleBody.decode(command.body)
        topic = command.ext.get("topic")
        if not isinstance(topic, str):
            raise BadRequestError("the custom field topic is null")
        config = ScheduleConfig(
            _named(command),
            topic,
            asked.body,
            " ".join(asked.expression.split()),
            asked.properties,
            asked.queue_id,
            asked.time_zone,
            asked.begin_ms,
            asked.end_ms,
            asked.paused,
        )
        self._check_topic(config)
        self._check_message(config)
        if not (0 <= config.begin_ms <= LAST_MS and 0 <= config.end_ms <= LAST_MS):
            raise _refused("begin and end are times from 1970 to 9998")
        if config.end_ms and config.begin_ms > config.end_ms:
            raise _refused("the schedule ends before it begins")
        size = len(cbor2.dumps(config.to_state()))
        if size > SCHEDULE_BYTES_MAX:
            raise _refused(f"the schedule has {size} bytes, at most {SCHEDULE_BYTES_MAX}")
        return config

    def _check_topic(self, config: ScheduleConfig) -> None:
        check_sendable(config.topic)
        topic = self._topics.config(config.topic)
        if topic is None or config.topic in self._group.state.builtin_topics:
            raise RefusedError(
                Condition.TOPIC_NOT_EXIST,
                f"topic[{config.topic}] not exist, apply first please! Nothing was changed",
            )
        if not topic.writeable:
            raise RefusedError(
                Condition.NO_PERMISSION, f"the topic[{config.topic}] sending message is forbidden"
            )
        if not ANY_QUEUE <= config.queue_id < topic.write_queue_nums:
            raise RefusedError(
                Condition.INVALID_QUEUE,
                f"queueId[{config.queue_id}] is illegal, {config.topic} has"
                f" {topic.write_queue_nums} queues for writing",
            )

    def _check_message(self, config: ScheduleConfig) -> None:
        if not config.body:
            raise body_refused(0, SCHEDULE_BYTES_MAX)
        for name in _NOT_TAKEN:
            if name in config.properties:
                raise _refused(f"a message of a schedule has no property {name}")
        try:
            properties = encode_properties(config.properties)
        except LocalProtocolError as error:
            raise _refused(str(error)) from error
        if has_owned(properties):
            raise _refused("it has a property that only brokers write")
        check_room(properties)

    def _coming(
        self, config: ScheduleConfig, current: ScheduleConfig | None, now_ms: int
    ) -> list[int]:
        """Return the next instants of *config*.

        Raises:
            RefusedError: Its expression cannot be read, or none comes any more.
        """
        row = self._group.state.schedules.get(config.name)
        # An interval counts from where it did when its times stay.
        is_same = row is not None and current is not None and current.times == config.times
        counts_from_ms = row.counts_from_ms if row is not None and is_same else now_ms
        try:
            coming = coming_instants(
                Schedule(config, counts_from_ms, counts_from_ms), now_ms, COMING_SHOWN
            )
        except ValueError as error:
            raise _refused(str(error)) from None
        if not coming:
            raise _refused("no instant of the schedule comes any more")
        return coming

    def _check_space(self) -> None:
        there = len(self._group.state.schedules) + len(self._view.pending)
        if there >= SCHEDULES_MAX:
            raise TableFullError(
                f"{there} schedules are there, at most {SCHEDULES_MAX}; nothing was stored; remove"
                " schedules that are not used"
            )

    # -- what is shown ----------------------------------------------------------------------

    def _info(self, row: Schedule, *, with_body: bool) -> ScheduleInfo:
        config = row.config
        return ScheduleInfo(
            name=config.name,
            topic=config.topic,
            expression=config.expression,
            time_zone=config.time_zone,
            queue_id=config.queue_id,
            properties=dict(config.properties) if with_body else {},
            body=config.body if with_body else b"",
            body_bytes=len(config.body),
            begin_ms=config.begin_ms,
            end_ms=config.end_ms,
            paused=config.paused,
            last_ms=row.last_ms,
            next_ms=self._view.next_ms(row) or 0,
            fired=row.fired,
            missed=row.missed,
            held="" if config.paused else self._view.problem(row),
        )


def _refused(reason: str) -> RefusedError:
    return RefusedError(Condition.BAD_REQUEST, f"{reason}; nothing was changed")


def _no_schedule(name: str) -> RefusedError:
    return RefusedError(Condition.NOT_FOUND, f"there is no schedule {name}; nothing was changed")


def _named(command: RemotingCommand) -> str:
    name = command.ext.get(NAME_FIELD)
    if not isinstance(name, str):
        raise BadRequestError(f"the custom field {NAME_FIELD} is null")
    problem = name_problem(name, "schedule", NAME_CHARS_MAX)
    if problem is not None:
        raise RefusedError(Condition.BAD_REQUEST, problem)
    return name
