"""What a leader counts stands on disks; a count without a copy is found."""

from __future__ import annotations

from typing import Any

import pytest

from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import Played, play
from dledger.raft import library
from dledger.raft.replicator import Replicator

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=6,
    duration_ms=30_000,
    steps=(
        Step(8_000, Kind.ISOLATE, "follower", 8_000),
        Step(9_000, Kind.DISK_SLOW, "1", 9_000, 900),
    ),
    workload=Workload(interval_ms=300),
)


def broken(played: Played) -> set[str]:
    return {violation.name for violation in played.violations}


def test_counts_without_a_bug_stand_on_disks() -> None:
    played = play(PLAN)
    assert played.is_valid, played.verdict.reason


def test_a_count_of_what_one_disk_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(matches: Any, node: Any) -> int:
        return int(matches._journal.stable_index) if dict.get(matches, node) else 0

    monkeypatch.setattr(library._CappedMatch, "__getitem__", read)
    assert broken(play(PLAN)) == {"counted_not_on_disks"}


def test_a_member_taken_for_further_than_it_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = Replicator.matched

    def too_far(replicator: Replicator, peer: str, index: int, now_s: float) -> None:
        progress = replicator.peers[peer]
        matched(replicator, peer, index, now_s)
        progress.match_index = max(progress.match_index, progress.next_index - 1)

    monkeypatch.setattr(Replicator, "matched", too_far)
    assert broken(play(PLAN)) == {"belief"}
