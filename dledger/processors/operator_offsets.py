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
from itertools import islice
from typing import Final

import structlog
import trio

from dledger.group_api import BrokerGroup, Proposed, search_offset
from dledger.processors.answers import (
    answer_when_done,
    bad_request,
    check_group_name,
    failed_proposal,
    nothing_to_change,
    require_leader,
    until_current,
    until_stored,
)
from dledger.processors.client_table import Client, ClientTable
from dledger.processors.handles import SUB, Limit, handles, needs
from dledger.remoting.access.accounts import ADMIN
from dledger.remoting.access.audit import Subject
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RemotingError
from dledger.remoting.handling import DEFERRED, Answered, Handled
from dledger.remoting.protocol.bodies import (
    MessageQueue,
    QueueOffset,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.fastjson import member
from dledger.remoting.protocol.headers import (
    CloneGroupOffsetHeader,
    ResetOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from dledger.remoting.protocol.own_fields import BY_OPERATOR_FIELD
from dledger.services.offset_commits import MAX_OFFSETS_PER_RECORD, OffsetCommits, OffsetSlot
from dledger.services.pop_grants import PopGrants
from dledger.settings.parts import BrokerSettings
from dledger.state.topics import TopicConfig
from dledger.waiting import CALLED_AT_ONCE, CALLS_PER_TURN, call_in_turns, joined_in_turns

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
    async def handle(self, connection: Connection, command: RemotingCommand) -> Answered:
        """Compute the offsets behind the read barrier, since the ends of queues are among them."""
        header = ResetOffsetHeader.decode(command.ext)
        require_leader(self._group)
        state = self._group.state
        is_out = any(topic == header.topic for _, topic, _ in state.pops.keys_with(0, header.group))
        if is_out or self._pops.receives(header.group, header.topic):
            await until_current(self._group)
            return await self._store(command, header, await self._targets(header))
        slots = self._offsets.slots(header.group, header.topic)
        await until_stored(self._group, self._offsets, slots)
        return await self._reset(connection, command, header)

    async def _store(
        self, command: RemotingCommand, header: ResetOffsetHeader, targets: dict[int, int]
    ) -> Answered:
        """Store the offsets, and answer when they are applied."""
        self._topic(header)
        if len(targets) > MAX_OFFSETS_PER_RECORD:
            raise bad_request(
                f"{len(targets)} offsets are more than {MAX_OFFSETS_PER_RECORD}: reset the queues"
                " one by one"
            )
        table = {
            self._queue(header, queue_id): self._offset(header, queue_id, target, default=target)
            for queue_id, target in targets.items()
        }
        outcomes: list[Proposed] = []
        decided = trio.Event()

        def done(proposed: Proposed) -> None:
            outcomes.append(proposed)
            decided.set()
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
        await decided.wait()
        if outcomes[0].outcome != "stored":
            return failed_proposal(command, outcomes[0], self._group)
        encoded = await joined_in_turns((member(*each) for each in table.items()), b"{}")
        return response_to(command, body=ResetOffsetBody(encoded).encode())

    async def _reset(
        self, connection: Connection, command: RemotingCommand, header: ResetOffsetHeader
    ) -> Answered:
        targets = await self._targets(header)
        queues = list[tuple[MessageQueue, int]]()

        def settle(queue_id: int) -> None:
            offset = self._offset(header, queue_id, targets[queue_id])
            queues.append((self._queue(header, queue_id), offset))

        await call_in_turns(settle, targets, CALLS_PER_TURN)
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
        table = await joined_in_turns((member(*each) for each in queues), b"{}")
        of_c = await joined_in_turns((_for_c(*each).encode() for each in queues), b"[]")
        body, body_of_c = ResetOffsetBody(table).encode(), ResetOffsetBodyForC(of_c).encode()

        def send(client: Client[Connection]) -> None:
            _send_reset(client, header, body_of_c if client.language == "CPP" else body)

        await call_in_turns(send, clients, CALLS_PER_TURN)
        return response_to(command, body=body)

    async def _targets(self, header: ResetOffsetHeader) -> dict[int, int]:
        """Return the offset that each queue is to get, by its id."""
        queues = range(self._topic(header).write_queue_nums)
        if header.queue_id is not None and header.queue_id >= 0:
            if header.queue_id not in queues:
                raise bad_request(f"topic {header.topic} has no queue {header.queue_id}")
            queues = range(header.queue_id, header.queue_id + 1)
        targets = dict[int, int]()

        def seek(queue_id: int) -> None:
            require_leader(self._group)
            targets[queue_id] = self._wanted(header, queue_id)

        await call_in_turns(seek, queues, CALLED_AT_ONCE)
        return targets

    def _topic(self, header: ResetOffsetHeader) -> TopicConfig:
        config = self._group.state.topic_config(header.topic)
        if config is None or not self._offsets.exists(header.topic):
            raise bad_request(f"topic {header.topic} does not exist")
        return config

    def _offset(
        self, header: ResetOffsetHeader, queue_id: int, target: int, default: int | None = None
    ) -> int:
        consumed = self._group.state.consumer_offset(header.group, header.topic, queue_id)
        if consumed is None:
            consumed = default
        if consumed is None:
            raise bad_request(
                f"the consumer group {header.group} has no offset in queue {queue_id} of"
                f" {header.topic}"
            )
        return target if header.is_force or target < consumed else consumed

    def _queue(self, header: ResetOffsetHeader, queue_id: int) -> MessageQueue:
        return MessageQueue(header.topic, self._settings.broker.broker_name, queue_id)

    def _wanted(self, header: ResetOffsetHeader, queue_id: int) -> int:
        state, topic = self._group.state, header.topic
        if header.offset is not None and header.offset >= 0:
            low, high = state.min_offset(topic, queue_id), state.max_offset(topic, queue_id)
            return min(max(header.offset, low), high)
        if header.timestamp == LATEST:
            return state.max_offset(topic, queue_id)
        return search_offset(self._group, topic, queue_id, header.timestamp, upper=False)


def _send_reset(client: Client[Connection], header: ResetOffsetHeader, body: bytes) -> None:
    reset = request(
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        {
            "topic": header.topic,
            "group": header.group,
            "timestamp": str(header.timestamp),
            "isForce": "true" if header.is_force else "false",
        },
        body,
    )
    try:
        client.channel.invoke_oneway(reset)
    except RemotingError as error:
        # It is taken out with its connection, and goes on from what is committed.
        logger.info("reset_not_sent", client=client.client_id, reason=str(error))


def _for_c(queue: MessageQueue, offset: int) -> QueueOffset:
    return QueueOffset(
        topic=queue.topic, broker_name=queue.broker_name, queue_id=queue.queue_id, offset=offset
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
        most = MAX_OFFSETS_PER_RECORD + 1
        source, items = header.src_group, list(islice(self._copies(header), most))
        if not items:
            return nothing_to_change(group, connection, command)
        if len(items) > MAX_OFFSETS_PER_RECORD:
            raise bad_request(
                f"the group has more than {MAX_OFFSETS_PER_RECORD} offsets: clone it topic by topic"
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
