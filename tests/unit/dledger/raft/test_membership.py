"""Lists of members: bytes, rules of change, steps of a replacement, truncation."""

from dataclasses import replace

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.broker_errors import ChangeRefusedError
from dledger.commitlog.errors import CorruptEntryError
from dledger.raft.membership import (
    MEMBERS_MAX,
    Member,
    Members,
    MembersLog,
    Sight,
    Standing,
    check_change,
    next_list,
)
from tests.harness.present import present

THREE = Members.bootstrap(
    {"n2": "c", "n0": "a", "n1": "b"},
    {"n0": ("h0", 1), "n1": ("h1", 2), "n2": ("h2", 3)},
    {"n0": "h0:10911"},
)
LEADER = ("n0", "a")


def learner(name: str, incarnation: str) -> Member:
    return Member(name, incarnation, "h", 9, "h:10", Standing.LEARNER)


def voter_of(members: Members, name: str) -> Member:
    return present(members.voter(name))


def test_the_same_list_has_the_same_bytes_whatever_its_order() -> None:
    again = Members.of(reversed(THREE.members))
    assert again == THREE
    assert again.encode() == THREE.encode()
    assert Members.decode(THREE.encode()) == THREE
    assert cbor2.loads(THREE.encode()) == {
        "v": 1,
        "members": [
            ["n0", "a", "h0", 1, "h0:10911", "voter"],
            ["n1", "b", "h1", 2, "", "voter"],
            ["n2", "c", "h2", 3, "", "voter"],
        ],
    }


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "cannot be read"),
        (cbor2.dumps({"v": 3, "members": []}), "version 3"),
        (cbor2.dumps({"v": 1}), "cannot be read"),
        (cbor2.dumps({"v": 1, "members": [["n0", "a", "h", 1, "", "king"]]}), "cannot be read"),
        (cbor2.dumps({"v": 1, "members": [["n0", "a", "h", "1", "", "voter"]]}), "would not write"),
        (
            cbor2.dumps({"v": 1, "members": [[n, "a", "h", 1, "", "voter"] for n in ("n1", "n0")]}),
            "would not write",
        ),
        (
            cbor2.dumps({"v": 1, "members": [["n0", i, "h", 1, "", "voter"] for i in "ab"]}),
            "two members of one name",
        ),
    ],
)
def test_a_list_that_this_version_would_not_write_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(CorruptEntryError, match=says):
        Members.decode(body)


def test_the_steps_of_adding_and_removing_are_allowed_one_by_one() -> None:
    added = THREE.with_learner(learner("n3", "d"))
    check_change(THREE, added, LEADER)
    promoted = added.promoted(learner("n3", "d"))
    check_change(added, promoted, LEADER)
    assert promoted.voter_names == ("n0", "n1", "n2", "n3")
    removed = promoted.without(voter_of(promoted, "n1"))
    check_change(promoted, removed, LEADER)
    assert removed.voter_names == ("n0", "n2", "n3")


def test_an_observer_is_a_learner_before_it_votes() -> None:
    observer = Member("n3", "d")
    observed = THREE.with_learner(observer, Standing.OBSERVER)
    with pytest.raises(ChangeRefusedError, match="was no learner"):
        check_change(observed, observed.promoted(observer), LEADER)
    asked = observed.asked_to_vote(observer)
    check_change(observed, asked, LEADER)
    check_change(asked, asked.promoted(observer), LEADER)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (Members(()), "without voters"),
        (THREE.without(THREE.members[0]), "the leader stays"),
        (THREE.without(THREE.members[1]).without(THREE.members[2]), "more than one"),
        (Members.of([*THREE.members, Member("n3", "d")]), "was no learner"),
        (
            Members.of([*THREE.without(THREE.members[1]).members, Member("n1", "new")]),
            "more than one",
        ),
    ],
)
def test_what_could_make_two_majorities_is_refused(after: Members, says: str) -> None:
    with pytest.raises(ChangeRefusedError, match=says):
        check_change(THREE, after, LEADER)


def test_a_demoted_leader_is_a_removed_leader() -> None:
    demoted = Members.of([*THREE.members[1:], learner("n0", "a")])
    with pytest.raises(ChangeRefusedError, match="the leader stays"):
        check_change(THREE, demoted, LEADER)


def test_an_address_may_change_without_a_change_of_votes() -> None:
    moved = THREE.moved(THREE.members[1], "elsewhere", 7, "elsewhere:8")
    check_change(THREE, moved, LEADER)
    assert moved.addresses("n1") == [("elsewhere", 7)]
    assert moved.is_voter("n1", "b")


def test_learner_and_observer_of_one_name_are_refused() -> None:
    observer = replace(learner("n3", "e"), standing=Standing.OBSERVER)
    with pytest.raises(ChangeRefusedError, match="two members of one name"):
        Members.of([*THREE.members, learner("n3", "d"), observer])


def test_a_group_has_a_largest_size() -> None:
    with pytest.raises(ChangeRefusedError, match="at most"):
        Members.of(Member(f"n{n}", "x") for n in range(MEMBERS_MAX + 1))


