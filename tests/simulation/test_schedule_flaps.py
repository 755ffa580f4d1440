"""Leadership flaps a hundred times over delayed messages: one at a time delivers, each one once.

Every `ScheduleMessageService.run` is watched at every node, from its begin to its end, with the
term it serves: when one begins no other may be able to commit: a majority that would take what it
appends. Terms only grow, so none of the others is ever able to again.

The rest, every delayed message in its queue exactly once, in time, none lost, progress that is the
same on all replicas, is what the laws and the invariants of a played plan judge.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import trio

from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.group import Group
from dledger.jepsen_like.checkers import delayed
from dledger.jepsen_like.plans.plan import Plan, Settings, Workload
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.machine import current_node
from dledger.jepsen_like.simulation.node import BrokerNode, CheckedWorld
from dledger.jepsen_like.simulation.play import Played, play
from dledger.jepsen_like.simulation.world import World
from dledger.services.delayed_message import queue_of_level
from dledger.services.schedule import ScheduleMessageService
from tests.harness.extent import EXTENT

pytestmark = pytest.mark.slow

FLAPS = 100
SECONDS_PER_FLAP = 6
"""A third more than a flap takes; the test reports when they did not fit in."""

DEPOSED_WITHIN_S = 4.0
"""A leader that no majority answers has to know it by then: an election timeout, a heartbeat."""

LEVELS = "1s 5s 10s 30s"
NEW_LEADER_WITHIN_S = 30.0
CALM_S = (0.0, 0.3, 2.0, 6.0)
"""How long a leader is left alone: some never deliver anything, some everything that is due."""


@dataclass(frozen=True)
class Running:
    """A schedule service between its begin and its end."""

    node: str
    term: int
    group: Group
    deposed_s: list[float] = field(default_factory=list)
    """When another one began on another node: it runs, but cannot commit any more."""


@dataclass
class Watch:
    """What was seen of schedule services and of what they did."""

    world: CheckedWorld | None = None
    running: list[Running] = field(default_factory=list)
    begun: int = 0
    terms: list[int] = field(default_factory=list)
    two_that_can_commit: list[str] = field(default_factory=list)
    outlived: list[str] = field(default_factory=list)
    """Services that went on behind their leadership."""
    deposed_for_s: list[float] = field(default_factory=list)
    """How long leaders went on that did not know yet that another was elected."""
    newest_term: dict[str, int] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    levels_in_flight: Counter[int] = field(default_factory=Counter)
    """Flaps by how many levels had messages waiting at that moment."""

    # -- services --------------------------------------------------------------------------

    def begins(self, service: Running) -> None:
        assert self.world is not None
        self.begun += 1
        self.terms.append(service.term)
        alive = [other for other in self.running if self._is_alive(other)]
        self.running.append(service)
        for other in alive:
            who = (
                f"{self.world.elapsed_s:.6f} s: {other.node} in term {other.term}, "
                f"{service.node} in term {service.term}"
            )
            if not self._believes(other):
                self.outlived.append(who)
            if self._can_commit(other) or not self._can_commit(service):
                self.two_that_can_commit.append(who)
            other.deposed_s.append(self.world.elapsed_s)

    def ends(self, service: Running) -> None:
        assert self.world is not None
        self.running.remove(service)
        if service.deposed_s:
            self.deposed_for_s.append(self.world.elapsed_s - service.deposed_s[0])

    def _is_alive(self, service: Running) -> bool:
        """Whether its process still is: a killed one delivers nothing, whatever its tasks do."""
        assert self.world is not None
        return self.world.brokers[service.node].group is service.group

    def _believes(self, service: Running) -> bool:
        leadership = service.group.leadership
        return leadership is not None and leadership.term == service.term

    def _can_commit(self, service: Running) -> bool:
        """Whether a majority would still take what it appends, as far as anybody can know."""
        assert self.world is not None
        brokers = self.world.brokers
        for name, node in brokers.items():
            if node.group is not None:
                self.newest_term[name] = max(self.newest_term.get(name, 0), node.group.term)
        would_take = sum(self.newest_term.get(name, 0) <= service.term for name in brokers)
        return would_take > len(brokers) // 2

    # -- flaps -----------------------------------------------------------------------------

    async def flap(self, world: World, seed: int, flaps: int) -> None:
        """Take the leadership away *flaps* times: by transfer, kill and isolation in turn."""
        rng = rng_stream(seed, "flaps")
        await world.sleep(15.0)
        for turn in range(flaps):
            leader = await world.wait_for_leader(NEW_LEADER_WITHIN_S)
            await world.sleep(rng.choice(CALM_S))
            leader = await world.wait_for_leader(NEW_LEADER_WITHIN_S)
            assert leader.group is not None
            self.levels_in_flight[self._levels_waiting(leader.group)] += 1
            kind = ("transfer", "kill", "isolate")[turn % 3]
            term = leader.group.term
            if kind == "transfer":
                await self._transfer(world, leader)
            elif kind == "kill":
                await leader.kill()
                await self._another(world, term)
                await leader.start()
            else:
                others = [name for name in world.brokers if name != leader.name]
                world.network.cut_between([leader.name], others)
                if turn % 2:
                    for name in others:
                        world.network.reset_between(leader.name, name)
                await self._another(world, term)
                await world.sleep(rng.choice(CALM_S))
                world.network.mend_all(reset=0.3)
            self.done[kind] += 1

    async def _transfer(self, world: World, leader: BrokerNode) -> None:
        group = leader.group
        assert group is not None
        term = group.term
        while world.leader() is leader and leader.group is group and group.term == term:
            try:
                await group.transfer_leadership()
            except (ChangePendingError, ChangeRefusedError):
                await world.sleep(0.5)  # a follower is still behind
            except NotLeaderError:
                break
        await self._another(world, term)

    async def _another(self, world: World, term: int) -> None:
        end_s = world.now_s + NEW_LEADER_WITHIN_S
        while True:
            leader = world.leader()
            if leader is not None and leader.group is not None and leader.group.term > term:
                return
            assert world.now_s < end_s, f"no leader behind term {term}: {world.status()}"
            await world.sleep(0.05)

    def _levels_waiting(self, group: Group) -> int:
        state = group.state
        return sum(
            state.max_offset(SCHEDULE_TOPIC, queue_of_level(level))
            > state.delay_progress.get(level, 0)
            for level in range(1, len(LEVELS.split()) + 1)
        )


def plan_of(seed: int, flaps: int) -> Plan:
    return Plan(
        seed=seed,
        duration_ms=flaps * SECONDS_PER_FLAP * 1000,
        workload=Workload(
            producers=2, consumers=1, readers=0, interval_ms=1200, delayed_per_mille=950
        ),
        settings=Settings(delay_levels=LEVELS),
    )


def play_watched(
    seed: int, monkeypatch: pytest.MonkeyPatch, flaps: int = FLAPS
) -> tuple[Played, Watch]:
    """Play the flaps of a seed with all schedule services watched."""
    watch = Watch()
    run = ScheduleMessageService.run

    async def run_watched(service: ScheduleMessageService) -> None:
        group = service._group
        assert isinstance(group, Group)
        if group.leadership is None:
            return
        running = Running(current_node.get(), group.leadership.term, group)
        watch.begins(running)
        try:
            await run(service)
        finally:
            watch.ends(running)

    monkeypatch.setattr(ScheduleMessageService, "run", run_watched)

    def prepare(world: World) -> None:
        watch.world = world
        world.nursery.start_soon(watch.flap, world, seed, flaps)

    return play(plan_of(seed, flaps), prepare=prepare), watch


@pytest.mark.parametrize("seed", range(1, 1 + EXTENT))
@pytest.mark.hunt
def test_a_hundred_flaps_never_let_two_deliver(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    played, watch = play_watched(seed, monkeypatch)

    def say(what: str) -> str:
        return f"seed {seed}: {what}"

    assert played.is_valid, say(f"{played.verdict.reason} {played.violations}")
    assert watch.done == {"transfer": 34, "kill": 33, "isolate": 33}, say("not all flaps fitted in")
    assert watch.begun >= FLAPS, say("a leader without a schedule service")
    assert played.sometimes["leader_change"] >= FLAPS, say("the leadership did not flap")
    assert sum(times for levels, times in watch.levels_in_flight.items() if levels > 1) > 90, say(
        f"too little was in flight: {watch.levels_in_flight}"
    )
    (judged,) = [verdict for verdict in played.verdicts if verdict.checker == delayed.NAME]
    assert judged.is_valid, say(judged.reason)
    assert judged.counts["seen"] > 500, say("too little was delivered")

    assert watch.two_that_can_commit == [], say("two schedule services could deliver")
    assert watch.outlived == [], say("a schedule service outlived its leadership")
    assert watch.terms == sorted(set(watch.terms)), say("two schedule services in one term")
    assert watch.deposed_for_s, say("no leader was ever deposed without knowing it")
    assert max(watch.deposed_for_s) < DEPOSED_WITHIN_S, say("a deposed leader did not notice")


def test_a_service_that_outlives_its_leadership_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose = Group._lose_leadership

    def lose_leadership(group: Group) -> None:
        assert group.leadership is not None
        group.leadership.scope = trio.CancelScope()  # not the one its services run in
        lose(group)

    monkeypatch.setattr(Group, "_lose_leadership", lose_leadership)
    _, watch = play_watched(1, monkeypatch, flaps=6)
    assert watch.outlived
