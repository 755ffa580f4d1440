"""What leaders write of members: each rule finds what breaks it, and nothing beside it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from dledger.jepsen_like.simulation.member_lists import MemberLists
from dledger.raft.membership import Member, Members, Standing

TERM = 3
FIRST_OF_TERM = 5


def members(*names: str, learner: str = "") -> Members:
    listed = [Member(name, f"{name}-0") for name in names]
    if learner:
        listed.append(Member(learner, f"{learner}-0", standing=Standing.LEARNER))
    return Members.of(listed)


class Scene:
    """A leader ``a`` with ``b`` and ``c``, whose state a test changes step by step."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.damaged: list[int] = []
        self.world: Any = SimpleNamespace(
            sometimes=Counter[str](),
            brokers={},
            violate=lambda name, _text: self.found.append(name),
        )
        self.lists = MemberLists(self.world)
        self.peers = {name: SimpleNamespace(is_connected=True) for name in "bcd"}
        self.raft: Any = SimpleNamespace(
            is_leader=True,
            term=TERM,
            commit_index=FIRST_OF_TERM,
            settings=SimpleNamespace(sync_flush=True),
            journal=SimpleNamespace(term_at=lambda index: TERM - (index < FIRST_OF_TERM)),
            roster=SimpleNamespace(
                log=SimpleNamespace(index=1), members=members("a", "b", "c", learner="d")
            ),
            state=SimpleNamespace(has_hole=False, peers=self.peers),
        )
        self.group: Any = SimpleNamespace(
            node=self.raft,
            log=SimpleNamespace(damaged=SimpleNamespace(indexes=self.damaged)),
            store=SimpleNamespace(damaged=False, refilling=False),
        )
        self.node: Any = SimpleNamespace(name="a", is_trusted=True)
        self.step()

    def step(self) -> list[str]:
        self.lists.after_step(self.node, self.group)
        return self.found

    def write(self, index: int, after: Members) -> list[str]:
        self.raft.roster.log.index, self.raft.roster.members = index, after
        return self.step()

    def learner_holds(self, index: int, incarnation: str = "d-0") -> None:
        log = SimpleNamespace(durable_index=index)
        self.world.brokers["d"] = SimpleNamespace(
            group=SimpleNamespace(
                node=SimpleNamespace(identity=SimpleNamespace(incarnation=incarnation)),
                store=SimpleNamespace(log=log, installing=False),
            )
        )


def test_a_change_after_a_committed_one_is_right() -> None:
    scene = Scene()
    assert scene.write(6, members("a", "b")) == []
    scene.raft.commit_index = 6
    assert scene.write(7, members("a", "b", "c")) == []


def test_a_change_before_the_last_is_committed_is_found() -> None:
    scene = Scene()
    scene.write(6, members("a", "b"))
    assert scene.write(7, members("a", "b", "c")) == ["change_too_early"]


def test_a_change_before_the_term_has_a_commit_is_found() -> None:
    scene = Scene()
    scene.raft.commit_index = FIRST_OF_TERM - 1
    assert scene.write(6, members("a", "b")) == ["change_too_early"]


def test_the_first_list_of_a_group_comes_at_once() -> None:
    scene = Scene()
    scene.write(0, members("a", "b", "c"))
    scene.raft.commit_index = 0
    assert scene.write(6, members("a", "b", "c")) == []


def test_a_list_that_a_follower_takes_is_not_its_own() -> None:
    scene = Scene()
    scene.raft.is_leader = False
    scene.write(6, members("a", "b"))
    assert scene.write(7, members("a", "b", "c")) == []


def test_a_list_whose_majority_is_away_is_found() -> None:
    scene = Scene()
    scene.peers["b"].is_connected = False
    assert scene.write(6, members("a", "b", "c")) == []
    scene.raft.commit_index = 6
    assert scene.write(7, members("a", "b")) == ["list_without_majority"]


def test_a_learner_that_has_caught_up_gets_its_vote() -> None:
    scene = Scene()
    scene.learner_holds(FIRST_OF_TERM)
    scene.raft.commit_index = FIRST_OF_TERM + 1
    assert scene.write(7, members("a", "b", "c", "d")) == []


def test_a_vote_of_a_learner_that_lacks_entries_is_found() -> None:
    scene = Scene()
    scene.learner_holds(FIRST_OF_TERM - 1)
    assert scene.write(6, members("a", "b", "c", "d")) == ["vote_before_caught_up"]


def test_a_learner_that_was_wiped_since_is_another_member() -> None:
    scene = Scene()
    scene.learner_holds(0, incarnation="d-1")
    assert scene.write(6, members("a", "b", "c", "d")) == []


def test_a_leader_that_leads_on_with_a_hole_is_found() -> None:
    scene = Scene()
    scene.damaged.append(4)
    scene.raft.state.has_hole = True
    assert scene.step() == ["leads_with_hole"]


def test_a_leader_that_finds_a_hole_and_ceases_is_right() -> None:
    scene = Scene()
    scene.damaged.append(4)
    scene.raft.state.has_hole, scene.raft.is_leader = True, False
    assert scene.step() == []


def test_a_candidate_that_wins_with_a_hole_found_none() -> None:
    scene = Scene()
    scene.raft.is_leader = False
    scene.damaged.append(4)
    scene.raft.state.has_hole = True
    scene.step()
    scene.raft.is_leader = True
    assert scene.step() == []


def test_damage_at_a_start_needs_a_disk_that_lost_something() -> None:
    scene = Scene()
    scene.group.store.damaged = True
    scene.node.is_trusted = False
    scene.lists.watch(scene.node, scene.group)
    assert scene.found == []
    scene.node.is_trusted = True
    scene.lists.watch(scene.node, scene.group)
    assert scene.found == ["damaged_without_loss"]


def test_a_member_that_comes_back_keeps_what_it_had() -> None:
    """The leader has followed it all the time."""
    scene = Scene()
    scene.learner_holds(FIRST_OF_TERM)
    scene.raft.commit_index = 6
    assert scene.write(7, members("a", "b", "c")) == []
    scene.raft.commit_index = 7
    assert scene.write(8, members("a", "b", "c", learner="d")) == []
    scene.raft.commit_index = 8
    assert scene.write(9, members("a", "b", "c", "d")) == []
