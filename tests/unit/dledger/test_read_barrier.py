"""Reads of a group that must not be stale."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from dledger.broker_errors import NotLeaderError
from dledger.waiting import Future
from tests.harness.groups import LATENCY_S, Replica, running_groups
from tests.harness.raft_cluster import batch


async def pass_barrier(replica: Replica) -> None:
    """Wait for a read barrier; raise the error that it ended with."""
    done = Future[NotLeaderError | None]()
    replica.group.read_barrier(done)
    if (error := await done.wait()) is not None:
        raise error


async def max_offset(replica: Replica) -> int:
    await pass_barrier(replica)
    return replica.group.state.max_offset("T", 0)


async def test_a_read_takes_one_round_trip(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"x"))
        for _ in range(5):
            await trio.sleep(0.0371)
            began = trio.current_time()
            assert await max_offset(leader) == 1
            assert trio.current_time() - began == pytest.approx(2 * LATENCY_S)


async def test_followers_refuse_and_name_the_leader(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        await groups.settle()
        follower = groups.replicas[groups.others(leader.name)[0]]
        with pytest.raises(NotLeaderError) as refused:
            follower.group.read_barrier(lambda _: None)
        assert refused.value.leader_address == f"{leader.name}:10911"


async def test_cut_off_leader_answers_no_later_read(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        old = await groups.leader()
        await old.group.submit(batch(b"before"))
        await groups.isolate(old.name)
        answers: list[NotLeaderError | None] = []
        asked = 0
        with trio.fail_after(5):
            while old.group.leadership is not None:
                old.group.read_barrier(answers.append)
                asked += 1
                await trio.sleep(0.01)
        assert asked > 20, "it believed for a while that it leads"
        assert len(answers) == asked
        assert all(isinstance(answer, NotLeaderError) for answer in answers)
        new = await groups.leader(among=groups.others(old.name))
        await new.group.submit(batch(b"after"))
        assert await max_offset(new) == 2
        groups.heal()
        await groups.settle()


async def test_read_without_a_majority_ends(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        # Heartbeats pass, their echoes do not count.
        leader.group.node.roster.is_voter = lambda name: False  # type: ignore[method-assign]  # echoes do not count
        answers: list[NotLeaderError | None] = []
        began = trio.current_time()
        leader.group.read_barrier(answers.append)
        while not answers:
            await trio.sleep(0.01)
        assert isinstance(answers[0], NotLeaderError)
        settings = leader.group.node.settings
        latest = settings.election_timeout_s + settings.heartbeat_interval_s
        assert trio.current_time() - began <= latest + 0.05
