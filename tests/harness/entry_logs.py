"""An entry log of small segments on a disk in memory."""

from typing import Final

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.store_paths import StorePaths
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import next_frame

ROOT: Final = "/store"
PATHS: Final = StorePaths(ROOT)
SEGMENT: Final = 2048
"""Bytes of a segment."""
UNITS: Final = 8
"""Entries of a file of the entry index."""


def open_log(disk: CrashDisk, **options: object) -> EntryLog:
    """Return the log on *disk*; *options* are those of `EntryLog.open`."""
    return EntryLog.open(
        disk,
        ROOT,
        segment_bytes=SEGMENT,
        index_units_per_file=UNITS,
        **options,  # type: ignore[arg-type]  # names and values of the test's own
    )


def fill(log: EntryLog, count: int, body_bytes: int = 0, term: int = 1) -> list[bytes]:
    """Append *count* entries; return their frames."""
    frames = []
    for _ in range(count):
        frames.append(next_frame(log, body_bytes, term=term))
        log.append(frames[-1])
    return frames


def segment_content(disk: CrashDisk, base: int) -> bytes:
    """Return the bytes of the segment that begins at position *base*."""
    return disk.read(PATHS.segment(base))
