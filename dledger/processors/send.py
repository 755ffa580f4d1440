"""SEND_MESSAGE: 10, 310 and 320. One message or one batch becomes one proposal.

The answer leaves when the outcome of the proposal is known, not before. WAIT=false changes nothing:
an acknowledgement means the same for every client.

Spec: docs/internals/protocol/remoting.md, section 7.1; docs/internals/protocol/semantics.md,
    sections 1, 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from typing_extensions import Buffer

from dledger.commitlog.entry import Run
from dledger.commitlog.errors import CorruptRecordError, MQError
from dledger.commitlog.message_id import UniqKeyFactory, encode_offset_message_id
from dledger.commitlog.properties import (
    MAX_CLIENT_PROPERTIES_BYTES,
    MAX_PROPERTIES_BYTES,
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQ_KEY,
    SCHEDULE_TOPIC,
    encode_properties,
    get_property,
    may_have_owned,
    without_owned,
    without_properties,
)
from dledger.commitlog.record import (
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_NEED_UNWRAP,
    SYS_FLAG_TRANSACTION_MASK,
    Record,
    encode_record,
)
from dledger.commitlog.record_batch import decode_batch
from dledger.filters.expiry import EXPIRE_MARK, expire_after_ms
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.processors.answers import (
    TRACED,
    RefusedError,
    answer_when_done,
    born_host_of,
    not_leader,
    refusal,
)
from dledger.processors.destination import (
    Destinations,
    body_refused,
    check_room,
    properties_too_long,
    retries_allowed,
)
from dledger.processors.handles import SENDS, Limit, handles
from dledger.processors.idempotent_sends import (
    MessageIdentity,
    ProducerSends,
    SendInFlight,
    first_records,
)
from dledger.processors.timer_sends import TimedSend, TimerSends, handle_of
from dledger.remoting.access.gate import limited_account
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.own_fields import ProducerStamp, stamp_of_texts
from dledger.remoting.protocol.topic_names import RETRY_PREFIX, is_of_copies
from dledger.remoting.seams import Clock
from dledger.services.delayed_message import (
    TIMER_MARK,
    TIMER_RUN,
    delay_level_of,
    deliver_at_ms,
    queue_of_level,
    with_real_destination,
    without_timer,
)
from dledger.services.half_message import HALF_RUN, delay_of, half_properties, is_half
from dledger.services.queue_locks import QueueLocks
from dledger.settings.parts import BrokerSettings
from dledger.state.producer_sessions import StoredSend
from dledger.state.state_record import ProducerSendChange, StateRecord, state_record
from dledger.state.topics import MAX_GROUP_CHARS, TopicConfig, name_problem

MAX_OPEN_HALVES = 100_000
"""Half messages without a decision, and those in flight: they are in memory and in every snapshot
of the tables, 40 bytes each there. Producers that die leave theirs open for minutes."""

# Bits that are not the client's to set: hosts are set by encoding, the others are broker formats.
_FOREIGN_SYS_FLAGS = SYS_FLAG_TRANSACTION_MASK | SYS_FLAG_NEED_UNWRAP | SYS_FLAG_INNER_BATCH

_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()
_DELAY = PROPERTY_DELAY.encode()
_TRAN_MSG = PROPERTY_TRANSACTION_PREPARED.encode()


@dataclass(slots=True)
class _Destination:
    """Where a send goes after all checks, and the topic that it makes."""

    topic: str
    queue_id: int
    create: TopicConfig | None
    clear_delay: bool
    transaction_id: str | None = None
    """Of a half message."""


@dataclass(eq=False, repr=False)
class SendProcessor:
    """Turns send requests into proposals."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _destinations: Destinations
    _sends: ProducerSends
    _timers: TimerSends
    _locks: QueueLocks
    _uniq_keys: UniqKeyFactory
    _clock: Clock

    def __post_init__(self) -> None:
        self._cluster_property = encode_properties(
            {PROPERTY_CLUSTER: self._settings.broker.cluster_name}
        )

    @handles(
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        limit=Limit.SEND,
        rule=SENDS,
        appends=True,
    )
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 10, 310 and 320: refusals at once, everything else when its outcome is known."""
        group = self._group
        timed: TimedSend | None = None
        try:
            if group.leadership is None:
                raise not_leader(group)
            header = SendMessageHeader.of(command)
            stamp = stamp_of_texts(command.ext)
            if stamp is not None:
                sent = identities_of(header, command)
                # Before any check that may refuse as "not stored" what is stored.
                first = self._sends.judge(stamp)
                if first is not None:
                    return self._repeat(connection, command, header, first, sent)
            destination = self._destination(connection, command, header)
            if header.batch:
                records = self._encode_batch(connection, command, header, destination)
                target = Run(destination.topic, destination.queue_id, len(records))
            else:
                record, target, timed = self._encode_one(connection, command, header, destination)
                records = [record]
            self._propose(connection, command, records, target, destination, stamp, timed)
        except MQError as error:
            self._timers.settled(timed)
            response = refusal(command, error)
            response.ext.update(TRACED)
            return response
        return DEFERRED

    def _repeat(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendMessageHeader,
        first: StoredSend | SendInFlight,
        sent: list[MessageIdentity],
    ) -> Handled:
        """Answer what the first attempt was answered, or will be."""
        records = first_records(self._group, first, sent)
        sizes = [record.size for record in records]
        stored = partial(self._answer, command, *self._names(header, records[0], sizes))
        if isinstance(first, SendInFlight):
            first.join(answer_when_done(connection, command, self._group, stored, TRACED))
            return DEFERRED
        return stored(Proposed("stored", (records[0].queue_offset,), first.position))

    def _names(
        self, header: SendMessageHeader, head: Record, sizes: list[int]
    ) -> tuple[int, list[int], str | None, str]:
        """Return what `_answer` needs of a first attempt whose first record is *head*."""
        handle = handle_of(head, self._settings.broker.broker_name)
        return header.queue_id, sizes, _transaction_id(head), handle

    def _destination(
        self, connection: Connection, command: RemotingCommand, header: SendMessageHeader
    ) -> _Destination:
        destinations, topic, queue_id = self._destinations, header.topic, header.queue_id
        if destinations.space.is_full:
            raise destinations.space.full_error()
        if topic.startswith(RETRY_PREFIX):
            queue_id = destinations.retry_queue(topic, queue_id)
        config, create = destinations.check(
            topic,
            queue_id,
            header.default_topic,
            header.default_topic_queue_nums,
            limited_account(connection),
        )
        if queue_id < 0:
            queue_id = destinations.any_queue(config)
        if topic.startswith(RETRY_PREFIX) and not header.batch:
            dead = self._dead_letter(header, command)
            if dead is not None:
                return dead
        return _Destination(topic, queue_id, create, clear_delay=False)

    def _dead_letter(
        self, header: SendMessageHeader, command: RemotingCommand
    ) -> _Destination | None:
        """Return the dead letter queue when a message was consumed too often."""
        name = header.topic[len(RETRY_PREFIX) :]
        config = self._destinations.consumer_group(name)
        most = retries_allowed(config, command.version, header.max_reconsume_times)
        times = header.reconsume_times or 0
        if times < most or (times == most and not self._locks.holds_any(name)):
            return None
        topic, create = self._destinations.dead_letter_topic(name)
        return _Destination(topic, 0, create, clear_delay=True)

    def _encode_one(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendMessageHeader,
        destination: _Destination,
    ) -> tuple[bytes, Run, TimedSend | None]:
        properties = self._properties(_encoded(header.properties))
        topic, queue_id = destination.topic, destination.queue_id
        if EXPIRE_MARK in properties:
            self._note_expiry(properties, destination)
        # A message that is consumed again keeps the mark of the transaction it once came by.
        if (
            _TRAN_MSG in properties
            and is_half(properties)
            and not header.topic.startswith(RETRY_PREFIX)
        ):
            properties = self._half_properties(header, properties, topic, queue_id)
            destination.transaction_id = (get_property(properties, _UNIQ_KEY) or b"").decode()
            topic, queue_id = HALF_RUN.topic, HALF_RUN.queue_id
            if TIMER_MARK in properties:
                properties = without_timer(properties)  # half messages are not delayed
        elif _DELAY in properties:
            if destination.clear_delay:
                properties = without_properties(properties, {_DELAY})
            else:
                level = delay_level_of(properties, len(self._settings.store.delay_levels_ms))
                if level:
                    properties = with_real_destination(properties, topic, queue_id)
                    topic, queue_id = SCHEDULE_TOPIC, queue_of_level(level)
        timed: TimedSend | None = None
        if TIMER_MARK in properties:
            if topic == SCHEDULE_TOPIC:
                deliver_at_ms(properties, 0)  # refused if it cannot be read
            if destination.clear_delay or topic == SCHEDULE_TOPIC:
                properties = without_timer(properties)  # a delay level goes before a time
            else:
                timed = self._timers.schedule(properties, topic, queue_id)
        if timed is not None:
            properties, topic, queue_id = timed.properties, TIMER_RUN.topic, TIMER_RUN.queue_id
        try:
            record = self._encode(
                connection, header, topic, queue_id, command.body, properties, header.flag
            )
        except MQError:
            self._timers.settled(timed)
            raise
        return record, Run(topic, queue_id, 1), timed

    def _note_expiry(self, properties: bytes, destination: _Destination) -> None:
        """Let the topic of a message that expires be one whose reads look for it.

        Raises RefusedError: its time cannot be read.
        """
        try:
            after_ms = expire_after_ms(properties)
        except ValueError as error:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, str(error)) from None
        topic = destination.topic
        if after_ms is None or is_of_copies(topic):
            return
        destination.create = self._destinations.expiring(topic, destination.create)

    def _half_properties(
        self, header: SendMessageHeader, properties: bytes, topic: str, queue_id: int
    ) -> bytes:
        """Return the properties that a half message for *topic* is stored with.

        Raises RefusedError: transactional messages are not accepted here, this one has a delay, or
        too many are open.
        """
        if self._settings.broker.reject_transaction_message:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"the broker[{self._settings.address}] sending transaction message is forbidden",
            )
        delayed_by = delay_of(properties)
        if delayed_by is not None:
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL,
                f"a transactional message cannot be delayed: it has {delayed_by}",
            )
        if name_problem(header.producer_group, "group", MAX_GROUP_CHARS) is not None:
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL,
                f"{header.producer_group[:MAX_GROUP_CHARS]!r} cannot be a producer group",
            )
        if len(self._group.state.transactions.open) >= MAX_OPEN_HALVES:
            raise RefusedError(
                Condition.BUSY,
                f"{MAX_OPEN_HALVES} transactions wait for their decision; nothing was stored",
            )
        return half_properties(properties, header.producer_group, topic, queue_id)

    def _encode_batch(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendMessageHeader,
        destination: _Destination,
    ) -> list[bytes]:
        if destination.topic.startswith(RETRY_PREFIX):
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL, "a batch may not be sent to a retry topic"
            )
        size, most = memoryview(command.body).nbytes, self._settings.store.max_message_size
        if size > most:
            raise body_refused(size, most)
        try:
            items = decode_batch(command.body)
        except CorruptRecordError as error:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, str(error)) from error
        if not items:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, "the batch is empty")
        records = []
        for item in items:
            # The batch's own properties are not merged into the items: that gave all of them one
            # UNIQ_KEY.
            properties = self._properties(_ended(item.properties))
            if _TRAN_MSG in properties and is_half(properties):
                raise RefusedError(
                    Condition.MESSAGE_ILLEGAL, "a batch may not hold transactional messages"
                )
            if _DELAY in properties and get_property(properties, _DELAY) is not None:
                raise RefusedError(
                    Condition.MESSAGE_ILLEGAL, "a batch may not hold delayed messages"
                )
            if TIMER_MARK in properties:
                self._timers.refuse_in_batch(properties)
            if EXPIRE_MARK in properties:
                self._note_expiry(properties, destination)
            records.append(
                self._encode(
                    connection,
                    header,
                    destination.topic,
                    destination.queue_id,
                    item.body,
                    properties,
                    item.flag,
                )
            )
        return records

    def _properties(self, properties: bytes) -> bytes:
        """Return what is stored of a message's properties, which end with ``\x02``.

        Raises RefusedError: they leave no space for what is added to them here and later.
        """
        if may_have_owned(properties):
            properties = without_owned(properties)
        if len(properties) > MAX_CLIENT_PROPERTIES_BYTES:
            check_room(properties)
        if _UNIQ_KEY not in properties or get_property(properties, _UNIQ_KEY) is None:
            key = self._uniq_keys.create(self._clock.wall_ms())
            properties = b"%b\x01%b\x02%b" % (_UNIQ_KEY, key.encode(), properties)
        return properties + self._cluster_property

    def _encode(
        self,
        connection: Connection,
        header: SendMessageHeader,
        topic: str,
        queue_id: int,
        body: Buffer,
        properties: bytes,
        flag: int,
    ) -> bytes:
        size = len(body) if isinstance(body, bytes) else memoryview(body).nbytes
        if not 0 < size <= self._settings.store.max_message_size:
            raise body_refused(size, self._settings.store.max_message_size)
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise properties_too_long(len(properties))
        return encode_record(
            topic=topic,
            queue_id=queue_id,
            body=body,
            properties=properties,
            flag=flag,
            sys_flag=header.sys_flag & ~_FOREIGN_SYS_FLAGS,
            born_timestamp_ms=header.born_timestamp,
            born_host=born_host_of(connection),
            reconsume_times=header.reconsume_times or 0,
            store_host=self._settings.store_host,
        )

    def _propose(
        self,
        connection: Connection,
        command: RemotingCommand,
        records: list[bytes],
        target: Run,
        destination: _Destination,
        stamp: ProducerStamp | None,
        timed: TimedSend | None,
    ) -> None:
        sizes = [len(record) for record in records]
        handle = "" if timed is None else timed.recall_handle
        queue_id, transaction_id = destination.queue_id, destination.transaction_id
        stored = partial(self._answer, command, queue_id, sizes, transaction_id, handle)
        answer = answer_when_done(connection, command, self._group, stored, TRACED)
        heads: list[StateRecord] = []
        settled: list[OnDone] = []
        if timed is not None and timed.recalls is not None:
            heads = self._timers.recalling(timed.recalls)
            settled.append(partial(self._timers.settled, timed))
        # Services, and a transaction's end, look for what is stored elsewhere than it was sent to.
        is_applied = target.topic != destination.topic or bool(heads)
        flight: SendInFlight | None = None
        if stamp is not None:
            flight = SendInFlight(stamp, b"".join(records), (), [answer])
            heads.append(state_record(ProducerSendChange(*stamp)))
            answer = flight.answered
            settled.append(partial(self._sends.settled, flight))
        self._destinations.propose(
            destination.create,
            records,
            target,
            answer,
            heads=heads,
            is_applied=is_applied,
            settled=settled,
        )
        if flight is not None:
            self._sends.add(flight)

    def _answer(
        self,
        command: RemotingCommand,
        queue_id: int,
        sizes: list[int],
        transaction_id: str | None,
        handle: str,
        placed: Proposed,
    ) -> RemotingCommand:
        """Return the answer for a send that is stored."""
        ext = {
            "msgId": self._message_ids(placed.phy_offset, sizes),
            "queueId": str(queue_id),
            "queueOffset": str(placed.first_offsets[-1]),
            **TRACED,
        }
        if transaction_id is not None:
            ext["transactionId"] = transaction_id
        if handle:
            ext["recallHandle"] = handle
        return response_to(command, ext=ext)

    def _message_ids(self, position: int, sizes: list[int]) -> str:
        host = self._settings.store_host
        if len(sizes) == 1:
            return encode_offset_message_id(host, position)
        ids = []
        for size in sizes:
            ids.append(encode_offset_message_id(host, position))
            position += size
        return ",".join(ids)


def _encoded(properties: str | None) -> bytes:
    if not properties:
        return b""
    try:
        return _ended(properties.encode())
    except UnicodeEncodeError as error:
        raise RefusedError(
            Condition.MESSAGE_ILLEGAL, f"the properties are not text: {error}"
        ) from error


def _ended(properties: bytes) -> bytes:
    # 4.x clients leave the last separator out; more is appended behind it here.
    if properties and not properties.endswith(b"\x02"):
        return properties + b"\x02"
    return properties


def _transaction_id(record: Record) -> str | None:
    """Return what names the transaction of a half message, None for any other message."""
    if record.topic != HALF_RUN.topic:
        return None
    return (get_property(record.properties, _UNIQ_KEY) or b"").decode()


def identities_of(header: SendMessageHeader, command: RemotingCommand) -> list[MessageIdentity]:
    """Return what identifies the messages of a stamped request, to recognise a repetition.

    Raises MQError: a request like this cannot have a stamp.
    """
    if header.queue_id < 0:
        raise BadRequestError("an idempotent send names its queue: another try must not choose")
    if header.batch:
        try:
            found = [
                (get_property(item.properties, _UNIQ_KEY), bytes(item.body))
                for item in decode_batch(command.body)
            ]
        except CorruptRecordError as error:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, str(error)) from error
    else:
        key = get_property(_encoded(header.properties), _UNIQ_KEY)
        found = [(key, bytes(memoryview(command.body)))]
    if any(key is None for key, _ in found):
        raise BadRequestError("the messages of an idempotent send have a UNIQ_KEY each")
    return found
