"""Entries: one Raft entry is one frame of one or more records.

A frame is a fixed header, a table of record sizes (u32 each) and the records back to back, all
big-endian::

    0 magic u32      4 size u32       8 index i64     16 term i64    24 position i64
    32 recordCount u32                36 kind u16     38 format u16  40 storeTime i64
    48 chain u64     56 bodyCRC u32   60 reserved u32 64 crc u32     68 pad u32

`bodyCRC` covers everything behind the header, `crc` the header without itself, `chain` is a running
checksum over all entries so far: equal chains at one index mean equal logs up to it.

Spec: docs/reference/formats.md, section 2.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from dledger.commitlog.errors import CorruptEntryError, InvariantBroken, NewerEntryError
from dledger.commitlog.record import (
    BORN_HOST_OFFSET,
    HOST_FLAGS,
    LAYOUTS,
    MIN_RECORD_BYTES,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_OFFSET,
    Layout,
)
from dledger.commitlog.record_columns import STORE_TIME_AT, scatter

ENTRY_MAGIC: Final = 0xD1ED6E01
ENTRY_FORMAT: Final = 1
ENTRY_HEADER_BYTES: Final = 72

KIND_NO_OP: Final = 0
KIND_RECORDS: Final = 1
KIND_CONFIG: Final = 2

FIRST_PREV_CHAIN: Final = 0
"""What stands for the chain before the first entry."""

MAX_ENTRY_BYTES: Final = 0xFFFFFFFF
"""The size field is 32 bits; the log's segment size is the tighter limit in practice."""

_HEADER: Final = struct.Struct(">IIqqqIHHqQIIII")
_BEFORE_CHAIN: Final = struct.Struct(">IIqqqIHHq")
_CHAIN_END: Final = struct.Struct(">QIIII")
_U64: Final = struct.Struct(">Q")
_U32: Final = struct.Struct(">I")
_OFFSETS: Final = struct.Struct(">qq")
SIZE_FIELD_BYTES: Final = 4
"""One record's line in the table of sizes."""
_CHAIN_OFFSET: Final = 48
_CRC_OFFSET: Final = 64
_PAD_OFFSET: Final = 68
_SYS_FLAG_LOW_BYTE: Final = SYS_FLAG_OFFSET + 3

_PLAIN_PATCH_RECORDS: Final = 24
"""Up to here patching record by record is cheaper than starting numpy (measured)."""

_PLAIN_SIZES: Final = 256
"""Up to here adding up sizes without numpy is cheaper, by far for the few of a common entry."""

_KINDS: Final = frozenset({KIND_NO_OP, KIND_RECORDS, KIND_CONFIG})


class EntryHeader(msgspec.Struct):
    """A frame's header, as it stands there.

    `body_start` is where the first record begins, counted in the frame.
    """

    magic: int
    size: int
    index: int
    term: int
    position: int
    record_count: int
    kind: int
    format: int
    store_time_ms: int
    chain: int
    body_crc: int
    reserved: int
    crc: int
    pad: int
    body_start: int = 0

    @property
    def end_position(self) -> int:
        """Absolute byte after the frame."""
        return self.position + self.size


class Run(msgspec.Struct, frozen=True):
    """Consecutive records of one queue in a batch."""

    topic: str
    queue_id: int
    count: int


class RecordBatch(msgspec.Struct, frozen=True, eq=False):
    """Encoded records that must go into one entry together.

    Args:
        records: Records back to back; offsets, store time and store host are filled in at sealing.
        sizes: Size of each record in bytes, uint32.
        runs: Which queue each stretch of records belongs to; counts add up to the records.
        born_host: Packed address to write into every record, or None when they have theirs.
        heads: How many at its begin are the broker's own, each a run: no answer counts them.
    """

    records: Buffer
    sizes: npt.NDArray[np.uint32]
    runs: tuple[Run, ...]
    born_host: bytes | None = None
    heads: int = 0

    @classmethod
    def joined(cls, records: Sequence[bytes], runs: Iterable[Run]) -> RecordBatch:
        """Return single records, which have their born hosts, as one batch."""
        sizes = np.array([len(record) for record in records], dtype=np.uint32)
        return cls(b"".join(records), sizes, tuple(runs))


