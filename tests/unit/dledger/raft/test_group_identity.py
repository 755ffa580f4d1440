"""A group has one identity for all its members; one that goes on alone is another group."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from commitlog.disk import OsDisk
from dledger.raft.identity import Identity
from dledger.raft.proof import GroupSecret
from dledger.raft.recover import Recovery
from tests.harness.groups import running_groups
from tests.unit.dledger.raft.test_recover import lose_all_but_one

pytestmark = pytest.mark.usefixtures("autojump_clock")


async def test_all_members_have_one_identity_and_keep_it_over_a_change_of_leader_and_a_restart(
    tmp_path: Path,
) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        identity = leader.group.group_identity
        assert len(bytes.fromhex(identity)) == 16
        await groups.settle()
        assert {r.group.group_identity for r in groups.replicas.values()} == {identity}
        assert leader.group.status()["group_identity"] == identity
        (name,) = [name for name, replica in groups.replicas.items() if replica is leader]
        groups.replicas.pop(name).kill()
        assert (await groups.leader()).group.group_identity == identity
        await groups.start(name)
        await trio.sleep(5)
        assert groups.replicas[name].group.group_identity == identity


def test_two_groups_of_one_name_have_two_identities(tmp_path: Path) -> None:
    found = set()
    for seed in range(2):
        alone = Identity(
            OsDisk(),
            str(tmp_path / f"identity{seed}"),
            cluster="C",
            group="G",
            name="n0",
            rng=random.Random(seed),
        )
        assert alone.group_identity == ""
        assert alone.agree([], {})
        found.add(alone.group_identity)
    assert len(found) == 2


async def test_a_replica_that_goes_on_alone_is_another_group(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        before = (await groups.leader()).group.group_identity
        name = await lose_all_but_one(groups)
        recovery = Recovery(OsDisk(), str(tmp_path / name))
        recovery.go_on_alone(random.Random(1))
        recovery.close()
        await groups.start(name)
        after = (await groups.leader()).group.group_identity
        assert after not in ("", before)


async def test_members_that_share_a_secret_have_one_proof_of_it_and_others_have_none(
    tmp_path: Path,
) -> None:
    proofs = set()
    for secret in (b"a secret of sixteen bytes", b"another of sixteen bytes", None):
        async with running_groups(tmp_path / str(secret), size=1) as groups:
            group = (await groups.leader()).group
            if secret is not None:
                group.node.settings = replace(group.node.settings, secret=GroupSecret(secret))
            assert group.membership_proof == group.membership_proof
            proofs.add(group.membership_proof)
    assert sorted(map(len, proofs)) == [0, 64, 64]
