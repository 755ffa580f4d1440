"""A data folder out of a backup, for the first member of a new group.

The member is the only founder of its group, under an incarnation that was never used, and the log
ends with an entry that makes it the only member: members of the old group refuse it. The others
start with empty folders and are added. `raft/format` is written last: without it no broker starts
with the folder, and a restore refuses it as one that is not empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dledger.backup.folder import BackupFolder
from dledger.backup.manifest import BackupDamagedError, Manifest
from dledger.backup.verify import verify
from dledger.commitlog.entry import ENTRY_HEADER_BYTES, seal_config
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.mark import SlotFile, store_anchor
from dledger.commitlog.seams import Disk, DiskFile
from dledger.commitlog.segment import LogFormat, encode_blank, place, segment_base
from dledger.commitlog.store_paths import StorePaths
from dledger.raft.identity import Identity
from dledger.raft.journal import TermVote
from dledger.raft.membership import Member, Members
from dledger.raft.wire import is_name
from dledger.remoting.seams import Rng

MAKE_AGAIN: Final = b"queues\n"
"""What `raft/derived_lost` holds: the first start derives queues and key index from the log."""


class RestoreRefusedError(ConfigError):
    """A restore would overwrite something, or was asked for what cannot be; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What the restored member is called: `cluster.name`, `cluster.broker_name`, its `self_id`."""

    cluster: str
    group: str
    name: str


def restore(
    backup: BackupFolder,
    disk: Disk,
    folder: str,
    *,
    owner: Owner,
    rng: Rng,
    written_to: Callable[[int], None] = lambda position: None,
) -> int:
    """Make the data folder *folder* out of *backup*; return its newest entry's index.

    Args:
        backup: Checked whole first, every entry: nothing is written out of one that is damaged.
        folder: Absolute path; an empty folder, or one that is not there yet.
    Raises:
        RestoreRefusedError: The folder is not empty, or no member can be called so.
        NoBackupError, BackupDamagedError, ForeignStoreError: The backup cannot be restored.
        DiskFullError, FlushFailedError: The folder's disk. As after every other error, what was
            written is removed again.
    """
    for kind, name in (("cluster", owner.cluster), ("group", owner.group), ("member", owner.name)):
        if not is_name(name):
            raise RestoreRefusedError(f"{name!r} is no name of a {kind}; nothing was changed")
    there = sorted(set(disk.list_dir(folder)) - {"lost+found"})
    if there:
        raise RestoreRefusedError(
            f"{folder} is not empty, it holds {there[0]}; nothing was changed. Restore into an "
            "empty folder"
        )
    manifest = verify(backup).manifest
    paths = StorePaths(folder)
    with _removed_on_error(disk, paths):
        _write_log(disk, backup, manifest, paths, written_to)
        index, frame, incarnation = _alone(manifest, owner, rng)
        _append(disk, paths, manifest, frame)
        if manifest.begin.first_index > 1:
            store_anchor(disk, paths.anchor, manifest.begin)
        if manifest.tables is not None:
            disk.replace(paths.snapshot, backup.tables(manifest.tables))
        disk.replace(paths.derived_lost, MAKE_AGAIN)
        marks = SlotFile(disk, paths.commit_mark)
        marks.store(manifest.end.encode())
        marks.close()
        slots = SlotFile(disk, paths.vote)
        vote = TermVote(slots)
        vote.set(manifest.end.term + 1, None)
        vote.write(vote.snapshot()[1])
        slots.close()
        Identity.found(
            disk,
            paths.identity,
            cluster=owner.cluster,
            group=owner.group,
            name=owner.name,
            incarnation=incarnation,
        )
        disk.flush_dir(folder)
        log_format = LogFormat(manifest.segment_bytes, manifest.index_units_per_file)
        disk.replace(paths.format, log_format.encode())
    return index


@contextmanager
def _removed_on_error(disk: Disk, paths: StorePaths) -> Iterator[None]:
    try:
        yield
    except BaseException:
        disk.unlink(paths.format)
        disk.remove_tree(paths.commitlog)
        disk.remove_tree(paths.raft)
        raise


def _write_log(
    disk: Disk,
    backup: BackupFolder,
    manifest: Manifest,
    paths: StorePaths,
    written_to: Callable[[int], None],
) -> None:
    size = manifest.segment_bytes
    file: DiskFile | None = None
    base = -1
    try:
        for part in manifest.parts:
            if file is None or segment_base(part.position, size) != base:
                if file is not None:
                    file.flush()
                    file.close()
                base = segment_base(part.position, size)
                file = disk.create(paths.segment(base), size, reserve=True)
            if part.end > base + size:
                raise BackupDamagedError(f"{backup.root}/{part.file} is longer than a segment")
            into = file

            def write(position: int, data: bytes, into: DiskFile = into, base: int = base) -> None:
                into.write_at(position - base, data)
                written_to(position + len(data))

            backup.check_part(part, write)
        assert file is not None
        file.flush()
    finally:
        if file is not None:
            file.close()
    disk.flush_dir(paths.commitlog)


def _alone(manifest: Manifest, owner: Owner, rng: Rng) -> tuple[int, bytes, str]:
    """Return index, frame and incarnation of the entry that makes the member the only one."""
    incarnation = rng.randbytes(16).hex()
    body = Members.of([Member(owner.name, incarnation)]).encode()
    end = manifest.end
    frame = seal_config(
        body,
        index=end.index + 1,
        term=end.term + 1,
        position=place(end.end_position, ENTRY_HEADER_BYTES + len(body), manifest.segment_bytes),
        prev_chain=end.chain,
        store_time_ms=manifest.end_time_ms,
    )
    return end.index + 1, frame, incarnation


def _append(disk: Disk, paths: StorePaths, manifest: Manifest, frame: bytes) -> None:
    size, end = manifest.segment_bytes, manifest.end.end_position
    position = place(end, len(frame), size)
    base = segment_base(position, size)
    if position != end and end % size:
        before = disk.open(paths.segment(segment_base(end, size)))
        before.write_at(end % size, encode_blank(size - end % size))
        before.flush()
        before.close()
    path = paths.segment(base)
    file = disk.open(path) if disk.exists(path) else disk.create(path, size, reserve=True)
    file.write_at(position - base, frame)
    file.flush()
    file.close()
    disk.flush_dir(paths.commitlog)
