"""Sealed frames that fit a given log."""

import numpy as np

from dledger.commitlog.entry import ENTRY_HEADER_BYTES, RecordBatch, Run, seal_entry, seal_no_op
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.record import encode_record

STORE_HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"


def record(body_bytes: int, fill: int = 0x78) -> bytes:
    """Return one encoded record of topic T."""
    return encode_record(
        topic="T", queue_id=0, body=bytes([fill]) * body_bytes, properties=b"", queue_offset=0
    )


RECORD_BYTES = len(record(0))
ENTRY_BYTES = ENTRY_HEADER_BYTES + 4 + RECORD_BYTES
"""Size of an entry of one record without a body."""


def next_frame(
    log: EntryLog,
    body_bytes: int = 0,
    *,
    term: int | None = None,
    records: int = 1,
    store_time_ms: int | None = None,
    fill: int = 0x78,
) -> bytes:
    """Return the frame that may be appended to *log* next."""
    one = record(body_bytes, fill)
    size = ENTRY_HEADER_BYTES + records * (4 + len(one))
    frame = seal_entry(
        [
            RecordBatch(
                one * records, np.full(records, len(one), np.uint32), (Run("T", 0, records),)
            )
        ],
        [log.last_index],
        index=log.last_index + 1,
        term=log.last_term if term is None else term,
        position=log.place(size),
        prev_chain=log.last_chain,
        store_time_ms=1_000 + log.last_index if store_time_ms is None else store_time_ms,
        store_host=STORE_HOST,
    )
    assert len(frame) == size
    return bytes(frame)


def next_no_op(log: EntryLog, *, term: int | None = None) -> bytes:
    """Return a no-op that may be appended to *log* next."""
    return seal_no_op(
        log.last_index + 1,
        log.last_term if term is None else term,
        log.place(ENTRY_HEADER_BYTES),
        log.last_chain,
        log.last_store_time_ms,
    )
