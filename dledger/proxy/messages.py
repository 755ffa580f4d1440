"""Messages of apache.rocketmq.v2 into those of the SDK, and back. Pure.

The id that a client gives a message becomes its UNIQ_KEY. A message group stands in the record as
RocketMQ's sharding key, so clients of both protocols see the same.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.message import (
    MAX_BODY_BYTES,
    MAX_RETRY_TOPIC_CHARS,
    MAX_TOPIC_CHARS,
    Message,
    check_topic,
)
from dledger.client.core.message_ext import MessageExt, decompress
from dledger.commitlog import properties as names
from dledger.commitlog.errors import CorruptRecordError
from dledger.commitlog.properties import PROPERTY_SHARDING_KEY
from dledger.commitlog.record import SYS_FLAG_COMPRESSED
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.status import RefusedError
from dledger.remoting.addresses import join_address
from dledger.remoting.protocol.topic_names import CLOSED_TOPICS, RETRY_PREFIX, is_of_copies

PROPERTY_TRACE_CONTEXT: Final = "__TraceContext"
PROPERTY_BORN_HOST: Final = "__BORNHOST"
"""The host of the client, as it names it: the connection that a broker sees is the proxy's."""

NAMESPACE_SEPARATOR: Final = "%"
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
"""What brokers take for topics and groups."""

_SEPARATORS: Final = re.compile("[\x01\x02]")

NAMES_MAX: Final = 1_024
"""Topics whose check is kept, none longer than topics are."""

TIME_MS_MAX: Final = (1 << 63) - 1
"""Of a time in a property."""

ATTEMPT_MAX: Final = (1 << 31) - 1
"""Of a delivery; a sender may have stated as many before."""

GROUP_CHARS_MAX: Final = MAX_RETRY_TOPIC_CHARS - len(RETRY_PREFIX)
"""Of a consumer group: it names its retry topic, which is a folder."""

RECOVERY_S_MAX: Final = 72 * 3600
"""After which brokers ask back about a transaction at the latest."""

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Of one request or answer: a batch of the largest bodies that brokers take has a quarter of it."""

CARRIED_BODY_BYTES_MAX: Final = MAX_MESSAGE_BYTES - (256 << 10)
"""Of a message to a client, decompressed: properties take no more than the rest, whatever they
hold."""

ENCODINGS: Final = frozenset({pb.ENCODING_UNSPECIFIED, pb.IDENTITY, pb.GZIP})
"""Of bodies. One that is none of them would reach consumers as what it is not."""

GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
"""For zlib: the data has the header and the trailer of gzip."""

GZIP_MEMBERS_MAX: Final = 64
"""Of a body. What is behind a member is copied for the next one: of 16 MiB of empty ones that would
take the proxy for minutes."""

RESERVED: Final = frozenset(
    value
    for name, value in vars(names).items()
    if name.startswith("PROPERTY_") and name != "PROPERTY_SEPARATOR"
) | {
    PROPERTY_TRACE_CONTEXT,
    PROPERTY_BORN_HOST,
    "BUYER_ID",
    "TRANSFER_FLAG",
    "CORRECTION_FLAG",
    "MQ2_FLAG",
    "MIN_OFFSET",
    "MAX_OFFSET",
    "CONSUME_START_TIME",
    "EXTEND_UNIQ_INFO",
    "INSTANCE_ID",
    "INNER_NUM",
    "INNER_BASE",
    "INNER_MULTI_DISPATCH",
    "INNER_MULTI_QUEUE_OFFSET",
    "POP_CK_OFFSET",
    "1ST_POP_TIME",
    "DUP_INFO",
    "UNITIZED",
    "__RMQ.TRACE",
    "TRAN_PREPARED_QUEUE_OFFSET",
    "__transactionId__",
}
"""Properties with a meaning for brokers or clients: a user's property cannot have such a name."""

_DELAYS: Final = (
    names.PROPERTY_TIMER_OUT_MS,
    names.PROPERTY_TIMER_DELIVER_MS,
    names.PROPERTY_TIMER_DELAY_MS,
    names.PROPERTY_TIMER_DELAY_SEC,
    names.PROPERTY_DELAY,
)


def full_name(resource: pb.Resource) -> str:
    """Return the name brokers know a topic or a group by."""
    if resource.resource_namespace:
        return f"{resource.resource_namespace}{NAMESPACE_SEPARATOR}{resource.name}"
    return resource.name


def resource_of(full: str, namespace: str) -> pb.Resource:
    """Return what brokers know as *full*, as a client of *namespace* names it."""
    start = f"{namespace}{NAMESPACE_SEPARATOR}"
    if namespace and full.startswith(start):
        return pb.Resource(resource_namespace=namespace, name=full.removeprefix(start))
    return pb.Resource(name=full)


