"""What a power cut might change of a log that a member counts as stable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.store_paths import StorePaths
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.promises import Promises, is_doubtful
from dledger.jepsen_like.simulation.sim_disk import SimDisk
from tests.harness.entry_frames import next_frame

PATHS = StorePaths("/store")
SEGMENT_BYTES = 4096
ENTRIES = 40


def filled() -> tuple[SimDisk, EntryLog]:
    disk = SimDisk(rng_stream(1))
    log = EntryLog.open(disk.mount(), "/store", segment_bytes=SEGMENT_BYTES)
    for _ in range(ENTRIES):
        log.append(next_frame(log, 200))
    log.flush()
    return disk, log


def doubtful(disk: SimDisk, log: EntryLog) -> bool:
    return is_doubtful(disk, PATHS, log, SEGMENT_BYTES, 0, log.end_position)


def test_entries_that_are_not_flushed_are_uncertain() -> None:
    disk, log = filled()
    assert not doubtful(disk, log)
    log.append(next_frame(log, 200))
    assert doubtful(disk, log)
    log.flush()
    assert not doubtful(disk, log)


@pytest.mark.parametrize("index", [1, 2, ENTRIES // 2, ENTRIES])
def test_claims_leave_out_only_what_is_known_damaged(index: int) -> None:
    disk, log = filled()
    frame = bytes(log.frame(index))
    position = log.position_at(index)
    base = position - position % SEGMENT_BYTES
    disk.flip(PATHS.segment(base), position - base + 100, position - base + 101)
    log.repair.mark_damaged(index)
    log.repair.write_copies([(log.repair.accept(frame), frame)])  # written, and not flushed
    assert not doubtful(disk, log)
    log.repair.mark_whole(index)
    assert doubtful(disk, log)
    log.flush()
    assert not doubtful(disk, log)


@pytest.mark.parametrize(("saved", "is_covered"), [(8, False), (9, True)])
def test_what_is_removed_is_in_a_checkpoint(saved: int, is_covered: bool) -> None:
    found: list[str] = []
    world = SimpleNamespace(violate=lambda name, _text: found.append(name))
    store = SimpleNamespace(log=SimpleNamespace(first_index=10), saved_index=saved)
    node, group = SimpleNamespace(name="n0"), SimpleNamespace(store=store)
    Promises(cast(Any, world), {})._check_covered(cast(Any, node), cast(Any, group))
    assert found == ([] if is_covered else ["removed_before_checkpoint"])
