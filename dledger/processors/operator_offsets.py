"""Offsets that operators set: resets (222), clones (314), and commits that a reset is made of.

A reset of a group that has messages out by POP is done here, in the log: it ends their grants.

INVOKE_BROKER_TO_RESET_OFFSET works as in RocketMQ 4.9: the broker computes the offsets and sends
them to every client of the group (220), which stops, adopts them and commits them. Without a
connected client the answer is 206, and the tools commit the offsets themselves, by the request
that consumers commit with. Those commits are administrative acts. Our tools mark them with
`BY_OPERATOR_FIELD`; those of RocketMQ commit on the connection on which the reset was refused.

Spec: docs/internals/protocol/remoting.md, sections 8.5, 10 and 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import structlog

from dledger.group_api import BrokerGroup, Proposed, search_offset
from dledger.processors.answers import (
    answer_when_done,
    bad_request,
    check_group_name,
    nothing_to_change,
    require_leader,
    when_current,
    when_stored,
)
from dledger.processors.client_table import Client, ClientTable
from dledger.processors.handles import SUB, Limit, handles, needs
from dledger.remoting.access.accounts import ADMIN
from dledger.remoting.access.audit import Subject
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RemotingError
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.bodies import (
    MessageQueue,
    QueueOffset,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import (
    CloneGroupOffsetHeader,
    ResetOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from dledger.remoting.protocol.own_fields import BY_OPERATOR_FIELD
from dledger.services.offset_commits import MAX_OFFSETS_PER_RECORD, OffsetCommits, OffsetSlot
from dledger.services.pop_grants import PopGrants
from dledger.settings.parts import BrokerSettings

LATEST = -1
"""As a time: the end of each queue."""

UNDERSTANDS_SINCE = 37
"""Clients from RocketMQ 3.0.11 on; the request is little older than that."""

RESETS_NOTED_MAX: Final = 64
"""Resets that were refused on one connection, newest kept: a tool asks for one after the other."""

_REFUSED: Final = "resets refused with 206"
"""Attribute of a connection: group and topic of each."""

logger = structlog.get_logger(__name__)


def note_refused_reset(connection: Connection, group: str, topic: str) -> None:
    """Let later commits of *group* in *topic* on this connection count as those of an operator."""
    noted: dict[tuple[str, str], None] = connection.attributes.setdefault(_REFUSED, {})
    noted.pop((group, topic), None)
    noted[group, topic] = None
    while len(noted) > RESETS_NOTED_MAX:
        del noted[next(iter(noted))]


def is_of_operator(connection: Connection, command: RemotingCommand) -> bool:
    """Return whether an offset commit is that of an operator, and not of a consumer."""
    if command.ext.get(BY_OPERATOR_FIELD) in (True, "true"):
        return True
    noted: dict[tuple[str, str], None] = connection.attributes.get(_REFUSED, {})
    return bool(noted) and (command.ext.get("consumerGroup"), command.ext.get("topic")) in noted


def subject_of_commit(command: RemotingCommand) -> Subject:
    """Return what a commit is about, for the audit line. Pure.

    Raises BadRequestError: it cannot be read.
    """
    header = UpdateConsumerOffsetHeader.decode(command.ext)
    return {
        "topic": header.topic,
        "consumerGroup": header.consumer_group,
        "queueId": str(header.queue_id),
        "commitOffset": str(header.commit_offset),
    }


@dataclass(eq=False, repr=False)
class ResetOffsetsProcessor:
    """Answers 222 with the offsets that were sent to the clients, or that are stored."""

    _group: BrokerGroup
    _clients: ClientTable[Connection]
    _offsets: OffsetCommits
    _settings: BrokerSettings
    _pops: PopGrants

    @handles(
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        limit=Limit.ADMIN,
        rule=needs(SUB, topic="topic", group="group"),
        reads=True,
        administers=True,
    )
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Compute the offsets behind the read barrier, since the ends of queues are among them."""
        header = ResetOffsetHeader.decode(command.ext)
        require_leader(self._group)
        state = self._group.state
        is_out = any(topic == header.topic for _, topic, _ in state.pops.keys_with(0, header.group))
        if is_out or self._pops.receives(header.group, header.topic):
            return when_current(
                self._group, connection, command, lambda: self._store(connection, command, header)
            )
        return when_stored(
            self._group,
            self._offsets,
            self._offsets.slots(header.group, header.topic),
            connection,
            command,
            lambda: self._reset(connection, command, header),
        )

    def _store(
        self, connection: Connection, command: RemotingCommand, header: ResetOffsetHeader
    ) -> None:
        """Store the offsets, and answer when they are applied."""
        table = self._table(header, is_stored=True)
        if len(table) > MAX_OFFSETS_PER_RECORD:
            raise bad_request(
                f"{len(table)} offsets are more than {MAX_OFFSETS_PER_RECORD}: reset the queues"
                " one by one"
            )
        body = ResetOffsetBody(offset_table=table)
        answered = answer_when_done(
            connection,
            command,
            self._group,
            lambda _: response_to(command, body=body.encode()),
        )

        def done(proposed: Proposed) -> None:
            answered(proposed)
            self._pops.offsets_set(header.group, header.topic)

        state = self._group.state
        items: list[tuple[OffsetSlot, int]] = [
            ((header.group, header.topic, queue.queue_id), offset)
            for queue, offset in table.items()
            # The present offset ends grants, too: that needs force.
            if header.is_force
            or offset != state.consumer_offset(header.group, header.topic, queue.queue_id)
        ]
        self._offsets.commit_now(items, done, by_admin=True)

    def _reset(
        self, connection: Connection, command: RemotingCommand, header: ResetOffsetHeader
    ) -> RemotingCommand:
        table = self._table(header)
        consumers = self._clients.consumer_group(header.group)
        if consumers is None:
            note_refused_reset(connection, header.group, header.topic)
            return response_to(
                command,
                int(ResponseCode.CONSUMER_NOT_ONLINE),
                f"Consumer not online, so can not reset offset, Group: {header.group}"
                f" Topic: {header.topic} Timestamp: {header.timestamp}",
            )
        clients = list(consumers.clients.values())
        for client in clients:
            if client.version < UNDERSTANDS_SINCE:
                raise bad_request(
                    f"the client {client.client_id} is too old for the request: {client.version}"
                )
        body = ResetOffsetBody(offset_table=table)
        for client in clients:
            self._send_reset(client, header, body)
        return response_to(command, body=body.encode())

    def _table(
        self, header: ResetOffsetHeader, *, is_stored: bool = False
    ) -> dict[MessageQueue, int]:
        state = self._group.state
        config = state.topic_config(header.topic)
        if config is None or not self._offsets.exists(header.topic):
            raise bad_request(f"topic {header.topic} does not exist")
        queues = range(config.write_queue_nums)
        if header.queue_id is not None and header.queue_id >= 0:
            if header.queue_id not in queues:
                raise bad_request(f"topic {header.topic} has no queue {header.queue_id}")
            queues = range(header.queue_id, header.queue_id + 1)
        table = {}
        for queue_id in queues:
            consumed = self._group.state.consumer_offset(header.group, header.topic, queue_id)
            wanted = self._wanted(header, queue_id)
            queue = MessageQueue(header.topic, self._settings.broker.broker_name, queue_id)
            if consumed is None and is_stored:
                consumed = wanted
            if consumed is None:
                raise bad_request(
                    f"the consumer group {header.group} has no offset in queue {queue_id} of"
                    f" {header.topic}"
                )
            table[queue] = wanted if header.is_force or wanted < consumed else consumed
        return table

    def _wanted(self, header: ResetOffsetHeader, queue_id: int) -> int:
        state, topic = self._group.state, header.topic
        if header.offset is not None and header.offset >= 0:
            low, high = state.min_offset(topic, queue_id), state.max_offset(topic, queue_id)
            return min(max(header.offset, low), high)
        if header.timestamp == LATEST:
            return state.max_offset(topic, queue_id)
        return search_offset(self._group, topic, queue_id, header.timestamp, upper=False)

    def _send_reset(
        self, client: Client[Connection], header: ResetOffsetHeader, body: ResetOffsetBody
    ) -> None:
        reset = request(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            {
                "topic": header.topic,
                "group": header.group,
                "timestamp": str(header.timestamp),
                "isForce": "true" if header.is_force else "false",
            },
            _for_c(body).encode() if client.language == "CPP" else body.encode(),
        )
        try:
            client.channel.invoke_oneway(reset)
        except RemotingError as error:
            # It is taken out with its connection, and goes on from what is committed.
            logger.info("reset_not_sent", client=client.client_id, reason=str(error))


