"""Properties that a broker writes: their owners, and how much space they need in a record.

A client that writes one of the owned names would speak to services of the broker in the broker's
place: they are taken out of what clients send. Messages that were delivered carry them, so clients
that send a message on send them too; that is why they are taken out and not refused.

What a broker adds later (a destination, the mark of a retry, a reason) must fit beside what the
client wrote, or a message that was acknowledged could not be delivered. So a client gets what is
left of the 32,767 bytes a record has for properties.
"""

from __future__ import annotations

import re
from typing import Final

from commitlog.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_POP_CK,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_PUSH_REPLY_TIME,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_SET_ASIDE_BY,
    PROPERTY_SET_ASIDE_POSITION,
    PROPERTY_SET_ASIDE_REASON,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    without_properties,
)
from commitlog.record import MAX_PROPERTIES_BYTES

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

ROOM_BYTES: Final = sum(len(name) + value + 2 for name, value in ADDED_BYTES.items())
"""With the two separators of each."""

MAX_CLIENT_PROPERTIES_BYTES: Final = MAX_PROPERTIES_BYTES - ROOM_BYTES
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


def leaves_room(properties: bytes) -> bool:
    """Return whether a record has space for *properties* and for all that a broker adds.

    What has the name of something that is added counts as that: a message that is sent on has
    some of it already.
    """
    return len(properties) <= MAX_CLIENT_PROPERTIES_BYTES or (
        len(without_properties(properties, _ADDED)) <= MAX_CLIENT_PROPERTIES_BYTES
        and len(properties) <= MAX_PROPERTIES_BYTES
    )
