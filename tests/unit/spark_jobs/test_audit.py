"""`dledger audit`: equal replicas are equal; one wrong byte is named with its replica and place."""

import fcntl
import json
import shutil
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.cli.main import main
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import parse_header
from dledger.commitlog.key_run import open_run, write_run
from dledger.commitlog.mark import Anchor, SlotFile, store_anchor
from dledger.spark_jobs.audit.compare import audit
from dledger.spark_jobs.audit.folder import NotAFolderError, open_folder
from dledger.spark_jobs.audit.segment_report import (
    ANCHOR,
    BLANK,
    ENTRY,
    ENTRY_INDEX,
    FORK,
    KEY_INDEX,
    LOST,
    MARK,
    OFFSETS,
    QUEUE_UNIT,
    Report,
)
from tests.harness.extent import examples
from tests.harness.replica_folders import (
    SEGMENT_BYTES,
    START_MS,
    Writer,
    fill,
    flip,
    usual,
    write_folder,
    write_group,
)

pytestmark = pytest.mark.slow

LOG = usual()
HEADERS = [parse_header(frame) for frame in LOG.frames]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three equal folders; a test that changes one changes it back."""
    return write_group(tmp_path_factory.mktemp("group"), LOG.frames)


def segment(root: Path, position: int) -> Path:
    return root / "commitlog" / f"{position // SEGMENT_BYTES * SEGMENT_BYTES:020d}"


def entry_at(position: int) -> int:
    """Return the entry whose frame holds a byte; the one before, for bytes of a blank."""
    return max(header.index for header in HEADERS if header.position <= position)


def notes(report: Report) -> str:
    return "\n".join(f"{note.replica}: {note.text}" for note in report.notes)


def kinds(report: Report) -> set[tuple[str, str]]:
    return {(finding.replica, finding.kind) for finding in report.findings}


def test_equal_replicas_are_equal_and_everything_was_looked_at(group: list[Path]) -> None:
    report = audit(group)
    assert (report.verdict, report.reason, report.findings, report.notes) == ("equal", "", [], [])
    assert report.entries == report.commit_index == len(LOG.frames)
    assert report.records == report.units == sum(header.record_count for header in HEADERS)
    assert report.commit_position == HEADERS[-1].end_position > 3 * SEGMENT_BYTES
    assert report.keys > report.records
    assert [one.last_index for one in report.replicas] == [len(LOG.frames)] * 3


@settings(max_examples=examples(100), deadline=None)
@given(
    position=st.integers(0, HEADERS[-1].end_position - 1),
    mask=st.sampled_from([1 << bit for bit in range(8)]),
    number=st.integers(0, 2),
    count=st.integers(2, 3),
)
def test_any_flipped_byte_of_the_log_is_named(
    group: list[Path], position: int, mask: int, number: int, count: int
) -> None:
    folders = [group[number], *(root for root in group if root != group[number])][:count]
    path = segment(group[number], position)
    flip(path, position % SEGMENT_BYTES, mask)
    try:
        report = audit(folders)
    finally:
        flip(path, position % SEGMENT_BYTES, mask)
    (finding,) = report.findings
    assert report.verdict == "parted"
    assert finding.replica == str(group[number])
    assert finding.file == f"commitlog/{path.name}"
    assert (finding.byte, finding.position) == (position % SEGMENT_BYTES, position)
    assert (finding.index, finding.count) == (entry_at(position), 1)


BLANKS = [
    (before.end_position, after.position)
    for before, after in pairwise(HEADERS)
    if before.end_position < after.position
]


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), mask=st.sampled_from([1 << bit for bit in range(8)]))
def test_any_flipped_byte_of_a_blank_is_named(
    group: list[Path], data: st.DataObject, mask: int
) -> None:
    begin, end = data.draw(st.sampled_from(BLANKS))
    position = data.draw(st.integers(begin, end - 1))
    path = segment(group[0], position)
    flip(path, position % SEGMENT_BYTES, mask)
    try:
        report = audit(group)
    finally:
        flip(path, position % SEGMENT_BYTES, mask)
    (finding,) = report.findings
    assert (finding.replica, finding.kind) == (str(group[0]), BLANK)
    assert (finding.position, finding.index) == (position, entry_at(position))


def test_a_segment_that_does_not_follow_the_one_before_is_found(tmp_path: Path) -> None:
    other = Writer(time_ms=START_MS + 1)
    fill(other)
    roots = write_group(tmp_path / "group", LOG.frames)
    stranger = write_folder(tmp_path / "stranger", other.frames)
    for root in roots:
        shutil.copy(segment(stranger, 0), segment(root, 0))
    report = audit(roots)
    first = next(header for header in HEADERS if header.position == SEGMENT_BYTES)
    forks = [finding for finding in report.findings if finding.kind == FORK]
    assert [(f.replica, f.index, f.position) for f in forks] == [("", first.index, SEGMENT_BYTES)]
    assert report.verdict == "parted"


def derived_bytes() -> Iterator[tuple[str, int, int]]:
    """Yield bytes of derived files that mean something: file below a folder, first, end."""
    units = {("T", 0): 0, ("T", 1): 0}
    for key in units:
        units[key] = LOG.offsets[key]
    for (topic, queue_id), end in units.items():
        for begin in range(0, end, 16):
            file = f"consumequeue/{topic}/{queue_id}/{begin * 20:020d}"
            yield file, 0, 20 * min(16, end - begin)
    yield "raft/entryindex/" + "0" * 20, 32, 32 * (1 + len(LOG.frames))


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), mask=st.sampled_from([1 << bit for bit in range(8)]))
def test_flipped_byte_of_a_unit_is_named(group: list[Path], data: st.DataObject, mask: int) -> None:
    file, first, end = data.draw(st.sampled_from(list(derived_bytes())))
    byte = data.draw(st.integers(first, end - 1))
    flip(group[1] / file, byte, mask)
    try:
        report = audit(group)
    finally:
        flip(group[1] / file, byte, mask)
    (finding,) = report.findings
    assert report.verdict == "parted"
    kind = ENTRY_INDEX if "entryindex" in file else QUEUE_UNIT
    assert (finding.replica, finding.kind) == (str(group[1]), kind)
    assert (finding.file, finding.byte) == (file, byte)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), mask=st.sampled_from([1 << bit for bit in range(8)]))
def test_a_flipped_byte_of_a_key_index_file_is_found(
    group: list[Path], data: st.DataObject, mask: int
) -> None:
    path = data.draw(st.sampled_from(sorted((group[2] / "index").iterdir())))
    byte = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, byte, mask)
    try:
        report = audit(group)
    finally:
        flip(path, byte, mask)
    assert report.verdict == "parted"
    assert kinds(report) == {(str(group[2]), KEY_INDEX)}
    assert any(finding.file in (f"index/{path.name}", "index") for finding in report.findings)


def test_run_that_a_merge_has_joined_is_no_finding(tmp_path: Path) -> None:
    group = write_group(tmp_path, LOG.frames)
    disk, (path, *_) = OsDisk(), sorted((group[2] / "index").iterdir())
    whole = open_run(disk, str(path))
    write_run(disk, str(path.parent), whole.first, whole.last - 1, whole.read(disk)[::2])
    assert audit(group).findings == []


def test_a_replica_that_lags_is_equal_as_far_as_it_goes(tmp_path: Path) -> None:
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", LOG.frames[:30], commit=20),
        write_folder(tmp_path / "n2", LOG.frames, commit=25),
    ]
    report = audit(roots)
    assert (report.verdict, report.findings) == ("equal", [])
    assert [one.last_index for one in report.replicas] == [37, 30, 37]
    assert [one.commit_index for one in report.replicas] == [37, 20, 25]
    assert "n1: ends before entry 31; entry 37 is committed" in notes(report)


def test_entries_behind_the_newest_mark_may_differ(tmp_path: Path) -> None:
    left, right = usual(), usual()
    left.term = right.term = 3
    left.messages("T", 0, 2)
    right.no_op()
    roots = [
        write_folder(tmp_path / "n0", left.frames, commit=37),
        write_folder(tmp_path / "n1", right.frames, commit=37),
    ]
    report = audit(roots)
    assert (report.verdict, report.findings) == ("equal", [])
    assert notes(report).count("1 entries behind the commit point are not compared") == 2


def test_uncommitted_other_entry_noted_not_a_difference(tmp_path: Path) -> None:
    other = Writer()
    other.no_op()
    other.topics(put=["T", "U"])
    other.messages("T", 0, 9)
    assert other.frames[:2] == LOG.frames[:2]
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", other.frames, commit=2),
        write_folder(tmp_path / "n2", LOG.frames),
    ]
    report = audit(roots)
    assert (report.verdict, report.findings) == ("equal", [])
    assert "n1: holds entries from 3 on that were never committed" in notes(report)


def test_two_committed_entries_at_one_index_diverge(tmp_path: Path) -> None:
    other = Writer()
    other.no_op()
    other.topics(put=["T", "U"])
    other.messages("T", 0, 9)
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", other.frames),
        write_folder(tmp_path / "n2", LOG.frames),
    ]
    report = audit(roots)
    forks = [finding for finding in report.findings if finding.kind == FORK]
    assert [(f.replica, f.index) for f in forks] == [(str(roots[1]), 3)]
    assert (str(roots[1]), MARK) in kinds(report)
    assert not any(replica in (str(roots[0]), str(roots[2])) for replica, _ in kinds(report))

    two = audit(roots[:2])
    assert two.verdict == "parted"
    assert any(f.replica == "" and "nothing shows which is right" in f.detail for f in two.findings)


def test_segments_one_replica_removed_compared_in_others(tmp_path: Path) -> None:
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", LOG.frames, floor=2),
        write_folder(tmp_path / "n2", LOG.frames, floor=1),
    ]
    report = audit(roots)
    assert (report.verdict, report.findings) == ("equal", [])
    begins = [one.first_index for one in report.replicas]
    assert begins[0] == 1 < begins[2] < begins[1]
    assert f"n1: begins with entry {begins[1]}" in notes(report)
    assert "entries are held by one replica alone" in notes(report)

    flip(segment(roots[2], 2 * SEGMENT_BYTES), 100)
    (finding,) = audit(roots).findings
    assert (finding.replica, finding.position) == (str(roots[2]), 2 * SEGMENT_BYTES + 100)


def test_an_anchor_that_names_another_entry_is_found(tmp_path: Path) -> None:
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", LOG.frames, floor=2),
    ]
    anchor = open_folder(roots[1]).anchor
    store_anchor(
        OsDisk(),
        str(roots[1] / "raft" / "anchor"),
        Anchor(anchor.first_index, anchor.position, anchor.prev_term, 7, 0),
    )
    assert kinds(audit(roots)) == {(str(roots[1]), ANCHOR)}


def test_torn_tail_above_mark_noted_not_a_difference(tmp_path: Path) -> None:
    torn = LOG.frames[30][: len(LOG.frames[30]) // 2]
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", LOG.frames),
        write_folder(tmp_path / "n2", LOG.frames[:30], commit=28, clean=False, tail=torn),
    ]
    report = audit(roots)
    assert (report.verdict, report.findings) == ("equal", [])
    assert "n2: a torn tail at byte" in notes(report)
    assert "n2: not stopped cleanly" in notes(report)


def test_hole_above_mark_is_damage_when_the_log_continues(tmp_path: Path) -> None:
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", LOG.frames, commit=10, clean=False),
    ]
    position = HEADERS[20].position + 80
    flip(segment(roots[1], position), position % SEGMENT_BYTES)
    (finding,) = audit(roots).findings
    assert (finding.replica, finding.kind, finding.index) == (str(roots[1]), ENTRY, 21)
    assert finding.position == position


def test_a_log_that_was_closed_with_more_has_lost_it(tmp_path: Path) -> None:
    roots = [
        write_folder(tmp_path / "n0", LOG.frames),
        write_folder(tmp_path / "n1", LOG.frames, commit=10),
    ]
    last = HEADERS[-1]
    with segment(roots[1], last.position).open("r+b") as file:
        file.seek(last.position % SEGMENT_BYTES)
        file.write(bytes(last.size))
    (finding,) = audit(roots).findings
    assert (finding.replica, finding.kind, finding.index) == (str(roots[1]), LOST, 37)


def test_a_missing_segment_below_the_mark_is_lost(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames)
    (roots[0] / "commitlog" / f"{SEGMENT_BYTES:020d}").unlink()
    report = audit(roots)
    (finding,) = report.findings
    assert (finding.replica, finding.kind) == (str(roots[0]), LOST)
    assert finding.file == f"commitlog/{SEGMENT_BYTES:020d}"


def test_the_same_damage_on_all_is_no_equality(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames)
    position = HEADERS[12].position + 70
    for root in roots:
        flip(segment(root, position), position % SEGMENT_BYTES)
    report = audit(roots)
    assert report.verdict == "parted"
    assert {(f.replica, f.index) for f in report.findings} == {(str(root), 13) for root in roots}
    assert all("no replica holds it whole" in f.detail for f in report.findings)


def test_units_that_queues_share_are_compared(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames, queue_files=1)
    shared = roots[0] / "consumequeue.shared" / f"{1:020d}"
    assert b"T" in shared.read_bytes()
    assert audit(roots).verdict == "equal"
    data = bytearray(shared.read_bytes())
    length = int.from_bytes(data[4:8], "big")
    data[12 + length - 3] ^= 1  # of the tags code in the last unit, with a checksum that fits
    data[8:12] = zlib.crc32(data[12 : 12 + length]).to_bytes(4, "big")
    shared.write_bytes(data)
    (finding,) = audit(roots).findings
    assert (finding.kind, finding.count) == (QUEUE_UNIT, 1)


def test_missing_units_count_after_a_clean_stop_only(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames)
    file = roots[0] / "consumequeue" / "T" / "0" / ("0" * 20)
    with file.open("r+b") as queue:
        queue.write(bytes(40))
    (finding,) = audit(roots).findings
    assert (finding.kind, finding.count, finding.byte) == (QUEUE_UNIT, 2, 6)
    assert finding.detail == "T queue 0 offset 0: the unit is missing"
    (roots[0] / "abort").write_text("1")
    report = audit(roots)
    assert report.verdict == "equal"
    assert "n0: 2 queue units are not written yet" in notes(report)


def test_a_lost_key_index_is_found(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames)
    shutil.rmtree(roots[0] / "index")
    report = audit(roots)
    assert kinds(report) == {(str(roots[0]), KEY_INDEX)}
    assert report.findings[0].count > 10


def test_offsets_with_a_gap_are_found_though_all_replicas_agree(tmp_path: Path) -> None:
    writer = usual(4)
    frames = list(writer.frames)
    roots = write_group(tmp_path, frames)
    for root in roots:
        store = root  # the same log, written past the checks of a store
        from dledger.commitlog.entry_log import EntryLog

        log = EntryLog.open(OsDisk(), str(store), segment_bytes=SEGMENT_BYTES)
        late = Writer(
            seed=9, term=2, index=writer.index, chain=writer.chain, end=writer.end,
            time_ms=writer.time_ms, offsets={("T", 0): 90},
        )  # fmt: skip
        late.messages("T", 0, 1)
        log.append(late.frames[0])
        log.flush()
        mark = log.mark_at(log.last_index)
        log.close()
        (root / "abort").write_text("1")
        SlotFile(OsDisk(), str(root / "raft" / "commit_mark")).store(mark.encode())
    report = audit(roots)
    assert kinds(report) == {("", OFFSETS)}
    assert "T queue 0 goes on with offset 90" in report.findings[0].detail


def test_nothing_is_written_to_a_folder(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames)
    for root in roots:
        for path in [root, *root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for r in roots for p in r.rglob("*")}
    try:
        assert audit(roots).verdict == "equal"
        assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in before} == before
    finally:
        for path in before:
            path.chmod(0o755)


def test_folder_in_use_is_read_and_noted(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames)
    with (roots[1] / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = audit(roots)
        assert report.verdict == "equal"
        assert [one.running for one in report.replicas] == [False, True, False]
        assert "n1: a broker runs on it" in notes(report)
        flip(roots[1] / "consumequeue" / "T" / "0" / ("0" * 20), 7)
        moving = audit(roots)
        assert moving.verdict == "unknown"
        assert "a broker went on" in moving.reason


def test_a_mark_that_cannot_be_read_makes_it_unknown(tmp_path: Path) -> None:
    roots = write_group(tmp_path, LOG.frames)
    (roots[2] / "raft" / "commit_mark").write_bytes(b"\xff" * 8192)
    report = audit(roots)
    assert (report.verdict, report.findings) == ("unknown", [])
    assert "neither slot is whole" in report.reason


def test_without_anything_to_compare_it_is_unknown(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "n0", LOG.frames)
    assert audit([root]).verdict == "unknown"
    bare = tmp_path / "n1"
    shutil.copytree(root, bare)
    (bare / "raft" / "commit_mark").unlink()
    shutil.copytree(bare, tmp_path / "n2")
    assert "no folder has a commit mark" in audit([bare, tmp_path / "n2"]).reason
    with pytest.raises(NotAFolderError, match="no commitlog"):
        audit([root, tmp_path / "nothing"])


def test_audit_command_prints_and_exits_with_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = write_group(tmp_path, LOG.frames)
    arguments = ["audit", *map(str, roots)]
    assert main([*arguments, "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "equal"
    flip(segment(roots[1], 5000), 5000 % SEGMENT_BYTES)
    assert main([*arguments, "--output", "json"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert reported["findings"][0]["byte"] == 5000 - SEGMENT_BYTES
    assert reported["findings"][0]["replica"] == str(roots[1])
    assert main(arguments) == 1
    assert f"{SEGMENT_BYTES:020d}" in capsys.readouterr().out
    (roots[2] / "raft" / "commit_mark").write_bytes(b"\xff" * 8192)
    flip(segment(roots[1], 5000), 5000 % SEGMENT_BYTES)
    assert main([*arguments, "--output", "json"]) == 2
    assert main(["audit", str(roots[0])]) == 2
