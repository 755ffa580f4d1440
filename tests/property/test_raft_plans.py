"""Whole groups under drawn plans: late, lost, doubled letters, power cuts, elections at any time.

Every member's disk forgets what was not flushed. After each step: at most one leader per term,
what one member has committed every member has at the same place with the same chain, and it
stays.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog.errors import DiskFullError
from dledger.testing.crash_disk import CrashDisk
from tests.harness.extent import EXTENT
from tests.harness.fast_part import gate_part
from tests.harness.only_new_garbage import only_new_garbage
from tests.harness.raft_cluster import Cluster, Letter

KINDS = (
    ["round"] * 10
    + ["flush"] * 6
    + ["append"] * 8
    + ["deliver"] * 6
    + ["collect"] * 4
    + ["flush all"] * 2
    + ["beat", "late", "late", "double", "double", "drop", "wait", "reset", "cut", "heal", "heal"]
    + ["stand", "stand", "power cut", "kill", "blackout"]
)
STEPS = st.sampled_from(KINDS)
SEEDS = 8 * EXTENT
"""Of long plans, in each block."""
PLANS = st.lists(st.tuples(STEPS, st.integers(0, 255)), min_size=20, max_size=160)


class Watched:
    """A cluster with its invariants."""

    def __init__(self, size: int, seed: int) -> None:
        self.cluster = Cluster(Path("/memory"), size, seed=seed, disks=CrashDisk)
        self.rng = random.Random(seed)
        self.leaders: dict[int, str] = {}
        self.committed: dict[int, int] = {}
        self.kept: list[Letter] = []
        for member in self.cluster.members.values():
            member.flushes_by_itself = False

    def act(self, kind: str, choice: int) -> None:
        """Do one step of a plan."""
        cluster = self.cluster
        name = cluster.names[choice % len(cluster.names)]
        node, post = cluster.node(name), cluster.post
        at = choice % len(post) if post else 0
        match kind:
            case "deliver" if post:
                cluster.deliver(post.pop(0))
            case "late" if post:
                cluster.deliver(post.pop(at))
            case "double" if post:
                self.kept = [*self.kept[-5:], post[at]]
                cluster.deliver(self.kept[choice % len(self.kept)])
            case "drop" if post:
                post.pop(at)
            case "collect":
                cluster.collect(name)
            case "round":
                for sender in cluster.names:
                    cluster.collect(sender)
                letters, cluster.post = post, []
                for letter in letters:
                    cluster.deliver(letter)
            case "flush":
                cluster.members[name].flush()
            case "flush all":
                for member in cluster.members.values():
                    member.flush()
            case "cut":
                cluster.cut |= {
                    pair for other in cluster.names for pair in ((name, other), (other, name))
                }
            case "heal":
                cluster.cut.clear()
            case "append":
                leaders = [n for n in cluster.names if cluster.node(n).is_leader]
                if leaders:
                    cluster.append(leaders[choice % len(leaders)], str(choice).encode())
            case "stand":
                cluster.clock.now_s += 1.0
                node.begin_election()
                node.settle()
                for _ in range(choice % 8):
                    self.act("round", 0)
                    self.act("flush all", 0)
            case "beat":
                node.leader.send_heartbeats()
                node.settle()
            case "wait":
                cluster.clock.now_s += 0.3
                node.settle()
            case "reset":
                other = cluster.names[(choice + 1) % len(cluster.names)]
                node.link_down(other, "data")
                node.link_up(other, "data", cluster.node(other).contacts.hello("data"))
            case "blackout" if choice % 2:
                post.clear()
                for each in cluster.names:
                    self.restart(each, power=True)
            case "power cut" | "kill" if choice % 2:
                self.restart(name, power=kind == "power cut")

    def restart(self, name: str, *, power: bool) -> None:
        """End a member at once and start it on what its disk still has."""
        cluster = self.cluster
        disk = cluster.disks[name]
        assert isinstance(disk, CrashDisk)
        cluster.disks[name] = disk.power_cut(lambda: not power or self.rng.random() < 0.5)
        member = cluster.start(name)
        member.flushes_by_itself = False
        for other in cluster.names:
            if other != name:
                for channel in ("control", "data"):
                    cluster.node(other).link_up(name, channel, member.node.contacts.hello(channel))
                    member.node.link_up(other, channel, cluster.node(other).contacts.hello(channel))

    def check(self) -> None:
        """Check what must hold at any moment."""
        for name, member in self.cluster.members.items():
            node = member.node
            if node.is_leader:
                assert self.leaders.setdefault(node.term, name) == name, f"two lead {node.term}"
            for index, chain in member.committed:
                assert self.committed.setdefault(index, chain) == chain, f"{index} differs"
            assert node.commit_index <= member.log.durable_index
            for index in range(1, node.commit_index + 1):
                assert member.log.chain_at(index) == self.committed[index]

    def heal(self) -> None:
        """Stop all faults: the group must elect a leader and agree."""
        cluster = self.cluster
        cluster.post.clear()
        cluster.cut.clear()
        for member in cluster.members.values():
            member.flushes_by_itself = True
        for name in cluster.names:
            for other in cluster.names:
                if other != name:
                    node = cluster.node(name)
                    node.link_up(other, "data", cluster.node(other).contacts.hello("data"))
        for attempt in range(3 * len(cluster.names)):
            leader = next((n for n in cluster.names if cluster.node(n).is_leader), None)
            if leader is None:
                cluster.clock.now_s += 2.0
                cluster.node(cluster.names[attempt % len(cluster.names)]).begin_election()
            else:
                cluster.append(leader, b"after")
                cluster.heartbeat(leader)
                cluster.heartbeat(leader)
            cluster.run()
            self.check()
            ends = {node.commit_index for node in map(cluster.node, cluster.names)}
            if leader is not None and ends == {cluster.node(leader).journal.last_index}:
                assert len({tuple(chain) for chain in cluster.chains().values()}) == 1
                return
        raise AssertionError("the group did not come together again")


def play(size: int, seed: int, plan: list[tuple[str, int]]) -> None:
    watched = Watched(size, seed)
    for kind, choice in plan:
        try:
            watched.act(kind, choice)
        except DiskFullError:
            raise AssertionError("the disk in memory has no end") from None
        watched.check()
    watched.heal()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(plan=PLANS, seed=st.integers(0, 2**16), size=st.sampled_from([3, 3, 5]))
def test_any_plan_keeps_what_was_committed_and_ends_in_agreement(
    plan: list[tuple[str, int]], seed: int, size: int
) -> None:
    play(size, seed, plan)


def test_plans_are_worth_playing() -> None:
    """Plans in which no member leads and nothing is committed would find nothing."""
    leaders = committed = 0
    for seed in range(6):
        rng = random.Random(seed)
        watched = Watched(3, seed)
        for _ in range(400):
            watched.act(rng.choice(KINDS), rng.randrange(256))
            watched.check()
        leaders += len(watched.leaders)
        committed += len(watched.committed)
    assert leaders >= 20
    assert committed >= 80


@pytest.mark.slow
@pytest.mark.parametrize("block", gate_part(range(8), 2))
def test_long_random_plans(block: int) -> None:
    """Plans too long for drawing one by one; a failure names its seed."""
    with only_new_garbage():
        for seed in range(block * SEEDS, (block + 1) * SEEDS):
            rng = random.Random(seed)
            plan = [(rng.choice(KINDS), rng.randrange(256)) for _ in range(1200)]
            try:
                play(rng.choice([3, 3, 5]), seed, plan)
            except BaseException as error:
                error.add_note(f"replay: play(size, seed={seed}, plan) of test_long_random_plans")
                raise
            gc.collect()  # few objects hold much: the disks of a plan, and members that were killed
