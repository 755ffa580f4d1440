"""`dledger log inspect` and `raft history`: what stands in the log of a stopped broker."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from dledger.cli.log_command import terms_of
from dledger.cli.log_verify import open_segments, walk
from dledger.cli.main import main
from dledger.cli.progress import BAR_CHARS, SILENT_S, ProgressLine, line_of
from tests.unit.dledger.test_log_verify import damage, write_store


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
    assert "the log cannot be read further: at byte " in capsys.readouterr().err


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
    entries = list(walk(open_segments(Path(paths.commitlog))))
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
