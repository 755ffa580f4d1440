"""CONSUMER_SEND_MSG_BACK (36): a group gets a message again later, or gives it up.

The copy goes to the group's retry topic after a delay that grows each time, or to its dead letter
topic when it was tried too often. A copy is the message with its body, keys and tags, born when and
where it was; its properties say what it is a copy of. The consumer commits the original afterwards:
when that is lost it consumes the message, and sends it back, once more.

Spec: docs/internals/protocol/semantics.md, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from dledger.commitlog.entry import Run
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    LocalProtocolError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.message_id import encode_offset_message_id
from dledger.commitlog.properties import (
    PROPERTY_DELAY,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
    SCHEDULE_TOPIC,
    with_properties,
    without_properties,
)
from dledger.commitlog.record import SYS_FLAG_TRANSACTION_MASK
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    RefusedError,
    answer_when_done,
    bad_request,
    check_group_name,
    check_sendable,
    require_leader,
)
from dledger.processors.destination import Destinations, check_accepts, retries_allowed
from dledger.processors.handles import Limit, handles, sends_back
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import ConsumerSendMsgBackHeader
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.seams import Rng
from dledger.services.delayed_message import queue_of_level
from dledger.services.leader_loop import fitting_properties, set_aside_properties
from dledger.services.stored_record import StoredRecord, StoredRecords, copy_of
from dledger.settings.parts import BrokerSettings
from dledger.state.topics import TopicConfig

# ---------------------------------------------------------------------------------- the copy


NAME = "retries"
"""In dead letters, logs and metrics."""

MAX_ORIGIN_CHARS = 255
"""Of a topic's name, and more than a message id has."""

FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry; each later one takes the next."""

MAX_RECONSUME_TIMES = 0x7FFFFFFF
"""What the field of a record holds; a client may have sent the number before."""

_NOT_OF_DEAD_LETTERS = frozenset(
    name.encode() for name in (PROPERTY_DELAY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID)
)


def retry_level(asked: int, reconsume_times: int, max_level: int) -> int:
    """Return the delay level of a retry: what the client *asked* for, or one more each time."""
    level = asked if asked > 0 else FIRST_RETRY_LEVEL + reconsume_times
    return max(1, min(level, max_level))


def retry_copy(
    record: StoredRecord, store_host: bytes, topic: str, queue_id: int, level: int
) -> tuple[bytes, Run]:
    """Return the copy that comes to queue *queue_id* of a retry *topic* after *level*'s delay.

    Raises:
        CorruptRecordError: The body does not fit its checksum.
        LocalProtocolError: There is no space for what is added.
    """
    added = {
        **_origin(record, store_host),
        PROPERTY_DELAY: str(level),
        PROPERTY_REAL_TOPIC: topic,
        PROPERTY_REAL_QUEUE_ID: str(queue_id),
    }
    run = Run(SCHEDULE_TOPIC, queue_of_level(level), 1)
    return _copy(record, run, with_properties(record.properties, added)), run


def dead_letter_copy(
    record: StoredRecord, store_host: bytes, topic: str, reason: str = "", *, times: int = 1
) -> tuple[bytes, Run]:
    """Return the copy for the dead letter *topic*; the arguments are those of `retry_copy`.

    Properties for which a record has no space are left out.
    """
    origin = _origin(record, store_host)
    added = {
        **origin,
        PROPERTY_DLQ_ORIGIN_TOPIC: origin[PROPERTY_RETRY_TOPIC],
        PROPERTY_DLQ_ORIGIN_MESSAGE_ID: origin[PROPERTY_ORIGIN_MESSAGE_ID],
    }
    if reason:
        added |= set_aside_properties(record.phy_offset, NAME, reason)
    kept = without_properties(record.properties, _NOT_OF_DEAD_LETTERS)
    run = Run(topic, 0, 1)
    return _copy(record, run, fitting_properties(kept, added), times), run


def _origin(record: StoredRecord, store_host: bytes) -> dict[str, str]:
    """Return what every copy has of the first message, which is that of a copy of a copy, too."""
    known = record.property_map
    first = {
        PROPERTY_RETRY_TOPIC: record.topic,
        PROPERTY_ORIGIN_MESSAGE_ID: encode_offset_message_id(store_host, record.phy_offset),
    }
    for name in first:
        value = known.get(name, "")
        # A client may have written it: what cannot be a name is not copied.
        if value and value.isprintable() and len(value) <= MAX_ORIGIN_CHARS:
            first[name] = value
    return {**first, PROPERTY_WAIT: "false"}


def _copy(record: StoredRecord, run: Run, properties: bytes, times: int = 1) -> bytes:
    return copy_of(
        record,
        run,
        properties=properties,
        sys_flag=record.sys_flag & ~SYS_FLAG_TRANSACTION_MASK,
        reconsume_times=min(record.reconsume_times + times, MAX_RECONSUME_TIMES),
        prepared_transaction_offset=0,
    )


# ---------------------------------------------------------------------------------- the request


logger = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class SendBackProcessor:
    """Makes copies for retry and dead letter topics."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _destinations: Destinations
    _rng: Rng

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
            header.delay_level, record.reconsume_times, len(self._settings.store.delay_levels_ms)
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
        raise bad_request(f"look message by offset failed, {offset}")
