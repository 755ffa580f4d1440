"""Groups whose members come, go, lose their folders and hand leadership over, under drawn plans.

On top of what `test_raft_plans` does and checks: lists change while letters are late and disks
forget, and in the end every listed member votes and has everything.
"""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.broker_errors import ReplicationError
from dledger.commitlog.errors import MQError
from dledger.raft.membership import Member, Standing
from dledger.testing.crash_disk import CrashDisk
from tests.harness.extent import EXTENT
from tests.harness.fast_part import gate_part
from tests.harness.only_new_garbage import only_new_garbage
from tests.property.test_raft_plans import KINDS, SEEDS, Watched

MEMBER_KINDS = [
    *KINDS,
    *["time"] * 8,
    *["calm"] * 4,
    *["remove"] * 3,
    *["add"] * 3,
    *["observe"] * 2,
    *["promote"] * 2,
    *["transfer", "wipe", "wipe"],
]
PLANS = st.lists(
    st.tuples(st.sampled_from(MEMBER_KINDS), st.integers(0, 255)), min_size=20, max_size=160
)


class WatchedMembers(Watched):
    """A cluster whose members change."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, seed)
        self.wipes = self.changes = self.promotions = 0

    def act(self, kind: str, choice: int) -> None:
        """Do one step of a plan."""
        cluster = self.cluster
        name = cluster.names[choice % len(cluster.names)]
        leader = next((n for n in cluster.names if cluster.node(n).is_leader), None)
        match kind:
            case "remove" if leader is not None:
                self.change(leader, name, remove=True)
            case "add" if leader is not None:
                self.change(leader, name, remove=False)
            case "observe" if leader is not None:
                self.change(leader, name, remove=False, standing=Standing.OBSERVER)
            case "promote" if leader is not None:
                self.promote(leader)
            case "transfer" if leader is not None:
                self.transfer(leader, None if choice % 2 else name)
            case "wipe" if self.may_lose(name):
                self.wipe(name)
            case "time" if leader is not None:
                cluster.clock.now_s += 0.4
                cluster.node(leader).leader.send_heartbeats()
                cluster.node(leader).settle()
            case "calm":
                cluster.cut.clear()
                for _ in range(1 + choice % 8):
                    super().act("round", 0)
                    super().act("flush all", 0)
            case _:
                super().act(kind, choice)

    def promote(self, leader: str) -> None:
        """Ask the first observer to vote; what no rule allows is refused."""
        node = self.cluster.node(leader)
        members = node.roster.members
        assert members is not None
        observers = [m for m in members.members if m.standing is Standing.OBSERVER]
        if not observers:
            return
        try:
            node.changes.change(members.asked_to_vote(observers[0]))
        except ReplicationError:
            return
        self.promotions += 1
        node.settle()

    def change(
        self, leader: str, name: str, *, remove: bool, standing: Standing = Standing.LEARNER
    ) -> None:
        """Remove *name*, or take it in as a learner; what no rule allows is refused."""
        node = self.cluster.node(leader)
        members = node.roster.members
        assert members is not None
        incarnation = self.cluster.node(name).identity.incarnation
        try:
            if remove and (voter := members.voter(name)) is not None:
                node.changes.change(members.without(voter))
                self.changes += 1
            elif not remove and name not in members.names:
                node.changes.change(
                    members.with_learner(Member(name, incarnation, "h", 1), standing)
                )
                self.changes += 1
        except ReplicationError:
            return
        node.settle()

    def transfer(self, leader: str, target: str | None) -> None:
        node = self.cluster.node(leader)
        try:
            node.transfers.begin(target)
        except ReplicationError:
            return
        node.settle()

    def may_lose(self, name: str) -> bool:
        """Whether all would be left without *name*: no second folder is missing meanwhile."""
        nodes = [self.cluster.node(other) for other in self.cluster.names]
        lists = {node.roster.members for node in nodes}
        newest = max(self.committed, default=0)
        members = lists.pop()
        return (
            not lists
            and members is not None
            and len(members.voter_names) >= 3
            and all(member.is_voter for member in members.members)
            and all(
                members.is_voter(node.settings.self_id, node.identity.incarnation)
                for node in nodes
                if node.settings.self_id in members.names
            )
            and all(
                node.journal.log.durable_index >= newest >= node.journal.members.index
                for node in nodes
                if node.settings.self_id != name
            )
        )

    def wipe(self, name: str) -> None:
        """Take the folder of *name* away and start it again."""
        cluster = self.cluster
        cluster.post = [x for x in cluster.post if name not in (x.sender, x.receiver)]
        self.kept = [x for x in self.kept if name not in (x.sender, x.receiver)]
        cluster.disks[name] = CrashDisk()
        cluster.members.pop(name)
        cluster.join(name).flushes_by_itself = False
        self.wipes += 1

    def heal(self) -> None:
        """Stop all faults: those that are listed must agree, and all of them vote."""
        cluster = self.cluster
        cluster.post.clear()
        cluster.cut.clear()
        for name, member in cluster.members.items():
            member.flushes_by_itself = True
            cluster.link(name)
        for attempt in range(4 * len(cluster.names)):
            leader = next((n for n in cluster.names if cluster.node(n).is_leader), None)
            if leader is None:
                cluster.clock.now_s += 2.0
                cluster.node(cluster.names[attempt % len(cluster.names)]).begin_election()
                cluster.run()
                self.check()
                continue
            self.promote(leader)
            cluster.append(leader, b"after")
            cluster.pass_time(leader, 3.0)
            self.check()
            if self.is_whole(leader):
                return
        assert self.lost_too_much(), "the group did not come together again"

    def lost_too_much(self) -> bool:
        """Whether a wiped voter and ones with torn logs together leave no majority to elect by."""
        nodes = [self.cluster.node(name) for name in self.cluster.names]
        newest = max(nodes, key=lambda node: node.journal.last_index).roster.members
        assert newest is not None
        sure = [
            node
            for node in nodes
            if not node.eligibility.doubtful
            and newest.is_voter(node.settings.self_id, node.identity.incarnation)
        ]
        return len(sure) <= len(newest.voter_names) // 2

    def is_whole(self, leader: str) -> bool:
        """Whether everybody in the leader's list votes and has what the leader has."""
        node = self.cluster.node(leader)
        members = node.roster.members
        assert members is not None
        listed = [self.cluster.node(name) for name in members.names]
        return (
            node.is_leader
            and {other.commit_index for other in listed} == {node.journal.last_index}
            and {other.journal.log.last_chain for other in listed} == {node.journal.log.last_chain}
            and all(other.roster.is_self_voter for other in listed)
            and len(members.members) == len(listed)
        )


