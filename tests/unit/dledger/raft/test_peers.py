"""The members a node knows and counts; refused peers in the log.

The state of a member, and the callbacks of its owner.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dledger.commitlog.errors import FlushFailedError, InvariantBroken
from dledger.raft.identity import Hello
from dledger.raft.leader import could_commit
from dledger.raft.membership import Member, Members, MembersLog, Standing
from dledger.raft.peers import REASONS_MAX, REPEAT_S, Failure, Owner, Refusals, Roster
from tests.harness.raft_cluster import Cluster

ADDRESSES = {name: ("127.0.0.1", 40911 + i) for i, name in enumerate(("n0", "n1", "n2"))}
OLD = {"n0": "a0", "n1": "a1", "n2": "a2"}
NEW = {"n0": "b0", "n1": "b1", "n2": "a2"}
"""Of the same names, after the folders of two were lost and replaced."""


@pytest.fixture
def roster() -> Roster:
    """n2's, whose list is that of long ago."""
    log = MembersLog()
    log.reset(12, Members.bootstrap(OLD, ADDRESSES, {}))
    identity: Any = SimpleNamespace(incarnation="a2", voters=OLD)
    return Roster(log, identity, "n2", ADDRESSES)


def answer(name: str, members: dict[str, str], *, inc: str = "", index: int = 300) -> Hello:
    """What the member *name* of the list *members* answers a call."""
    return Hello(
        cluster="C",
        group="G",
        name=name,
        incarnation=inc or members[name],
        voters=OLD,
        doubtful=False,
        client_address="",
        channel="data",
        members=tuple(sorted(members.items())),
        members_index=index,
    )


def test_roster_accepts_successors_with_a_majority(roster: Roster) -> None:
    roster.found(answer("n0", NEW))
    assert not roster.is_member(("n0", "b0"))
    roster.found(answer("n1", NEW))
    assert roster.is_member(("n0", "b0"))
    assert roster.is_member(("n1", "b1"))
    assert not roster.is_member(("n3", "c3"))


def test_roster_refuses_a_successor_of_one_address(roster: Roster) -> None:
    claimed = {"n0": "evil", "n1": "evil too", "n2": "a2"}
    roster.found(answer("n0", claimed))
    for name, incarnation in claimed.items():
        assert roster.is_member((name, incarnation)) == (name == "n2")


def test_roster_refuses_successors_without_this_member(roster: Roster) -> None:
    for members in ({**NEW, "n2": "b2"}, {"n0": "b0", "n1": "b1"}):
        for name in ("n0", "n1"):
            roster.found(answer(name, members))
        assert not roster.is_member(("n0", "b0"))


def test_roster_refuses_successors_of_an_older_list(roster: Roster) -> None:
    for name in ("n0", "n1"):
        roster.found(answer(name, NEW, index=11))
    assert not roster.is_member(("n0", "b0"))


def test_roster_forgets_an_address_that_changed(roster: Roster) -> None:
    for name in ("n0", "n1"):
        roster.found(answer(name, NEW))
    roster.found(answer("n1", {}, inc="c1"))
    assert not roster.is_member(("n0", "b0"))


def call(name: str, incarnation: str) -> Hello:
    """What a caller sends of itself."""
    return answer(name, {}, inc=incarnation)


def test_roster_answers_a_caller_that_knows_it(roster: Roster) -> None:
    unknown = ("n0", "b0")
    assert not roster.is_answered(unknown)
    assert not roster.is_answered(unknown, ("a0", "another"))
    assert roster.is_answered(unknown, ("another", "a2"))
    # Under a name that this member does not look for it is nothing to it.
    assert not roster.is_answered(("evil", "b0"), ("a2",))


def test_roster_keeps_newest_refused_incarnations(roster: Roster) -> None:
    assert roster.shown_by("n0") == ()
    for number in range(12):
        roster.note_shown(call("n0", f"b{number}"))
        roster.note_shown(call("n0", f"b{number}"))
        roster.note_shown(call("evil", f"b{number}"))
    assert roster.shown_by("n0") == tuple(f"b{number}" for number in range(4, 12))
    assert roster.shown_by("evil") == ()
    roster.found(answer("n0", {}, inc="b11"))
    assert roster.shown_by("n0") == ()


def test_roster_connects_members_that_no_list_names() -> None:
    """One came back with a list of long ago after all folders had been replaced, its own too."""
    own = {"n0": "c0", "n2": "b2"}
    rosters = {}
    for name, listed in (("n0", OLD), ("n2", {**NEW, "n2": "b2"})):
        log = MembersLog()
        log.reset(12, Members.bootstrap(listed, ADDRESSES, {}))
        identity: Any = SimpleNamespace(incarnation=own[name], voters=OLD)
        rosters[name] = Roster(log, identity, name, ADDRESSES)

    def calls(caller: str, called: str) -> bool:
        """Whether *called* answers; then the caller has found it."""
        hello, shown = call(caller, own[caller]), rosters[caller].shown_by(called)
        if not rosters[called].is_answered(hello.key, shown):
            rosters[called].note_shown(hello)
            return False
        rosters[caller].found(call(called, own[called]))
        return True

    assert [calls("n0", "n2"), calls("n2", "n0"), calls("n0", "n2")] == [False, True, True]
    assert rosters["n0"].is_known(("n2", "b2"))
    assert rosters["n2"].is_known(("n0", "c0"))


