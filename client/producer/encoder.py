"""Messages into slots of a lane: checked, given an id, and written as records.

Messages that make the broker do more than append go alone, as the request RocketMQ's own clients
would send; so does everything to a broker that takes no records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import Buffer

from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.hooks import MessagePropertiesHook, with_hook_properties
from dledger.client.core.message import Message, check_body, encode_message_properties
from dledger.client.core.message_ext import compress
from dledger.client.core.route import DEFAULT_TOPIC, MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.request_reply import is_reply
from dledger.client.producer.state import SendSlot
from dledger.commitlog.errors import LocalProtocolError
from dledger.commitlog.message_id import UniqKeyFactory
from dledger.commitlog.properties import PROPERTY_EXPIRE_AFTER_MS, PROPERTY_TRANSACTION_PREPARED
from dledger.commitlog.record import SYS_FLAG_PREPARED, RecordTemplate, encode_record
from dledger.commitlog.record_batch import BatchItem, encode_batch
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.remoting.protocol.topic_names import RETRY_PREFIX
from dledger.remoting.seams import Clock

SINGLE_PROPERTIES: Final = frozenset(
    {
        "TRAN_MSG",
        "PGROUP",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TIMER_DEL_UNIQKEY",
        "POP_CK",
        "RETRY_TOPIC",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "MSG_TYPE",
        "CORRELATION_ID",
        "REPLY_TO_CLIENT",
        "INNER_MULTI_DISPATCH",
        PROPERTY_EXPIRE_AFTER_MS,
    }
)
"""Properties that make the broker do more than append: such messages go alone, as RocketMQ's do."""
TEMPLATES_MAX: Final = 10_000
"""Queues whose records have a template; they are made again when there are more."""


def goes_alone(message: Message) -> bool:
    """Whether *message* is no record among others."""
    properties = message.properties
    if message.is_delayed or message.ttl_ms:
        return True
    return bool(properties and not SINGLE_PROPERTIES.isdisjoint(properties))


def budget_s(timeout_s: float | None, default_s: float) -> float:
    """Return how long a call may take, in seconds: *timeout_s*, for None the default. Pure.

    Raises MessageIllegalError: it is no time above 0; nothing was sent.
    """
    if timeout_s is None:
        return default_s
    if not timeout_s > 0:
        raise MessageIllegalError(f"timeout_s is {timeout_s}; it must be above 0")
    return timeout_s