def parse_header(buf: Buffer, offset: int = 0) -> EntryHeader:
    """Return the entry header at byte *offset* of *buf*; checks the header alone.

    Raises:
        CorruptEntryError: Cut short, no entry here, or a header that does not fit its checksum.
        NewerEntryError: (a CorruptEntryError) A format or kind this version does not know.
    """
    view = memoryview(buf)
    if offset < 0 or view.nbytes - offset < ENTRY_HEADER_BYTES:
        raise CorruptEntryError(f"{max(view.nbytes - offset, 0)} bytes are too few for an entry")
    header = EntryHeader(*_HEADER.unpack_from(view, offset))
    index, count, kind = header.index, header.record_count, header.kind
    if header.magic != ENTRY_MAGIC:
        raise CorruptEntryError(f"magic 0x{header.magic:08X} at {offset} is not an entry's")
    if header.crc != _header_crc(view, offset):
        raise CorruptEntryError(f"entry header at {offset} does not fit its checksum")
    if header.format != ENTRY_FORMAT or kind not in _KINDS:
        raise NewerEntryError(
            f"entry {index} has format {header.format}, kind {kind}; "
            f"this version knows format {ENTRY_FORMAT}, kinds up to {max(_KINDS)}"
        )
    header.body_start = ENTRY_HEADER_BYTES + SIZE_FIELD_BYTES * count
    if header.size < header.body_start + MIN_RECORD_BYTES * count:
        raise CorruptEntryError(f"entry {index}: {header.size} bytes cannot hold {count} records")
    if (kind == KIND_RECORDS) != (count > 0):
        raise CorruptEntryError(f"entry {index} of kind {kind} has {count} records")
    return header


def verify_frame(frame: Buffer, header: EntryHeader, prev_chain: int) -> None:
    """Check a whole frame: length, body checksum, chain, and sizes that add up.

    Args:
        prev_chain: Chain of the entry before; `FIRST_PREV_CHAIN` before the first.
    Raises:
        CorruptEntryError: Naming what does not fit.
    """
    view = memoryview(frame)
    if view.nbytes != header.size:
        raise CorruptEntryError(
            f"entry {header.index} has {header.size} bytes, the frame {view.nbytes}"
        )
    if zlib.crc32(view[ENTRY_HEADER_BYTES:]) != header.body_crc:
        raise CorruptEntryError(f"entry {header.index}: the body does not fit its checksum")
    if _chain(prev_chain, view[:_CHAIN_OFFSET], header.body_crc) != header.chain:
        raise CorruptEntryError(f"entry {header.index} does not follow the entry before it")
    if header.kind == KIND_RECORDS:
        total, least = _sum_and_least(_size_table(view, header))
        if total != header.size - header.body_start:
            raise CorruptEntryError(f"entry {header.index}: record sizes do not add up")
        if least < MIN_RECORD_BYTES:
            raise CorruptEntryError(f"entry {header.index} has a record that is too short")


def record_sizes(frame: Buffer, header: EntryHeader) -> npt.NDArray[np.uint32]:
    """Return the size in bytes of each record of a frame, in native order (a copy).

    Raises CorruptEntryError: the frame ends before its table of sizes does.
    """
    return _size_table(memoryview(frame), header).astype(np.uint32)


def record_starts(frame: Buffer, header: EntryHeader) -> npt.NDArray[np.int64]:
    """Return where each record starts, in bytes from the begin of the frame."""
    return _starts(record_sizes(frame, header), header.body_start)


def seal_entry(
    batches: Sequence[RecordBatch],
    queue_offsets: Sequence[int],
    *,
    index: int,
    term: int,
    position: int,
    prev_chain: int,
    store_time_ms: int,
    store_host: bytes,
) -> bytearray:
    """Return the frame of an entry that holds all records of *batches*, in order.

    Queue offset, physical offset, store time and store host (and the born host where the batch
    brings one) are written into every record; the batches themselves are left alone.

    Args:
        queue_offsets: First queue offset for each run, over all batches in order.
        position: Absolute byte at which the frame will stand.
        prev_chain: Chain of entry *index* - 1.
        store_time_ms: Not less than that of any entry before; the caller sees to it.
        store_host: Packed like the records' own store hosts: 8 bytes, or 20 where their system
            flag has IPv6.
    Raises:
        InvariantBroken: Sizes, runs or hosts do not fit the records: a bug of the caller, which
            checks foreign batches with `dledger.commitlog.record_batch.verify_record_layout`.
    """
    if len(batches) == 1:
        sizes = batches[0].sizes
    else:
        sizes = np.concatenate([batch.sizes for batch in batches])
    count = len(sizes)
    body_start = ENTRY_HEADER_BYTES + SIZE_FIELD_BYTES * count
    frame = bytearray().join(
        (
            bytes(ENTRY_HEADER_BYTES),
            sizes.astype(">u4").tobytes(),
            *(batch.records for batch in batches),
        )
    )
    runs = [run for batch in batches for run in batch.runs]
    _check_batches(batches, runs, queue_offsets, count, len(frame) - body_start, sizes)
    patch = _patch_plain if count <= _PLAIN_PATCH_RECORDS else _patch_bulk
    patch(
        frame, batches, runs, queue_offsets, body_start, sizes, position, store_time_ms, store_host
    )
    _write_header(frame, KIND_RECORDS, index, term, position, count, prev_chain, store_time_ms)
    return frame


