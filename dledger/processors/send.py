"""SEND_MESSAGE: 10, 310 and 320. One message or one batch becomes one proposal.

The answer leaves when the group says what became of it, not before. WAIT=false changes nothing:
an acknowledgement means the same for everybody.

Spec: remoting fact sheet, section 7.1; semantics, sections 1 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Buffer

from commitlog.entry import Run
from commitlog.errors import CorruptRecordError, MQError
from commitlog.message_batch import decode_batch
from commitlog.message_id import UniqKeyFactory, encode_offset_message_id
from commitlog.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQ_KEY,
    encode_properties,
    get_property,
    without_properties,
)
from commitlog.record import (
    MAX_PROPERTIES_BYTES,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_NEED_UNWRAP,
    SYS_FLAG_TRANSACTION_MASK,
    Record,
    decode_record,
    encode_record,
    iter_records,
)
from commitlog.reserved_properties import (
    MAX_CLIENT_PROPERTIES_BYTES,
    may_have_owned,
    without_owned,
)
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.processors.born_host import born_host_of
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.dead_letters import consumer_group_of, dead_letter_topic, retries_allowed
from dledger.processors.first_message import propose_with_topic
from dledger.processors.half_messages import HalfMessages
from dledger.processors.names_check import check_sendable
from dledger.processors.properties_check import check_room, properties_too_long
from dledger.processors.refusal import RefusedError, failed_proposal, not_leader, refusal
from dledger.processors.repeated_send import MessageIdentity, check_same, stored_records
from dledger.processors.timer_sends import TimedSend, TimerSends, handle_of
from dledger.services.delay_level import delay_level_of, queue_of_level, with_real_destination
from dledger.services.disk_space import DiskSpace
from dledger.services.half_message import HALF_RUN, is_half
from dledger.services.pending_configs import TopicView
from dledger.services.producer_sends import ProducerSends, SendInFlight, behind
from dledger.services.timer_message import TIMER_MARK, TIMER_RUN, without_timer
from dledger.state.names import RETRY_PREFIX, SCHEDULE_TOPIC
from dledger.state.producer_sessions import StoredSend
from dledger.state.state_record import ProducerSendChange, StateRecord, state_record
from dledger.state.topic_config import PERM_WRITE, TopicConfig
from remoting.access.gate import limited_account
from remoting.connection import Connection
from remoting.errors import BadRequestError
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import SendMessageHeader
from remoting.protocol.outcome import Condition
from remoting.protocol.producer_stamp import ProducerStamp, stamp_of_texts
from remoting.seams import Clock, Rng

# Bits that are not the client's to set: hosts are set by encoding, the others are broker formats.
_FOREIGN_SYS_FLAGS = SYS_FLAG_TRANSACTION_MASK | SYS_FLAG_NEED_UNWRAP | SYS_FLAG_INNER_BATCH

_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()
_DELAY = PROPERTY_DELAY.encode()
_TRAN_MSG = PROPERTY_TRANSACTION_PREPARED.encode()


@dataclass(slots=True)
class _Destination:
    """Where a send goes after all checks, and the topic that has to be made for it."""

    topic: str
    queue_id: int
    create: TopicConfig | None
    clear_delay: bool
    transaction_id: str | None = None
    """Of a half message."""


class SendProcessor:
    """Turns send requests into proposals."""

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        settings: BrokerSettings,
        sends: ProducerSends,
        *,
        clock: Clock,
        rng: Rng,
        uniq_keys: UniqKeyFactory,
        timers: TimerSends,
        space: DiskSpace,
    ) -> None:
        self._group = group
        self._topics = topics
        self._settings = settings
        self._sends = sends
        self._clock = clock
        self._rng = rng
        self._uniq_keys = uniq_keys
        self._timers = timers
        self._space = space
        self._halves = HalfMessages(group, settings)
        self._cluster_property = encode_properties({PROPERTY_CLUSTER: settings.cluster_name})
        self._always = {
            "MSG_REGION": settings.msg_region,
            "TRACE_ON": "true" if settings.trace_on else "false",
        }

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 10, 310 and 320: refused at once, everything else when its fate is known."""
        try:
            return self._send(connection, command)
        except MQError as error:
            return self._with_region(refusal(command, error))

    def _with_region(self, response: RemotingCommand) -> RemotingCommand:
        response.ext.update(self._always)
        return response

    def _send(self, connection: Connection, command: RemotingCommand) -> Handled:
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        header = SendMessageHeader.of(command)
        stamp = stamp_of_texts(command.ext)
        if stamp is not None:
            sent = _identities(header, command)
            # Before any check that may say "not stored" of what is.
            first = self._sends.judge(stamp)
            if first is not None:
                return self._repeat(connection, command, header, first, sent)
        if self._space.is_full:
            raise self._space.full_error()
        destination = self._destination(header, command, limited_account(connection))
        timed: TimedSend | None = None
        if header.batch:
            records = self._encode_batch(connection, command, header, destination)
            target = Run(destination.topic, destination.queue_id, len(records))
        else:
            record, target, timed = self._encode_one(connection, command, header, destination)
            records = [record]
        try:
            self._propose(connection, command, records, target, destination, stamp, timed)
        except MQError:
            self._timers.not_proposed(timed)
            raise
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
        if isinstance(first, SendInFlight):
            check_same(first.records, sent)
            head = decode_record(first.records)
            handle = handle_of(head, self._settings.broker_name)
            sizes = _sizes(first.records)
            transaction_id = _transaction_id(head)
            first.join(
                self._teller(connection, command, header.queue_id, sizes, transaction_id, handle)
            )
            return DEFERRED
        found = stored_records(self._group, first.position, sent)
        placed = Proposed("stored", (found[0].queue_offset,), first.position)
        sizes = [record.size for record in found]
        response = self._answer(command, placed, header.queue_id, sizes, _transaction_id(found[0]))
        handle = handle_of(found[0], self._settings.broker_name)
        if handle:
            response.ext["recallHandle"] = handle
        transaction_id = _transaction_id(found[0])
        if transaction_id is not None:
            response.ext["transactionId"] = transaction_id
        return response

    def _destination(
        self, header: SendMessageHeader, command: RemotingCommand, account: str
    ) -> _Destination:
        if not self._settings.broker_permission & PERM_WRITE:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"the broker[{self._settings.address}] sending message is forbidden",
            )
        topic = header.topic
        check_sendable(topic)
        config = self._topics.config(topic)
        create: TopicConfig | None = None
        if config is None:
            config = create = self._topics.to_create(
                topic, header.default_topic, header.default_topic_queue_nums, account
            )
            if config is None:
                raise RefusedError(
                    Condition.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!"
                )
        if not config.writeable:
            raise RefusedError(
                Condition.NO_PERMISSION, f"the topic[{topic}] sending message is forbidden"
            )
        queue_id = header.queue_id
        if queue_id >= config.queue_nums:
            raise RefusedError(
                Condition.INVALID_QUEUE,
                f"request queueId[{queue_id}] is illegal, {topic} has {config.queue_nums} queues",
            )
        if queue_id < 0:
            queue_id = self._rng.randrange(max(1, config.write_queue_nums))
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
        config = consumer_group_of(self._topics, name)
        most = retries_allowed(config, command.version, header.max_reconsume_times)
        if (header.reconsume_times or 0) < most:
            return None
        topic, create = dead_letter_topic(self._topics, name)
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
        # A message that is consumed again keeps the mark of the transaction it once came by.
        if (
            _TRAN_MSG in properties
            and is_half(properties)
            and not header.topic.startswith(RETRY_PREFIX)
        ):
            properties = self._halves.properties(header, properties, topic, queue_id)
            destination.transaction_id = (get_property(properties, _UNIQ_KEY) or b"").decode()
            topic, queue_id = HALF_RUN.topic, HALF_RUN.queue_id
            if TIMER_MARK in properties:
                properties = without_timer(properties)  # half messages are not delayed
        elif _DELAY in properties:
            if destination.clear_delay:
                properties = without_properties(properties, {_DELAY})
            else:
                level = delay_level_of(properties, len(self._settings.delay_levels_ms))
                if level:
                    properties = with_real_destination(properties, topic, queue_id)
                    topic, queue_id = SCHEDULE_TOPIC, queue_of_level(level)
        timed: TimedSend | None = None
        if TIMER_MARK in properties:
            if destination.clear_delay or topic == SCHEDULE_TOPIC:
                properties = without_timer(properties)  # a delay level goes before a time
            else:
                timed = self._timers.schedule(properties, topic, queue_id)
        if timed is not None:
            properties, topic, queue_id = timed.properties, TIMER_RUN.topic, TIMER_RUN.queue_id
        record = self._encode(
            connection, header, topic, queue_id, command.body, properties, header.flag
        )
        return record, Run(topic, queue_id, 1), timed

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
        if memoryview(command.body).nbytes > self._settings.max_message_bytes:
            raise self._too_large(memoryview(command.body).nbytes)
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
        """Return what is stored of a message's properties, which end with ``\\x02``.

        Raises:
            RefusedError: They leave no room for what is added to them here and later.
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
        if not size:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, "the message body is empty")
        if size > self._settings.max_message_bytes:
            raise self._too_large(size)
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
        )

    def _too_large(self, size: int) -> RefusedError:
        return RefusedError(
            Condition.MESSAGE_ILLEGAL,
            f"the message has {size} bytes, at most {self._settings.max_message_bytes}",
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
        tell = self._teller(
            connection, command, destination.queue_id, sizes, destination.transaction_id, handle
        )
        ahead: StateRecord | None = None
        if timed is not None and timed.recalls is not None:
            tell, ahead = self._timers.recalling(timed.recalls, tell)
        if stamp is None:
            before = 0

            def done(proposed: Proposed) -> None:
                tell(behind(proposed, len(proposed.first_offsets) - 1, before))

            before = propose_with_topic(
                self._group, self._topics, destination.create, records, target, done, ahead=ahead
            )
            return
        flight = SendInFlight(b"".join(records), (), [tell])
        noted = state_record(ProducerSendChange(*stamp))

        def stamped_done(proposed: Proposed) -> None:
            placed = behind(proposed, len(proposed.first_offsets) - 1, before)
            self._sends.answered(stamp, flight, placed)

        before = propose_with_topic(
            self._group,
            self._topics,
            destination.create,
            records,
            target,
            stamped_done,
            noted=noted,
            ahead=ahead,
        )
        self._sends.add(stamp, flight)

    def _teller(
        self,
        connection: Connection,
        command: RemotingCommand,
        queue_id: int,
        sizes: list[int],
        transaction_id: str | None = None,
        handle: str = "",
    ) -> OnDone:
        def tell(placed: Proposed) -> None:
            response = self._answer(command, placed, queue_id, sizes, transaction_id)
            if handle and placed.outcome == "stored":
                response.ext["recallHandle"] = handle
            connection.reply(command, response)

        return tell

    def _answer(
        self,
        command: RemotingCommand,
        placed: Proposed,
        queue_id: int,
        sizes: list[int],
        transaction_id: str | None,
    ) -> RemotingCommand:
        if placed.outcome != "stored":
            return self._with_region(failed_proposal(command, placed, self._group))
        response = response_to(
            command,
            0,
            None,
            {
                "msgId": self._message_ids(placed.phy_offset, sizes),
                "queueId": str(queue_id),
                "queueOffset": str(placed.first_offsets[-1]),
                **self._always,
            },
        )
        if transaction_id is not None:
            response.ext["transactionId"] = transaction_id
        return response

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


def _sizes(records: Buffer) -> list[int]:
    return [record.size for record in iter_records(records)]


def _identities(header: SendMessageHeader, command: RemotingCommand) -> list[MessageIdentity]:
    """Return who the messages of a stamped request are, so that a repetition can be recognised."""
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
