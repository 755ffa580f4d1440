"""Stored records on their way into new ones: read whole, copied with the checksum they had.

A copy gets a new entry with fresh checksums. If rotten bytes went into it, every replica would
hold them as valid. So a record that may be copied comes from `StoredRecords` alone, which compares
at the checksums of the whole entry around it, and `copy_of` compares the body once more while it
computes the checksum of the copy.
"""

from __future__ import annotations

from typing import Final, NewType

import numpy as np
import numpy.typing as npt

from dledger.commitlog.damage import check_entries
from dledger.commitlog.entry import Run, parse_header, record_starts
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError
from dledger.commitlog.record import (
    BODY_CRC_OFFSET,
    NO_HOST,
    QUEUE_ID_OFFSET,
    Record,
    decode_record,
    encode_record,
    pack_host,
)
from dledger.group_api import BrokerGroup

MAX_CHECKED_BYTES: Final = 16 << 20
"""Bytes of entries whose checksums one step of a service compares, damaged ones and one entry at
least: some 15 ms, well below a heartbeat. What is left takes the next step."""

StoredRecord = NewType("StoredRecord", Record)
"""A record out of an entry that fits its checksums."""

StoredBytes = NewType("StoredBytes", memoryview)
"""The bytes of such a record."""


class StoredRecords:
    """Reads applied records; the checksums of an entry are looked at once by each reader.

    Make a new one for each step of work and drop it: it keeps a view of the entry read last.
    """

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._position = 0
        self._frame = memoryview(b"")
        self._starts: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.checked_bytes = 0

    @property
    def is_tired(self) -> bool:
        """Whether this step has looked at as many bytes as a step may."""
        return self.checked_bytes >= MAX_CHECKED_BYTES

    def bytes_at(self, position: int) -> StoredBytes:
        """Return the record that begins at *position*: a view that pins its segment.

        Raises:
            OffsetOutOfRangeError: Outside the log.
            CorruptEntryError: The entry around it is damaged; that is reported, and repaired from
                now on.
            CorruptRecordError: The entry is whole, and no record begins there.
        """
        if not self._position <= position < self._position + len(self._frame):
            self._read_entry(position)
        start = position - self._position
        at = int(np.searchsorted(self._starts, start))
        if at >= len(self._starts) or self._starts[at] != start:
            raise CorruptRecordError(f"no record begins at {position}")
        end = int(self._starts[at + 1]) if at + 1 < len(self._starts) else len(self._frame)
        return StoredBytes(self._frame[start:end])

    def read(self, position: int) -> StoredRecord:
        """Return the record that begins at *position*, decoded; its body fits its checksum.

        Raises: As `bytes_at`.
        """
        return decode_stored(self.bytes_at(position))

    def _read_entry(self, position: int) -> None:
        entry_log = self._group.log
        index = entry_log.index_of(position)
        try:
            frame = entry_log.frame(index)
            self.checked_bytes += len(frame)
            if check_entries(entry_log, index, index, 0).suspects:
                raise CorruptEntryError(f"entry {index}, around {position}, is damaged")
            header = parse_header(frame)
            starts = record_starts(frame, header)
        except CorruptEntryError:
            self._group.report_damage(position, 1)
            raise
        self._position, self._frame, self._starts = header.position, frame, starts


def decode_stored(data: StoredBytes) -> StoredRecord:
    """Return what stands in *data*.

    Raises CorruptRecordError: the body does not fit its checksum.
    """
    return StoredRecord(decode_record(data))


def copy_of(
    record: StoredRecord,
    run: Run,
    *,
    properties: bytes | None = None,
    sys_flag: int | None = None,
    reconsume_times: int | None = None,
    prepared_transaction_offset: int | None = None,
    in_place: bool = False,
) -> bytes:
    """Return *record* encoded for the queue of *run*, with the body checksum it is stored with.

    Args:
        properties, sys_flag, reconsume_times, prepared_transaction_offset: Of the copy, where it
            differs.
        in_place: Keep offsets, store time and store host; else they are zero until an entry is
            sealed.
    Raises:
        CorruptRecordError: The body does not fit the checksum any more.
        LocalProtocolError: The properties are too long for a record.
    """
    prepared = prepared_transaction_offset
    copied = encode_record(
        topic=run.topic,
        queue_id=run.queue_id,
        body=record.body,
        properties=record.properties if properties is None else properties,
        flag=record.flag,
        sys_flag=record.sys_flag if sys_flag is None else sys_flag,
        born_timestamp_ms=record.born_timestamp_ms,
        born_host=pack_host(*record.born_host),
        reconsume_times=record.reconsume_times if reconsume_times is None else reconsume_times,
        prepared_transaction_offset=(
            record.prepared_transaction_offset if prepared is None else prepared
        ),
        queue_offset=record.queue_offset if in_place else 0,
        phy_offset=record.phy_offset if in_place else 0,
        store_timestamp_ms=record.store_timestamp_ms if in_place else 0,
        store_host=pack_host(*record.store_host) if in_place else NO_HOST,
    )
    crc = int.from_bytes(copied[BODY_CRC_OFFSET:QUEUE_ID_OFFSET], "big")
    if crc != record.body_crc:
        raise CorruptRecordError(
            f"the body of the record at {record.phy_offset} does not fit its checksum"
        )
    return copied