def seal_no_op(index: int, term: int, position: int, prev_chain: int, store_time_ms: int) -> bytes:
    """Return the frame of an entry without records."""
    frame = bytearray(ENTRY_HEADER_BYTES)
    _write_header(frame, KIND_NO_OP, index, term, position, 0, prev_chain, store_time_ms)
    return bytes(frame)


def seal_config(
    body: Buffer, *, index: int, term: int, position: int, prev_chain: int, store_time_ms: int
) -> bytes:
    """Return the frame of an entry that holds a list of members and no records."""
    frame = bytearray(ENTRY_HEADER_BYTES)
    frame += memoryview(body)
    _write_header(frame, KIND_CONFIG, index, term, position, 0, prev_chain, store_time_ms)
    return bytes(frame)


def config_body(frame: Buffer, header: EntryHeader) -> bytes:
    """Return the encoded list of members in a verified entry of kind `KIND_CONFIG`."""
    return bytes(memoryview(frame)[header.body_start : header.size])


def _size_table(view: memoryview, header: EntryHeader) -> npt.NDArray[np.uint32]:
    if view.nbytes < header.body_start:
        raise CorruptEntryError(f"entry {header.index} ends within its table of record sizes")
    return np.frombuffer(view, np.dtype(">u4"), header.record_count, ENTRY_HEADER_BYTES)


def _sum_and_least(table: npt.NDArray[np.uint32]) -> tuple[int, int]:
    if len(table) <= _PLAIN_SIZES:
        sizes = table.tolist()
        return sum(sizes), min(sizes)
    return int(table.sum(dtype=np.int64)), int(table.min())


def _starts(sizes: npt.NDArray[np.uint32], body_start: int) -> npt.NDArray[np.int64]:
    starts = np.cumsum(sizes, dtype=np.int64)
    starts -= sizes
    starts += body_start
    return starts


def _check_batches(
    batches: Sequence[RecordBatch],
    runs: Sequence[Run],
    queue_offsets: Sequence[int],
    count: int,
    records_bytes: int,
    sizes: npt.NDArray[np.uint32],
) -> None:
    if not count:
        raise InvariantBroken("an entry of records has at least one")
    if len(runs) != len(queue_offsets):
        raise InvariantBroken(f"{len(queue_offsets)} queue offsets for {len(runs)} runs")
    if sum([run.count for run in runs]) != count:
        raise InvariantBroken("runs and record sizes count differently")
    total, least = _sum_and_least(sizes)
    if total != records_bytes or least < MIN_RECORD_BYTES:
        raise InvariantBroken(f"record sizes do not add up to {records_bytes} bytes")


def _patch_plain(
    frame: bytearray,
    batches: Sequence[RecordBatch],
    runs: Sequence[Run],
    queue_offsets: Sequence[int],
    body_start: int,
    sizes: npt.NDArray[np.uint32],
    position: int,
    store_time_ms: int,
    store_host: bytes,
) -> None:
    time_and_host = store_time_ms.to_bytes(8, "big", signed=True) + store_host
    record_sizes_ = sizes.tolist()
    start = body_start
    i = 0
    for run, queue_offset in zip(runs, queue_offsets, strict=True):
        for _ in range(run.count):
            _OFFSETS.pack_into(frame, start + QUEUE_OFFSET_OFFSET, queue_offset, position + start)
            layout = Layout.at(frame, start)
            _check_store_host(layout, store_host)
            frame[start + layout.store_time : start + layout.reconsume_times] = time_and_host
            queue_offset += 1
            start += record_sizes_[i]
            i += 1
    start = body_start
    i = 0
    for batch in batches:
        count = len(batch.sizes)
        if batch.born_host is None:
            start += sum(record_sizes_[i : i + count])
        else:
            for size in record_sizes_[i : i + count]:
                layout = Layout.at(frame, start)
                _check_born_host(layout, batch.born_host)
                frame[start + BORN_HOST_OFFSET : start + layout.store_time] = batch.born_host
                start += size
        i += count


