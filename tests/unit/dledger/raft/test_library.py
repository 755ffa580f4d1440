"""Elections and commits are decided by pysyncobj's own code, not by a copy of it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pysyncobj.syncobj
import pytest
from pysyncobj.syncobj import SyncObj

from dledger.raft import library
from tests.harness.raft_cluster import Cluster

DECIDING = (
    "_onTick",
    "_SyncObj__onMessageReceived",
    "_SyncObj__onBecomeLeader",
    "_SyncObj__setCurrentTerm",
    "_SyncObj__setState",
    "_SyncObj__getEntries",
    "_SyncObj__deleteEntriesFrom",
)


def test_what_decides_is_not_overridden() -> None:
    for kind in (library._Library, library._LibraryWithoutDump):
        for name in DECIDING:
            assert getattr(kind, name) is getattr(SyncObj, name), name
            assert inspect.getsourcefile(getattr(kind, name)) == pysyncobj.syncobj.__file__


def test_library_tick_is_needed_to_elect_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    leader = cluster.elect("n0")
    before = leader.commit_index
    real_tick = SyncObj._onTick

    def idle(self: Any, timeToWait: float = 0.0) -> None:  # noqa: N803 - the library's name
        return

    monkeypatch.setattr(SyncObj, "_onTick", idle)
    index = cluster.append("n0", b"x")
    cluster.run()
    assert leader.replicator.peers["n1"].match_index == index
    assert leader.commit_index == before
    cluster.clock.now_s += 10.0
    cluster.node("n1").begin_election()
    cluster.run()
    assert not cluster.node("n1").is_leader
    monkeypatch.setattr(SyncObj, "_onTick", real_tick)


def test_library_counts_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SyncObj._SyncObj__onMessageReceived

    def deaf_to_votes(self: Any, node: Any, message: dict[str, Any]) -> None:
        if message["type"] != "response_vote":
            real(self, node, message)

    monkeypatch.setattr(SyncObj, "_SyncObj__onMessageReceived", deaf_to_votes)
    cluster = Cluster(tmp_path)
    cluster.clock.now_s += 10.0
    cluster.node("n0").begin_election()
    cluster.run()
    assert cluster.node("n0").term == 1
    assert not cluster.node("n0").is_leader


def test_earlier_term_commits_with_an_own_entry(
    tmp_path: Path,
) -> None:
    """Raft §5.4.2, figure 8: replicas of an old term's entry are not counted."""
    cluster = Cluster(tmp_path)
    cluster.elect("n0")
    cluster.cut = {("n0", "n1"), ("n0", "n2")}
    old = cluster.append("n0", b"of term 1")
    cluster.run()
    cluster.cut = set()
    leader = cluster.node("n0")
    cluster.clock.now_s += 10.0
    leader.settle()
    leader.replicator.append_bytes = 1
    leader.begin_election()
    while not leader.is_leader or leader.replicator.peers["n1"].match_index < old:
        assert cluster.step()
    assert leader.journal.term_at(old) == 1
    assert leader.replicator.peers["n2"].match_index >= old
    assert leader.commit_index < old
    cluster.run()
    assert leader.commit_index == leader.state.noop_index == old + 1
