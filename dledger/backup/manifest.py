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
from dledger.commitlog.segment import MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES

MANIFEST_FORMAT: Final = 1

LOG_NUMBERS: Final = 1 << 62
"""Below it are indexes, positions, terms and times of entries, and sizes of files."""

CHAINS: Final = 1 << 64

INDEX_UNITS_MAX: Final = 1 << 27
"""Of one file of the entry index: it has 5 GiB then, and a member makes it whole."""


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


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds.

    Attributes:
        member: Name of the member whose folder it was taken from last.
        group_identity: Of the group; a backup goes on only with the same one.
        begin, end: Where the log begins, and its newest entry, stored at *end_time_ms*.
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
    begin: Anchor
    end: Mark
    end_time_ms: int
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

    Raises:
        BackupDamagedError: It is not what `encode_manifest` wrote.
        ForeignStoreError: It is of another format.
    """
    try:
        version = msgspec.json.decode(data, type=_AnyVersion).manifest.format
        if version != MANIFEST_FORMAT:
            raise ForeignStoreError(
                f"{place} has format {version}; this program knows {MANIFEST_FORMAT}"
            )
        manifest = msgspec.json.decode(data, type=_Sealed).manifest
        is_whole = encode_manifest(manifest) == data
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise BackupDamagedError(f"{place} is damaged: {error}") from error
    if not is_whole:
        raise BackupDamagedError(f"{place} is damaged: it does not fit its checksum")
    if wrong := _out_of_bounds(manifest):
        raise BackupDamagedError(f"{place} is no manifest: {wrong}")
    for name in sorted(manifest.files):
        if "\0" in name or not all(each.strip(".") for each in name.split("/")):
            raise BackupDamagedError(f"{place} is no manifest: it names a file {name!r}")
    return manifest


def _out_of_bounds(manifest: Manifest) -> str:
    """Return which number of a manifest none can be; empty: each may be. A sum shows no maker."""
    begin, end, tables = manifest.begin, manifest.end, manifest.tables
    numbers = {
        "segment_bytes": (manifest.segment_bytes, MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES + 1),
        "index_units_per_file": (manifest.index_units_per_file, 1, INDEX_UNITS_MAX),
        "made_at_ms": (manifest.made_at_ms, 0, LOG_NUMBERS),
        "end_time_ms": (manifest.end_time_ms, begin.prev_store_time_ms, LOG_NUMBERS),
        "begin.first_index": (begin.first_index, 1, LOG_NUMBERS),
        "begin.position": (begin.position, 0, LOG_NUMBERS),
        "begin.prev_term": (begin.prev_term, 0, LOG_NUMBERS),
        "begin.prev_chain": (begin.prev_chain, 0, CHAINS),
        "begin.prev_store_time_ms": (begin.prev_store_time_ms, 0, LOG_NUMBERS),
        "end.index": (end.index, begin.first_index, LOG_NUMBERS),
        "end.term": (end.term, begin.prev_term, LOG_NUMBERS),
        "end.position": (end.position, begin.position, LOG_NUMBERS),
        "end.chain": (end.chain, 0, CHAINS),
        "end.end_position": (end.end_position, end.position + 1, LOG_NUMBERS),
    }
    for number, part in enumerate(manifest.parts):
        numbers[f"parts[{number}].position"] = (part.position, 0, LOG_NUMBERS)
        numbers[f"parts[{number}].size"] = (part.size, 1, manifest.segment_bytes + 1)
    if tables is not None:
        numbers["tables.size"] = (tables.size, 1, LOG_NUMBERS)
        numbers["tables.applied_index"] = (tables.applied_index, 0, LOG_NUMBERS)
    for name, (value, least, above) in numbers.items():
        if not least <= value < above:
            return f"{name} is {value}, which is not from {least} to {above - 1}"
    return ""


def sha256_of(data: bytes) -> str:
    """Return the checksum of a file as it stands in a manifest."""
    return hashlib.sha256(data).hexdigest()
