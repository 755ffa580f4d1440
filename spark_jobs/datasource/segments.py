"""Topics read from data folders, without a broker: what is committed, up to the commit mark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client.core.message_ext import MessageExt
from commitlog.derive import derive
from commitlog.errors import CorruptEntryError
from commitlog.segment import BLANK_BYTES, encode_blank
from spark_jobs.audit.folder import ReplicaFolder, open_folder
from spark_jobs.audit.reference import Before, Side, Whole, whole_at
from spark_jobs.datasource.options import Options
from spark_jobs.datasource.pushdown import Bounds
from spark_jobs.datasource.ranges import QueueRange


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """One segment of one folder, up to the commit mark as it was when the read began."""

    folder: str
    base: int
    end: int


def parts_of(options: Options, bounds: Bounds) -> list[SegmentPart]:
    """Return the segments that may hold something wanted.

    Raises:
        NotAFolderError: A path is no data folder.
    """
    found = []
    for name in options.path.split(","):
        folder = open_folder(Path(name.strip()))
        size = folder.log_format.segment_bytes
        parts = [
            SegmentPart(str(folder.root), base, min(base + size, folder.due))
            for base in folder.segments
            if base + size > folder.anchor.position and base < folder.due
        ]
        times = [_first_time_ms(folder, part.base) for part in parts]
        for number, part in enumerate(parts):
            until = times[number + 1] if number + 1 < len(times) else None
            if until is not None and until < bounds.from_ms:
                continue
            if (begin := times[number]) is not None and begin >= bounds.until_ms:
                continue
            found.append(part)
    return found


def _first_time_ms(folder: ReplicaFolder, base: int) -> int | None:
    side = Side(folder, base, folder.segment(base), folder.anchor.position, folder.due)
    whole = whole_at(side, base, None)
    return None if whole is None else whole.header.store_time_ms


def read_part(part: SegmentPart, options: Options, bounds: Bounds) -> Iterator[list[MessageExt]]:
    """Yield the messages of a segment that are wanted, entry by entry, in log order.

    Raises:
        CorruptEntryError: A byte of it is wrong; names the place.
    """
    folder = open_folder(Path(part.folder))
    side = Side(folder, part.base, folder.segment(part.base), part.base, part.end)
    at = part.base
    before: Before | None = None
    while at < part.end:
        whole = whole_at(side, at, before)
        if whole is None:
            remaining = part.base + len(side.view) - at
            if side.bytes_at(at, BLANK_BYTES) == encode_blank(remaining):
                return
            raise CorruptEntryError(
                f"{folder.segment_path(part.base)}: no whole entry at byte {at - part.base}; "
                "compare the replicas with dledger audit"
            )
        header = whole.header
        before = Before(header.index, header.term, header.chain, header.store_time_ms)
        at = header.end_position
        if header.record_count and bounds.from_ms <= header.store_time_ms < bounds.until_ms:
            messages = list(_wanted(whole, folder.name, options, bounds))
            if messages:
                yield messages


def _wanted(whole: Whole, broker: str, options: Options, bounds: Bounds) -> Iterator[MessageExt]:
    derived = derive(whole.frame, whole.header)
    for topic, queue_id, where in derived.groups:
        queue = QueueRange(topic, broker, queue_id, 0, 0)
        if (options.topics and topic not in options.topics) or not bounds.has(queue):
            continue
        offsets, starts = derived.queue_offset[where], derived.starts[where]
        rows = np.flatnonzero((offsets >= bounds.first_offset) & (offsets < bounds.end_offset))
        for row in rows.tolist():
            yield MessageExt(whole.frame, int(starts[row]), broker)