def play(size: int, seed: int, plan: list[tuple[str, int]]) -> WatchedMembers:
    watched = WatchedMembers(size, seed)
    for kind, choice in plan:
        watched.act(kind, choice)
        watched.check()
    watched.heal()
    return watched


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(plan=PLANS, seed=st.integers(0, 2**16), size=st.sampled_from([3, 3, 5]))
def test_member_changes_keep_what_was_committed(
    plan: list[tuple[str, int]], seed: int, size: int
) -> None:
    play(size, seed, plan)


@pytest.mark.slow
@pytest.mark.parametrize("block", gate_part(range(8), 2))
def test_long_random_plans_with_changes(block: int) -> None:
    """Plans too long for drawing one by one; a failure names its seed."""
    wipes = changes = promotions = 0
    with only_new_garbage():
        for seed in range(block * SEEDS, (block + 1) * SEEDS):
            rng = random.Random(seed)
            plan = [(rng.choice(MEMBER_KINDS), rng.randrange(256)) for _ in range(1200)]
            try:
                watched = play(rng.choice([3, 3, 5]), seed, plan)
            except (MQError, AssertionError) as error:
                error.add_note(f"replay: play(size, seed={seed}, plan) of this test")
                raise
            wipes, changes = wipes + watched.wipes, changes + watched.changes
            promotions += watched.promotions
            gc.collect()  # few objects hold much: the disks of a plan, and members that were killed
    assert wipes >= 2 * EXTENT
    assert changes + promotions >= 8 * EXTENT
    # Not every few seeds have one.
    assert block != 1 or promotions >= EXTENT
