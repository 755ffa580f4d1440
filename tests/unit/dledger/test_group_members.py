"""Members of a group of brokers: handed leadership, added, replaced, removed, promoted."""

from pathlib import Path

import pytest
import trio

from dledger.broker_errors import ChangeRefusedError, NotLeaderError, UnknownOutcomeError
from dledger.processors.raft import MembershipChanges
from tests.harness.groups import bodies, running_groups
from tests.harness.raft_cluster import batch

pytestmark = pytest.mark.slow


async def test_handover_under_load_leaves_nothing_unknown(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        old = await groups.leader()
        outcomes: list[str] = []

        async def send_all_the_time() -> None:
            while old.group.leadership is not None:
                old.group.propose(batch(b"x"), lambda p: outcomes.append(p.outcome))
                old.group.kick()
                await trio.sleep(0.0003)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all_the_time)
            await trio.sleep(0.2)
            began = trio.current_time()
            assert await old.group.transfer_leadership()
            took_s = trio.current_time() - began
        new = await groups.leader(among=groups.others(old.name))
        assert took_s < 0.1
        assert old.group.leader_address == new.group.leader_address
        await groups.settle()
        assert set(outcomes) == {"stored", "not_stored"}
        assert outcomes.count("stored") == len(bodies(new.group))


async def test_leadership_goes_to_the_one_that_was_named(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        for _ in range(3):
            leader = await groups.leader()
            target = groups.others(leader.name)[1]
            assert await leader.group.transfer_leadership(target)
            assert (await groups.leader(among=groups.others(leader.name))).name == target


async def test_a_transfer_that_fails_seals_what_waited(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"a"))
        target = groups.others(leader.name)[0]
        # The target receives everything, and has no space to lead in.
        groups.replicas[target].group.node.owner.may_lead = lambda: False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.group.submit, batch(b"b"))
            assert not await leader.group.transfer_leadership(target)
        assert leader.group.leadership is not None
        assert bodies(leader.group) == [b"a", b"b"]


async def test_observer_copies_and_votes_only_when_asked(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        changes = MembershipChanges(leader.group, leader.clock)
        groups.names.append("n3")
        observer = await groups.start("n3")
        await changes.observe("n3", ("127.0.0.1", 40914))
        await leader.group.submit(batch(b"one"))
        await trio.sleep(60)
        assert bodies(observer.group) == [b"one"]
        members = leader.group.node.roster.members
        assert members is not None
        assert members.voter_names == ("n0", "n1", "n2")
        with pytest.raises(ChangeRefusedError, match="see promote"):
            await changes.add("n3", ("127.0.0.1", 40914))
        with pytest.raises(ChangeRefusedError, match="votes, or will"):
            await changes.observe(groups.others(leader.name)[0], ("127.0.0.1", 1))
        with pytest.raises(ChangeRefusedError, match="no observer"):
            await changes.promote("n9")
        # With two voters away an observer makes no majority.
        for name in set(groups.others(leader.name)) - {"n3"}:
            groups.replicas.pop(name).kill()
        with pytest.raises(UnknownOutcomeError):
            await leader.group.submit(batch(b"alone"))
        assert leader.group.leadership is None


async def test_promoted_observer_is_counted(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        changes = MembershipChanges(leader.group, leader.clock)
        groups.names.append("n3")
        observer = await groups.start("n3")
        await changes.observe("n3", ("127.0.0.1", 40914))
        await leader.group.submit(batch(b"one"))
        await changes.promote("n3")
        await changes.promote("n3")
        with trio.fail_after(30):
            while not observer.group.node.roster.is_self_voter:
                await trio.sleep(0.1)
        with pytest.raises(ChangeRefusedError, match="no observer"):
            await changes.promote("n3")
        await changes.transfer("n3")
        await (await groups.leader(among=["n3"])).group.submit(batch(b"two"))
        await groups.settle()
        assert {tuple(bodies(r.group)) for r in groups.replicas.values()} == {(b"one", b"two")}


async def test_impossible_change_is_refused(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        changes = MembershipChanges(leader.group, leader.clock)
        other = groups.others(leader.name)[0]
        before = leader.group.node.roster.members
        for change, says in (
            (changes.add("n9", ("127.0.0.1", 999)), "does not answer"),
            (changes.add(other, ("127.0.0.1", 40911)), "member already"),
            (changes.remove(leader.name), "transfer its leadership"),
            (changes.remove("n9"), "no member"),
            (changes.replace("n9", ("127.0.0.1", 1)), "no member"),
            (changes.replace(other, ("127.0.0.1", 999)), "calls itself"),
            (changes.transfer("n9"), "n9 is not a connected voter"),
        ):
            with pytest.raises(ChangeRefusedError, match=says):
                await change
        follower = groups.replicas[other]
        with pytest.raises(NotLeaderError):
            await MembershipChanges(follower.group, follower.clock).remove(leader.name)
        assert leader.group.node.roster.members == before
        assert leader.group.node.journal.members.before() is None


async def test_clean_stop_tries_another_successor(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        best = max(groups.others(leader.name))
        groups.replicas[best].group.node.owner.may_lead = lambda: False
        assert not await leader.group.transfer_leadership()
        assert await leader.group.transfer_leadership()
        assert best != (await groups.leader(among=groups.others(leader.name))).name
