"""Checking a backup: every file, every entry, and what it holds.

The walk over stored entries checks each one whole before anything is done with it. An entry counts
if both checksums fit, it continues the chain, and index, term, time and position follow the entry
before. What is walked goes up to a known entry: anything else ends the walk with an error that
names the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from dledger.backup.folder import BackupFolder
from dledger.backup.manifest import BackupDamagedError, Manifest
from dledger.commitlog.derive import Derived, derive
from dledger.commitlog.entry import ENTRY_HEADER_BYTES, EntryHeader, parse_header, verify_frame
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    MQError,
)
from dledger.commitlog.mark import Mark
from dledger.commitlog.segment import BLANK_BYTES, encode_blank
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.snapshot import load
from dledger.state.tables import StateTables

READ_BYTES: Final = 1 << 20
"""Read at once: an entry is a few kilobytes, a call of the disk for each would cost more."""

BytesAt = Callable[[int, int], bytes]
"""Returns bytes from a position of the log on; fewer where the segment, or what is there, ends."""


class EntryDamagedError(CorruptStoreError):
    """No whole entry stands at *position*."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"byte {position} of the log: {why}")
        self.position = position


class Window:
    """Gives bytes of a log out of larger pieces that were read at once; *read*: reads them."""

    def __init__(self, read: BytesAt) -> None:
        self._read = read
        self._position = 0
        self._data = b""

    def at(self, position: int, size: int) -> memoryview:
        """Return *size* bytes from *position* on; fewer where there are no more."""
        if not self._position <= position <= position + size <= self._position + len(self._data):
            self._data = self._read(position, max(size, READ_BYTES))
            self._position = position
        begin = position - self._position
        return memoryview(self._data)[begin : begin + size]


def entries(
    read: BytesAt, before: Mark, before_ms: int, last: Mark, segment_bytes: int
) -> Iterator[tuple[EntryHeader, memoryview]]:
    """Yield every entry behind *before* up to *last* with its frame.

    Args:
        before: The entry before the first one, or an anchor's mark.
        before_ms: Its store time; 0: not known.
    Raises:
        EntryDamagedError: An entry, or the blank that ends a segment, is not what must be there.
    """
    window = Window(read)
    position = before.end_position
    index, term, chain, newest_ms = before.index, before.term, before.chain, before_ms
    while index < last.index:
        free = segment_bytes - position % segment_bytes
        if bytes(window.at(position, BLANK_BYTES)) == encode_blank(free):
            position += free
            continue
        try:
            header = parse_header(window.at(position, ENTRY_HEADER_BYTES))
            if header.position != position or header.size + BLANK_BYTES > free:
                raise EntryDamagedError(position, f"entry {header.index} does not belong there")
            frame = window.at(position, header.size)
            verify_frame(frame, header, chain)
        except CorruptEntryError as error:
            raise EntryDamagedError(position, f"no entry {index + 1}: {error}") from error
        if header.index != index + 1 or header.term < term or header.store_time_ms < newest_ms:
            raise EntryDamagedError(position, f"entry {header.index} does not follow entry {index}")
        yield header, frame
        index, term, chain = header.index, header.term, header.chain
        newest_ms = header.store_time_ms
        position = header.end_position
    if (index, term, chain, position) != (last.index, last.term, last.chain, last.end_position):
        raise EntryDamagedError(position, f"entry {index} is not the one that was committed")


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
