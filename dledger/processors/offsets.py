"""Offsets: of groups (14, 15), of queues (29 to 32), resets (222) and clones (314).

A reset of a group that has messages out by POP is done here, in the log: it ends their grants.

INVOKE_BROKER_TO_RESET_OFFSET works as in RocketMQ 4.9: the broker computes the offsets and sends
them to every client of the group (220), which stops, adopts them and commits them. Without a
connected client the answer is 206, and the tools commit the offsets themselves.

Spec: docs/internals/protocol/remoting.md, sections 8.5, 10 and 11.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog

from commitlog.errors import MQError
from commitlog.record import (
    BORN_HOST_OFFSET,
    IPV6_EXTRA_BYTES,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_OFFSET,
)
from dledger.broker_settings import BrokerSettings
from dledger.group_api import BrokerGroup, Proposed
from dledger.processors.answers import (
    RefusedError,
    answer_when_done,
    check_group_name,
    not_leader,
    nothing_to_change,
    refusal,
    require_leader,
    when_current,
)
from dledger.processors.client_table import Client, ClientTable
from dledger.processors.handles import ANY, CONSUMES, SUB, Limit, handles, needs
from dledger.processors.locks import check_lock_token
from dledger.processors.operator_commits import (
    is_of_operator,
    note_refused_reset,
    subject_of_commit,
)
from dledger.services.offset_commits import MAX_OFFSETS_PER_RECORD, OffsetCommits, OffsetSlot
from dledger.services.pending_configs import TopicView
from dledger.services.pop_grants import PopGrants
from dledger.services.queue_locks import QueueLocks
from remoting.access.accounts import ADMIN
from remoting.access.gate import limited_account
from remoting.connection import Connection
from remoting.errors import RemotingError
from remoting.processor import DEFERRED, Handled
from remoting.protocol.bodies import MessageQueue, QueueOffset, ResetOffsetBody, ResetOffsetBodyForC
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, request, response_to
from remoting.protocol.headers import (
    CloneGroupOffsetHeader,
    GetMaxOffsetHeader,
    QueryConsumerOffsetHeader,
    QueueHeader,
    ResetOffsetHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from remoting.protocol.outcome import Condition

NO_TIME = -1
"""Store time of the first message of an empty queue."""


def starts_in_memory(group: BrokerGroup, topic: str, queue_id: int, recent_bytes: int) -> bool:
    """Return whether a queue still has its first message, and that in memory.

    Args:
        recent_bytes: How much of the log's end is taken to be in memory.
    """
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or bounds.max_offset == 0:
        return True
    if bounds.min_offset > 0:
        return False
    unit = group.queues.queue(topic, queue_id).read(0, 1)
    behind = group.log.end_position - int(unit["phy_offset"][0])
    return behind <= recent_bytes


def store_time_at(group: BrokerGroup, topic: str, queue_id: int, offset: int) -> int:
    """Return when the message at *offset* was stored, ms since the epoch.

    Raises:
        OffsetOutOfRangeError: It is not kept any more.
    """
    unit = group.queues.queue(topic, queue_id).read(offset, 1)
    head = group.log.read(int(unit["phy_offset"][0]), STORE_TIMESTAMP_OFFSET + IPV6_EXTRA_BYTES + 8)
    at = STORE_TIMESTAMP_OFFSET
    if head[SYS_FLAG_OFFSET + 3] & SYS_FLAG_BORN_HOST_V6:
        at = BORN_HOST_OFFSET + 8 + IPV6_EXTRA_BYTES
    return int.from_bytes(head[at : at + 8], "big", signed=True)


def search_offset(
    group: BrokerGroup, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool
) -> int:
    """Return the offset at a store time.

    Args:
        upper: The last message stored at or before *timestamp_ms* (the first one when all are
            later), instead of the first stored at or after it (the end when all are earlier).
    """
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or bounds.max_offset <= bounds.min_offset:
        return 0
    # Store times never go back along a queue, across leaders too.
    low, high = bounds.min_offset, bounds.max_offset
    while low < high:
        middle = (low + high) // 2
        stored = store_time_at(group, topic, queue_id, middle)
        if stored < timestamp_ms or (upper and stored == timestamp_ms):
            low = middle + 1
        else:
            high = middle
    return max(bounds.min_offset, low - 1) if upper else low


class OffsetsProcessor:
    """Answers 14, 15, 29, 30, 31 and 32."""

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        offsets: OffsetCommits,
        settings: BrokerSettings,
        locks: QueueLocks,
    ) -> None:
        self._group = group
        self._topics = topics
        self._offsets = offsets
        self._settings = settings
        self._locks = locks

    @handles(RequestCode.QUERY_CONSUMER_OFFSET, limit=Limit.CLIENT, rule=CONSUMES, reads=True)
    def query_consumer_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 14: the newest committed offset, pending ones of this leader included.

        A follower answers with what it has applied: perhaps an older offset, from which messages
        come again, and never that there is none.

        With ``sync=true`` only what is stored counts, and only a leader that is known to lead
        still answers: a later answer never goes back.
        """
        header = QueryConsumerOffsetHeader.decode(command.ext)
        key = (header.consumer_group, header.topic, header.queue_id)
        if command.ext.get("sync") not in (True, "true"):
            return self._consumer_offset(command, header, self._offsets.offset(*key))
        state = self._group.state
        return when_current(
            self._group,
            connection,
            command,
            lambda: self._consumer_offset(command, header, state.consumer_offset(*key)),
        )

    def _consumer_offset(
        self, command: RemotingCommand, header: QueryConsumerOffsetHeader, offset: int | None
    ) -> RemotingCommand:
        if (
            offset is None
            and header.set_zero_if_not_found is not False
            and starts_in_memory(
                self._group, header.topic, header.queue_id, self._settings.recent_bytes
            )
        ):
            # A young queue is read from its begin, whatever consumeFromWhere is.
            offset = 0
        if offset is None and self._group.leadership is None:
            # It may be behind: a group taken for a new one would begin at the end of the queue.
            return refusal(command, not_leader(self._group))
        if offset is None:
            return refusal(
                command,
                RefusedError(
                    Condition.NOT_FOUND, "Not found, maybe this group consumer boot first"
                ),
            )
        return _offset(command, offset)

    @handles(
        RequestCode.UPDATE_CONSUMER_OFFSET,
        limit=Limit.CLIENT,
        rule=CONSUMES,
        administers_if=is_of_operator,
        subject=subject_of_commit,
    )
    def update_consumer_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 15: taken for the next flush, or with ``sync=true`` answered when applied."""
        header = UpdateConsumerOffsetHeader.decode(command.ext)
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        config = self._topics.config(header.topic)
        if config is None:
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"Topic {header.topic} not exist!")
        if self._topics.subscription_group_or_default(header.consumer_group) is None:
            raise RefusedError(
                Condition.GROUP_NOT_EXIST, f"Group {header.consumer_group} not exist!"
            )
        # Clients send -1 for queues they have not touched: nothing to keep, nothing wrong.
        if header.commit_offset < 0 or header.queue_id < 0:
            return response_to(command)
        check_group_name(header.consumer_group)
        if header.queue_id >= config.queue_nums:
            raise RefusedError(
                Condition.INVALID_QUEUE,
                f"queueId[{header.queue_id}] is illegal, {header.topic} has "
                f"{config.queue_nums} queues",
            )
        account = limited_account(connection)
        self._offsets.check_room(header.consumer_group, header.topic, account)
        key = (header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        shows_token = check_lock_token(self._locks, command, key[:3])
        if command.ext.get("sync") not in (True, "true"):
            if shows_token:
                # Ahead of the next grant of that queue, not within a second.
                self._offsets.commit_now(*key, lambda _: None)
            else:
                self._offsets.commit(*key)
            return response_to(command)

        self._offsets.commit_now(*key, answer_when_done(connection, command, group))
        return DEFERRED

    @handles(
        RequestCode.GET_MAX_OFFSET, limit=Limit.CLIENT, rule=needs(ANY, topic="topic"), reads=True
    )
    def max_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 30: the offset the next message will get; 0 for an unknown queue.

        Only a leader that is known to lead still answers: everything stored before is counted.
        """
        header = GetMaxOffsetHeader.decode(command.ext)
        state = self._group.state
        return when_current(
            self._group,
            connection,
            command,
            lambda: _offset(command, state.max_offset(header.topic, header.queue_id)),
        )

    @handles(
        RequestCode.GET_MIN_OFFSET, limit=Limit.CLIENT, rule=needs(ANY, topic="topic"), reads=True
    )
    def min_offset(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 31: the first offset still kept."""
        header = QueueHeader.decode(command.ext)
        return _offset(command, self._group.state.min_offset(header.topic, header.queue_id))

    @handles(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        limit=Limit.CLIENT,
        rule=needs(ANY, topic="topic"),
        reads=True,
    )
    def search_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 29: the offset at a store time.

        One that depends on where the queue ends comes from a leader that is known to lead still.
        """
        header = SearchOffsetHeader.decode(command.ext)
        upper = (header.boundary_type or "").upper() == "UPPER"
        key = (header.topic, header.queue_id)

        def found() -> int:
            return search_offset(self._group, *key, header.timestamp, upper=upper)

        offset, end = found(), self._group.state.max_offset(*key)
        if offset < (end - 1 if upper else end):
            return _offset(command, offset)
        return when_current(self._group, connection, command, lambda: _offset(command, found()))

    @handles(
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        limit=Limit.CLIENT,
        rule=needs(ANY, topic="topic"),
        reads=True,
    )
    def earliest_store_time(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 32: store time of the first message kept, -1 when there is none."""
        header = QueueHeader.decode(command.ext)
        bounds = self._group.state.queues.get((header.topic, header.queue_id))
        time = NO_TIME
        if bounds is not None and bounds.min_offset < bounds.max_offset:
            time = store_time_at(self._group, header.topic, header.queue_id, bounds.min_offset)
        return response_to(command, 0, None, {"timestamp": str(time)})


def _offset(command: RemotingCommand, offset: int) -> RemotingCommand:
    return response_to(command, 0, None, {"offset": str(offset)})


LATEST = -1
"""As a time: the end of each queue."""

UNDERSTANDS_SINCE = 37
"""Clients from RocketMQ 3.0.11 on; the request is little older than that."""

logger = structlog.get_logger(__name__)


class ResetOffsetsProcessor:
    """Answers 222 with the offsets that were sent to the clients, or that are stored."""

    def __init__(
        self,
        group: BrokerGroup,
        clients: ClientTable[Connection],
        offsets: OffsetCommits,
        settings: BrokerSettings,
        pops: PopGrants,
    ) -> None:
        self._group = group
        self._clients = clients
        self._offsets = offsets
        self._settings = settings
        self._pops = pops

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
        is_out = any(key[:2] == (header.group, header.topic) for key in state.pops)
        if is_out or self._pops.receives(header.group, header.topic):
            return self._reset_popped(connection, command, header)
        return when_current(
            self._group, connection, command, lambda: self._reset(connection, command, header)
        )

    def _reset_popped(
        self, connection: Connection, command: RemotingCommand, header: ResetOffsetHeader
    ) -> Handled:
        """Store the offsets, and answer when they are applied.

        No receipt of before counts from there on, and nothing moves the offset but new grants.
        """
        refused: list[MQError] = []
        is_deferred = False

        def passed(error: MQError | None) -> None:
            try:
                if error is not None:
                    raise error
                self._store(connection, command, header)
            except MQError as problem:
                if is_deferred:
                    connection.reply(command, refusal(command, problem))
                else:
                    refused.append(problem)

        self._group.read_barrier(passed)
        if refused:
            raise refused[0]
        is_deferred = True
        return DEFERRED

    def _store(
        self, connection: Connection, command: RemotingCommand, header: ResetOffsetHeader
    ) -> None:
        table = self._table(header, is_stored=True)
        if len(table) > MAX_OFFSETS_PER_RECORD:
            raise RefusedError(
                Condition.BAD_REQUEST,
                f"{len(table)} offsets are more than {MAX_OFFSETS_PER_RECORD}: reset the queues"
                " one by one",
            )
        body = ResetOffsetBody(offset_table=table)
        answered = answer_when_done(
            connection,
            command,
            self._group,
            lambda _: response_to(command, 0, None, None, body.encode()),
        )

        def done(proposed: Proposed) -> None:
            answered(proposed)
            self._pops.offsets_set(header.group, header.topic)

        items: list[tuple[OffsetSlot, int]] = [
            ((header.group, header.topic, queue.queue_id), offset)
            for queue, offset in table.items()
            # The present offset ends grants, too: that needs force.
            if header.is_force
            or offset != self._offsets.offset(header.group, header.topic, queue.queue_id)
        ]
        self._offsets.commit_all_now(items, done, by_admin=True)

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
                raise RefusedError(
                    Condition.BAD_REQUEST,
                    f"the client {client.client_id} is too old for the request: {client.version}",
                )
        body = ResetOffsetBody(offset_table=table)
        for client in clients:
            self._send_reset(client, header, body)
        return response_to(command, 0, None, None, body.encode())

    def _table(
        self, header: ResetOffsetHeader, *, is_stored: bool = False
    ) -> dict[MessageQueue, int]:
        state = self._group.state
        config = state.topic_config(header.topic)
        if config is None:
            raise RefusedError(Condition.BAD_REQUEST, f"topic {header.topic} does not exist")
        queues = range(config.write_queue_nums)
        if header.queue_id is not None and header.queue_id >= 0:
            if header.queue_id not in queues:
                raise RefusedError(
                    Condition.BAD_REQUEST, f"topic {header.topic} has no queue {header.queue_id}"
                )
            queues = range(header.queue_id, header.queue_id + 1)
        table = {}
        for queue_id in queues:
            consumed = self._offsets.offset(header.group, header.topic, queue_id)
            wanted = self._wanted(header, queue_id)
            queue = MessageQueue(header.topic, self._settings.broker.broker_name, queue_id)
            if consumed is None and is_stored:
                consumed = wanted
            if consumed is None:
                raise RefusedError(
                    Condition.BAD_REQUEST,
                    f"the consumer group {header.group} has no offset in queue {queue_id} of"
                    f" {header.topic}",
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


class CloneOffsetsProcessor:
    """Answers 314 when the offsets are in the log, all of them in one entry."""

    def __init__(
        self, group: BrokerGroup, clients: ClientTable[Connection], offsets: OffsetCommits
    ) -> None:
        self._group = group
        self._clients = clients
        self._offsets = offsets

    @handles(RequestCode.CLONE_GROUP_OFFSET, limit=Limit.ADMIN, rule=ADMIN)
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Copy the offsets; success when there are none."""
        header = CloneGroupOffsetHeader.decode(command.ext)
        group = self._group
        require_leader(group)
        check_group_name(header.dest_group)
        items = list(self._copies(header))
        if not items:
            return nothing_to_change(group, connection, command)
        if len(items) > MAX_OFFSETS_PER_RECORD:
            raise RefusedError(
                Condition.BAD_REQUEST,
                f"{len(items)} offsets are more than {MAX_OFFSETS_PER_RECORD}: clone the group"
                " topic by topic",
            )

        done = answer_when_done(connection, command, group)
        self._offsets.commit_all_now(items, done, by_admin=True)
        return DEFERRED

    def _copies(self, header: CloneGroupOffsetHeader) -> Iterator[tuple[OffsetSlot, int]]:
        source, target = header.src_group, header.dest_group
        consumers = self._clients.consumer_group(source)
        subscribed = consumers.subscriptions if consumers is not None else {}
        for topic in [header.topic] if header.topic else self._offsets.topics_of(source):
            config = self._group.state.topic_config(topic)
            left_behind = subscribed and topic not in subscribed and not header.offline
            if config is None or left_behind:
                continue
            for queue_id in range(config.queue_nums):
                offset = self._offsets.offset(source, topic, queue_id)
                if offset is not None:
                    yield (target, topic, queue_id), offset
