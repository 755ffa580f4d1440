"""How a folder's log was written: sizes that cannot change while files of the old size are there.

Spec: docs/reference/formats.md, section 9.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from commitlog.errors import ConfigError, CorruptStoreError, ForeignStoreError
from commitlog.seams import Disk
from commitlog.segment import MAX_SEGMENT_BYTES
from commitlog.store_paths import StorePaths

FORMAT_VERSION: Final = 1
MIN_SEGMENT_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class LogFormat:
    """Sizes a log was made with."""

    segment_bytes: int
    index_units_per_file: int

    def encode(self) -> bytes:
        """Return the content of the format file: one line of JSON."""
        fields = {
            "format": FORMAT_VERSION,
            "segment_bytes": self.segment_bytes,
            "index_units_per_file": self.index_units_per_file,
        }
        return json.dumps(fields).encode() + b"\n"


def check_format(disk: Disk, paths: StorePaths, wanted: LogFormat) -> LogFormat:
    """Return the format of the folder; a new folder gets *wanted*.

    The size of index files is taken from the folder, the segment size must be the same.

    Raises:
        ConfigError: A size that no log can have.
        ForeignStoreError: Another segment size, a newer version, or segments of another program.
        CorruptStoreError: The format file is damaged.
    """
    if not MIN_SEGMENT_BYTES <= wanted.segment_bytes <= MAX_SEGMENT_BYTES:
        raise ConfigError(
            f"segment size {wanted.segment_bytes} is not within "
            f"{MIN_SEGMENT_BYTES} and {MAX_SEGMENT_BYTES} bytes"
        )
    if wanted.index_units_per_file < 1:
        raise ConfigError(f"{wanted.index_units_per_file} units do not make an index file")
    if not disk.exists(paths.format):
        if disk.list_dir(paths.commitlog):
            raise ForeignStoreError(
                f"{paths.commitlog} holds files of another program: {paths.format} is missing"
            )
        disk.make_dir(paths.raft)
        disk.replace(paths.format, wanted.encode())
        return wanted
    found = _decode(disk.read(paths.format), paths.format)
    if found.segment_bytes != wanted.segment_bytes:
        raise ForeignStoreError(
            f"{paths.root} was written with segments of {found.segment_bytes} bytes, "
            f"not {wanted.segment_bytes}"
        )
    return found


def read_format(disk: Disk, paths: StorePaths) -> LogFormat:
    """Return the format of a folder that has one; raises like `check_format`."""
    return _decode(disk.read(paths.format), paths.format)


def _decode(data: bytes, path: str) -> LogFormat:
    try:
        fields = json.loads(data)
        version = fields["format"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ForeignStoreError(
                f"{path} has format {version}; this version knows up to {FORMAT_VERSION}"
            )
        found = LogFormat(int(fields["segment_bytes"]), int(fields["index_units_per_file"]))
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"the format file {path} is damaged: {error}") from error
    if found.index_units_per_file < 1 or found.segment_bytes < MIN_SEGMENT_BYTES:
        raise CorruptStoreError(f"the format file {path} is damaged: {found}")
    return found
