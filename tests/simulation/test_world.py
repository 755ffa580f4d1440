"""The nodes of a world do what machines do, and a world notices what must not happen."""

from contextlib import suppress
from typing import Any

import pytest
import trio

from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.simulation.machine import State
from dledger.jepsen_like.simulation.node import BrokerNode, ClientNode
from dledger.jepsen_like.simulation.world import Violation, World, run_world
from dledger.raft.replicator import Replicator


async def send_forever(node: ClientNode) -> None:
    assert node.instance is not None
    async with Producer(node.instance, "producers") as producer:
        number = 0
        while True:
            number += 1
            with suppress(ClientError):
                await producer.send(Message("Orders", b"%d" % number))
            await node.clock.sleep(0.5)


def test_a_paused_leader_is_replaced_and_follows_when_it_goes_on() -> None:
    async def main(world: World) -> None:
        old = await world.wait_for_leader()
        old.pause()
        await world.sleep(15)
        new = await world.wait_for_leader()
        assert new is not old
        assert old.leads  # it stands still and knows nothing of it
        old.resume()
        await world.sleep(5)
        assert not old.leads
        assert world.leader() is new
        await world.wait_for_agreement()

    run_world(1, main)


def test_a_power_failure_of_all_keeps_what_was_committed() -> None:
    async def main(world: World) -> int:
        await world.wait_for_leader()
        await world.client("c").run(send_forever)
        await world.sleep(20)
        committed = world.checks.last_committed
        for node in world.brokers.values():
            await node.power_cut()
        assert world.leader() is None
        assert world.replicas() == []
        await world.heal()
        await world.wait_for_leader()
        await world.sleep(10)
        await world.clients["c"].kill()
        await world.wait_for_agreement()
        assert world.checks.last_committed > committed
        return committed

    assert run_world(2, main) > 30


def test_a_clean_stop_is_no_error_and_is_noticed_at_once() -> None:
    async def main(world: World) -> None:
        old = await world.wait_for_leader()
        assert await old.stop()
        assert (old.state, old.error) == (State.DOWN, None)
        await world.sleep(5)
        assert await world.wait_for_leader() is not old
        assert await old.start()
        await world.wait_for_agreement()

    run_world(3, main)


def test_a_program_of_a_killed_client_does_nothing_more() -> None:
    async def main(world: World) -> None:
        await world.wait_for_leader()
        client = world.client("c")
        await client.run(send_forever)
        await world.sleep(5)
        await client.kill()
        await world.sleep(1)
        committed = world.checks.last_committed
        await world.sleep(20)
        assert world.checks.last_committed == committed
        await client.start()
        await world.sleep(5)
        assert world.checks.last_committed > committed

    run_world(4, main)


def test_a_broker_whose_flush_fails_ends_and_can_start_again() -> None:
    async def main(world: World) -> None:
        leader = await world.wait_for_leader()
        await world.client("c").run(send_forever)
        await world.sleep(5)
        await leader.fail_flushes(1)
        await world.sleep(20)
        assert leader.state is State.DOWN
        assert leader.error is not None
        await world.heal()
        await world.clients["c"].kill()
        await world.wait_for_agreement()

    run_world(5, main)


def test_no_majority_is_a_violation_where_one_is_demanded() -> None:
    async def main(world: World) -> None:
        for name in ("n0", "n1"):
            await world.brokers[name].kill()
        await world.wait_for_leader(timeout_s=30)

    with pytest.raises(Violation, match="no leader within 30 s") as caught:
        run_world(6, main)
    assert caught.value.invariant == "liveness"


