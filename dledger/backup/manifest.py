"""The manifest: what belongs to a backup, and up to which entry the backup goes.

One line of JSON. A reader encodes what it has decoded and compares: so one changed byte anywhere in
the file is found, and so is a field that this version would not write.

Spec: docs/reference/formats.md, section 11.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from dledger.commitlog.errors import CorruptStoreError, ForeignStoreError
from dledger.commitlog.mark import Anchor, Mark

MANIFEST_FORMAT: Final = 1


class BackupDamagedError(CorruptStoreError):
    """A file of a backup is missing or is not what was written; nothing was changed."""


class Part(msgspec.Struct, frozen=True):
    """A stretch of the log in one file: whole entries of one segment."""

    file: str
    position: int
    size: int
    sha256: str

    @property
    def end(self) -> int:
        """Absolute byte of the log after the stretch."""
        return self.position + self.size


class Tables(msgspec.Struct, frozen=True):
    """A snapshot of the tables, as the member had written it."""

    file: str
    size: int
    sha256: str
    applied_index: int


class LogBegin(msgspec.Struct, frozen=True):
    """Where the log begins; the fields of `dledger.commitlog.mark.Anchor`."""

    first_index: int
    position: int
    prev_term: int
    prev_chain: str
    prev_store_time_ms: int

    @classmethod
    def of(cls, anchor: Anchor) -> LogBegin:
        """Return *anchor* as it stands in a manifest."""
        return cls(
            anchor.first_index,
            anchor.position,
            anchor.prev_term,
            f"{anchor.prev_chain:016x}",
            anchor.prev_store_time_ms,
        )

    @property
    def anchor(self) -> Anchor:
        """The anchor of a log that begins here."""
        return Anchor(
            self.first_index,
            self.position,
            self.prev_term,
            int(self.prev_chain, 16),
            self.prev_store_time_ms,
        )


class LogEnd(msgspec.Struct, frozen=True):
    """The newest entry; the fields of `dledger.commitlog.mark.Mark`."""

    index: int
    term: int
    position: int
    chain: str
    end_position: int
    store_time_ms: int

    @classmethod
    def of(cls, mark: Mark, store_time_ms: int) -> LogEnd:
        """Return *mark* as it stands in a manifest."""
        return cls(
            mark.index,
            mark.term,
            mark.position,
            f"{mark.chain:016x}",
            mark.end_position,
            store_time_ms,
        )

    @property
    def mark(self) -> Mark:
        """The mark of that entry."""
        return Mark(self.index, self.term, self.position, int(self.chain, 16), self.end_position)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds.

    Attributes:
        member: Name of the member whose folder it was taken from last.
        group_identity: Of the group; a backup goes on only with the same one.
        made_at_ms: Wall time of the newest `create`.
        tables: None only while the member had written none: its log begins at entry 1.
    """

    format: int = MANIFEST_FORMAT
    cluster: str
    group: str
    group_identity: str
    member: str
    made_at_ms: int
    segment_bytes: int
    index_units_per_file: int
    begin: LogBegin
    end: LogEnd
    tables: Tables | None
    parts: tuple[Part, ...]

    @property
    def files(self) -> set[str]:
        """Names of all files that belong to it, the manifest left out."""
        return {part.file for part in self.parts} | ({self.tables.file} if self.tables else set())

    @property
    def size_bytes(self) -> int:
        """Bytes of these files."""
        return sum(part.size for part in self.parts) + (self.tables.size if self.tables else 0)


class _Sealed(msgspec.Struct, frozen=True):
    manifest: Manifest
    sha256: str


class _Versioned(msgspec.Struct):
    format: int


class _AnyVersion(msgspec.Struct):
    manifest: _Versioned


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the manifest file."""
    sealed = _Sealed(manifest, sha256_of(msgspec.json.encode(manifest)))
    return msgspec.json.encode(sealed) + b"\n"


def decode_manifest(data: bytes, place: str) -> Manifest:
    """Return the manifest in a file's content.

    Args:
        place: Name of the file, for errors.
    Raises:
        BackupDamagedError: It is not what `encode_manifest` wrote.
        ForeignStoreError: A newer version wrote it.
    """
    try:
        version = msgspec.json.decode(data, type=_AnyVersion).manifest.format
        if version > MANIFEST_FORMAT:
            raise ForeignStoreError(
                f"{place} has format {version}; this version knows up to {MANIFEST_FORMAT}"
            )
        manifest = msgspec.json.decode(data, type=_Sealed).manifest
        manifest.begin.anchor  # noqa: B018  its chain is a number, or this raises
        manifest.end.mark  # noqa: B018
        is_whole = encode_manifest(manifest) == data
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise BackupDamagedError(f"{place} is damaged: {error}") from error
    if not is_whole:
        raise BackupDamagedError(f"{place} is damaged: it does not fit its checksum")
    for name in sorted(manifest.files):
        if "\0" in name or not all(each.strip(".") for each in name.split("/")):
            raise BackupDamagedError(f"{place} is no manifest: it names a file {name!r}")
    return manifest


def sha256_of(data: bytes) -> str:
    """Return the checksum of a file as it stands in a manifest."""
    return hashlib.sha256(data).hexdigest()
