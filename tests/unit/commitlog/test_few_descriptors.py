"""A log of many files on a disk that keeps few descriptors."""

import os
from pathlib import Path

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry_log import EntryLog
from tests.harness.entry_frames import next_frame

DESCRIPTORS = 12
SEGMENT = 2048
UNITS = 8
ENTRIES = 300


def open_log(disk: OsDisk, root: Path) -> EntryLog:
    return EntryLog.open(disk, str(root), segment_bytes=SEGMENT, index_units_per_file=UNITS)


def open_now(root: Path) -> int:
    """Return how many descriptors this process has below *root*."""
    below = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            below += os.readlink(f"/proc/self/fd/{number}").startswith(str(root))
        except FileNotFoundError:
            continue  # the one of this look
    return below


def test_segments_and_index_files_share_few_descriptors(tmp_path: Path) -> None:
    disk = OsDisk(DESCRIPTORS)
    log = open_log(disk, tmp_path)
    frames = []
    for _ in range(ENTRIES):
        frames.append(next_frame(log, 60))
        log.append(frames[-1])
        log.flush()
        assert open_now(tmp_path) <= DESCRIPTORS + 1, "and its lock"
    assert len(os.listdir(tmp_path / "commitlog")) > DESCRIPTORS
    for index in (*range(1, ENTRIES + 1), *range(ENTRIES, 0, -7)):
        assert log.frame(index) == frames[index - 1]
        assert open_now(tmp_path) <= DESCRIPTORS + 1
    log.close()
    assert disk.descriptors == 0
    assert open_now(tmp_path) == 0
    log = open_log(OsDisk(DESCRIPTORS), tmp_path)
    assert log.last_index == ENTRIES
    assert [bytes(log.frame(index)) for index in (1, ENTRIES)] == [frames[0], frames[-1]]
    assert open_now(tmp_path) <= DESCRIPTORS + 1
    log.close()
