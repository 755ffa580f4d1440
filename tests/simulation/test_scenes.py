"""Moments that drawn plans seldom meet: the second half of a trigger is brought about."""

import pytest

from dledger.group import Group
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.node import BrokerNode
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

AWAY_S = 8.0
"""Longer than the others need to elect."""
STEPS = (
    Step(8_000, Kind.MEMBER_REMOVE, "follower", 5_000, 1),
    Step(35_000, Kind.MEMBER_REMOVE, "leader", 5_000),
    Step(70_000, Kind.MEMBER_ADD, "all"),
)


@pytest.mark.parametrize("seed", gate_part([1, 2, 3], 1))
def test_list_whose_writer_is_cut_off_before_one_answer(seed: int) -> None:
    writers: list[str] = []

    def prepare(world: World) -> None:
        look, seen = world.checks.lists.after_step, dict[str, tuple[int, int]]()

        def after_step(node: BrokerNode, group: Group) -> None:
            look(node, group)
            raft = group.node
            now = (raft.term if raft.is_leader else 0, raft.roster.log.index)
            before = seen.setdefault(node.name, now)
            seen[node.name] = now
            if before[0] == now[0] > 0 and before[1] < now[1]:
                writers.append(node.name)
                world.nursery.start_soon(cut_off, world, node.name)

        world.checks.lists.after_step = after_step  # type: ignore[method-assign]  # sees lists

    async def cut_off(world: World, name: str) -> None:
        world.network.cut_between([name], [other for other in world.brokers if other != name])
        await world.sleep(AWAY_S)
        world.network.mend_all()

    run = play(Plan(seed, 100_000, STEPS, workload=Workload(interval_ms=700)), prepare=prepare)
    assert run.is_valid, run.violations
    assert len(writers) >= 3
    assert run.sometimes["leader_change"] >= 3