@dataclass(eq=False, repr=False)
class SlotEncoder:
    """Makes the slots of one producer."""

    _config: ProducerConfig
    _clock: Clock
    _ids: UniqKeyFactory
    group: str
    default_topic_queue_nums: int

    def __post_init__(self) -> None:
        self._properties_hooks = tuple(
            hook
            for hook in self._config.send_message_hooks
            if isinstance(hook, MessagePropertiesHook)
        )
        self._templates: dict[MessageQueue, RecordTemplate] = {}
        self._compress_over = (
            self._config.max_message_bytes
            if self._config.compress_over_bytes is None
            else min(self._config.compress_over_bytes, self._config.max_message_bytes)
        )

    def _template(self, queue: MessageQueue) -> RecordTemplate:
        if len(self._templates) >= TEMPLATES_MAX:
            self._templates.clear()
        template = self._templates[queue] = RecordTemplate(queue.topic, queue.queue_id)
        return template

    def record(
        self,
        message: Message,
        queue: MessageQueue,
        pinned: bool,
        timeout_s: float | None,
    ) -> SendSlot:
        """Return *message* as one record. Raises MessageIllegalError: it cannot be sent."""
        if self._properties_hooks:
            message = with_hook_properties(message, self._properties_hooks)
        now_ms = self._clock.wall_ms()
        message_id = message.message_id or self._ids.create(now_ms)
        body = message.body
        longest = self._config.max_message_bytes
        size = len(body) if type(body) is bytes else check_body(body, longest)
        sys_flag = 0
        if size > self._compress_over or size == 0:
            check_body(body, longest)
            body, sys_flag = self._compressed(body, size)
            size = memoryview(body).nbytes
        properties = encode_message_properties(message, message_id)
        template = self._templates.get(queue)
        if template is None:
            template = self._template(queue)
        try:
            record = template.encode(body, size, properties, message.flag, sys_flag, now_ms)
        except MessageIllegalError:
            raise
        except LocalProtocolError as error:
            raise MessageIllegalError(str(error)) from error
        return SendSlot(
            message,
            queue,
            message_id,
            record,
            len(record).to_bytes(4, "big"),
            1,
            self._deadline(timeout_s),
            pinned,
        )

    def single(
        self, message: Message, queue: MessageQueue, pinned: bool, timeout_s: float | None
    ) -> SendSlot:
        """Return *message* to be written when it is sent, by `request_of`.

        Raises MessageIllegalError: it cannot be sent.
        """
        check_body(message.body, self._config.max_message_bytes)
        if self._properties_hooks:
            message = with_hook_properties(message, self._properties_hooks)
        message_id = message.message_id or self._ids.create(self._clock.wall_ms())
        encode_message_properties(message, message_id)
        deadline = self._deadline(timeout_s)
        return SendSlot(message, queue, message_id, b"", b"", 1, deadline, pinned)

    def batch(
        self,
        messages: Sequence[Message],
        topic: bytes,
        queue: MessageQueue,
        pinned: bool,
        timeout_s: float | None,
        as_records: bool,
    ) -> SendSlot:
        """Return *messages* as one slot, of records if *as_records*.

        Raises MessageIllegalError: they break a rule for batches.
        """
        name = messages[0].topic
        if name.startswith(RETRY_PREFIX):
            raise MessageIllegalError("messages of a retry topic cannot be sent as a batch")
        most = self._config.max_request_records
        if len(messages) > most:
            raise MessageIllegalError(f"the batch has {len(messages)} messages, at most {most}")
        if self._properties_hooks:
            messages = [with_hook_properties(each, self._properties_hooks) for each in messages]
        limit = self._config.max_message_bytes
        now_ms = self._clock.wall_ms()
        create = self._ids.create
        ids: list[str] = []
        records: list[bytes] = []
        sizes: list[bytes] = []
        total = 0
        queue_id = queue.queue_id
        for message in messages:
            if message.topic != name:
                raise MessageIllegalError(f"the batch mixes topics {name} and {message.topic}")
            if goes_alone(message):
                raise MessageIllegalError(
                    "a batch cannot hold delayed or transactional messages, nor such that expire"
                )
            body = message.body
            total += len(body) if type(body) is bytes and body else check_body(body, limit)
            message_id = message.message_id or create(now_ms)
            ids.append(message_id)
            encoded = encode_message_properties(message, message_id)
            if not as_records:
                continue
            try:
                record = encode_record(
                    topic=topic,
                    queue_id=queue_id,
                    body=body,
                    properties=encoded,
                    flag=message.flag,
                    born_timestamp_ms=now_ms,
                )
            except LocalProtocolError as error:
                raise MessageIllegalError(str(error)) from error
            records.append(record)
            sizes.append(len(record).to_bytes(4, "big"))
        if total > limit:
            raise MessageIllegalError(f"the batch has {total} body bytes, at most {limit}")
        return SendSlot(
            tuple(messages),
            queue,
            tuple(ids),
            b"".join(records),
            b"".join(sizes),
            len(messages),
            self._deadline(timeout_s),
            pinned,
        )

    def request_of(self, slot: SendSlot) -> RemotingCommand:
        """Return the request RocketMQ's own clients would send for *slot*.

        Raises MessageIllegalError: it cannot be written.
        """
        given = slot.message
        sys_flag = 0
        properties = ""
        flag = 0
        code = RequestCode.SEND_MESSAGE_V2
        body: Buffer
        if isinstance(given, Message):
            assert isinstance(slot.message_ids, str)
            properties = encode_message_properties(given, slot.message_ids).decode()
            flag = given.flag
            body, sys_flag = self._compressed(given.body, memoryview(given.body).nbytes)
            if given.properties and PROPERTY_TRANSACTION_PREPARED in given.properties:
                sys_flag |= SYS_FLAG_PREPARED
            if is_reply(given):
                code = RequestCode.SEND_REPLY_MESSAGE_V2
        else:
            code = RequestCode.SEND_BATCH_MESSAGE
            try:
                body = encode_batch(
                    BatchItem(
                        bytes(message.body),
                        encode_message_properties(message, message_id),
                        message.flag,
                    )
                    for message, message_id in zip(given, slot.message_ids, strict=True)
                )
            except LocalProtocolError as error:
                raise MessageIllegalError(str(error)) from error
        header = SendMessageHeader(
            producer_group=self.group,
            topic=slot.queue.topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=self.default_topic_queue_nums,
            queue_id=slot.queue.queue_id,
            sys_flag=sys_flag,
            born_timestamp=self._clock.wall_ms(),
            flag=flag,
            properties=properties,
            reconsume_times=0,
            unit_mode=False,
            batch=code == RequestCode.SEND_BATCH_MESSAGE,
            bname=slot.queue.broker_name,
        )
        return request(code, dict(header.encode_v2()), body)

    def _deadline(self, timeout_s: float | None) -> float:
        return self._clock.monotonic() + budget_s(timeout_s, self._config.send_timeout_s)

    def _compressed(self, body: Buffer, size: int) -> tuple[Buffer, int]:
        if self._config.compress_over_bytes is None or size <= self._compress_over:
            return body, 0
        kind = self._config.compress_type
        packed = compress(body, kind, self._config.compress_level)
        return (packed, kind.sys_flag) if len(packed) < size else (body, 0)
