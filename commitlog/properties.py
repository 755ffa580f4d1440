"""Message properties: ``key \x01 value \x02`` repeated, as UTF-8; request and reply.

Some properties are written by brokers alone: they are taken out of what clients send, and not
refused, since messages that were delivered carry them and may be sent on. What a broker adds later
must fit beside what the client wrote: a client gets what is left of the 32,767 bytes that a record
has for properties.

Spec: docs/reference/formats.md, section 1; docs/internals/protocol/remoting.md, section 11.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Final

from dledger.commitlog.errors import LocalProtocolError

MAX_PROPERTIES_BYTES: Final = 32767
"""The length field of a record is a signed 16-bit integer."""

NAME_VALUE_SEPARATOR: Final = "\x01"
PROPERTY_SEPARATOR: Final = "\x02"

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_UNIQ_KEY: Final = "UNIQ_KEY"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
PROPERTY_TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
PROPERTY_TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
PROPERTY_TIMER_OUT_MS: Final = "TIMER_OUT_MS"
PROPERTY_TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
PROPERTY_TIMER_DELETE_UNIQ_KEY: Final = "TIMER_DEL_UNIQKEY"
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
PROPERTY_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_RECONSUME_TIME: Final = "RECONSUME_TIME"
PROPERTY_MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
PROPERTY_DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
PROPERTY_TRANSACTION_PREPARED: Final = "TRAN_MSG"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
PROPERTY_CLUSTER: Final = "CLUSTER"
PROPERTY_MSG_REGION: Final = "MSG_REGION"
PROPERTY_TRACE_ON: Final = "TRACE_ON"
PROPERTY_CORRELATION_ID: Final = "CORRELATION_ID"
PROPERTY_REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PROPERTY_TTL: Final = "TTL"
PROPERTY_EXPIRE_AFTER_MS: Final = "EXPIRE_AFTER_MS"
"""Of this project: not delivered so long after the message was stored in its queue."""
PROPERTY_MSG_TYPE: Final = "MSG_TYPE"
PROPERTY_PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
PROPERTY_ARRIVE_TIME: Final = "ARRIVE_TIME"
PROPERTY_POP_CK: Final = "POP_CK"
PROPERTY_SET_ASIDE_BY: Final = "SET_ASIDE_BY"
"""Of this project: which service of a leader could not process a message."""
PROPERTY_SET_ASIDE_REASON: Final = "SET_ASIDE_REASON"
PROPERTY_SET_ASIDE_POSITION: Final = "SET_ASIDE_POSITION"
"""Where the message stands in the log."""
PROPERTY_SHARDING_KEY: Final = "__SHARDINGKEY"
"""Message group: what has the same one goes to the same queue."""

KEY_SEPARATOR: Final = " "
"""Between the parts of KEYS."""


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return *properties* as a record or a request carries them, in the mapping's order.

    Pairs whose key or value is empty are left out, as in RocketMQ.

    Raises LocalProtocolError: a key or value holds \x01 or \x02, for which there is no escape, or a
    lone surrogate.
    """
    pairs = [f"{key}\x01{value}\x02" for key, value in properties.items() if key and value]
    text = "".join(pairs)
    if text.count("\x01") != len(pairs) or text.count("\x02") != len(pairs):
        bad = next(
            key
            for key, value in properties.items()
            if not {NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR}.isdisjoint(key + value)
        )
        raise LocalProtocolError(
            f"property {bad!r} holds \\x01 or \\x02, which separate properties"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a property cannot be written as UTF-8: {error}") from error


def decode_properties(raw: bytes | str) -> dict[str, str]:
    """Return the pairs in *raw*; never raises.

    A missing last separator is accepted, items without a separator inside, with an empty key or
    an empty value are skipped, a later duplicate wins. Bytes that are not UTF-8 become U+FFFD.
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    properties: dict[str, str] = {}
    for item in text.split("\x02"):
        key, _, value = item.partition("\x01")
        if key and value:
            properties[key] = value
    return properties


def get_property(raw: bytes, key: bytes) -> bytes | None:
    """Return the value of *key* in encoded properties without decoding the others.

    The last occurrence with a value wins, as in `decode_properties`.
    """
    start = len(raw)
    wanted = key + b"\x01"
    while True:
        start = raw.rfind(wanted, 0, start + len(wanted) - 1) if start else -1
        if start < 0:
            return None
        if start == 0 or raw[start - 1] == 0x02:
            value_start = start + len(wanted)
            value_end = raw.find(b"\x02", value_start)
            value = raw[value_start : value_end if value_end >= 0 else len(raw)]
            if value:
                return value


def without_properties(raw: bytes, names: Container[bytes]) -> bytes:
    """Return encoded properties without those of *names*, all other bytes as they were.

    Works on any bytes: what is not UTF-8 or has a second separator inside stays as it is, so the
    result is at most one separator longer than *raw*.
    """
    items = raw.split(b"\x02")
    kept = [item for item in items if item and item.partition(b"\x01")[0] not in names]
    return b"".join([item + b"\x02" for item in kept])


def with_properties(raw: bytes, added: Mapping[str, str]) -> bytes:
    """Return encoded properties in which each of *added* has its new value, at the end.

    The other bytes stay as they were, as with `without_properties`.

    Raises LocalProtocolError: as `encode_properties`, about *added* only.
    """
    kept = without_properties(raw, {name.encode() for name in added})
    return kept + encode_properties(added)


REPLY_MESSAGE_FLAG: Final = "reply"
"""Value of the property MSG_TYPE on a reply."""

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
"""Its units hold the delivery time in place of a tags code; queue id + 1 is the delay level."""
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
"""Its units hold the delivery time, too: the value of TIMER_OUT_MS; 0 for records without it."""
REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"


def reply_topic(cluster: str) -> str:
    """Return the topic that replies within *cluster* go by."""
    return cluster + REPLY_TOPIC_SUFFIX


# ------------------------------------------------------------------------------- what brokers write


OWNED_NAMES: Final = (
    PROPERTY_REAL_TOPIC,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_POP_CK,
    PROPERTY_SET_ASIDE_BY,
    PROPERTY_SET_ASIDE_REASON,
    PROPERTY_SET_ASIDE_POSITION,
)
"""Written by brokers alone."""

_NAME_BYTES: Final = 255
"""Of a topic, a group or a cluster."""
_NUMBER_BYTES: Final = 20
"""Of any 64-bit number."""
_ID_BYTES: Final = 56
"""Of a message id with an IPv6 host."""

ADDED_BYTES: Final = {
    PROPERTY_UNIQ_KEY: 64,
    PROPERTY_CLUSTER: _NAME_BYTES,
    PROPERTY_PRODUCER_GROUP: _NAME_BYTES,
    PROPERTY_REAL_TOPIC: _NAME_BYTES,
    PROPERTY_REAL_QUEUE_ID: _NUMBER_BYTES,
    PROPERTY_DELAY: _NUMBER_BYTES,
    PROPERTY_TIMER_OUT_MS: _NUMBER_BYTES,
    PROPERTY_TIMER_ROLL_TIMES: _NUMBER_BYTES,
    PROPERTY_TRANSACTION_CHECK_TIMES: _NUMBER_BYTES,
    PROPERTY_WAIT: len("false"),
    PROPERTY_RETRY_TOPIC: _NAME_BYTES,
    PROPERTY_ORIGIN_MESSAGE_ID: _ID_BYTES,
    PROPERTY_DLQ_ORIGIN_TOPIC: _NAME_BYTES,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID: _ID_BYTES,
    PROPERTY_PUSH_REPLY_TIME: _NUMBER_BYTES,
    PROPERTY_SET_ASIDE_BY: 32,
    PROPERTY_SET_ASIDE_REASON: 800,
    PROPERTY_SET_ASIDE_POSITION: _NUMBER_BYTES,
}
"""All that is ever added to one message, with the most bytes its value has."""

RESERVED_BYTES: Final = sum(len(name) + value + 2 for name, value in ADDED_BYTES.items())
"""With the two separators of each."""

MAX_CLIENT_PROPERTIES_BYTES: Final = MAX_PROPERTIES_BYTES - RESERVED_BYTES
"""What a client may write itself."""

_OWNED: Final = frozenset(name.encode() for name in OWNED_NAMES)
_ADDED: Final = frozenset(name.encode() for name in ADDED_BYTES)
_has_owned: Final = re.compile(
    rb"(?:\A|\x02)(?:%b)\x01" % b"|".join(re.escape(name) for name in sorted(_OWNED))
).search


def may_have_owned(data: bytes) -> bool:
    """Tell whether an owned name may stand somewhere in *data*: one message's properties.

    What is looked for stands in each of `OWNED_NAMES`; a chain costs less than any loop.
    """
    return (
        b"REAL_" in data
        or b"TIMER_" in data
        or b"POP_CK" in data
        or b"SET_ASIDE_" in data
        or b"TRANSACTION_CHECK" in data
    )


def has_owned(properties: bytes) -> bool:
    """Tell whether encoded properties hold one of the owned names."""
    return may_have_owned(properties) and _has_owned(properties) is not None


def without_owned(properties: bytes) -> bytes:
    """Return encoded properties without those that only brokers write."""
    return without_properties(properties, _OWNED) if has_owned(properties) else properties


def leaves_space(properties: bytes) -> bool:
    """Return whether a record has space for *properties* and for all that a broker adds.

    What has the name of something that is added counts as that: a message that is sent on has
    some of it already.
    """
    return len(properties) <= MAX_CLIENT_PROPERTIES_BYTES or (
        len(without_properties(properties, _ADDED)) <= MAX_CLIENT_PROPERTIES_BYTES
        and len(properties) <= MAX_PROPERTIES_BYTES
    )
