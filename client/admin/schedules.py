"""Administration of repeated schedules, each in the log of one broker group.

`dledger.client.admin.admin.Admin` has these as its own methods.
"""

from __future__ import annotations

from dataclasses import dataclass

from dledger.client.admin.groups import checked
from dledger.client.admin.leader_asks import LeaderAsks
from dledger.client.core.errors import MessageIllegalError, NoRouteError, RequestFailedError
from dledger.client.core.message import Message, check_body, check_topic
from dledger.commitlog.properties import (
    KEY_SEPARATOR,
    PROPERTY_KEYS,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TAGS,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand
from dledger.remoting.protocol.schedule_bodies import (
    DRY_RUN_FIELD,
    NAME_FIELD,
    PAUSED_FIELD,
    ComingInstants,
    ScheduleBody,
    ScheduleInfo,
    ScheduleList,
)

SCHEDULE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SchedulePut:
    """Where a schedule stands, and when it is due next.

    Attributes:
        broker_name: The group that has it.
        coming_ms: Its next instants, up to five, milliseconds since 1970.
    """

    broker_name: str
    coming_ms: tuple[int, ...]


class ScheduleAdmin(LeaderAsks):
    """Reads and changes schedules."""

    async def put_schedule(
        self,
        name: str,
        expression: str,
        message: Message,
        *,
        time_zone: str = "UTC",
        message_group: str = "",
        queue_id: int = -1,
        begin_ms: int = 0,
        end_ms: int = 0,
        paused: bool = False,
        broker_name: str | None = None,
        dry_run: bool = False,
    ) -> SchedulePut:
        """Let a broker group send *message* again and again; a schedule of that name is replaced.

        Args:
            name: Of the schedule, at most 127 characters, as topics have them.
            expression: Five fields of cron, ``@daily`` and the like, or ``@every 30s``.
            message: Its topic is there already. Delays, a time to live and an id it has none.
            time_zone: Of a cron expression, as the IANA names it.
            message_group: Messages with the same one go to the same queue.
            queue_id: The queue; -1: that of the message group, else one after the other.
            begin_ms: No instant before it, milliseconds since 1970; an interval counts from there.
            end_ms: No instant after it; 0: without an end.
            paused: Nothing is sent until `resume_schedule`.
            broker_name: The group; None: the one that has a schedule of that name, else the first
                by name that has the topic.
            dry_run: Check everything and return the instants, and change nothing.
        Raises:
            MessageIllegalError: No broker takes the message for a schedule; nothing was sent.
            NoRouteError: No group has the topic, or as `schedules`.
            RequestFailedError: Refused, with the reason; nothing was changed. Code 3: the broker is
                of an earlier release, or a RocketMQ.
            BrokerUnreachableError: No leader answers; the change may or may not be stored.
        """
        body = ScheduleBody(
            expression=expression,
            body=_body_of(message),
            properties=_properties_of(message, message_group),
            queue_id=queue_id,
            time_zone=time_zone,
            begin_ms=begin_ms,
            end_ms=end_ms,
            paused=paused,
        )
        chosen = broker_name or await self._group_with(name) or await self._first(message.topic)
        ext = {NAME_FIELD: name, "topic": message.topic}
        if dry_run:
            ext[DRY_RUN_FIELD] = "true"
        answer = await self._ask_about_schedule(
            chosen, RequestCode.PUT_SCHEDULE, ext, body.encode()
        )
        coming = ComingInstants.decode(answer.body).coming_ms
        return SchedulePut(chosen, tuple(coming))

    async def schedules(self) -> dict[str, list[ScheduleInfo]]:
        """Return the schedules of each broker group, by its name; without bodies and properties.

        Groups of earlier releases, and RocketMQ's, have none.

        Raises:
            NoRouteError: No group has registered with the NameServer, which has just started.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        found = {}
        for broker_name in await self._groups_of_cluster():
            found[broker_name] = await self._schedules_of(broker_name, {})
        return found

    async def schedule(self, name: str) -> tuple[str, ScheduleInfo] | None:
        """Return the broker group that has a schedule, and the whole of it; None: there is none.

        Errors as `schedules`.
        """
        for broker_name in await self._groups_of_cluster():
            if infos := await self._schedules_of(broker_name, {NAME_FIELD: name}):
                return broker_name, infos[0]
        return None

    async def delete_schedule(self, name: str) -> str:
        """Delete a schedule: no message of it comes any more when this returns.

        Returns:
            The broker group that had it.
        Raises:
            NoRouteError: As `schedules`; nothing was changed.
            RequestFailedError: There is none of that name, or its group refused; nothing was
                changed.
            BrokerUnreachableError: No leader answers; the change may or may not be stored.
        """
        return await self._change_schedule(RequestCode.DELETE_SCHEDULE, name, {})

    async def pause_schedule(self, name: str) -> str:
        """Let a schedule rest: what is due meanwhile is not sent; as `delete_schedule`."""
        return await self._change_schedule(RequestCode.PAUSE_SCHEDULE, name, {PAUSED_FIELD: "true"})

    async def resume_schedule(self, name: str) -> str:
        """Let a schedule go on, with the first instant from now on; as `delete_schedule`."""
        return await self._change_schedule(
            RequestCode.PAUSE_SCHEDULE, name, {PAUSED_FIELD: "false"}
        )

    # ------------------------------------------------------------------------------ inside

    async def _change_schedule(self, code: RequestCode, name: str, ext: dict[str, str]) -> str:
        broker_name = await self._group_with(name)
        if broker_name is None:
            raise RequestFailedError(
                f"no broker group has a schedule {name}; nothing was changed",
                code=ResponseCode.QUERY_NOT_FOUND,
                remark="",
            )
        await self._ask_about_schedule(broker_name, code, {NAME_FIELD: name, **ext})
        return broker_name

    async def _groups_of_cluster(self) -> list[str]:
        """Return all groups: one without a leader now may have the schedule that is looked for."""
        table = (await self.cluster_info()).broker_addr_table
        if not table:
            # One that has just started: which schedules there are is not known.
            raise NoRouteError("no broker group has registered with the NameServer; asked none")
        for name, group in table.items():
            self._instance.routes.add_members(name, dict(group.broker_addrs))
        return sorted(table)

    async def _group_with(self, name: str) -> str | None:
        found = await self.schedule(name)
        return None if found is None else found[0]

    async def _first(self, topic: str) -> str:
        queues = (await self.topic_route(topic)).publish_queues
        if not queues:
            raise NoRouteError(f"no broker group takes messages for topic {topic}")
        return min(queue.broker_name for queue in queues)

    async def _schedules_of(self, broker_name: str, ext: ExtFields) -> list[ScheduleInfo]:
        try:
            answer = await self._ask_about_schedule(broker_name, RequestCode.LIST_SCHEDULES, ext)
        except RequestFailedError as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return []
            raise
        return ScheduleList.decode(answer.body).schedules

    async def _ask_about_schedule(
        self, broker_name: str, code: RequestCode, ext: ExtFields, body: bytes = b""
    ) -> RemotingCommand:
        answer = await self._instance.ask_leader(
            broker_name,
            code,
            dict(ext),
            body,
            topic="TBW102",
            timeout_s=SCHEDULE_TIMEOUT_S,
            changes=code is not RequestCode.LIST_SCHEDULES,
        )
        return checked(answer, f"{code.name} on {broker_name}")


def _body_of(message: Message) -> bytes:
    check_topic(message.topic)
    check_body(message.body)
    if message.is_delayed or message.ttl_ms or message.message_id or message.flag:
        raise MessageIllegalError(
            "a message of a schedule has no delay, no time to live, no flag and no id of its own;"
            " nothing was sent"
        )
    return bytes(message.body)


def _properties_of(message: Message, message_group: str) -> dict[str, str]:
    keys = message.keys if isinstance(message.keys, str) else KEY_SEPARATOR.join(message.keys)
    written = {
        PROPERTY_KEYS: keys,
        PROPERTY_TAGS: message.tags,
        PROPERTY_SHARDING_KEY: message_group,
    }
    properties = dict(message.properties or {})
    for name in written.keys() & properties.keys():
        raise MessageIllegalError(f"property {name} has a field of its own; nothing was sent")
    return properties | {name: value for name, value in written.items() if value}
