"""``dledger log``: the files of a stopped broker are checked, read and compared."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dledger.cli.main import main
from dledger.cli.progress import BAR_CHARS, SILENT_S, ProgressLine, line_of
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.derive import derive
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import RecordBatch, Run, parse_header, seal_entry, seal_no_op
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.mark import SlotFile
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.commitlog.record import encode_record, pack_host
from dledger.commitlog.store_paths import StorePaths
from dledger.log_report import entries_of, terms_of, verify_store
from dledger.spark_jobs.audit.folder import open_folder

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
    assert (report.entries, report.records, report.units) == (41, 400, 400)
    assert (report.last_index, report.commit_index, report.last_term) == (41, 41, 1)
    assert main(["log", "verify", str(tmp_path / "n0")]) == 0


@pytest.mark.parametrize("at", [60, 300, 5_000, 40_000])
def test_a_flipped_byte_in_the_log_is_found(tmp_path: Path, at: int) -> None:
    paths = write_store(tmp_path / "n0")
    segment = Path(paths.segment(0))
    damage(segment, at, bytes([segment.read_bytes()[at] ^ 0x10]))
    report = verify_store(tmp_path / "n0")
    assert report.problems[0].startswith("log: byte ")
    assert main(["log", "verify", str(tmp_path / "n0"), "--output", "json"]) == 1


def test_a_log_that_ends_before_the_commit_mark_is_found(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", entries=3)
    end = verify_store(tmp_path / "n0").end_position
    damage(paths.segment(0), end - 1_200, bytes(1_200))
    assert any("entry 4" in problem for problem in verify_store(tmp_path / "n0").problems)


def test_bytes_behind_the_last_entry_are_found(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", entries=3)
    end = verify_store(tmp_path / "n0").end_position
    damage(paths.segment(0), end + 500, b"x")
    (problem,) = verify_store(tmp_path / "n0").problems
    assert problem == f"log: byte {end + 500} behind the last whole entry is not zero"


def test_a_unit_that_points_elsewhere_is_found(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0")
    file = Path(paths.consume_queue("T", 1)) / f"{0:020}"
    damage(file, 7 * UNIT_BYTES + 7, b"\x01")
    (problem,) = verify_store(tmp_path / "n0").problems
    assert "T queue 1 offset 7: phy_offset is " in problem


def test_a_folder_that_is_no_data_folder_is_a_usage_error(tmp_path: Path) -> None:
    assert main(["log", "verify", str(tmp_path)]) == 2


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    paths = write_store(tmp_path / "n0", entries=2)
    lock = OsDisk().lock(paths.lock)
    try:
        assert main(["log", "verify", str(tmp_path / "n0")]) == 1
    finally:
        lock.release()


def listed(
    capsys: pytest.CaptureFixture[str], *tokens: str, status: int = 0
) -> list[dict[str, Any]]:
    """Run a command and return its JSON rows."""
    capsys.readouterr()
    assert main([*tokens, "--output", "json"]) == status
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_inspect_lists_entries_from_an_index_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tmp_path / "n0")
    rows = listed(capsys, "log", "inspect", str(tmp_path / "n0"), "--from", "3", "--count", "2")
    assert [(row["index"], row["kind"], row["records"]) for row in rows] == [
        (3, "records", 10),
        (4, "records", 10),
    ]
    assert rows[0]["first"] == "T queue 1 offset 0"
    assert rows[1]["first"] == "T queue 0 offset 10"
    assert rows[0]["topics"] == {"T": 10}
    (first,) = listed(capsys, "log", "inspect", str(tmp_path / "n0"), "--count", "1")
    assert (first["kind"], first["first"]) == ("no-op", "")


def test_inspect_shows_only_entries_of_a_topic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tmp_path / "n0", entries=3)
    assert len(listed(capsys, "log", "inspect", str(tmp_path / "n0"), "--topic", "T")) == 3
    assert listed(capsys, "log", "inspect", str(tmp_path / "n0"), "--topic", "U") == []


def test_inspect_ends_where_the_log_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_store(tmp_path / "n0", entries=3)
    damage(paths.segment(0), 300, b"\xff\xff")
    (row,) = listed(capsys, "log", "inspect", str(tmp_path / "n0"), status=1)
    assert row["index"] == 1
    assert main(["log", "inspect", str(tmp_path / "n0")]) == 1
    assert "the log cannot be read further: byte " in capsys.readouterr().err


def test_inspect_of_another_folder_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log", "inspect", str(tmp_path)]) == 2
    assert "is not a data folder" in capsys.readouterr().err


def test_history_has_a_row_for_each_term(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_store(tmp_path / "n0", entries=4)
    first, row = listed(capsys, "raft", "history", str(tmp_path / "n0"))
    assert (first["term"], first["entries"], first["leader"]) == (0, 1, None)
    assert first["began"] is None, "no message, no date"
    assert row == {
        "term": 1,
        "began": "1970-01-01T00:00:01.002",
        "first_index": 2,
        "entries": 4,
        "records": 40,
        "leader": "127.0.0.1:10911",
    }
    entries = list(entries_of(open_folder(Path(paths.root))))
    for entry in entries[3:]:
        entry.header.term = 7
    assert [(row["term"], row["first_index"], row["entries"]) for row in terms_of(entries)] == [
        (0, 1, 1),
        (1, 2, 2),
        (7, 4, 2),
    ]


class Terminal(io.StringIO):
    """Text that is written to a terminal."""

    def isatty(self) -> bool:
        """A terminal."""
        return True


def test_progress_appears_after_two_seconds() -> None:
    out, now = Terminal(), [0.0]
    line = ProgressLine(10, "entries", out, lambda: now[0])
    line.add()
    assert out.getvalue() == ""
    now[0] = SILENT_S
    line.add()
    assert "2 of 10 entries" in out.getvalue()
    line.end()
    assert out.getvalue().endswith("\r\x1b[K")


def test_progress_is_silent_where_no_terminal_is() -> None:
    out, now = io.StringIO(), [0.0]
    line = ProgressLine(10, "entries", out, lambda: now[0])
    now[0] = 60.0
    line.to(9)
    line.end()
    assert out.getvalue() == ""


def test_progress_line_has_rate_and_time_left() -> None:
    half = "#" * (BAR_CHARS // 2) + "." * (BAR_CHARS // 2)
    assert line_of(50, 100, "MB", 5.0) == f"[{half}]  50%  50 of 100 MB, 10 MB/s, 5 s left"
    assert line_of(50, 0, "MB", 5.0) == "50 MB, 10 MB/s"
