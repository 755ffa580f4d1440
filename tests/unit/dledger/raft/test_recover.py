"""One replica goes on alone after a majority was lost for good."""

import random
from pathlib import Path

import cbor2
import pytest
import trio

from dledger.cli.raft_command import recover, repair_term, what_may_be_lost
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import CorruptStoreError, StoreLockedError
from dledger.commitlog.mark import SlotFile
from dledger.commitlog.record import decode_record
from dledger.commitlog.store_paths import StorePaths
from dledger.log_report import verify_store
from dledger.processors.raft import MembershipChanges
from dledger.raft.journal import TermVote
from dledger.raft.recover import REPAIRED_TERM_STEP, Recovery
from tests.harness.groups import Groups, running_groups
from tests.harness.raft_cluster import batch


def bodies(groups: Groups, name: str) -> list[bytes]:
    group = groups.replicas[name].group
    units = group.queues.queue("T", 0).read(0, group.state.max_offset("T", 0))
    return [
        bytes(decode_record(group.log.record_at(int(unit["phy_offset"]))).body) for unit in units
    ]


async def lose_all_but_one(groups: Groups) -> str:
    """Store two messages everywhere, end all replicas, and return the name of the last one."""
    leader = await groups.leader()
    for body in (b"a", b"b"):
        await leader.group.submit(batch(body))
    await groups.settle()
    await trio.sleep(4)  # a checkpoint
    for replica in list(groups.replicas.values()):
        replica.kill()
    groups.replicas.clear()
    await trio.sleep(0.1)
    return "n1"


async def test_it_leads_alone_with_all_it_had_and_others_join_it_again(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        name = await lose_all_but_one(groups)
        recovery = Recovery(OsDisk(), str(tmp_path / name))
        survivor = recovery.survivor
        assert (survivor.name, survivor.group) == (name, "G")
        assert [member.name for member in survivor.members] == ["n0", "n1", "n2"]
        assert 0 < survivor.commit_index <= survivor.last_index
        recovery.go_on_alone(random.Random(1))
        recovery.close()
        await groups.start(name)
        leader = await groups.leader()
        await leader.group.submit(batch(b"c"))
        assert bodies(groups, name) == [b"a", b"b", b"c"]
        # An old member that comes back after all is refused, and does no harm.
        old = await groups.start("n0")
        await trio.sleep(5)
        assert bodies(groups, name) == [b"a", b"b", b"c"]
        assert leader.group.leadership is not None
        assert old.group.node.leader_id is None
        old.kill()
        del groups.replicas["n0"]
        await trio.sleep(0.1)
        (tmp_path / "n0").rename(tmp_path / "old")
        again = await groups.start("n0")
        await MembershipChanges(leader.group, leader.clock).add("n0", ("127.0.0.1", 40911))
        with trio.fail_after(30):
            while not again.group.node.roster.is_self_voter:
                await trio.sleep(0.1)
        await groups.settle()
        assert bodies(groups, "n0") == [b"a", b"b", b"c"]


async def test_observer_that_goes_on_alone_keeps_its_address(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        groups.names.append("n3")
        await groups.start("n3")
        await MembershipChanges(leader.group, leader.clock).observe("n3", ("127.0.0.1", 40914))
        await lose_all_but_one(groups)
        recovery = Recovery(OsDisk(), str(tmp_path / "n3"))
        recovery.go_on_alone(random.Random(1))
        recovery.close()
        await groups.start("n3")
        members = (await groups.leader()).group.node.roster.members
        assert members is not None
        assert members.voter_names == ("n3",)
        assert members.addresses("n3") == [("127.0.0.1", 40914)]


async def test_recover_names_losses_and_needs_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_groups(tmp_path) as groups:
        name = await lose_all_but_one(groups)
        folder = tmp_path / name
        before = (folder / "raft" / "identity").read_bytes()
        assert recover(folder) == 1
        said = capsys.readouterr().err
        assert "nothing was changed; --force goes on" in said
        assert "that the other members acknowledged" in said
        monkeypatch.setattr("sys.stdin.readline", lambda: "something else\n", raising=False)
        assert recover(folder, force=True) == 1
        assert (folder / "raft" / "identity").read_bytes() == before
        assert recover(folder, force=True, yes=True, output="json") == 0
        out = capsys.readouterr()
        assert '"members": [' in out.out
        assert "the only member of G" in out.err
        await groups.start(name)
        assert (await groups.leader()).group.node.roster.voters == 1


async def test_a_folder_in_use_or_of_something_else_is_refused(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        await groups.leader()
        with pytest.raises(StoreLockedError):
            Recovery(OsDisk(), str(tmp_path / "n0"))
    with pytest.raises(CorruptStoreError, match="no data folder"):
        Recovery(OsDisk(), str(tmp_path))


async def test_recover_names_entries_of_unknown_commit(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        name = await lose_all_but_one(groups)
        recovery = Recovery(OsDisk(), str(tmp_path / name))
        survivor = recovery.survivor
        recovery.close()
        lines = what_may_be_lost(survivor)
        assert f"every entry after {survivor.last_index}" in lines[0]
        unsure = f"{survivor.commit_index + 1} to {survivor.last_index}"
        assert len(lines) == 1 + (survivor.commit_index < survivor.last_index)
        assert all(unsure in line for line in lines[1:])


def spoil_term(folder: Path, term: int) -> None:
    slots = SlotFile(OsDisk(), StorePaths(str(folder)).vote)
    for _ in range(2):
        slots.store(cbor2.dumps([term, "evil"]))
    slots.close()


async def test_impossible_term_is_found_and_repaired(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        await lose_all_but_one(groups)
        for name in groups.names:
            spoil_term(tmp_path / name, 2**63 - 1)
            found = [p for p in verify_store(tmp_path / name).problems if p.startswith("vote: ")]
            assert len(found) == 1
            assert "dledger raft repair-term DIR" in found[0]
            with pytest.raises(CorruptStoreError, match="repair-term"):
                TermVote(SlotFile(OsDisk(), StorePaths(str(tmp_path / name)).vote))
            repair_term(tmp_path / name)
            assert not verify_store(tmp_path / name).problems
            repair_term(tmp_path / name)
            await groups.start(name)
        leader = await groups.leader()
        await leader.group.submit(batch(b"c"))
        assert bodies(groups, leader.name) == [b"a", b"b", b"c"]
        assert leader.group.term > REPAIRED_TERM_STEP


async def test_a_missing_vote_is_refused_until_a_term_is_written(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        await lose_all_but_one(groups)
        for name in groups.names:
            Path(StorePaths(str(tmp_path / name)).vote).unlink()
        with pytest.raises(CorruptStoreError, match="is missing: a vote"):
            await groups.start(groups.names[0])
        for name in groups.names[1:]:
            repair_term(tmp_path / name)
            await groups.start(name)
        leader = await groups.leader()
        assert bodies(groups, leader.name) == [b"a", b"b"]
        assert leader.group.term > REPAIRED_TERM_STEP


async def test_a_replica_with_such_a_term_can_go_on_alone(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        name = await lose_all_but_one(groups)
        spoil_term(tmp_path / name, 2**62)
        recovery = Recovery(OsDisk(), str(tmp_path / name))
        recovery.go_on_alone(random.Random(1))
        recovery.close()
        await groups.start(name)
        leader = await groups.leader()
        await leader.group.submit(batch(b"c"))
        assert bodies(groups, name) == [b"a", b"b", b"c"]
