"""CONSUMER_SEND_MSG_BACK (36): a consumer could not process a message and gets it again later.

The copy goes to the group's retry topic after a delay that grows each time, or to its dead letter
topic when it was tried too often. The consumer commits the original afterwards: when that is lost
it consumes the message, and sends it back, once more.

Spec: docs/internals/protocol/semantics.md, section 4.
"""

from __future__ import annotations

import structlog

from commitlog.entry import Run
from commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    LocalProtocolError,
    OffsetOutOfRangeError,
)
from dledger.broker_settings import BrokerSettings
from dledger.group_api import BrokerGroup
from dledger.processors.answers import RefusedError, answer_when_done, require_leader
from dledger.processors.destination import Destinations, check_accepts, retries_allowed
from dledger.processors.handles import Limit, handles
from dledger.processors.request_checks import check_group_name, check_sendable
from dledger.processors.rights import sends_back
from dledger.services.retry_message import NAME, dead_letter_copy, retry_copy, retry_level
from dledger.services.stored_record import StoredRecord, StoredRecords
from dledger.state.configs import TopicConfig
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.codes import RequestCode
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
        settings: BrokerSettings,
        destinations: Destinations,
        rng: Rng,
    ) -> None:
        self._group = group
        self._settings = settings
        self._destinations = destinations
        self._rng = rng

    @handles(RequestCode.CONSUMER_SEND_MSG_BACK, limit=Limit.SEND, rule=sends_back)
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 36: refusals at once, everything else when the copy's outcome is known."""
        group = self._group
        require_leader(group)
        if self._destinations.space.is_full:
            raise self._destinations.space.full_error()
        header = ConsumerSendMsgBackHeader.decode(command.ext)
        check_group_name(header.group)
        config = self._destinations.consumer_group(header.group)
        check_accepts(self._settings)
        if config.retry_queue_nums <= 0:
            return response_to(command)
        record = self._record_at(header.offset)
        most = retries_allowed(config, command.version, header.max_reconsume_times)
        if record.reconsume_times >= most or header.delay_level < 0:
            copy, run, create = self._dead_letter(record, header.group)
        else:
            copy, run, create = self._retry(record, header, config.retry_queue_nums)
        done = answer_when_done(connection, command, group)
        self._destinations.propose(create, [copy], run, done)
        return DEFERRED

    def _retry(
        self, record: StoredRecord, header: ConsumerSendMsgBackHeader, queues: int
    ) -> tuple[bytes, Run, TopicConfig | None]:
        level = retry_level(
            header.delay_level, record.reconsume_times, len(self._settings.delay_levels_ms)
        )
        topic, create = self._destinations.retry_topic(header.group)
        queue_id = self._rng.randrange(queues)
        try:
            copy, run = retry_copy(record, self._settings.store_host, topic, queue_id, level)
        except LocalProtocolError as error:
            # Stored by a version that left no space in its properties: it can never be retried.
            logger.error(
                "message_set_aside", service=NAME, position=record.phy_offset, reason=str(error)
            )
            self._group.service_counts.set_aside[NAME] += 1
            return self._dead_letter(record, header.group, str(error))
        return copy, run, create

    def _dead_letter(
        self, record: StoredRecord, group: str, reason: str = ""
    ) -> tuple[bytes, Run, TopicConfig | None]:
        topic, create = self._destinations.dead_letter_topic(group)
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
            pass  # no record begins there: refused below
        raise RefusedError(Condition.BAD_REQUEST, f"look message by offset failed, {offset}")