def _spoil(world: World, invariant: str, leader: BrokerNode, follower: BrokerNode) -> None:
    """Make *invariant* appear broken to what checks it."""
    checks, promises = world.checks, world.promises
    assert leader.group is not None
    assert follower.group is not None
    journal = follower.group.node.journal
    match invariant:
        case "log_matching":
            checks.committed[checks.last_committed + 1] = 1
        case "two_leaders":
            checks.leaders = dict.fromkeys(range(10), "another")
            leader.kill_now()
        case "two_leaders_for_long":
            world.last_term, checks.led_since_s = 99, -100.0
            leader.ran_since_s = -100.0
        case "leader_incomplete":
            checks.last_committed += 1_000
            checks.committed[checks.last_committed] = 1
            leader.kill_now()
        case "commit_ahead":
            checks.led_commit = -1_000
            checks._commit_moved(follower, follower.group, 0, 1)
        case "members":
            log = follower.group.node.roster.log
            assert log.members is not None
            log.append(1_000, log.members)
        case "two_votes":
            for node in world.followers():
                assert node.group is not None
                inc = node.group.node.identity.incarnation
                promises.votes |= {(node.name, inc, term): "nobody" for term in range(2, 9)}
            leader.kill_now()
        case "vote_forgotten":
            follower.promised_vote = (99, leader.name)
            follower.kill_now()
        case "acknowledgement_forgotten":
            follower.promised_entry = (journal.last_term, journal.last_index, 1)
            follower.kill_now()
        case "false_acknowledgement":
            log_there: Any = leader.group.node.journal.log
            log_there.chain_at = lambda _index: 1
        case "state_machines":
            checks.states = {64: ("another replica", {})}


@pytest.mark.parametrize(
    "invariant",
    [
        *("log_matching", "two_leaders", "two_leaders_for_long", "leader_incomplete"),
        *("commit_ahead", "members", "two_votes", "vote_forgotten", "acknowledgement_forgotten"),
        *("false_acknowledgement", "belief", "state_machines"),
    ],
)
def test_a_broken_invariant_ends_the_run(invariant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matched = Replicator.matched

    def beyond(replicator: Replicator, peer: str, _: int, now_s: float) -> None:
        matched(replicator, peer, replicator.log.last_index, now_s)

    if invariant == "belief":
        monkeypatch.setattr(Replicator, "matched", beyond)

    async def main(world: World) -> None:
        leader = await world.wait_for_leader()
        follower = world.followers()[0]
        _spoil(world, invariant, leader, follower)
        if follower.state is State.DOWN:
            await follower.start()
        for name in ("c", "d"):
            await world.client(name).run(send_forever)
        await world.sleep(120)

    with pytest.raises(Violation) as caught:
        run_world(7, main)
    assert caught.value.invariant == invariant


@pytest.mark.parametrize(("which", "doubtful"), [(0, 0), (1, 1), (0, 2)])
def test_vote_without_all_that_was_shown_ends_the_run(which: int, doubtful: int) -> None:
    """One of the two followers votes for itself, the other one for it; both may if uncertain."""

    async def main(world: World) -> None:
        leader = await world.wait_for_leader()
        world.followers()[which].promised_entry = (1_000_000, 1, 0)
        for node in world.followers()[:doubtful]:
            node.began_doubtful = True
        leader.kill_now()
        await world.wait_for_leader()

    found = ""
    try:
        run_world(7, main)
    except Violation as violation:
        found = violation.invariant
    assert found == ("" if doubtful == 2 else "hollow_vote")


def test_a_wall_clock_that_jumps_back_moves_no_leadership() -> None:
    async def main(world: World) -> None:
        leader = await world.wait_for_leader()
        await world.client("c").run(send_forever)
        leader.jump_clock(-3_600_000)
        world.followers()[0].drift_clock(500)
        await world.sleep(30)
        assert world.leader() is leader
        assert world.checks.last_committed > 40

    run_world(8, main)


def test_what_a_killed_process_raises_at_its_end_is_no_finding() -> None:
    async def fail_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("of a process that has ended")

    async def program(_: ClientNode) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(fail_at_the_end)

    async def main(world: World) -> None:
        node = world.client("c")
        await node.run(program)
        await node.kill()
        await world.sleep(1)
        assert node.state is State.DOWN

    run_world(1, main)
