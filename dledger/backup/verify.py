"""Checking a backup: every file, every entry, and what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dledger.backup.entries import EntryDamagedError, entries
from dledger.backup.folder import BackupFolder
from dledger.backup.manifest import BackupDamagedError, Manifest
from dledger.commitlog.derive import Derived, derive
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError, MQError
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.snapshot import load
from dledger.state.tables import StateTables


@dataclass(slots=True)
class Contents:
    """What a backup holds.

    Attributes:
        topics: Messages by topic, of deleted topics too; half messages are not counted.
        first_ms, last_ms: Store times of the first and the newest message; 0: there is none.
    """

    manifest: Manifest
    entries: int = 0
    messages: int = 0
    topics: Counter[str] = field(default_factory=Counter)
    first_ms: int = 0
    last_ms: int = 0

    def add(self, store_time_ms: int, derived: Derived) -> None:
        """Count the messages of one entry."""
        for topic, _, where in derived.groups:
            if topic == STATE_TOPIC:
                continue
            count = len(derived.queue_offset[where])
            self.topics[topic] += count
            self.messages += count
            self.first_ms = self.first_ms or store_time_ms
            self.last_ms = store_time_ms

    def rows(self) -> dict[str, Any]:
        """Return the facts for people and JSON."""
        manifest = self.manifest
        return {
            "cluster": manifest.cluster,
            "group": manifest.group,
            "group_identity": manifest.group_identity,
            "member": manifest.member,
            "first_index": manifest.begin.first_index,
            "last_index": manifest.end.index,
            "last_term": manifest.end.term,
            "chain": f"{manifest.end.chain:016x}",
            "entries": self.entries,
            "messages": self.messages,
            "topics": dict(sorted(self.topics.items())),
            "first_ms": self.first_ms,
            "last_ms": self.last_ms,
            "files": len(manifest.files),
            "size_bytes": manifest.size_bytes,
        }


def verify(
    folder: BackupFolder, *, checked_to: Callable[[int], None] = lambda position: None
) -> Contents:
    """Check the backup in *folder* and return what it holds. Nothing is changed.

    Raises:
        NoBackupError: There is none.
        BackupDamagedError: It is damaged, naming the place.
        ForeignStoreError: It is of another format.
    """
    manifest, root = folder.need_manifest(), folder.root
    tables = loaded_tables(folder, manifest)
    check_parts_join(manifest, root)
    contents, begin = Contents(manifest), manifest.begin
    if tables is not None and tables.applied_index == begin.first_index - 1:
        _check_tables(tables, begin.prev_chain, root)
    try:
        for header, frame in entries(
            folder.reader(manifest.parts),
            begin.mark,
            begin.prev_store_time_ms,
            manifest.end,
            manifest.segment_bytes,
        ):
            contents.entries += 1
            if tables is not None and header.index == tables.applied_index:
                _check_tables(tables, header.chain, root)
            if header.record_count:
                contents.add(header.store_time_ms, derive(frame, header))
            checked_to(header.end_position)
    except (EntryDamagedError, CorruptEntryError, CorruptRecordError) as error:
        raise BackupDamagedError(f"{root} is damaged: {error}") from error
    if (header.position, header.store_time_ms) != (manifest.end.position, manifest.end_time_ms):
        raise BackupDamagedError(f"{root} is damaged: its newest entry stands elsewhere")
    # What stands between entries and in front of the first one is in no checksum of an entry.
    for part in manifest.parts:
        folder.check_part(part)
    return contents


def loaded_tables(folder: BackupFolder, manifest: Manifest) -> StateTables | None:
    """Return the tables of a backup; None where it has none and needs none.

    Raises BackupDamagedError: they are damaged, or are missing.
    """
    found = manifest.tables
    if found is None:
        if manifest.begin.first_index > 1:
            raise BackupDamagedError(
                f"{folder.root} is damaged: its log begins with entry "
                f"{manifest.begin.first_index}, and there are no tables"
            )
        return None
    data = folder.tables(found)
    try:
        tables = load(data)
    except MQError as error:
        raise BackupDamagedError(f"{folder.root}/{found.file} is damaged: {error}") from error
    fits = manifest.begin.first_index <= tables.applied_index + 1 <= manifest.end.index + 1
    same_floor = tables.floor.first_index == manifest.begin.first_index
    fits = fits and (not same_floor or tables.floor == manifest.begin)
    if tables.applied_index != found.applied_index or not fits:
        raise BackupDamagedError(f"{folder.root}/{found.file} does not fit the log of this backup")
    return tables


def check_parts_join(manifest: Manifest, root: str) -> None:
    """Check that the files of a backup hold the log without a gap.

    Raises BackupDamagedError: they do not.
    """
    begin, end = manifest.begin.position, manifest.end.end_position
    parts = manifest.parts
    joined = all(a.end == b.position for a, b in pairwise(parts))
    if not (parts and joined and parts[0].position <= begin < end == parts[-1].end):
        raise BackupDamagedError(f"{root} is damaged: its files do not hold the log without a gap")


def _check_tables(tables: StateTables, chain: int, root: str) -> None:
    if tables.applied_chain != chain:
        raise BackupDamagedError(f"{root} is damaged: the tables are of another log")