def test_roster_accepts_configured_addresses_until_listed() -> None:
    log = MembersLog()
    log.reset(12, Members.bootstrap(OLD, ADDRESSES, {}))
    identity: Any = SimpleNamespace(incarnation="c2", voters={})
    roster = Roster(log, identity, "n2", {**ADDRESSES, "n3": ("127.0.0.1", 40914)})
    leader, other = ("n0", "b0"), ("n9", "b9")
    assert "n3" in roster.expected()
    assert not roster.is_member(leader), "it has not answered at its address"
    for name, incarnation in (leader, other):
        roster.found(call(name, incarnation))
    assert roster.is_member(leader)
    assert not roster.is_member(other), "nothing is configured for that name"
    log.reset(40, Members.bootstrap({"n0": "z0", "n1": "a1", "n2": "c2"}, ADDRESSES, {}))
    assert not roster.is_member(leader)
    assert "n3" not in roster.expected()


NEWER = "n2 speaks version 2, known here is 1"


def test_a_reason_gets_one_line_however_often_it_comes() -> None:
    refusals = Refusals()
    assert refusals.note(NEWER, 5.0) == 1
    assert [refusals.note(NEWER, 5.0 + 0.1 * n) for n in range(100)] == [None] * 100
    assert refusals.note("a peer frame with a wrong CRC", 6.0) == 1


def test_next_log_line_counts_repeats() -> None:
    refusals = Refusals()
    refusals.note(NEWER, 0.0)
    for n in range(7):
        assert refusals.note(NEWER, 1.0 + n) is None
    assert refusals.note(NEWER, REPEAT_S) == 8
    assert refusals.note(NEWER, REPEAT_S + 1.0) is None
    assert refusals.note(NEWER, 2 * REPEAT_S) == 2


def test_refusals_of_a_stranger_are_bounded() -> None:
    refusals = Refusals()
    for n in range(10 * REASONS_MAX):
        assert refusals.note(f"a peer frame of {n} bytes", 1.0) == 1
    last = 10 * REASONS_MAX - 1
    assert refusals.note(f"a peer frame of {last} bytes", 2.0) is None
    assert refusals.note(f"a peer frame of {last - REASONS_MAX + 1} bytes", 2.0) is None
    assert refusals.note(f"a peer frame of {last - REASONS_MAX} bytes", 2.0) == 1


LIST = Members.of(Member(name, f"{name}-1") for name in ("n0", "n1", "n2", "n3", "n4"))


def hello(name: str, incarnation: str = "", *, doubtful: bool = False) -> Hello:
    return Hello("C", "G", name, incarnation or f"{name}-1", {}, doubtful, "", "control")


@pytest.mark.parametrize(
    ("connected", "can"),
    [
        ([], False),
        ([hello("n1")], False),
        ([hello("n1"), hello("n2")], True),
        ([hello("n1"), hello("n2", doubtful=True)], False),
        ([hello("n1"), hello("n2", "n2-2")], False),
        ([hello("n1"), hello("guest")], False),
        ([hello("n1"), hello("n2", doubtful=True), hello("n3")], True),
    ],
)
def test_list_commits_with_a_majority_that_votes(connected: list[Hello], can: bool) -> None:
    """Name and incarnation count, the leader counts itself; eligibility does not matter."""
    assert could_commit(LIST, connected) is can


def test_owner_without_hooks_is_not_called() -> None:
    owner = Owner(lambda: None)
    assert owner.may_lead()
    assert not owner.on_suspect(7)
    with pytest.raises(InvariantBroken, match="no tables to send"):
        owner.take_snapshot()
    with pytest.raises(InvariantBroken, match="3 bytes from n1"):
        owner.on_snapshot("n1", b"abc")


def test_end_of_events_runs_after_the_owner(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    node, seen = cluster.elect("n0"), list[tuple[int, int]]()
    inner = node.owner.on_settled

    def looking_on() -> None:
        inner()
        seen.append((node.commit_index, len(cluster.members["n0"].committed)))

    node.owner.on_settled = looking_on
    index = cluster.append("n0", b"x")
    cluster.run()
    assert seen[-1] == (index, index)
    assert all(commit == applied for commit, applied in seen)


def test_what_the_owner_answers_may_change_while_the_node_runs(cluster: Cluster) -> None:
    node = cluster.node("n0")
    node.owner.may_lead = lambda: False
    cluster.clock.now_s += 10.0
    node.begin_election()
    cluster.run()
    assert not node.is_leader
    node.owner.may_lead = lambda: True
    assert cluster.elect("n0").is_leader


def test_disk_failure_is_no_connection_error() -> None:
    failure = Failure()
    raised = failure.of_disk(OSError(5, "input/output error"))
    assert failure.error is raised
    assert isinstance(raised, FlushFailedError)
    assert not isinstance(raised, OSError)


@pytest.mark.parametrize("standing", [Standing.LEARNER, Standing.OBSERVER])
def test_members_without_a_vote_commit_no_list(standing: Standing) -> None:
    members = LIST.with_learner(Member("n7", "n7-1"), standing)
    assert not could_commit(members, [hello("n1"), hello("n7")])
    assert could_commit(members, [hello("n1"), hello("n2"), hello("n7")])
