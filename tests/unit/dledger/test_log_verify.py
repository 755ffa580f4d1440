"""`dledger log verify`: a good folder is good, and each kind of damage is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dledger.cli.log_verify import open_segments, verify_store
from dledger.cli.main import main
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.derive import derive
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import RecordBatch, Run, parse_header, seal_entry, seal_no_op
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.mark import SlotFile
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.commitlog.record import encode_record, pack_host
from dledger.commitlog.store_paths import StorePaths
from dledger.output import CliError
from tests.harness.replica_folders import equal_bytes

SEGMENT_BYTES = 64 * 1024


def write_store(
    root: Path, entries: int = 40, *, skip_unit_of: int | None = None, queue_files: int = 200
) -> StorePaths:
    """Write a cleanly stopped store: one no-op, then entries of ten messages over two queues."""
    disk = OsDisk()
    paths = StorePaths(str(root))
    disk.make_dir(str(root))
    log = EntryLog.open(disk, str(root), segment_bytes=SEGMENT_BYTES, trusted=None)
    queues = ConsumeQueueStore(disk, paths.consumequeue, max_open_files=queue_files)
    log.append(seal_no_op(1, 0, 0, 0, 0))
    offsets = {0: 0, 1: 0}
    for number in range(2, entries + 2):
        queue_id = number % 2
        records = [
            encode_record(
                topic="T", queue_id=queue_id, body=b"body %d %d" % (number, n), properties=b""
            )
            for n in range(10)
        ]
        sizes = np.array([len(record) for record in records], np.uint32)
        size = 72 + 4 * len(records) + int(sizes.sum())
        frame = seal_entry(
            [RecordBatch(b"".join(records), sizes, (Run("T", queue_id, 10),))],
            [offsets[queue_id]],
            index=number,
            term=1,
            position=log.place(size),
            prev_chain=log.last_chain,
            store_time_ms=1_000 + number,
            store_host=pack_host("127.0.0.1", 10911),
        )
        log.append(frame)
        derived = derive(frame, parse_header(frame))
        if skip_unit_of != number:
            queues.queue("T", queue_id).put(offsets[queue_id], derived.units)
        offsets[queue_id] += 10
    log.flush()
    queues.flush()
    SlotFile(disk, paths.commit_mark).store(log.mark_at(log.last_index).encode())
    queues.close()
    log.close()
    return paths


def damage(path: str | Path, at: int, data: bytes) -> None:
    """Overwrite bytes of a file."""
    with Path(path).open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_good_folder_is_good(tmp_path: Path) -> None:
    write_store(tmp_path / "n0")
    report = verify_store(tmp_path / "n0")
    assert report.problems == []
    assert (report.entries, report.records, report.units, report.queues) == (41, 400, 400, 2)
    assert (report.last_index, report.commit_index, report.last_term) == (41, 41, 1)
    assert report.segments == 1 + report.end_position // SEGMENT_BYTES
    assert main(["log", "verify", str(tmp_path / "n0")]) == 0


def test_shared_units_are_compared_with_the_log(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", queue_files=1)
    assert not Path(paths.consume_queue("T", 1)).exists() or not list(
        Path(paths.consume_queue("T", 1)).iterdir()
    )
    report = verify_store(tmp_path / "n0")
    assert (report.problems, report.units) == ([], 400)
    (shared,) = (path for path in Path(paths.shared_units).iterdir() if path.name.isdecimal())
    damage(shared, 400, b"\xff")
    first = verify_store(tmp_path / "n0").problems[0]
    assert first == f"shared units: {shared} is damaged at byte 0"


def test_missing_shared_units_are_found(tmp_path: Path) -> None:
    write_store(tmp_path / "n0", queue_files=1, skip_unit_of=41)
    (problem,) = verify_store(tmp_path / "n0").problems
    assert problem.endswith("10 units missing from offset 190 on")


@pytest.mark.parametrize("at", [60, 300, 5_000, 40_000])
def test_a_flipped_byte_in_the_log_is_found(tmp_path: Path, at: int) -> None:
    paths = write_store(tmp_path / "n0")
    segment = Path(paths.segment(0))
    damage(segment, at, bytes([segment.read_bytes()[at] ^ 0x10]))
    report = verify_store(tmp_path / "n0")
    assert report.problems[0].startswith("log: at byte ")
    assert main(["log", "verify", str(tmp_path / "n0"), "--output", "json"]) == 1


def test_a_log_that_ends_before_the_commit_mark_is_found(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", entries=3)
    end = verify_store(tmp_path / "n0").end_position
    damage(paths.segment(0), end - 1_200, bytes(1_200))
    assert any("was committed" in problem for problem in verify_store(tmp_path / "n0").problems)


def test_bytes_behind_the_last_entry_are_found(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", entries=3)
    end = verify_store(tmp_path / "n0").end_position
    damage(paths.segment(0), end + 500, b"x")
    (problem,) = verify_store(tmp_path / "n0").problems
    assert problem == f"log: byte {end + 500} behind the last entry is not zero"


def test_a_unit_that_points_elsewhere_is_found(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0")
    file = Path(paths.consume_queue("T", 1)) / f"{0:020}"
    damage(file, 7 * UNIT_BYTES + 7, b"\x01")
    (problem,) = verify_store(tmp_path / "n0").problems
    assert problem.startswith("T queue 1 offset 7: unit ")


def test_missing_units_are_found_after_a_clean_stop_only(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", skip_unit_of=10)
    (problem,) = verify_store(tmp_path / "n0").problems
    assert problem == "T queue 0: 10 units missing from offset 40 on"
    Path(paths.abort).write_bytes(b"1")
    report = verify_store(tmp_path / "n0")
    assert report.good
    assert not report.clean_stop


def test_a_folder_that_is_no_data_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(CliError) as caught:
        verify_store(tmp_path)
    assert caught.value.exit_code == 2
    assert main(["log", "verify", str(tmp_path)]) == 2


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", entries=2)
    lock = OsDisk().lock(paths.lock)
    try:
        assert main(["log", "verify", str(tmp_path / "n0")]) == 1
    finally:
        lock.release()


def test_equal_logs_are_equal_and_the_first_difference_is_named(tmp_path: Path) -> None:
    for name in ("n0", "n1"):
        write_store(tmp_path / name)
    end = verify_store(tmp_path / "n0").end_position
    damage(tmp_path / "n1" / "commitlog" / f"{0:020}", 9_000, b"\xfe")
    left, right = (open_segments(tmp_path / name / "commitlog") for name in ("n0", "n1"))
    assert equal_bytes(left, left, end) is None
    assert equal_bytes(left, right, end) == 9_000
    assert equal_bytes(left, right, 9_000) is None