def topic_of(resource: pb.Resource) -> str:
    """Return the topic that a client names.

    Raises RefusedError: it can be none, or is the brokers' own: half messages and delayed ones of
    all topics stand there, which no consumer is to have yet.
    """
    topic = full_name(resource)
    # What is too long is not kept, either.
    if not resource.name or len(topic) > MAX_RETRY_TOPIC_CHARS or not _is_topic(topic):
        raise RefusedError(pb.ILLEGAL_TOPIC, f"{topic[:64]!r} is no name of a topic")
    return topic


@lru_cache(maxsize=NAMES_MAX)
def _is_topic(topic: str) -> bool:
    most = MAX_RETRY_TOPIC_CHARS if is_of_copies(topic) else MAX_TOPIC_CHARS
    return _is_name(topic, most) and topic not in CLOSED_TOPICS


@lru_cache(maxsize=NAMES_MAX)
def _why_no_sends(topic: str) -> str:
    """Return why no message can be sent to *topic*; empty: one can."""
    try:
        check_topic(topic)
    except MessageIllegalError as error:
        return str(error)
    return ""


def group_of(resource: pb.Resource) -> str:
    """Return the consumer group that a client names. Raises RefusedError: it can be none."""
    group = full_name(resource)
    if not resource.name or not _is_name(group, GROUP_CHARS_MAX):
        raise RefusedError(pb.ILLEGAL_CONSUMER_GROUP, f"{group[:64]!r} is no name of a group")
    return group


def _is_name(text: str, most: int) -> bool:
    return len(text) <= most and _NAME.fullmatch(text) is not None


