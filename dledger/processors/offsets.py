"""Offsets: what a group consumed (14, 15), where a queue begins and ends (29, 30, 31, 32).

Spec: remoting fact sheet, section 8.5.
"""

from __future__ import annotations

from commitlog.errors import MQError
from commitlog.record import (
    BORN_HOST_OFFSET,
    IPV6_EXTRA_BYTES,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_OFFSET,
)
from dledger.group_api import BrokerGroup, Proposed
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.current_read import when_current
from dledger.processors.lock_token import check_lock_token
from dledger.processors.names_check import check_group_name
from dledger.processors.refusal import RefusedError, failed_proposal, not_leader, refusal
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.queue_locks import QueueLocks
from remoting.access.gate import limited_account
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import (
    GetMaxOffsetHeader,
    QueryConsumerOffsetHeader,
    QueueHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from remoting.protocol.outcome import Condition

NO_TIME = -1
"""Store time of the first message of an empty queue."""


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

    def query_consumer_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 14: the newest committed offset, pending ones of this leader included.

        A follower says what it has applied: perhaps an older one, from which messages come again,
        and never that there is none.

        With ``sync=true`` only what is stored counts, and only a leader that is known to lead
        still says so: what was answered once is never taken back.
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
            and self._starts_in_memory(header.topic, header.queue_id)
        ):
            # A young queue is read from its begin, whatever consumeFromWhere says.
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

    def _starts_in_memory(self, topic: str, queue_id: int) -> bool:
        bounds = self._group.state.queues.get((topic, queue_id))
        if bounds is None or bounds.max_offset == 0:
            return True
        if bounds.min_offset > 0:
            return False
        unit = self._group.queues.queue(topic, queue_id).read(0, 1)
        behind = self._group.log.end_position - int(unit["phy_offset"][0])
        return behind <= self._settings.recent_bytes

    def update_consumer_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 15: taken for the next flush, or with ``sync=true`` answered when applied."""
        try:
            return self._update(connection, command)
        except MQError as error:
            return refusal(command, error)

    def _update(self, connection: Connection, command: RemotingCommand) -> Handled:
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

        def done(proposed: Proposed) -> None:
            if proposed.outcome == "stored":
                response = response_to(command)
            else:
                response = failed_proposal(command, proposed, group)
            connection.reply(command, response)

        self._offsets.commit_now(*key, done)
        return DEFERRED

    def max_offset(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 30: the offset the next message will get; 0 for a queue nobody has seen.

        Only a leader that is known to lead still says so: everything stored before is counted.
        """
        header = GetMaxOffsetHeader.decode(command.ext)
        state = self._group.state
        return when_current(
            self._group,
            connection,
            command,
            lambda: _offset(command, state.max_offset(header.topic, header.queue_id)),
        )

    def min_offset(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 31: the first offset still kept."""
        header = QueueHeader.decode(command.ext)
        return _offset(command, self._group.state.min_offset(header.topic, header.queue_id))

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
