"""Gives messages a listener could not cope with back to the broker, for another try later.

Either way the message is stored once more before it is acknowledged here: nothing is lost, and one
whose answer got lost may come twice.

Spec: semantics fact sheet, section 4.
"""

from __future__ import annotations

from typing import Final

from client.consumer.delivered_message import DeliveredMessage, retry_topic_of
from client.core.client_instance import ClientInstance
from client.core.errors import RequestFailedError
from client.core.route import DEFAULT_TOPIC
from commitlog.errors import MQError
from commitlog.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_WAIT,
    encode_properties,
)
from commitlog.record import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_TYPE_MASK
from remoting.log import get_logger
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.headers import ConsumerSendMsgBackHeader, SendMessageHeader

FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry; each later one takes the next."""
SEND_BACK_TIMEOUT_S: Final = 5.0
"""For each of the two ways."""
INNER_PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
"""RocketMQ's name for the producer inside a consumer."""

_STORED: Final = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    )
)
# What belongs to the way the message came, not to the message.
_LEFT_BEHIND: Final = (
    PROPERTY_CLUSTER,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_WAIT,
)
_COMPRESSION_FLAGS: Final = SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_TYPE_MASK

_log = get_logger(__name__)


class SendBack:
    """Gives back the messages of one consumer group.

    Attributes:
        sent_back: Messages given back by request.
        sent_to_retry_topic: Messages given back by sending them to the retry topic.
    """

    def __init__(self, instance: ClientInstance, group: str, max_reconsume_times: int) -> None:
        """Prepare.

        Args:
            max_reconsume_times: After so many tries a message goes to the dead letters.
        """
        self._instance = instance
        self._group = group
        self._retry_topic = retry_topic_of(group)
        self._max_reconsume_times = max_reconsume_times
        self.sent_back = 0
        self.sent_to_retry_topic = 0

    async def send_back(self, message: DeliveredMessage, delay_level: int) -> None:
        """Ask the broker to store *message* for another try; send it oneself when that fails.

        Args:
            delay_level: See `client.consumer.listener.ConsumeContext`.
        Raises:
            ClientError: Neither worked; the message may be stored, and is still the consumer's.
        """
        try:
            await self._ask(message, delay_level)
        except MQError as error:
            _log.warning("send_back_failed", message_id=message.message_id, error=str(error))
            await self.send_to_retry_topic(message, delay_level)
        else:
            self.sent_back += 1

    async def _ask(self, message: DeliveredMessage, delay_level: int) -> None:
        header = ConsumerSendMsgBackHeader(
            offset=message.phy_offset,
            group=self._group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=message.topic,
            unit_mode=False,
            max_reconsume_times=self._max_reconsume_times,
        )
        answer = await self._instance.ask_leader(
            message.broker_name,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            dict(header.encode()),
            topic=message.message_queue.topic,
            timeout_s=SEND_BACK_TIMEOUT_S,
        )
        if answer.code != ResponseCode.SUCCESS:
            raise RequestFailedError(
                f"message {message.message_id} not taken back: code {answer.code} "
                f"{answer.remark or ''}",
                code=answer.code,
                remark=answer.remark or "",
            )

    async def send_to_retry_topic(self, message: DeliveredMessage, delay_level: int = 0) -> None:
        """Send a copy of *message* to the group's retry topic, on the broker it came from.

        A broker puts one that was tried too often into the dead letters.

        Raises:
            ClientError: It is not known to be stored.
        """
        record = message.record
        times = message.reconsume_times
        header = SendMessageHeader(
            producer_group=INNER_PRODUCER_GROUP,
            topic=self._retry_topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=self._instance.config.default_topic_queue_nums,
            queue_id=-1,  # the broker knows how many there are
            sys_flag=record.sys_flag & _COMPRESSION_FLAGS,
            born_timestamp=record.born_timestamp_ms,
            flag=record.flag,
            properties=encode_properties(self._properties(message, delay_level)).decode(),
            reconsume_times=self._max_reconsume_times if delay_level < 0 else times + 1,
            unit_mode=False,
            max_reconsume_times=self._max_reconsume_times,
        )
        answer = await self._instance.ask_leader(
            message.broker_name,
            RequestCode.SEND_MESSAGE_V2,
            dict(header.encode_v2()),
            bytes(record.body),
            topic=message.message_queue.topic,
            timeout_s=SEND_BACK_TIMEOUT_S,
        )
        if answer.code not in _STORED:
            raise RequestFailedError(
                f"message {message.message_id} not sent to {self._retry_topic}: code "
                f"{answer.code} {answer.remark or ''}",
                code=answer.code,
                remark=answer.remark or "",
            )
        self.sent_to_retry_topic += 1

    def _properties(self, message: DeliveredMessage, delay_level: int) -> dict[str, str]:
        properties = {
            name: value for name, value in message.properties.items() if name not in _LEFT_BEHIND
        }
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.offset_message_id)
        properties[PROPERTY_RETRY_TOPIC] = message.topic
        level = delay_level if delay_level > 0 else FIRST_RETRY_LEVEL + message.reconsume_times
        properties[PROPERTY_DELAY] = str(level)
        return properties
