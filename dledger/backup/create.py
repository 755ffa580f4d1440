"""Making a backup, or bringing one up to date: only what is new is copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dledger.backup.entries import EntryDamagedError, entries
from dledger.backup.manifest import LogBegin, LogEnd, Manifest, Part, Tables
from dledger.backup.source import Picture, Source
from dledger.backup.target import BackupDisk, PartWriter, Target
from dledger.commitlog.errors import ConfigError, CorruptStoreError
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
    disk: BackupDisk,
    source: Source,
    root: str,
    *,
    made_at_ms: int,
    copied_to: Callable[[int], None] = lambda position: None,
) -> Created:
    """Copy what *source* holds and the backup at *root* does not.

    Every entry is checked before it is written. Until the end the backup is the one of before.

    Args:
        disk: Of the target.
        copied_to: Called with the position in the log that is copied.
    Raises:
        AnotherGroupError, NoBackupError: The target is for something else; nothing was changed.
        StoreLockedError: Another `create` writes there.
        BackupDamagedError: Its manifest is damaged, or a file is missing; nothing was changed.
        StoreError: The source is damaged, or lost a segment meanwhile. The backup is what it was.
        DiskFullError, FlushFailedError: The target. The backup is what it was.
    """
    target = Target(disk, root)
    old = target.manifest()
    if old is not None:
        _check_same_group(old, source, root)
    lock = target.lock()
    try:
        old = target.manifest()
        target.remove_strays(old)
        return _create(source, target, old, made_at_ms, copied_to)
    finally:
        source.close()
        lock.release()


def _check_same_group(old: Manifest, source: Source, root: str) -> None:
    mine = source.identity
    if (old.group_identity, old.segment_bytes) != (
        mine.group_identity,
        source.log_format.segment_bytes,
    ):
        raise AnotherGroupError(
            f"{root} is the backup of group {old.group} in cluster {old.cluster}, identity "
            f"{old.group_identity or 'unknown'}; {source.root} is of {mine.group} in "
            f"{mine.cluster}, identity {mine.group_identity or 'unknown'}. Nothing was changed: "
            "give another target"
        )


def _create(
    source: Source,
    target: Target,
    old: Manifest | None,
    made_at_ms: int,
    copied_to: Callable[[int], None],
) -> Created:
    if old is not None:
        target.need_files(old)
    picture = source.look()
    anchor = picture.anchor
    first_index = anchor.first_index
    if old is None or old.end.index < first_index:
        kept: list[Part] = []
        begin = LogEnd.of(anchor.mark, anchor.prev_store_time_ms)
    else:
        if picture.mark.index < old.end.index:
            raise CorruptStoreError(
                f"{source.root} knows of committed entries up to {picture.mark.index}, the backup "
                f"goes up to {old.end.index}: it was taken from a member that was further. "
                "Nothing was changed; take the folder of another member, or wait"
            )
        if old.begin.first_index > first_index:
            # A member gives segments up when it comes to it: this one has more than the backup.
            anchor = old.begin.anchor
        kept = [part for part in old.parts if part.end > anchor.position]
        begin = old.end
    copy = _Copy(source, target, picture, begin, copied_to)
    copy.run()
    tables = _tables(target, old, picture)
    identity = source.identity
    manifest = Manifest(
        cluster=identity.cluster,
        group=identity.group,
        group_identity=identity.group_identity,
        member=identity.name,
        made_at_ms=made_at_ms,
        segment_bytes=source.log_format.segment_bytes,
        index_units_per_file=source.log_format.index_units_per_file,
        begin=LogBegin.of(anchor),
        end=LogEnd.of(replace(picture.mark, position=copy.position), copy.store_time_ms),
        tables=tables,
        parts=(*kept, *copy.parts),
    )
    target.finish(manifest)
    return Created(
        manifest,
        sum(part.size for part in copy.parts),
        copy.count,
        began_over=old is not None and old.end.index + 1 < first_index,
    )


def _tables(target: Target, old: Manifest | None, picture: Picture) -> Tables | None:
    """Return the newest tables: the log of the backup may begin behind those of this member."""
    known = None if old is None else old.tables
    if picture.tables is None or (
        known is not None and known.applied_index >= picture.applied_index
    ):
        return known
    return target.write_tables(picture.tables, picture.applied_index)


class _Copy:
    """The entries behind *begin*, written as they are checked; one file for each segment.

    Attributes:
        position: Begin of the newest entry.
    """

    def __init__(
        self,
        source: Source,
        target: Target,
        picture: Picture,
        begin: LogEnd,
        copied_to: Callable[[int], None],
    ) -> None:
        self._source = source
        self._target = target
        self._picture = picture
        self._begin = begin
        self._copied_to = copied_to
        self._writer: PartWriter | None = None
        self._segment_bytes = source.log_format.segment_bytes
        self.parts: list[Part] = []
        self.count = 0
        self.position = begin.position
        self.store_time_ms = begin.store_time_ms

    def run(self) -> None:
        """Copy them all."""
        picture, begin = self._picture, self._begin
        walk = entries(
            self._source.at, begin.mark, begin.store_time_ms, picture.mark, self._segment_bytes
        )
        try:
            for header, frame in walk:
                self._fill_up_to(header.position)
                assert self._writer is not None
                self._writer.add(frame)
                self.count += 1
                self.position = header.position
                self.store_time_ms = max(self.store_time_ms, header.store_time_ms)
                if header.index == picture.applied_index and header.chain != picture.applied_chain:
                    raise EntryDamagedError(header.position, "the tables are of another log")
                self._copied_to(header.end_position)
        except EntryDamagedError as error:
            raise CorruptStoreError(
                f"{self._source.root}: {error}. The backup is what it was; take the folder of "
                "another member, and see dledger raft status --wide"
            ) from error
        if self._writer is not None:
            self.parts.append(self._writer.finish())

    def _fill_up_to(self, position: int) -> None:
        """Have a file under way that goes on at *position*; segments before it end in a blank."""
        end = self._begin.end_position if self._writer is None else self._writer.end
        while end < position or self._writer is None:
            if self._writer is None:
                self._writer = self._target.begin_part(end, self._part_end(end))
                continue
            free = self._segment_bytes - end % self._segment_bytes
            self._writer.add(encode_blank(free))
            self.parts.append(self._writer.finish())
            end += free
            self._writer = self._target.begin_part(end, self._part_end(end))

    def _part_end(self, position: int) -> int:
        segment_end = position - position % self._segment_bytes + self._segment_bytes
        return min(segment_end, self._picture.mark.end_position)
