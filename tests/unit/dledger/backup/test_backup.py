"""Backups of a member's folder: whole, incremental, never half made, damage found."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dledger.backup.restore as restoring
from dledger.backup.create import AnotherGroupError, Created, create
from dledger.backup.folder import MANIFEST, BackupFailedError, BackupFolder, NoBackupError
from dledger.backup.manifest import BackupDamagedError, decode_manifest, encode_manifest, sha256_of
from dledger.backup.restore import Owner, RestoreRefusedError, restore
from dledger.backup.source import NotABrokersFolderError, SegmentGoneError, Source
from dledger.backup.verify import verify
from dledger.commitlog.derive import derive
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import parse_header
from dledger.commitlog.errors import CorruptStoreError, DiskFullError, ForeignStoreError
from dledger.commitlog.seams import DiskFile
from dledger.commitlog.store_paths import StorePaths
from dledger.maintenance import members_of
from dledger.raft.identity import Identity
from dledger.state.snapshot import snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from tests.harness.disk_files import folder_on
from tests.harness.replica_folders import SEGMENT_BYTES, flip, settings, usual, write_folder

pytestmark = pytest.mark.slow

FRAMES = usual(60).frames
OWNER = Owner("c2", "G2", "m0")


def source_folder(
    root: Path, commit: int = len(FRAMES), *, floor: int = 0, name: str = "n0"
) -> Path:
    """Write the folder of a member that knows of *commit* committed entries."""
    shutil.rmtree(root, ignore_errors=True)
    write_folder(root, FRAMES, commit=commit, clean=False, floor=floor)
    identity = StorePaths(str(root)).identity
    Identity.found(OsDisk(), identity, cluster="c", group="G", name=name, incarnation="1" * 32)
    return root


def at(target: Path) -> BackupFolder:
    return BackupFolder.open(str(target))


def back_up(source: Path, target: Path, disk: OsDisk | None = None) -> Created:
    folder = at(target) if disk is None else folder_on(disk, str(target))
    return create(folder, Source(disk or OsDisk(), str(source)), made_at_ms=1)


def restored(target: Path, folder: Path, disk: OsDisk | None = None) -> int:
    rng = random.Random(1)
    return restore(at(target), disk or OsDisk(), str(folder), owner=OWNER, rng=rng)


def content(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@contextmanager
def opened(root: Path):  # type: ignore[no-untyped-def]  # a context manager of a store
    store = ReplicaStore(OsDisk(), settings(root), StateTables)
    try:
        yield store
    finally:
        store.close(clean=False)


def units_of(frames: list[bytes], tables: StateTables) -> dict[tuple[str, int, int], Any]:
    """Return the queue units that follow from entries, of queues that still exist."""
    units = {}
    for frame in frames:
        derived = derive(frame, parse_header(frame), delay_ms={1: 1000, 2: 5000})
        for topic, queue_id, where in derived.groups:
            for offset, unit in zip(
                derived.queue_offset[where].tolist(), derived.units[where].tolist(), strict=True
            ):
                bounds = tables.queues.get((topic, queue_id))
                if bounds is not None and bounds.min_offset <= offset < bounds.max_offset:
                    units[topic, queue_id, offset] = unit
    return units


@pytest.mark.parametrize("floor", [0, 1, 2])
@pytest.mark.parametrize("commit", [len(FRAMES), 50])
def test_restored_folder_has_the_entries_tables_and_units(
    tmp_path: Path, floor: int, commit: int
) -> None:
    source = source_folder(tmp_path / "n0", commit, floor=floor)
    back_up(source, tmp_path / "bk")
    assert restored(tmp_path / "bk", tmp_path / "new") == commit + 1
    with opened(source) as before, opened(tmp_path / "new") as after:
        first = before.log.first_index
        assert (first > 1) == (floor > 0)
        assert (after.log.first_index, after.log.last_index) == (first, commit + 1)
        frames = [bytes(after.log.frame(index)) for index in range(first, commit + 1)]
        assert frames == [bytes(frame) for frame in FRAMES[first - 1 : commit]]
        assert snapshot(after.tables) == snapshot(before.tables)
        assert after.restored_commit_index == commit
        wanted = units_of(frames, before.tables)
        assert len(wanted) > 10
        for (topic, queue_id, offset), unit in wanted.items():
            assert after.queues.queue(topic, queue_id).read(offset, 1).tolist() == [unit]
        members = members_of(after).members
        assert members is not None
        assert [(m.name, m.is_voter) for m in members.members] == [("m0", True)]
        identity = Identity.load(OsDisk(), StorePaths(str(tmp_path / "new")).identity)
        assert (identity.cluster, identity.group, identity.name) == ("c2", "G2", "m0")
        assert identity.voters == {"m0": members.members[0].incarnation}
        assert identity.is_of_another_group({"n0": "1" * 32})


@pytest.mark.parametrize("old", [0, 20])
def test_tables_ahead_of_the_mark_are_committed(tmp_path: Path, old: int) -> None:
    target, mark = tmp_path / "bk", tmp_path / "n0" / "raft" / "commit_mark"
    if old:
        source_folder(tmp_path / "n0", old)
        earlier = mark.read_bytes()
        back_up(tmp_path / "n0", target)
    whole = back_up(source_folder(tmp_path / "n0"), tmp_path / "whole").manifest
    mark.write_bytes(earlier) if old else mark.unlink()
    done = back_up(tmp_path / "n0", target)
    assert done.manifest.end == whole.end
    assert done.copied_entries == len(FRAMES) - old
    restored(target, tmp_path / "new")
    with opened(tmp_path / "new") as store:
        assert store.restored_commit_index == len(FRAMES)
        assert not store.damaged


def test_verify_states_what_a_backup_holds(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    contents = verify(at(tmp_path / "bk"))
    rows = contents.rows()
    assert (rows["first_index"], rows["last_index"]) == (1, len(FRAMES))
    assert rows["entries"] == len(FRAMES)
    assert set(rows["topics"]) == {"T", "U", "SCHEDULE_TOPIC_XXXX"}
    assert sum(rows["topics"].values()) == rows["messages"] > 50
    assert 0 < rows["first_ms"] < rows["last_ms"]


def test_second_create_copies_only_what_is_new(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    log = b""
    copied = 0
    for commit in range(4, len(FRAMES) + 1, 9):
        before = content(target) if target.exists() else {}
        done = back_up(source_folder(tmp_path / "n0", commit), target)
        after = content(target)
        assert not done.began_over
        old = {name: data for name, data in before.items() if name.startswith("log/")}
        assert {name: after[name] for name in old} == old
        new = b"".join(after[n] for n in sorted(after) if n.startswith("log/") and n not in old)
        assert len(new) == done.copied_bytes
        log += new
        copied += done.copied_entries
        assert verify(at(target)).entries == commit == copied
    assert done.copied_entries == 9
    back_up(source_folder(tmp_path / "n0", commit), tmp_path / "whole")
    whole = content(tmp_path / "whole")
    assert log == b"".join(data for name, data in whole.items() if name.startswith("log/"))
    assert back_up(tmp_path / "n0", target).copied_bytes == 0


def test_backup_follows_retention(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    back_up(source_folder(tmp_path / "n0", 50), target)
    done = back_up(source_folder(tmp_path / "n0", floor=1), target)
    assert not done.began_over
    assert done.copied_entries == len(FRAMES) - 50
    assert done.manifest.begin.first_index > 1
    assert min(content(target / "log")) >= f"{SEGMENT_BYTES:020d}"
    verify(at(target))
    restored(target, tmp_path / "new")
    with opened(tmp_path / "new") as store:
        assert store.tables.applied_index == len(FRAMES)


def test_backup_goes_on_with_a_member_that_keeps_more(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    begin = back_up(source_folder(tmp_path / "n0", 50, floor=2), target).manifest.begin
    done = back_up(source_folder(tmp_path / "n1", floor=1), target)
    assert (done.copied_entries, done.manifest.begin) == (len(FRAMES) - 50, begin)
    assert verify(at(target)).entries == len(FRAMES) - begin.first_index + 1


def test_backup_begins_over_behind_a_gap(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    back_up(source_folder(tmp_path / "n0", 3), target)
    done = back_up(source_folder(tmp_path / "n0", floor=1), target)
    assert done.began_over
    assert verify(at(target)).entries == done.copied_entries < len(FRAMES)


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    for commit in (20, len(FRAMES)):
        back_up(source_folder(tmp_path / "n0", commit), target)
    tried = 0
    for name, data in content(target).items():
        step = 149
        for byte in [*range(0, len(data), step), len(data) - 1]:
            flip(target / name, byte)
            with pytest.raises((BackupDamagedError, ForeignStoreError)):
                verify(at(target))
            flip(target / name, byte)
            tried += 1
    assert tried > 60
    verify(at(target))


def test_damage_names_the_place_in_the_log(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    flip(next(iter(sorted((tmp_path / "bk" / "log").iterdir()))), len(FRAMES[0]) + 100)
    with pytest.raises(BackupDamagedError, match=f"byte {len(FRAMES[0])} of the log: no entry 2"):
        verify(at(tmp_path / "bk"))


def test_missing_and_short_files_are_found(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    back_up(source_folder(tmp_path / "n0"), target)
    for name, data in content(target).items():
        if name == MANIFEST:
            continue
        (target / name).write_bytes(data[:-1])
        with pytest.raises(BackupDamagedError):
            verify(at(target))
        (target / name).unlink()
        with pytest.raises(BackupDamagedError, match="cannot be read"):
            verify(at(target))
        (target / name).write_bytes(data)
    verify(at(target))


FULL = (DiskFullError, BackupFailedError)
"""Of the member's disk, and of the backup's."""


class FullDisk(OsDisk):
    """Has space for *steps* steps that write; then every one fails."""

    def __init__(self, steps: int, below: Path) -> None:
        super().__init__()
        self.steps = steps
        self._below = str(below)

    def _step(self, path: str) -> None:
        if path.startswith(self._below):
            self.steps -= 1
            if self.steps < 0:
                raise DiskFullError("no space, as planned")

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        self._step(path)
        return super().create(path, size, reserve=reserve)

    def replace(self, path: str, data: object) -> None:
        self._step(path)
        super().replace(path, data)  # type: ignore[arg-type]  # passed on

    def flush_dir(self, path: str) -> None:
        self._step(path)
        super().flush_dir(path)


def every_interruption(work: Callable[[FullDisk], object], below: Path) -> int:
    """Run *work* with space for one more step each time, until it gets through."""
    for steps in range(100):
        try:
            work(FullDisk(steps, below))
        except FULL:
            continue
        return steps
    raise AssertionError("it never gets through")


def test_interrupted_create_leaves_the_earlier_backup(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    back_up(source_folder(tmp_path / "n0", 20), target)
    manifest = (target / MANIFEST).read_bytes()
    source_folder(tmp_path / "n0")

    def interrupted(disk: FullDisk) -> None:
        try:
            back_up(tmp_path / "n0", target, disk)
        except FULL:
            if (target / MANIFEST).read_bytes() == manifest:
                assert verify(at(target)).entries == 20
            raise

    assert every_interruption(interrupted, target) > 4
    assert verify(at(target)).entries == len(FRAMES)
    named = at(target).need_manifest().files
    assert {name for name in content(target) if name != MANIFEST} == named


def test_interrupted_first_create_is_no_backup(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "n0")
    target = tmp_path / "bk"

    def interrupted(disk: FullDisk) -> None:
        try:
            back_up(source, target, disk)
        except FULL:
            if not (target / MANIFEST).exists():
                with pytest.raises(NoBackupError, match="holds no backup"):
                    verify(at(target))
            raise

    assert every_interruption(interrupted, target) > 4
    verify(at(target))


def test_failed_restore_leaves_nothing(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    new = tmp_path / "new"

    def interrupted(disk: FullDisk) -> None:
        try:
            restored(tmp_path / "bk", new, disk)
        except FULL:
            assert not new.exists() or list(new.iterdir()) == []
            raise

    assert every_interruption(interrupted, new) > 8
    with opened(new) as store:
        assert store.tables.applied_index == len(FRAMES)


def test_killed_restore_is_taken_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    monkeypatch.setattr(restoring, "_removed_on_error", lambda *_: nullcontext())
    refused = 0

    def killed(disk: FullDisk) -> None:
        nonlocal refused
        new = tmp_path / "new"
        shutil.rmtree(new, ignore_errors=True)
        try:
            restored(tmp_path / "bk", new, disk)
        except FULL:
            if new.exists() and list(new.iterdir()) and not (new / "raft" / "format").exists():
                with pytest.raises(RestoreRefusedError, match="is not empty"):
                    restored(tmp_path / "bk", new)
                if list((new / "commitlog").iterdir()):
                    with pytest.raises(ForeignStoreError, match="format is missing"):
                        ReplicaStore(OsDisk(), settings(new), StateTables)
                    refused += 1
            raise

    assert every_interruption(killed, tmp_path / "new") > 8
    assert refused > 4


def test_restore_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "n0")
    back_up(source, tmp_path / "bk")
    before = content(source)
    with pytest.raises(RestoreRefusedError, match="is not empty, it holds abort"):
        restored(tmp_path / "bk", source)
    assert content(source) == before
    with pytest.raises(RestoreRefusedError, match="no name of a member"):
        restore(
            at(tmp_path / "bk"), OsDisk(), str(tmp_path / "x"),
            owner=Owner("c", "G", ""), rng=random.Random(1),
        )  # fmt: skip
    assert not (tmp_path / "x").exists()


def test_restore_refuses_a_damaged_backup(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    new = tmp_path / "new"
    for path in [*(tmp_path / "bk" / "log").iterdir(), *(tmp_path / "bk" / "tables").iterdir()]:
        flip(path, path.stat().st_size // 2)
        with pytest.raises(BackupDamagedError):
            restored(tmp_path / "bk", new)
        flip(path, path.stat().st_size // 2)
        assert not new.exists() or list(new.iterdir()) == []


def test_damaged_source_is_not_copied(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    back_up(source_folder(tmp_path / "n0", 20), target)
    source = source_folder(tmp_path / "n0")
    newest = parse_header(FRAMES[-1]).position
    flip(source / "commitlog" / f"{newest - newest % SEGMENT_BYTES:020d}", newest % SEGMENT_BYTES)
    with pytest.raises(CorruptStoreError, match=r"of the log: no entry .* another member"):
        back_up(source, target)
    assert verify(at(target)).entries == 20


def test_source_of_another_group_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "bk"
    back_up(source_folder(tmp_path / "n0", 20), target)
    before = content(target)
    with pytest.raises(AnotherGroupError, match="identity"):
        back_up(source_folder(tmp_path / "other", name="n1"), target)
    assert content(target) == before


def test_source_that_is_behind_is_refused(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    with pytest.raises(CorruptStoreError, match=r"up to 20, the backup goes up to"):
        back_up(source_folder(tmp_path / "n0", 20), tmp_path / "bk")
    verify(at(tmp_path / "bk"))


def test_target_with_other_files_is_refused(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "n0")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("keep")
    with pytest.raises(NoBackupError, match="holds letter"):
        back_up(source, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter"]


def test_source_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotABrokersFolderError, match="no data folder"):
        back_up(tmp_path, tmp_path / "bk")
    source = source_folder(tmp_path / "n0")
    (source / "raft" / "commit_mark").unlink()
    (source / "raft" / "snapshot").unlink()
    with pytest.raises(NotABrokersFolderError, match="no committed entry yet"):
        back_up(source, tmp_path / "bk")
    source = source_folder(tmp_path / "n0")
    (source / "raft" / "install").write_bytes(b"a leader's")
    with pytest.raises(CorruptStoreError, match="being refilled"):
        back_up(source, tmp_path / "bk")
    source = source_folder(tmp_path / "n0")
    (source / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(SegmentGoneError, match="make it again"):
        back_up(source, tmp_path / "bk")
    with pytest.raises(NoBackupError):
        verify(at(tmp_path / "bk"))


def test_newer_backup_is_refused_by_its_version(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    path = tmp_path / "bk" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'{"format":1,', b'{"format":2,"more":[],'))
    with pytest.raises(ForeignStoreError, match="has format 2"):
        verify(at(tmp_path / "bk"))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "log/../../x", "..", "log/a\0b", ""])
def test_manifest_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    manifest = decode_manifest((tmp_path / "bk" / MANIFEST).read_bytes(), MANIFEST)
    part = msgspec.structs.replace(manifest.parts[0], file=name)
    hostile = encode_manifest(msgspec.structs.replace(manifest, parts=(part,)))
    with pytest.raises(BackupDamagedError, match="it names a file"):
        decode_manifest(hostile, MANIFEST)


def leaves(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield where each value of a document stands."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, *path, key)


def test_restore_takes_no_odd_manifest_with_a_right_sum(tmp_path: Path) -> None:
    """A sum shows no maker: each value is one that may be, or the manifest is refused."""
    source, target = source_folder(tmp_path / "n0", floor=1), tmp_path / "bk"
    back_up(source, target)
    manifest = target / MANIFEST
    sealed = msgspec.json.decode(manifest.read_bytes())
    text = manifest.read_bytes()
    free: set[tuple[str | int, ...]] = {
        (name,) for name in ("cluster", "group", "group_identity", "member", "made_at_ms")
    }
    # Of the entry before the first one nothing is there but its chain.
    free |= {("index_units_per_file",), ("begin", 2), ("begin", 4)}
    odds: tuple[Any, ...] = (None, -1, 0, 1, 1 << 31, 1 << 63, 1 << 70, "x", [], {})
    for path in leaves(sealed["manifest"]):
        for odd in odds:
            document = msgspec.json.decode(text)["manifest"]
            holder = document
            for key in path[:-1]:
                holder = holder[key]
            if holder[path[-1]] == odd:
                continue
            holder[path[-1]] = odd
            checksum = sha256_of(json.dumps(document, separators=(",", ":")).encode())
            changed = {"manifest": document, "sha256": checksum}
            manifest.write_text(json.dumps(changed, separators=(",", ":")) + "\n")
            new = tmp_path / "new"
            try:
                restored(target, new)
            except (CorruptStoreError, ForeignStoreError):
                assert not new.exists() or not any(new.rglob("*")), (path, odd)
            else:
                assert path in free, (path, odd)
                shutil.rmtree(new)


def test_restore_checks_each_entry_before_it_writes(tmp_path: Path) -> None:
    """A file whose sum was made again."""
    source, target = source_folder(tmp_path / "n0"), tmp_path / "bk"
    made = back_up(source, target).manifest
    part = made.parts[0]
    file = target / part.file
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    parts = (msgspec.structs.replace(part, sha256=sha256_of(bytes(data))), *made.parts[1:])
    changed = msgspec.structs.replace(made, parts=parts)
    (target / MANIFEST).write_bytes(encode_manifest(changed))
    with pytest.raises(BackupDamagedError, match="of the log"):
        restored(target, tmp_path / "new")
    assert not (tmp_path / "new").exists()
