"""Dead letters of a leader's services: what stands there instead of a message. Pure.

A message that a delay level, the timer or a transaction cannot process is copied, with the reason,
to a dead letter topic of its own, and does not come up again. Where the stored bytes are damaged
for good there is nothing to copy: then a note stands there that names their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from commitlog.entry import RecordBatch, Run
from commitlog.properties import (
    PROPERTY_SET_ASIDE_BY,
    PROPERTY_SET_ASIDE_POSITION,
    PROPERTY_SET_ASIDE_REASON,
    PROPERTY_UNIQ_KEY,
    encode_properties,
    get_property,
    with_properties,
)
from commitlog.record import MAX_PROPERTIES_BYTES, SYS_FLAG_TRANSACTION_MASK, encode_record
from dledger.services.stored_record import StoredRecord, copy_of
from dledger.state.names import SET_ASIDE_TOPIC
from dledger.state.state_record import TopicsChange, state_record
from dledger.state.topic_config import PERM_READ, PERM_WRITE, TopicConfig

SET_ASIDE_RUN: Final = Run(SET_ASIDE_TOPIC, 0, 1)

MAX_REASON_CHARS: Final = 200
"""Of a reason: it may quote what a client sent."""

_UNIQ_KEY_BYTES: Final = 255
"""A longer key is not copied when there is no space for all properties."""


def set_aside_copy(record: StoredRecord, service: str, reason: str) -> bytes:
    """Return the dead letter for *record*, with its body, and its properties if there is space.

    Args:
        service: Which one could not process it.
        reason: Why; cut where it is long.
    Raises:
        CorruptRecordError: The body does not fit its checksum.
    """
    return copy_of(
        record,
        SET_ASIDE_RUN,
        properties=fitting_properties(
            record.properties, set_aside_properties(record.phy_offset, service, reason)
        ),
        sys_flag=record.sys_flag & ~SYS_FLAG_TRANSACTION_MASK,
        prepared_transaction_offset=0,
    )


def fitting_properties(properties: bytes, added: Mapping[str, str]) -> bytes:
    """Return *properties* with *added*; where a record has no space for all, UNIQ_KEY and *added*.

    Args:
        added: Far below what a record has space for.
    """
    found = with_properties(properties, added)
    if len(found) <= MAX_PROPERTIES_BYTES:
        return found
    key = get_property(properties, PROPERTY_UNIQ_KEY.encode()) or b""
    kept = b""
    if key and len(key) <= _UNIQ_KEY_BYTES:
        kept = b"%b\x01%b\x02" % (PROPERTY_UNIQ_KEY.encode(), key)
    return with_properties(kept, added)


def set_aside_note(position: int, service: str, reason: str) -> bytes:
    """Return the dead letter for a message that cannot be copied: it names where it stands."""
    return encode_record(
        topic=SET_ASIDE_TOPIC,
        queue_id=SET_ASIDE_RUN.queue_id,
        body=f"The message at position {position} of the log cannot be copied.".encode(),
        properties=encode_properties(set_aside_properties(position, service, reason)),
    )


def with_set_aside_topic(batch: RecordBatch) -> RecordBatch:
    """Return *batch* behind the creation of the dead letter topic."""
    config = TopicConfig(SET_ASIDE_TOPIC, 1, 1, PERM_READ | PERM_WRITE)
    head = state_record(TopicsChange(put=(config,)))
    return RecordBatch(
        records=head.record + bytes(batch.records),
        sizes=np.concatenate([np.array([len(head.record)], np.uint32), batch.sizes]),
        runs=(head.run, *batch.runs),
        born_host=batch.born_host,
    )


def set_aside_properties(position: int, service: str, reason: str) -> dict[str, str]:
    """Return the properties that name the service that set a message aside, the reason, and its
    place."""
    plain = "".join(each if each.isprintable() else "?" for each in reason[:MAX_REASON_CHARS])
    return {
        PROPERTY_SET_ASIDE_BY: service,
        PROPERTY_SET_ASIDE_REASON: plain or "unknown",
        PROPERTY_SET_ASIDE_POSITION: str(position),
    }
