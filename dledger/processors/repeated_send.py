"""A send that was stored before, or is on its way: answered like its first attempt.

Spec: docs/guide/idempotent-producer.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Buffer

from commitlog.errors import CorruptRecordError, OffsetOutOfRangeError
from commitlog.properties import PROPERTY_UNIQ_KEY, get_property
from commitlog.record import Record, decode_record, iter_records
from dledger.broker_errors import SequenceReusedError, SequenceTooOldError
from dledger.group_api import BrokerGroup

_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()

MessageIdentity = tuple[bytes | None, bytes]
"""UNIQ_KEY and body: what a repetition has in common with the first attempt."""


def identities(records: Buffer) -> list[MessageIdentity]:
    """Return who the messages in *records* are, in their order.

    Raises:
        CorruptRecordError: Something in it is no record.
    """
    return [_identity(record) for record in iter_records(records)]


def stored_records(
    group: BrokerGroup, position: int, sent: Sequence[MessageIdentity]
) -> list[Record]:
    """Return the records of the first attempt, which stand at *position*.

    Args:
        sent: What the repetition holds.
    Raises:
        SequenceTooOldError: They are stored, but no longer kept here or damaged.
        SequenceReusedError: They are other messages.
    """
    records: list[Record] = []
    try:
        for identity in sent:
            record = decode_record(group.log.record_at(position))
            if _identity(record) != identity:
                raise _reused()
            records.append(record)
            position += record.size
    except OffsetOutOfRangeError as error:
        raise SequenceTooOldError(
            "the first attempt was stored, but its messages are not kept any more; where they "
            "stood is not known"
        ) from error
    except CorruptRecordError as error:
        group.report_damage(position, 1)
        raise SequenceTooOldError(
            "the first attempt was stored, but its messages are damaged here and being repaired"
        ) from error
    return records


def check_same(first: Buffer, sent: Sequence[MessageIdentity]) -> None:
    """Check that a repetition holds the messages of the *first* attempt.

    Raises:
        SequenceReusedError: It does not.
    """
    if identities(first) != list(sent):
        raise _reused()


def _identity(record: Record) -> MessageIdentity:
    return get_property(record.properties, _UNIQ_KEY), bytes(record.body)


def _reused() -> SequenceReusedError:
    return SequenceReusedError(
        "another message was stored under this sequence; this one is not stored"
    )