def timestamp(at_ms: int) -> Timestamp:
    """Return *at_ms* as the protocol has times."""
    return Timestamp(seconds=at_ms // 1000, nanos=at_ms % 1000 * 1_000_000)


def milliseconds(time: Timestamp | Duration) -> int:
    """Return a time, or a length of time, in milliseconds."""
    return int(time.seconds) * 1000 + int(time.nanos) // 1_000_000


def duration(length_ms: int) -> Duration:
    """Return *length_ms* as the protocol has lengths of time."""
    return Duration(seconds=length_ms // 1000, nanos=length_ms % 1000 * 1_000_000)


# ------------------------------------------------------------------------------ from a client


def sent_message(message: pb.Message) -> Message:
    """Return what *message* asks to be stored.

    Raises RefusedError: it breaks a rule of the protocol.
    """
    system = message.system_properties
    kind = system.message_type
    topic = topic_of(message.topic)
    if why := _why_no_sends(topic):
        raise RefusedError(pb.ILLEGAL_TOPIC, why)
    if not system.message_id.strip() or _holds(system.message_id, "\x01\x02"):
        raise RefusedError(
            pb.ILLEGAL_MESSAGE_ID, r"the message has no id, or one that holds \x01 or \x02"
        )
    # What is empty is not there, as in RocketMQ: some clients fill in every field.
    if system.tag and (not system.tag.strip() or _holds(system.tag, "|\x01\x02")):
        raise RefusedError(
            pb.ILLEGAL_MESSAGE_TAG, r"a tag is not blank and holds none of | \x01 \x02"
        )
    keys = tuple(filter(None, system.keys))
    if keys and any(not key.strip() or _holds(key, " \x01\x02") for key in keys):
        raise RefusedError(
            pb.ILLEGAL_MESSAGE_KEY, r"a key is not blank and holds no space, \x01 or \x02"
        )
    if system.HasField("lite_topic") or kind == pb.LITE:
        raise RefusedError(pb.ILLEGAL_LITE_TOPIC, "lite topics are not supported")
    _check_kind(system)
    properties: dict[str, str] = dict(message.user_properties)
    if properties:
        _check_user(properties)
    if system.message_group:
        properties[PROPERTY_SHARDING_KEY] = system.message_group
    if system.trace_context:
        properties[PROPERTY_TRACE_CONTEXT] = system.trace_context
    born_host = _SEPARATORS.sub(" ", system.born_host).strip()
    if born_host:
        properties[PROPERTY_BORN_HOST] = born_host
    size_bytes = _properties_bytes(properties, keys, system.tag, system.message_id)
    if size_bytes > names.MAX_CLIENT_PROPERTIES_BYTES:
        raise RefusedError(
            pb.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the properties have {size_bytes} bytes, at most {names.MAX_CLIENT_PROPERTIES_BYTES}",
        )
    deliver_at_ms = 0
    if system.HasField("delivery_timestamp"):
        deliver_at_ms = milliseconds(system.delivery_timestamp)
        if not 0 <= deliver_at_ms <= TIME_MS_MAX:
            raise RefusedError(
                pb.ILLEGAL_DELIVERY_TIME, "the delivery time is none that can be stored"
            )
    if kind == pb.TRANSACTION and system.HasField("orphaned_transaction_recovery_duration"):
        recovery_s = system.orphaned_transaction_recovery_duration.seconds
        if not 0 <= recovery_s <= RECOVERY_S_MAX:
            raise RefusedError(
                pb.BAD_REQUEST, f"a transaction is asked about within {RECOVERY_S_MAX} s"
            )
        properties[names.PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS] = str(recovery_s)
    return Message(
        topic,
        body_of(message),
        tags=system.tag,
        keys=keys,
        properties=properties,
        deliver_at_ms=deliver_at_ms,
        message_id=system.message_id,
    )


def _holds(text: str, characters: str) -> bool:
    for each in characters:  # noqa: SIM110  # a third of the price of a generator
        if each in text:
            return True
    return False


def _check_user(properties: Mapping[str, str]) -> None:
    """Refuse a user's properties that cannot be stored as such."""
    taken = RESERVED.intersection(properties)
    if taken:
        raise RefusedError(
            pb.ILLEGAL_MESSAGE_PROPERTY_KEY, f"properties {sorted(taken)} have a meaning already"
        )
    if any(
        not name or not value or _holds(name + value, "\x01\x02")
        for name, value in properties.items()
    ):
        raise RefusedError(
            pb.ILLEGAL_MESSAGE_PROPERTY_KEY,
            r"a property has a name and a value, and neither holds \x01 or \x02",
        )


def _properties_bytes(
    properties: Mapping[str, str], keys: Sequence[str], tag: str, message_id: str
) -> int:
    """Return about how many bytes a record has for them: no less than they have alone."""
    size_bytes = len("UNIQ_KEY") + len(message_id.encode()) + 2
    if tag:
        size_bytes += len(names.PROPERTY_TAGS) + len(tag.encode()) + 2
    if keys:
        size_bytes += len(names.PROPERTY_KEYS) + len(" ".join(keys).encode()) + 2
    for name, value in properties.items():
        size_bytes += len(name.encode()) + len(value.encode()) + 2
    return size_bytes


_FITTING: Final[Mapping[int, tuple[tuple[bool, bool], ...]]] = {
    pb.MESSAGE_TYPE_UNSPECIFIED: ((False, False), (True, False), (False, True)),
    pb.NORMAL: ((False, False),),
    pb.FIFO: ((True, False),),
    pb.DELAY: ((False, True),),
    pb.TRANSACTION: ((False, False),),
}
"""Whether a message of a type has a group and a delivery time: what may be."""


def _check_kind(system: pb.SystemProperties) -> None:
    """Refuse a message whose properties are those of another type than it claims."""
    kind = system.message_type
    group = system.message_group
    has_group, is_delayed = bool(group), system.HasField("delivery_timestamp")
    if has_group and (not group.strip() or _holds(group, "\x01\x02")):
        raise RefusedError(
            pb.ILLEGAL_MESSAGE_GROUP, r"the message group is blank, or holds \x01 or \x02"
        )
    if kind == pb.PRIORITY:
        raise RefusedError(pb.UNSUPPORTED, "priorities are not supported")
    if (has_group, is_delayed) not in _FITTING.get(kind, ()):
        raise RefusedError(
            pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            "a message has a group, a delivery time, or neither, as its type asks for",
        )


def kind_sent(message: pb.Message) -> pb.MessageType:
    """Return the type of a message of a client; older ones leave it out."""
    system = message.system_properties
    if system.message_type != pb.MESSAGE_TYPE_UNSPECIFIED:
        return system.message_type
    if system.message_group:
        return pb.FIFO
    return pb.DELAY if system.HasField("delivery_timestamp") else pb.NORMAL


def body_of(message: pb.Message) -> bytes:
    """Return the body, decompressed.

    Raises RefusedError: it is empty, too large, damaged, or encoded in a way that is not known.
    """
    body = message.body
    encoding = message.system_properties.body_encoding
    if encoding not in ENCODINGS:
        raise RefusedError(pb.UNSUPPORTED, f"no encoding of a body has the number {encoding}")
    if encoding == pb.GZIP:
        body = _unzipped(body)
    if not body:
        raise RefusedError(pb.MESSAGE_BODY_EMPTY, "the body is empty")
    if len(body) > MAX_BODY_BYTES:
        raise RefusedError(
            pb.MESSAGE_BODY_TOO_LARGE, f"the body has more than {MAX_BODY_BYTES} bytes"
        )
    return body


def _unzipped(packed: bytes) -> bytes:
    """Return what all members of *packed* hold, or more than a body may have.

    Raises RefusedError: it is no gzip, is cut, has too many members, or something else follows.
    """
    found = b""
    for _ in range(GZIP_MEMBERS_MAX):
        unpacker = zlib.decompressobj(GZIP_WINDOW)
        try:
            found += unpacker.decompress(packed, MAX_BODY_BYTES + 1 - len(found))
        except zlib.error as error:
            raise RefusedError(pb.MESSAGE_CORRUPTED, f"the body is no gzip: {error}") from error
        if len(found) > MAX_BODY_BYTES:
            return found
        if not unpacker.eof:
            raise RefusedError(pb.MESSAGE_CORRUPTED, "the compressed body is cut")
        packed = unpacker.unused_data
        if not packed:
            return found
    raise RefusedError(
        pb.MESSAGE_CORRUPTED, f"the body has more than {GZIP_MEMBERS_MAX} gzip members"
    )


# ------------------------------------------------------------------------------ to a client


def stored_kind(properties: Mapping[str, str]) -> pb.MessageType:
    """Return the type a stored message was sent with."""
    if PROPERTY_SHARDING_KEY in properties:
        return pb.FIFO
    if properties.get(names.PROPERTY_TRANSACTION_PREPARED, "").lower() == "true":
        return pb.TRANSACTION
    if any(name in properties for name in _DELAYS):
        return pb.DELAY
    return pb.NORMAL


def received_message(
    message: MessageExt, topic: pb.Resource, *, receipt: str = "", invisible_ms: int = 0
) -> pb.Message:
    """Return a stored message as a client gets it.

    Args:
        receipt: What it is acknowledged with; empty: it was pulled.
        invisible_ms: For how long it is this client's.
    Raises:
        CorruptRecordError: Its bytes are damaged, a number in it is none that the protocol has, or
            its body is larger than one answer may be.
    """
    try:
        return _received_message(message, topic, receipt, invisible_ms)
    except ValueError as error:
        raise CorruptRecordError(f"no message of this protocol: {error}") from error


def _received_message(
    message: MessageExt, topic: pb.Resource, receipt: str, invisible_ms: int
) -> pb.Message:
    properties, record = message.properties, message.record
    if record.sys_flag & SYS_FLAG_COMPRESSED:
        body = decompress(record.body, record.sys_flag, CARRIED_BODY_BYTES_MAX)
    else:
        body = message.body
    if len(body) > CARRIED_BODY_BYTES_MAX:
        raise CorruptRecordError(f"{len(body)} bytes, at most {CARRIED_BODY_BYTES_MAX}")
    system = pb.SystemProperties(
        keys=properties.get(names.PROPERTY_KEYS, "").split(names.KEY_SEPARATOR)
        if names.PROPERTY_KEYS in properties
        else (),
        message_id=message.message_id,
        body_digest=digest(body),
        body_encoding=pb.IDENTITY,
        message_type=stored_kind(properties),
        born_timestamp=timestamp(message.born_timestamp_ms),
        born_host=properties.get(PROPERTY_BORN_HOST) or join_address(*message.born_host),
        store_timestamp=timestamp(message.store_timestamp_ms),
        store_host=join_address(*message.store_host),
        queue_id=message.queue_id,
        queue_offset=message.queue_offset,
        delivery_attempt=min(message.reconsume_times + 1, ATTEMPT_MAX),
    )
    if names.PROPERTY_TAGS in properties:
        system.tag = properties[names.PROPERTY_TAGS]
    if PROPERTY_SHARDING_KEY in properties:
        system.message_group = properties[PROPERTY_SHARDING_KEY]
    if PROPERTY_TRACE_CONTEXT in properties:
        system.trace_context = properties[PROPERTY_TRACE_CONTEXT]
    due = properties.get(names.PROPERTY_TIMER_OUT_MS) or properties.get(
        names.PROPERTY_TIMER_DELIVER_MS, ""
    )
    if due.isascii() and due.isdigit():
        system.delivery_timestamp.CopyFrom(timestamp(int(due)))
    if names.PROPERTY_DLQ_ORIGIN_TOPIC in properties:
        system.dead_letter_queue.topic = properties[names.PROPERTY_DLQ_ORIGIN_TOPIC]
        system.dead_letter_queue.message_id = properties.get(
            names.PROPERTY_DLQ_ORIGIN_MESSAGE_ID, ""
        )
    if receipt:
        system.receipt_handle = receipt
        system.invisible_duration.CopyFrom(duration(invisible_ms))
    user = {name: value for name, value in properties.items() if name not in RESERVED}
    return pb.Message(topic=topic, user_properties=user, system_properties=system, body=body)


def digest(body: bytes) -> pb.Digest:
    """Return the digest of *body* as RocketMQ's proxy writes it."""
    checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    return pb.Digest(type=pb.MD5, checksum=checksum)
