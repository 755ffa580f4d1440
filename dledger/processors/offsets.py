"""Offsets: of groups (14, 15) and of queues (29 to 32).

Spec: docs/internals/protocol/remoting.md, sections 8.5 and 10.
"""

from __future__ import annotations

from dataclasses import dataclass

from dledger.group_api import BrokerGroup, search_offset, starts_in_memory, store_time_at
from dledger.processors.answers import (
    RefusedError,
    answer_when_done,
    check_group_name,
    not_leader,
    refusal,
    when_current,
    when_stored,
)
from dledger.processors.handles import ANY, CONSUMES, Limit, handles, needs
from dledger.processors.locks import check_lock_token
from dledger.processors.operator_offsets import is_of_operator, subject_of_commit
from dledger.remoting.access.gate import limited_account
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import (
    GetMaxOffsetHeader,
    QueryConsumerOffsetHeader,
    QueueHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from dledger.remoting.protocol.outcome import Condition
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.queue_locks import QueueLocks
from dledger.settings.parts import BrokerSettings

NO_TIME = -1
"""Store time of the first message of an empty queue."""


@dataclass(eq=False, repr=False)
class OffsetsProcessor:
    """Answers 14, 15, 29, 30, 31 and 32."""

    _group: BrokerGroup
    _topics: TopicView
    _offsets: OffsetCommits
    _settings: BrokerSettings
    _locks: QueueLocks

    @handles(RequestCode.QUERY_CONSUMER_OFFSET, limit=Limit.CLIENT, rule=CONSUMES, reads=True)
    def query_consumer_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 14: the newest committed offset; a leader stores first what it has taken.

        A follower answers with what it has applied: perhaps an older offset, from which messages
        come again, and never that there is none.

        With ``sync=true`` only a leader that is known to lead still answers: a later answer never
        goes back.
        """
        header = QueryConsumerOffsetHeader.decode(command.ext)
        key = (header.consumer_group, header.topic, header.queue_id)

        def read() -> RemotingCommand:
            return self._consumer_offset(command, header, self._group.state.consumer_offset(*key))

        is_current = command.ext.get("sync") in (True, "true")
        return when_stored(
            self._group, self._offsets, [key], connection, command, read, is_current=is_current
        )

    def _consumer_offset(
        self, command: RemotingCommand, header: QueryConsumerOffsetHeader, offset: int | None
    ) -> RemotingCommand:
        if offset is None and self._group.leadership is None:
            # It may be behind: a group taken for a new one would begin elsewhere in the queue.
            return refusal(command, not_leader(self._group))
        if (
            offset is None
            and header.set_zero_if_not_found is not False
            and starts_in_memory(
                self._group, header.topic, header.queue_id, self._settings.recent_bytes
            )
        ):
            # A young queue is read from its begin, whatever consumeFromWhere is.
            offset = 0
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
        """Answer 15 when the offset is stored; one-way, it is taken for the next flush."""
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
        slot = (header.consumer_group, header.topic, header.queue_id)
        offset = header.commit_offset
        account = limited_account(connection)
        self._offsets.check_room(header.consumer_group, header.topic, account)
        shows_token = check_lock_token(self._locks, command, slot)
        if command.is_oneway and not shows_token:
            self._offsets.commit(*slot, offset)
            return response_to(command)
        # With a token ahead of the next grant of that queue, not within a second.
        self._offsets.commit_now([(slot, offset)], answer_when_done(connection, command, group))
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
        """Answer 29: the offset at a store time."""
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
        return response_to(command, ext={"timestamp": str(time)})


def _offset(command: RemotingCommand, offset: int) -> RemotingCommand:
    return response_to(command, ext={"offset": str(offset)})