def _patch_bulk(
    frame: bytearray,
    batches: Sequence[RecordBatch],
    runs: Sequence[Run],
    queue_offsets: Sequence[int],
    body_start: int,
    sizes: npt.NDArray[np.uint32],
    position: int,
    store_time_ms: int,
    store_host: bytes,
) -> None:
    starts = _starts(sizes, body_start)
    count = len(starts)
    offsets = np.empty((count, 2), ">i8")
    if len(runs) == 1:
        offsets[:, 0] = np.arange(queue_offsets[0], queue_offsets[0] + count)
    else:
        counts = np.array([run.count for run in runs], np.int64)
        first_record = np.cumsum(counts) - counts
        offsets[:, 0] = np.repeat(np.array(queue_offsets, np.int64) - first_record, counts)
        offsets[:, 0] += np.arange(count)
    offsets[:, 1] = starts + position
    scatter(frame, starts + QUEUE_OFFSET_OFFSET, offsets.view("V16").ravel())

    host_flags = np.frombuffer(frame, np.uint8)[starts + _SYS_FLAG_LOW_BYTE] & HOST_FLAGS
    for flags in set(host_flags.tobytes()):
        _check_store_host(LAYOUTS[flags], store_host)
    store_times = starts + STORE_TIME_AT[host_flags]
    time_and_host = store_time_ms.to_bytes(8, "big", signed=True) + store_host
    scatter(frame, store_times, np.frombuffer(time_and_host, f"V{len(time_and_host)}"))

    done = 0
    for batch in batches:
        after = done + len(batch.sizes)
        if batch.born_host is not None:
            for flags in set(host_flags[done:after].tobytes()):
                _check_born_host(LAYOUTS[flags], batch.born_host)
            host = np.frombuffer(batch.born_host, f"V{len(batch.born_host)}")
            scatter(frame, starts[done:after] + BORN_HOST_OFFSET, host)
        done = after


def _check_store_host(layout: Layout, store_host: bytes) -> None:
    if len(store_host) != layout.reconsume_times - layout.store_host:
        raise InvariantBroken(f"a store host of {len(store_host)} bytes does not fit its record")


def _check_born_host(layout: Layout, born_host: bytes) -> None:
    if len(born_host) != layout.store_time - BORN_HOST_OFFSET:
        raise InvariantBroken(f"a born host of {len(born_host)} bytes does not fit its record")


def _write_header(
    frame: bytearray,
    kind: int,
    index: int,
    term: int,
    position: int,
    count: int,
    prev_chain: int,
    store_time_ms: int,
) -> None:
    if len(frame) > MAX_ENTRY_BYTES:
        raise InvariantBroken(f"an entry of {len(frame)} bytes is beyond {MAX_ENTRY_BYTES}")
    view = memoryview(frame)
    body_crc = zlib.crc32(view[ENTRY_HEADER_BYTES:])
    _BEFORE_CHAIN.pack_into(
        frame,
        0,
        ENTRY_MAGIC,
        len(frame),
        index,
        term,
        position,
        count,
        kind,
        ENTRY_FORMAT,
        store_time_ms,
    )
    chain = _chain(prev_chain, view[:_CHAIN_OFFSET], body_crc)
    _CHAIN_END.pack_into(frame, _CHAIN_OFFSET, chain, body_crc, 0, 0, 0)
    _U32.pack_into(frame, _CRC_OFFSET, _header_crc(view, 0))


def _chain(prev_chain: int, before_chain: Buffer, body_crc: int) -> int:
    digest = blake2b(_U64.pack(prev_chain), digest_size=8)
    digest.update(before_chain)
    digest.update(_U32.pack(body_crc))
    return int.from_bytes(digest.digest(), "big")


def _header_crc(view: memoryview, offset: int) -> int:
    crc = zlib.crc32(view[offset : offset + _CRC_OFFSET])
    return zlib.crc32(view[offset + _PAD_OFFSET : offset + ENTRY_HEADER_BYTES], crc)
