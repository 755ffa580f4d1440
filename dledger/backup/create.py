"""Making a backup, or bringing one up to date: only what is new is copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dledger.backup.folder import BackupFolder, PartWriter
from dledger.backup.manifest import Manifest, Part
from dledger.backup.source import Picture, Source
from dledger.backup.verify import EntryDamagedError, entries
from dledger.commitlog.errors import ConfigError, CorruptStoreError
from dledger.commitlog.mark import Anchor, Mark
from dledger.commitlog.segment import encode_blank


class AnotherGroupError(ConfigError):
    """The target holds the backup of another group; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Created:
    """What one `create` did.

    Attributes:
        copied_bytes, copied_entries: New in the target.
        began_over: The backup ended before the first entry that the group still keeps: what it held
            is replaced.
    """

    manifest: Manifest
    copied_bytes: int
    copied_entries: int
    began_over: bool


def create(
    folder: BackupFolder,
    source: Source,
    *,
    made_at_ms: int,
    copied_to: Callable[[int], None] = lambda position: None,
) -> Created:
    """Copy what *source* holds and the backup in *folder* does not.

    Every entry is checked before it is written. Until the end the backup is the one of before.

    Raises:
        AnotherGroupError, NoBackupError: The target is for something else; nothing was changed.
        BackupDamagedError: Its manifest is damaged, or a file is missing; nothing was changed.
        StoreError: The source is damaged, or lost a segment meanwhile, or the target fails. The
            backup is what it was.
    """
    old = folder.manifest()
    if old is not None:
        _check_same_group(old, source, folder.root)
        folder.need_files(old, "nothing was copied. Make a new backup in another folder")
    try:
        folder.remove_strays(old)
        picture = source.look()
        anchor, before, before_ms = _begin(source, old, picture)
        copy = _Copy(before, before_ms)
        copy.run(source, folder, picture, copied_to)
    finally:
        source.close()
    kept = () if old is None else [part for part in old.parts if part.end > anchor.position]
    tables = None if old is None else old.tables
    if picture.tables is not None and (
        tables is None or tables.applied_index < picture.applied_index
    ):
        # The log of the backup may begin behind the tables of this member.
        tables = folder.write_tables(picture.tables, picture.applied_index)
    identity = source.identity
    manifest = Manifest(
        cluster=identity.cluster,
        group=identity.group,
        group_identity=identity.group_identity,
        member=identity.name,
        made_at_ms=made_at_ms,
        segment_bytes=source.log_format.segment_bytes,
        index_units_per_file=source.log_format.index_units_per_file,
        begin=anchor,
        end=replace(picture.mark, position=copy.newest.position),
        end_time_ms=copy.newest_ms,
        tables=tables,
        parts=(*kept, *copy.parts),
    )
    folder.finish(manifest)
    began_over = old is not None and old.end.index + 1 < picture.anchor.first_index
    return Created(manifest, sum(part.size for part in copy.parts), copy.count, began_over)


def _check_same_group(old: Manifest, source: Source, root: str) -> None:
    mine, segment_bytes = source.identity, source.log_format.segment_bytes
    if (old.group_identity, old.segment_bytes) != (mine.group_identity, segment_bytes):
        raise AnotherGroupError(
            f"{root} is the backup of group {old.group} in cluster {old.cluster}, identity "
            f"{old.group_identity or 'unknown'}; {source.root} is of {mine.group} in "
            f"{mine.cluster}, identity {mine.group_identity or 'unknown'}. Nothing was changed: "
            "give another target"
        )


def _begin(source: Source, old: Manifest | None, picture: Picture) -> tuple[Anchor, Mark, int]:
    """Return where the backup begins, and the entry before those to copy with its store time."""
    anchor = picture.anchor
    if old is None or old.end.index < anchor.first_index:
        return anchor, anchor.mark, anchor.prev_store_time_ms
    if picture.mark.index < old.end.index:
        raise CorruptStoreError(
            f"{source.root} knows of committed entries up to {picture.mark.index}, the backup "
            f"goes up to {old.end.index}: it was taken from a member that was further. "
            "Nothing was changed; take the folder of another member, or wait"
        )
    if old.begin.first_index > anchor.first_index:
        # A member gives segments up when it comes to it: this one has more than the backup.
        anchor = old.begin
    return anchor, old.end, old.end_time_ms


class _Copy:
    """The entries behind *before*, written as they are checked; one file for each segment."""

    def __init__(self, before: Mark, before_ms: int) -> None:
        self.newest, self.newest_ms = before, before_ms
        self.parts: list[Part] = []
        self.count = 0

    def run(
        self,
        source: Source,
        folder: BackupFolder,
        picture: Picture,
        copied_to: Callable[[int], None],
    ) -> None:
        """Copy them all."""
        size, last = source.log_format.segment_bytes, picture.mark
        at, writer = self.newest.end_position, None
        try:
            for header, frame in entries(source.at, self.newest, self.newest_ms, last, size):
                while writer is None or at < header.position:
                    if writer is not None:  # a segment ends in a blank
                        writer.add(encode_blank(size - at % size))
                        self.parts.append(writer.finish())
                        at += size - at % size
                    end = min(at - at % size + size, last.end_position)
                    writer = PartWriter(folder, at, end)
                writer.add(frame)
                at = header.end_position
                self.count += 1
                self.newest = Mark(header.index, header.term, header.position, header.chain, at)
                self.newest_ms = max(self.newest_ms, header.store_time_ms)
                if header.index == picture.applied_index and header.chain != picture.applied_chain:
                    raise EntryDamagedError(header.position, "the tables are of another log")
                copied_to(at)
        except EntryDamagedError as error:
            raise CorruptStoreError(
                f"{source.root}: {error}. The backup is what it was; take the folder of "
                "another member, and see dledger raft status --wide"
            ) from error
        if writer is not None:
            self.parts.append(writer.finish())
