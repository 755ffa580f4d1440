"""Message properties: ``key \\x01 value \\x02`` repeated, as UTF-8; request and reply.

Spec: docs/reference/formats.md, section 1; docs/internals/protocol/remoting.md, section 11.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from commitlog.errors import LocalProtocolError

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
PROPERTY_MSG_TYPE: Final = "MSG_TYPE"
PROPERTY_PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
PROPERTY_ARRIVE_TIME: Final = "ARRIVE_TIME"
PROPERTY_POP_CK: Final = "POP_CK"
PROPERTY_SET_ASIDE_BY: Final = "SET_ASIDE_BY"
"""Of this project: which service of a leader could not process a message."""
PROPERTY_SET_ASIDE_REASON: Final = "SET_ASIDE_REASON"
PROPERTY_SET_ASIDE_POSITION: Final = "SET_ASIDE_POSITION"
"""Where the message stands in the log."""

KEY_SEPARATOR: Final = " "
"""Between the parts of KEYS."""


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return *properties* as a record or a request carries them, in the mapping's order.

    Pairs whose key or value is empty are left out, as in RocketMQ.

    Raises:
        LocalProtocolError: A key or value holds \\x01 or \\x02, for which there is no escape, or
            a lone surrogate.
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

    Raises:
        LocalProtocolError: As `encode_properties`, about *added* only.
    """
    kept = without_properties(raw, {name.encode() for name in added})
    return kept + encode_properties(added)


REPLY_MESSAGE_FLAG: Final = "reply"
"""Value of the property MSG_TYPE on a reply."""

REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"


def reply_topic(cluster: str) -> str:
    """Return the topic that replies within *cluster* go by."""
    return cluster + REPLY_TOPIC_SUFFIX