def _for_c(body: ResetOffsetBody) -> ResetOffsetBodyForC:
    return ResetOffsetBodyForC(
        offset_table=[
            QueueOffset(
                topic=queue.topic,
                broker_name=queue.broker_name,
                queue_id=queue.queue_id,
                offset=offset,
            )
            for queue, offset in body.offset_table.items()
        ]
    )


@dataclass(eq=False, repr=False)
class CloneOffsetsProcessor:
    """Answers 314 when the offsets are in the log, all of them in one entry."""

    _group: BrokerGroup
    _clients: ClientTable[Connection]
    _offsets: OffsetCommits

    @handles(RequestCode.CLONE_GROUP_OFFSET, limit=Limit.ADMIN, rule=ADMIN)
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Copy the offsets; success when there are none."""
        header = CloneGroupOffsetHeader.decode(command.ext)
        group = self._group
        require_leader(group)
        check_group_name(header.dest_group)
        source, items = header.src_group, list(self._copies(header))
        if not items:
            return nothing_to_change(group, connection, command)
        if len(items) > MAX_OFFSETS_PER_RECORD:
            raise bad_request(
                f"{len(items)} offsets are more than {MAX_OFFSETS_PER_RECORD}: clone the group"
                " topic by topic"
            )

        done = answer_when_done(connection, command, group)
        # What is copied is stored ahead of the copies.
        self._offsets.store_first([(source, *slot[1:]) for slot, _ in items], lambda: None)
        self._offsets.commit_now(items, done, by_admin=True)
        return DEFERRED

    def _copies(self, header: CloneGroupOffsetHeader) -> Iterator[tuple[OffsetSlot, int]]:
        source, target = header.src_group, header.dest_group
        consumers = self._clients.consumer_group(source)
        subscribed = consumers.subscriptions if consumers is not None else {}
        for topic in [header.topic] if header.topic else self._offsets.topics_of(source):
            config = self._group.state.topic_config(topic)
            left_behind = subscribed and topic not in subscribed and not header.offline
            if config is None or left_behind or not self._offsets.exists(topic):
                continue
            for queue_id in range(config.queue_nums):
                offset = self._offsets.offset(source, topic, queue_id)
                if offset is not None:
                    yield (target, topic, queue_id), offset
