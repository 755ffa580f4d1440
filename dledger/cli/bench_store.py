"""``dledger bench store``: one log with records, CRC and queue units, beside a raw write.

The log and the raw write have the same number of bytes into preallocated files of one size and
flush after the same number of bytes, in turns, so that both meet the same disk.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from dledger.cli.bench_load import Figures
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.derive import derive
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import ENTRY_HEADER_BYTES, RecordBatch, Run, seal_entry
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.record import encode_record, pack_host
from dledger.commitlog.store_paths import StorePaths
from dledger.output import CliError, ExitCode

SIZE_TABLE_BYTES = 4
ROUNDS = 4
"""Turns of each side: one slow moment of the disk does not decide."""

MIB = 1 << 20


FLUSH_BYTES = 64 * MIB
SEGMENT_BYTES = 256 * MIB


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLoad:
    """What one run writes."""

    size: Annotated[int, Parameter(help="Bytes of a body.")] = 1_024
    entry: Annotated[int, Parameter(help="Bytes of an entry, approximately.")] = MIB
    total_mib: Annotated[int, Parameter(help="MiB to write.")] = 512
    folder: Annotated[
        Path | None,
        Parameter(
            name="--dir", help="Folder on the disk to measure; its files are removed afterwards."
        ),
    ] = None


def bench_store(load: StoreLoad) -> Figures:
    """Measure in a folder that is removed afterwards.

    Raises CliError: a number makes no sense.
    """
    if not (0 < load.size < 4 * MIB and 1_024 <= load.entry <= 64 * MIB and load.total_mib > 0):
        raise CliError("--size up to 4 MiB, --entry from 1 KiB to 64 MiB", exit_code=ExitCode.USAGE)
    with tempfile.TemporaryDirectory(prefix="dledger-bench-", dir=load.folder) as folder:
        return _Bench(folder, load).run()


class _Bench:
    def __init__(self, folder: str, load: StoreLoad) -> None:
        self._load = load
        self._disk = OsDisk()
        root = f"{folder}/store"
        self._disk.make_dir(root)
        self._log = EntryLog.open(self._disk, root, segment_bytes=SEGMENT_BYTES, trusted=None)
        self._queues = ConsumeQueueStore(self._disk, StorePaths(root).consumequeue)
        self._raw_folder = f"{folder}/raw"
        record = encode_record(
            topic="bench",
            queue_id=0,
            body=bytes(load.size),
            properties=b"UNIQ_KEY\x01" + b"A" * 32 + b"\x02",
        )
        count = max((load.entry - ENTRY_HEADER_BYTES) // (len(record) + SIZE_TABLE_BYTES), 1)
        self._batch = RecordBatch(
            record * count, np.full(count, len(record), np.uint32), (Run("bench", 0, count),)
        )
        self._frame_bytes = ENTRY_HEADER_BYTES + count * (len(record) + SIZE_TABLE_BYTES)
        self._per_flush = max(FLUSH_BYTES // self._frame_bytes, 1)
        self._offset = 0

    def run(self) -> Figures:
        per_round = max(self._load.total_mib * MIB // ROUNDS // self._frame_bytes, 1)
        log_s = raw_s = 0.0
        payload = bytes(memoryview(self._batch.records)).ljust(self._frame_bytes, b"\0")
        for number in range(ROUNDS):
            log_s += self._log_round(per_round)
            raw_s += self._raw_round(number, payload, per_round)
        self._queues.close()
        self._log.close()
        entries = per_round * ROUNDS
        written = entries * self._frame_bytes
        records = entries * len(self._batch.sizes)
        return {
            "records": records,
            "entries": entries,
            "bytes": written,
            "body_bytes": self._load.size,
            "log_s": log_s,
            "raw_s": raw_s,
            "mb_per_s": written / log_s / 1e6,
            "raw_mb_per_s": written / raw_s / 1e6,
            "ratio": raw_s / log_s,
            "records_per_s": records / log_s,
        }

    def _log_round(self, entries: int) -> float:
        log, queue = self._log, self._queues.queue("bench", 0)
        host = pack_host("127.0.0.1", 10911)
        # A broker does this in a worker before it needs the space; so does the raw side.
        log.allocator.reserve_next()
        began = time.perf_counter()
        for number in range(entries):
            frame = seal_entry(
                [self._batch],
                [self._offset],
                index=log.last_index + 1,
                term=1,
                position=log.place(self._frame_bytes),
                prev_chain=log.last_chain,
                store_time_ms=1,
                store_host=host,
            )
            header = log.append(frame, sealed_here=True)
            queue.put(self._offset, derive(frame, header).units)
            self._offset += header.record_count
            if (number + 1) % self._per_flush == 0:
                log.flush()
            if log.allocator.needs_reserve:
                log.allocator.reserve_next()
        log.flush()
        self._queues.flush()
        return time.perf_counter() - began

    def _raw_round(self, number: int, payload: bytes, entries: int) -> float:
        file = self._disk.create(
            f"{self._raw_folder}/{number:020}", entries * len(payload), reserve=True
        )
        file.flush()
        began = time.perf_counter()
        for place in range(entries):
            file.write_at(place * len(payload), payload)
            if (place + 1) % self._per_flush == 0:
                file.flush()
        file.flush()
        took = time.perf_counter() - began
        file.close()
        return took
