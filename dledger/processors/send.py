"""SEND_MESSAGE: 10, 310 and 320. One message or one batch becomes one proposal.

The answer leaves when the group says what became of it, not before. WAIT=false changes nothing:
an acknowledgement means the same for everybody.

Spec: remoting fact sheet, section 7.1; semantics, sections 1 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import Buffer

from commitlog.entry import RecordBatch, Run
from commitlog.errors import CorruptRecordError, MQError
from commitlog.message_batch import decode_batch
from commitlog.message_id import UniqKeyFactory, encode_offset_message_id
from commitlog.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_POP_CK,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQ_KEY,
    decode_properties,
    encode_properties,
    get_property,
)
from commitlog.record import (
    MAX_PROPERTIES_BYTES,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_NEED_UNWRAP,
    SYS_FLAG_TRANSACTION_MASK,
    encode_record,
)
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.processors.born_host import born_host_of
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.names_check import check_sendable
from dledger.processors.refusal import RefusedError, failed_proposal, not_leader, refusal
from dledger.services.delay_level import delay_level_of, queue_of_level, with_real_destination
from dledger.services.pending_configs import TopicView
from dledger.state.names import RETRY_PREFIX, SCHEDULE_TOPIC, dlq_topic
from dledger.state.state_record import StateRecord, TopicsChange, state_record
from dledger.state.topic_config import PERM_READ, PERM_WRITE, TopicConfig
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import SendMessageHeader
from remoting.protocol.outcome import Condition
from remoting.seams import Clock, Rng

MAX_RECONSUME_TIMES_VERSION = 121
"""3.4.9: from here on a client's own maxReconsumeTimes is honoured."""

# Bits that are not the client's to set: hosts are set by encoding, the others are broker formats.
_FOREIGN_SYS_FLAGS = SYS_FLAG_TRANSACTION_MASK | SYS_FLAG_NEED_UNWRAP | SYS_FLAG_INNER_BATCH

_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()
_DELAY = PROPERTY_DELAY.encode()
_TRAN_MSG = PROPERTY_TRANSACTION_PREPARED.encode()
_POP_CK = PROPERTY_POP_CK.encode()


@dataclass(slots=True)
class _Destination:
    """Where a send goes after all checks, and the topic that has to be made for it."""

    topic: str
    queue_id: int
    create: TopicConfig | None
    clear_delay: bool


class SendProcessor:
    """Turns send requests into proposals."""

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        settings: BrokerSettings,
        *,
        clock: Clock,
        rng: Rng,
        uniq_keys: UniqKeyFactory,
    ) -> None:
        self._group = group
        self._topics = topics
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._uniq_keys = uniq_keys
        self._cluster_property = encode_properties({PROPERTY_CLUSTER: settings.cluster_name})
        self._always = {
            "MSG_REGION": settings.msg_region,
            "TRACE_ON": "true" if settings.trace_on else "false",
        }

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 10, 310 and 320: refused at once, everything else when its fate is known."""
        try:
            self._send(connection, command)
        except MQError as error:
            return self._with_region(refusal(command, error))
        return DEFERRED

    def _with_region(self, response: RemotingCommand) -> RemotingCommand:
        response.ext.update(self._always)
        return response

    def _send(self, connection: Connection, command: RemotingCommand) -> None:
        group = self._group
        if group.leadership is None:
            raise not_leader(group)
        header = SendMessageHeader.of(command)
        destination = self._destination(header, command)
        if header.batch:
            records = self._encode_batch(connection, command, header, destination)
            target = Run(destination.topic, destination.queue_id, len(records))
        else:
            record, target = self._encode_one(connection, command, header, destination)
            records = [record]
        self._propose(connection, command, records, target, destination)

    def _destination(self, header: SendMessageHeader, command: RemotingCommand) -> _Destination:
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
                topic, header.default_topic, header.default_topic_queue_nums
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
        config = self._topics.subscription_group_or_default(name)
        if config is None:
            raise RefusedError(Condition.GROUP_NOT_EXIST, f"subscription group not exist, {name}")
        most = config.retry_max_times
        if (
            command.version >= MAX_RECONSUME_TIMES_VERSION
            and header.max_reconsume_times is not None
        ):
            most = header.max_reconsume_times
        if (header.reconsume_times or 0) < most:
            return None
        topic = dlq_topic(name)
        create = None
        if self._topics.config(topic) is None:
            if self._topics.is_deleting(topic):
                raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{topic}] is being deleted")
            create = TopicConfig(topic, 1, 1, PERM_READ | PERM_WRITE)
        return _Destination(topic, 0, create, clear_delay=True)

    def _encode_one(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendMessageHeader,
        destination: _Destination,
    ) -> tuple[bytes, Run]:
        properties = self._properties(_encoded(header.properties))
        topic, queue_id = destination.topic, destination.queue_id
        if _DELAY in properties:
            if destination.clear_delay:
                properties = _without(properties, PROPERTY_DELAY)
            else:
                level = delay_level_of(properties, len(self._settings.delay_levels_ms))
                if level:
                    properties = with_real_destination(properties, topic, queue_id)
                    topic, queue_id = SCHEDULE_TOPIC, queue_of_level(level)
        record = self._encode(
            connection, header, topic, queue_id, command.body, properties, header.flag
        )
        return record, Run(topic, queue_id, 1)

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
            if _DELAY in properties and get_property(properties, _DELAY) is not None:
                raise RefusedError(
                    Condition.MESSAGE_ILLEGAL, "a batch may not hold delayed messages"
                )
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
        """Return what is stored of a message's properties, which end with ``\\x02``."""
        if _TRAN_MSG in properties and get_property(properties, _TRAN_MSG) == b"true":
            raise RefusedError(
                Condition.NOT_SUPPORTED, "transactional messages are not supported by this broker"
            )
        if _POP_CK in properties:
            properties = _without(properties, PROPERTY_POP_CK)
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
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL,
                f"the properties have {len(properties)} bytes, at most {MAX_PROPERTIES_BYTES}",
            )
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
    ) -> None:
        sizes = [len(record) for record in records]
        runs: tuple[Run, ...] = (target,)
        first: StateRecord | None = None
        if destination.create is not None:
            # The topic is made by the same entry that holds its first message.
            first = state_record(TopicsChange(put=(destination.create,)))
            runs = (first.run, target)
        batch = RecordBatch(
            records=b"".join((first.record, *records)) if first else b"".join(records),
            sizes=np.array([len(first.record), *sizes] if first else sizes, np.uint32),
            runs=runs,
        )
        before = len(first.record) if first else 0
        made: OnDone | None = None

        def done(proposed: Proposed) -> None:
            if made is not None:
                made(proposed)
            if proposed.outcome == "stored":
                response = response_to(
                    command,
                    0,
                    None,
                    {
                        "msgId": self._message_ids(proposed.phy_offset + before, sizes),
                        "queueId": str(destination.queue_id),
                        "queueOffset": str(proposed.first_offsets[-1]),
                        **self._always,
                    },
                )
            else:
                response = self._with_region(failed_proposal(command, proposed, self._group))
            connection.reply(command, response)

        self._group.propose(batch, done)
        if destination.create is not None:
            made = self._topics.pending.put(destination.create.topic, destination.create)

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


def _without(properties: bytes, name: str) -> bytes:
    kept = decode_properties(properties)
    kept.pop(name, None)
    return encode_properties(kept)
