"""CONSUMER_SEND_MSG_BACK (36): a consumer could not cope with a message and wants it later.

The copy goes to the group's retry topic after a delay that grows each time, or to its dead letter
topic when it was tried too often. The consumer commits the original afterwards: when that is lost
it consumes the message, and sends it back, once more.

Spec: semantics fact sheet, section 4.
"""

from __future__ import annotations

import structlog

from commitlog.entry import Run
from commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    LocalProtocolError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.group_api import BrokerGroup, Proposed
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.dead_letters import consumer_group_of, dead_letter_topic, retries_allowed
from dledger.processors.first_message import propose_with_topic
from dledger.processors.names_check import check_group_name, check_sendable
from dledger.processors.refusal import RefusedError, failed_proposal, not_leader, refusal
from dledger.services.disk_space import DiskSpace
from dledger.services.pending_configs import TopicView
from dledger.services.retry_message import NAME, dead_letter_copy, retry_copy, retry_level
from dledger.services.stored_record import StoredRecord, StoredRecords
from dledger.state.names import retry_topic
from dledger.state.topic_config import PERM_WRITE, TopicConfig
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import ConsumerSendMsgBackHeader
from remoting.protocol.outcome import Condition
from remoting.seams import Rng

logger = structlog.get_logger(__name__)


class SendBackProcessor:
    """Makes copies for retry and dead letter topics."""

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        settings: BrokerSettings,
        *,
        rng: Rng,
        space: DiskSpace,
    ) -> None:
        self._space = space
        self._group = group
        self._topics = topics
        self._settings = settings
        self._rng = rng

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 36: refused at once, otherwise when it is known what became of the copy."""
        try:
            return self._send_back(connection, command)
        except MQError as error:
            return refusal(command, error)

    def _send_back(self, connection: Connection, command: RemotingCommand) -> Handled:
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        if self._space.is_full:
            raise self._space.full_error()
        header = ConsumerSendMsgBackHeader.decode(command.ext)
        check_group_name(header.group)
        config = consumer_group_of(self._topics, header.group)
        if not self._settings.broker_permission & PERM_WRITE:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"the broker[{self._settings.address}] sending message is forbidden",
            )
        if config.retry_queue_nums <= 0:
            return response_to(command)
        record = self._record_at(header.offset)
        most = retries_allowed(config, command.version, header.max_reconsume_times)
        if record.reconsume_times >= most or header.delay_level < 0:
            copy, run, create = self._dead_letter(record, header.group)
        else:
            copy, run, create = self._retry(record, header, config.retry_queue_nums)
        self._propose(connection, command, copy, run, create)
        return DEFERRED

    def _retry(
        self, record: StoredRecord, header: ConsumerSendMsgBackHeader, queues: int
    ) -> tuple[bytes, Run, TopicConfig | None]:
        level = retry_level(
            header.delay_level, record.reconsume_times, len(self._settings.delay_levels_ms)
        )
        topic, create = self._retry_topic(header.group)
        queue_id = self._rng.randrange(queues)
        try:
            copy, run = retry_copy(record, self._settings.store_host, topic, queue_id, level)
        except LocalProtocolError as error:
            # Stored by a version that left no room in its properties: it can never be retried.
            logger.error(
                "message_set_aside", service=NAME, position=record.phy_offset, reason=str(error)
            )
            self._group.service_counts.set_aside[NAME] += 1
            return self._dead_letter(record, header.group, str(error))
        return copy, run, create

    def _dead_letter(
        self, record: StoredRecord, group: str, reason: str = ""
    ) -> tuple[bytes, Run, TopicConfig | None]:
        topic, create = dead_letter_topic(self._topics, group)
        copy, run = dead_letter_copy(record, self._settings.store_host, topic, reason)
        return copy, run, create

    def _record_at(self, offset: int) -> StoredRecord:
        try:
            if 0 <= offset < self._group.state.applied_end_position:
                record = StoredRecords(self._group).read(offset)
                check_sendable(record.topic)  # what clients may not write, they may not copy
                return record
        except CorruptEntryError as error:
            raise RefusedError(
                Condition.NOT_READY, f"the message is damaged and being repaired: {error}"
            ) from error
        except (OffsetOutOfRangeError, CorruptRecordError):
            pass  # no record begins there: told below
        raise RefusedError(Condition.BAD_REQUEST, f"look message by offset failed, {offset}")

    def _retry_topic(self, group: str) -> tuple[str, TopicConfig | None]:
        topic = retry_topic(group)
        if self._topics.is_deleting(topic):
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{topic}] is being deleted")
        change = self._topics.retry_topic_to_create(group)
        return topic, None if change is None else change.put[0]

    def _propose(
        self,
        connection: Connection,
        command: RemotingCommand,
        copy: bytes,
        run: Run,
        create: TopicConfig | None,
    ) -> None:
        def done(proposed: Proposed) -> None:
            if proposed.outcome == "stored":
                connection.reply(command, response_to(command))
            else:
                connection.reply(command, failed_proposal(command, proposed, self._group))

        propose_with_topic(self._group, self._topics, create, [copy], run, done)
