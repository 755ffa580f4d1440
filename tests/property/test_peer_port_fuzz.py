"""Whatever a peer sends, member or not, in whatever state a node is: the node goes on.

Well formed frames with hostile fields, of all kinds. A few thousand in every run; ``make
peer-fuzz`` tries a million.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from dledger.broker_errors import ChangeRefusedError
from dledger.commitlog.errors import CorruptEntryError, RemoteProtocolError
from dledger.raft.identity import Hello
from dledger.raft.member import RaftNode
from dledger.raft.membership import Member, Members
from dledger.raft.peers import NotAMemberError
from dledger.raft.wire import TERM_MAX
from dledger.testing.crash_disk import CrashDisk
from tests.harness.hostile_frames import Hostile
from tests.harness.raft_cluster import Cluster

FRAMES = int(os.environ.get("DLEDGER_PEER_FUZZ_FRAMES", "6000"))
"""Over all states."""

ROUND_FRAMES = 400
"""On one cluster; then it may have left what can be attacked at all, and another is made."""

STATES = ("follower", "candidate", "leader", "learner", "unconfigured", "removed")


def in_state(root: Path, state: str, seed: int) -> tuple[Cluster, RaftNode]:
    """Return a group, and the member of it that is attacked."""
    cluster = Cluster(root, seed=seed, disks=CrashDisk, segment_bytes=1 << 16)
    if state == "unconfigured":
        cluster.names.append("n3")
        return cluster, cluster.start("n3").node
    leader = cluster.elect("n0")
    cluster.append("n0", b"kept")
    cluster.run()
    cluster.heartbeat("n0")
    members = leader.roster.members
    assert members is not None
    match state:
        case "leader":
            return cluster, leader
        case "candidate":
            node = cluster.node("n1")
            cluster.clock.now_s += 10.0
            node.begin_election()
            return cluster, node
        case "learner":
            node = cluster.join("n3").node
            hello = node.contacts.hello("control")
            leader.changes.change(members.with_learner(Member("n3", hello.incarnation)))
            leader.settle()
            cluster.run()
            return cluster, node
        case "removed":
            voter = members.voter("n2")
            assert voter is not None
            leader.changes.change(members.without(voter))
            leader.settle()
            cluster.run()
            cluster.heartbeat("n0")
            return cluster, cluster.node("n2")
        case _:
            return cluster, cluster.node("n1")


def attack(cluster: Cluster, node: RaftNode, hostile: Hostile, frames: int) -> Counter[str]:
    """Send hostile frames under the names of members and others; count what became of them."""
    ends: Counter[str] = Counter()
    name = node.settings.self_id
    senders = [*(other for other in cluster.names if other != name), "evil"]
    committed = list(cluster.members[name].committed)
    for number in range(frames):
        frame = hostile.frame(node)
        if frame is None:
            ends["not decoded"] += 1
            continue
        sender = hostile.rng.choice(senders)
        before = node.term
        try:
            node.receive(sender, frame)
            ends["taken"] += 1
        except NotAMemberError:
            ends["no member"] += 1
        except RemoteProtocolError:
            ends["refused"] += 1
        assert sender != "evil" or node.term == before
        if number % 7 == 0:
            cluster.clock.now_s += hostile.rng.random()
            node.begin_election()
        node.settle()
        if number % 5 == 0:
            cluster.members[name].flush()
            drain(node)
        if number % 11 == 0:
            node.leader.send_heartbeats()
    assert cluster.members[name].committed[: len(committed)] == committed
    assert node.term <= TERM_MAX
    return ends


def drain(node: RaftNode) -> None:
    """Take away what the node wants to send, as links do."""
    for name, state in list(node.peers.items()):
        state.control.clear()
        state.replies.clear()
        for _ in range(4):
            if node.next_frame(name) is None:
                break


@pytest.mark.parametrize("state", STATES)
def test_no_frame_ends_a_node(tmp_path: Path, state: str) -> None:
    ends: Counter[str] = Counter()
    left, seed = FRAMES // len(STATES), 0
    while left > 0:
        hostile = Hostile(random.Random(f"{state} {seed}"))
        cluster, node = in_state(tmp_path / str(seed), state, seed)
        node.owner.on_snapshot = lambda _leader, _data: None
        ends += attack(cluster, node, hostile, min(left, ROUND_FRAMES))
        cluster.close()
        left, seed = left - ROUND_FRAMES, seed + 1
    assert min(ends["taken"], ends["no member"], ends["not decoded"]) > 0, ends


def test_no_hello_is_more_than_refused() -> None:
    honest = Hello("C", "G", "n1", "ab" * 16, {}, False, "h:1", "data", "127.0.0.1:2", (1, 2))
    hostile = Hostile(random.Random(5))
    taken = 0
    for _ in range(FRAMES // 2):
        said = hostile.hello(honest)
        try:
            hello = Hello.decode(said)
        except RemoteProtocolError:
            continue
        taken += 1
        assert hello.peer_address is None or 0 < hello.peer_address[1] <= 65_535
        hello.encode()
    assert taken > 0


def test_no_list_of_members_is_more_than_refused() -> None:
    hostile = Hostile(random.Random(6))
    taken = 0
    for _ in range(FRAMES // 2):
        body = hostile.members_body()
        try:
            members = Members.decode(body)
            members.check_usable()
        except (CorruptEntryError, ChangeRefusedError):
            continue
        taken += 1
        assert all(member.is_usable for member in members.members)
    assert taken > 0
