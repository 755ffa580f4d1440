"""What a link lets through: frames of its own connection, each once, in order."""

from __future__ import annotations

import random
from pathlib import Path

from dledger.raft.guards import Guards
from dledger.raft.links import Links
from dledger.raft.wire import Kind, PeerFrame
from dledger.testing.inline_executor import InlineExecutor
from dledger.testing.memory_network import MemoryNetwork
from tests.harness.guard_proofs import proves
from tests.harness.raft_cluster import Cluster


def links_of(cluster: Cluster, name: str) -> Links:
    return Links(
        cluster.node(name),
        network=MemoryNetwork(),
        clock=cluster.clock,
        rng=random.Random(1),
        executor=InlineExecutor(),
    )


@proves("envelope")
def test_a_frame_counts_once_and_only_in_its_own_connection(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    leader = cluster.elect("n0")
    links = links_of(cluster, "n0")
    received: list[tuple[int, int]] = []
    take = leader.receive

    def noted(peer: str, frame: PeerFrame) -> bool:
        received.append((frame.epoch, frame.sequence))
        return take(peer, frame)

    leader.receive = noted  # type: ignore[method-assign] # watches what comes through

    def frame(epoch: int, sequence: int) -> PeerFrame:
        fields = [True, leader.journal.last_index]
        return PeerFrame(Kind.APPEND_REPLY, leader.term, epoch, sequence, fields, memoryview(b""))

    hello = cluster.node("n1").hello("data")
    last = links._deliver(hello, 7, 0, [frame(7, 1), frame(7, 1), frame(6, 2), frame(7, 3)])
    last = links._deliver(hello, 7, last, [frame(7, 2), frame(7, 3), frame(7, 4)])
    assert received == [(7, 1), (7, 3), (7, 4)]
    assert last == 4