members_strategy = st.dictionaries(
    st.sampled_from(["n0", "n1", "n2", "n3", "n4"]), st.booleans(), min_size=1
).map(
    lambda drawn: Members.of(
        Member(
            name, "i" + name, standing=Standing.VOTER if votes or name == "n0" else Standing.LEARNER
        )
        for name, votes in {"n0": True, **drawn}.items()
    )
)


@given(members_strategy, members_strategy)
def test_majorities_over_a_change_share_a_member(before: Members, after: Members) -> None:
    try:
        check_change(before, after, ("n0", "in0"))
    except ChangeRefusedError:
        return
    old, new = set(before.voter_names), set(after.voter_names)
    smallest = (len(old) // 2 + 1) + (len(new) // 2 + 1)
    assert smallest > len(old | new)


# -- the way of a replacement --------------------------------------------------------------


def sight(incarnation: str, *, settled: bool = True, caught_up: bool = False) -> Sight:
    return Sight(incarnation, settled, caught_up, "new", 5, "new:6")


def test_unchanged_members_need_no_change() -> None:
    assert next_list(THREE, {"n1": sight("b"), "n2": sight("c", caught_up=True)}) is None
    assert next_list(THREE, {}) is None


def test_a_wiped_voter_joins_catches_up_and_takes_its_own_place() -> None:
    steps, members = [], THREE
    seen = {"n1": sight("new", caught_up=False)}
    for caught_up in (False, False, True, True, True):
        seen["n1"] = sight("new", caught_up=caught_up)
        after = next_list(members, seen)
        if after is None:
            steps.append("wait")
            continue
        check_change(members, after, LEADER)
        members = after
        steps.append(" ".join(f"{m.incarnation}:{m.standing}" for m in members.members))
    assert steps == [
        *("a:voter b:voter new:learner c:voter", "wait", "a:voter new:learner c:voter"),
        *("a:voter new:voter c:voter", "wait"),
    ]
    assert members.addresses("n1") == [("new", 5)]


def test_an_incarnation_that_just_appeared_is_waited_for() -> None:
    assert next_list(THREE, {"n1": sight("new", settled=False)}) is None


def test_newest_incarnation_is_the_learner() -> None:
    once = present(next_list(THREE, {"n1": sight("new")}))
    twice = present(next_list(once, {"n1": sight("newer")}))
    check_change(once, twice, LEADER)
    found = present(twice.learner("n1"))
    assert found.incarnation == "newer"
    assert twice.is_voter("n1", "b")


def test_returned_folder_removes_its_learner() -> None:
    once = present(next_list(THREE, {"n1": sight("new")}))
    assert next_list(once, {"n1": sight("b")}) == THREE


def test_an_added_learner_is_promoted_when_it_has_caught_up() -> None:
    members = THREE.with_learner(learner("n3", "d"))
    assert next_list(members, {"n3": sight("d")}) is None
    promoted = present(next_list(members, {"n3": sight("d", caught_up=True)}))
    assert promoted.is_voter("n3", "d")


OBSERVED = THREE.with_learner(learner("n3", "d"), Standing.OBSERVER)


def test_observer_stays_one_until_it_is_asked_to_vote() -> None:
    caught_up = {"n3": sight("d", caught_up=True)}
    check_change(THREE, OBSERVED, LEADER)
    assert next_list(OBSERVED, caught_up) is None
    observer = present(OBSERVED.learner("n3"))
    asked = OBSERVED.asked_to_vote(observer)
    check_change(OBSERVED, asked, LEADER)
    assert asked.voter_names == OBSERVED.voter_names == ("n0", "n1", "n2")
    promoted = present(next_list(asked, caught_up))
    check_change(asked, promoted, LEADER)
    assert promoted.is_voter("n3", "d")


def test_observer_that_lost_its_folder_is_an_observer_again() -> None:
    again = present(next_list(OBSERVED, {"n3": sight("e", caught_up=True)}))
    check_change(OBSERVED, again, LEADER)
    found = present(again.learner("n3"))
    assert (found.incarnation, found.standing) == ("e", Standing.OBSERVER)
    assert next_list(again, {"n3": sight("e", caught_up=True)}) is None


def test_voter_that_lost_its_folder_is_no_observer() -> None:
    once = present(next_list(OBSERVED, {"n1": sight("new")}))
    found = present(once.learner("n1"))
    assert found.standing is Standing.LEARNER


# -- the list in force ---------------------------------------------------------------------


def test_a_truncation_returns_to_the_list_before() -> None:
    log = MembersLog(0, THREE)
    added = THREE.with_learner(learner("n3", "d"))
    log.append(5, added)
    log.append(9, added.promoted(learner("n3", "d")))
    assert (log.index, log.before()) == (9, added)
    version = log.version
    log.truncate_from(10)
    assert (log.index, log.version) == (9, version)
    log.truncate_from(9)
    assert (log.index, log.members) == (5, added)
    log.truncate_from(2)
    assert (log.index, log.members, log.before()) == (0, THREE, None)


def test_what_is_committed_is_the_ground() -> None:
    log = MembersLog(0, THREE)
    added = THREE.with_learner(learner("n3", "d"))
    log.append(5, added)
    log.append(9, THREE)
    log.committed(8)
    assert log.before() == added
    log.committed(9)
    assert (log.before(), log.members, log.index) == (None, THREE, 9)
