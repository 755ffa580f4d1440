"""The key index of each replica: what is in its files by itself, and against one segment.

A file has the keys of entries that follow each other, sorted by hash. Those of a segment are found
by position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import CorruptStoreError
from dledger.commitlog.key_run import (
    PAIR_DTYPE,
    PAIRS_PER_BLOCK,
    Pairs,
    Run,
    decode_run,
    is_run_name,
)
from dledger.spark_jobs.audit.folder import ReplicaFolder, Side
from dledger.spark_jobs.audit.segment_report import KEY_INDEX, Finding

NAMED_MAX: Final = 20
"""Wrong keys named per replica and segment; the count goes on."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """One file, as it is read."""

    run: Run
    pairs: Pairs


def key_files(folder: ReplicaFolder) -> list[Path]:
    """Return the key index files of a replica, oldest first."""
    root = Path(folder.paths.index)
    return [
        path for path in sorted(root.iterdir() if root.is_dir() else ()) if is_run_name(path.name)
    ]


def open_key_file(folder: ReplicaFolder, path: Path) -> KeyFile:
    """Return a key index file. Raises CorruptStoreError: it is damaged."""
    data = folder.map(path)

    def read(at: int, size: int) -> bytes:
        return bytes(data[at : at + size])

    run = decode_run(folder.relative(path), read, len(data))
    return KeyFile(run, run.pairs(read))


def check_file(folder: ReplicaFolder, path: Path) -> Iterator[Finding]:
    """Yield where a file contradicts itself: checksums, order, head."""
    file = folder.relative(path)
    try:
        found = open_key_file(folder, path)
    except CorruptStoreError as error:
        yield Finding(replica=folder.name, kind=KEY_INDEX, file=file, detail=str(error))
        return
    run, pairs = found.run, found.pairs
    name = f"{run.first:020d}-{run.last:020d}"
    hashes, positions = pairs["key_hash"].astype(np.int64), pairs["position"].astype(np.int64)
    ends = (int(positions.min()), int(positions.max())) if len(pairs) else (0, 0)
    order = np.lexsort((positions, hashes))
    for is_right, what in (
        (name == path.name, "its head has other entries than its name"),
        ((run.low, run.high) == ends, "its head has other positions than its keys"),
        (np.array_equal(run.fences, hashes[::PAIRS_PER_BLOCK]), "its head has other hashes"),
        ((order == np.arange(len(order))).all(), "its keys are not in order"),
    ):
        if not is_right:
            yield Finding(replica=folder.name, kind=KEY_INDEX, file=file, detail=f"{file}: {what}")


class ExpectedKeys:
    """The keys of one segment, in log order."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._pairs: list[Pairs] = []
        self._holes: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return sum(map(len, self._pairs))

    def add(self, hashes: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> None:
        """Take in the keys of the next entry."""
        pairs = np.empty(len(hashes), PAIR_DTYPE)
        pairs["key_hash"], pairs["position"] = hashes, positions
        self._pairs.append(pairs)

    def add_hole(self, begin: int, end: int) -> None:
        """Between these bytes the keys of the log are not known."""
        self._holes.append((begin, end))

    def compare(self, begin: int, stop: int) -> Iterator[Finding]:
        """Yield what is wrong in each replica's files about the log between *begin* and *stop*."""
        expected = np.concatenate([np.empty(0, PAIR_DTYPE), *self._pairs])
        for side in self._sides:
            low, high = max(begin, side.first), min(stop, side.due)
            yield from _compare_side(
                side.folder, _within(expected, low, high), low, high, self._holes
            )


def _within(pairs: Pairs, low: int, high: int) -> Pairs:
    return pairs[(pairs["position"] >= low) & (pairs["position"] < high)]


def _is_part(file: KeyFile, other: KeyFile) -> bool:
    run, whole = file.run, other.run
    return run is not whole and whole.first <= run.first and run.last <= whole.last


def _compare_side(
    folder: ReplicaFolder, expected: Pairs, low: int, high: int, holes: Sequence[tuple[int, int]]
) -> Iterator[Finding]:
    files: list[KeyFile] = []
    for path in key_files(folder):
        try:
            files.append(open_key_file(folder, path))
        except CorruptStoreError:
            return  # found by `check_file`
    # A merge leaves the runs that it has joined to the next flush.
    files = [file for file in files if not any(_is_part(file, other) for other in files)]
    if not folder.derived_promised:
        # What was not flushed yet is put again at the next start.
        high = min(high, max((file.run.high + 1 for file in files), default=0))
        expected = _within(expected, low, high)
    wanted = Counter(expected.tolist())
    strangers: list[Finding] = []
    for file in files:
        pairs = _within(file.pairs, low, high)
        for begin, end in holes:
            pairs = pairs[(pairs["position"] < begin) | (pairs["position"] >= end)]
        for key_hash, position in pairs.tolist():
            if wanted[key_hash, position] > 0:
                wanted[key_hash, position] -= 1
                continue
            strangers.append(
                Finding(
                    replica=folder.name,
                    kind=KEY_INDEX,
                    file=file.run.path,
                    position=position,
                    detail=f"hash {key_hash} points at byte {position}: the log has no such key",
                )
            )
    yield from strangers[:NAMED_MAX]
    missing = sorted(wanted.elements(), key=lambda pair: (pair[1], pair[0]))
    for key_hash, position in missing[:NAMED_MAX]:
        yield Finding(
            replica=folder.name,
            kind=KEY_INDEX,
            file="index",
            position=position,
            count=len(missing),
            detail=f"no key with hash {key_hash} for the record at byte {position}",
        )
