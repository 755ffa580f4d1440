import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio._core._run as scheduler

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.store_paths import StorePaths
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.member_lists import MemberLists
from dledger.jepsen_like.simulation.promises import Promises, is_doubtful
from dledger.jepsen_like.simulation.sim_disk import SimDisk
from dledger.jepsen_like.simulation.virtual_time import (
    EPOCH_MS,
    START_S,
    Gate,
    SimClock,
    SimulationError,
    VirtualTime,
    run_virtual,
)
from dledger.raft.membership import Member, Members, Standing
from tests.harness.entry_frames import next_frame


def test_a_day_passes_at_once_and_in_order() -> None:
    seen: list[tuple[float, str]] = []

    async def main(time: VirtualTime) -> float:
        async def wait(seconds: float, name: str) -> None:
            await time.sleep(seconds)
            seen.append((time.now_s - START_S, name))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 86_400, "day")
            nursery.start_soon(wait, 3_600, "hour")
            nursery.start_soon(wait, 0, "now")
        return time.now_s - START_S

    assert run_virtual(1, main) == 86_400
    assert seen == [(0.0, "now"), (3_600.0, "hour"), (86_400.0, "day")]


def test_trios_own_deadlines_pass_on_the_same_time() -> None:
    async def main(time: VirtualTime) -> tuple[bool, float]:
        with trio.move_on_after(5) as scope:
            await time.sleep(7)
        return scope.cancelled_caught, time.now_s - START_S

    assert run_virtual(1, main) == (True, 5.0)


def test_a_cancelled_timer_does_not_happen() -> None:
    async def main(time: VirtualTime) -> list[str]:
        happened: list[str] = []
        timer = time.call_later(1, happened.append, "cancelled")
        time.call_later(2, happened.append, "kept")
        timer.cancel()
        await time.sleep(3)
        return happened

    assert run_virtual(1, main) == ["kept"]


def test_a_world_in_which_nothing_will_happen_fails_clearly() -> None:
    async def main(time: VirtualTime) -> None:
        await trio.sleep_forever()

    with pytest.raises(SimulationError, match="never happen"):
        run_virtual(1, main)


def test_a_loop_that_never_waits_does_not_stop_time() -> None:
    async def main(time: VirtualTime) -> int:
        with trio.move_on_after(20e-6):
            while True:
                await trio.lowlevel.checkpoint()
        return time.nudges

    assert run_virtual(1, main) > 0


def order_of_tasks(seed: int) -> list[int]:
    order: list[int] = []

    async def main(time: VirtualTime) -> None:
        async def note(number: int) -> None:
            await trio.lowlevel.checkpoint()
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(note, number)

    run_virtual(seed, main)
    return order


def test_the_seed_alone_decides_the_order_of_tasks() -> None:
    assert order_of_tasks(1) == order_of_tasks(1)
    assert len({tuple(order_of_tasks(seed)) for seed in range(8)}) == 8


def test_trios_scheduler_and_the_collector_are_left_as_they_were() -> None:
    private: Any = scheduler
    before = (private._ALLOW_DETERMINISTIC_SCHEDULING, private._r.getstate(), gc.isenabled())
    order_of_tasks(3)
    after = (private._ALLOW_DETERMINISTIC_SCHEDULING, private._r.getstate(), gc.isenabled())
    assert before == after


def test_a_trio_without_the_private_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.raises(SimulationError, match="_ALLOW_DETERMINISTIC_SCHEDULING"):
        order_of_tasks(1)


def test_streams_of_a_seed_are_their_own() -> None:
    assert rng_stream(1, "n0").random() == rng_stream(1, "n0").random()
    assert len({rng_stream(seed, name).random() for seed in (1, 2) for name in ("n0", "n1")}) == 4


def test_a_clock_has_offset_drift_and_jumps() -> None:
    async def main(time: VirtualTime) -> None:
        clock = SimClock(time, Gate(), offset_ms=5_000, drift_ppm=1000)
        begin_s = clock.monotonic()
        assert clock.wall_ms() == EPOCH_MS + 5_000
        await time.sleep(100)
        assert clock.wall_ms() == EPOCH_MS + 5_000 + 100_100
        clock.jump(-60_000)
        clock.drift(-1000)
        await time.sleep(100)
        assert clock.wall_ms() == EPOCH_MS + 5_000 + 100_100 + 99_900 - 60_000
        assert clock.monotonic() - begin_s == pytest.approx(200)
        before_s = time.now_s
        await clock.sleep(10)
        assert time.now_s - before_s == pytest.approx(10 / 0.999, abs=1e-5)

    run_virtual(1, main)


def test_waits_of_one_length_end_at_instants_of_their_own() -> None:
    async def main(time: VirtualTime) -> set[float]:
        ends: set[float] = set()

        async def one(clock: SimClock) -> None:
            await clock.sleep(1)
            ends.add(time.now_s)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                clock = SimClock(time, Gate(), number=number)
                for _ in range(3):
                    nursery.start_soon(one, clock)
        return ends

    ends = run_virtual(1, main)
    assert len(ends) == 15
    assert max(ends) - min(ends) < 1e-6


def test_a_closed_gate_keeps_sleepers_until_it_opens() -> None:
    async def main(time: VirtualTime) -> list[float]:
        gate = Gate()
        clock = SimClock(time, gate)
        woken: list[float] = []

        async def sleeper() -> None:
            await clock.sleep(1)
            woken.append(round(time.now_s - START_S, 3))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper)
            await time.sleep(0.5)
            gate.close()
            await time.sleep(9.5)
            assert woken == []
            gate.open()
        return woken

    assert run_virtual(1, main) == [10.0]


def test_a_sleeper_behind_a_closed_gate_can_be_cancelled() -> None:
    async def main(time: VirtualTime) -> bool:
        gate = Gate()
        clock = SimClock(time, gate)
        with trio.CancelScope() as scope:
            time.call_later(0.5, lambda _: gate.close(), None)
            time.call_later(3, lambda _: scope.cancel(), None)
            await clock.sleep(1)
        gate.open()
        await time.sleep(1)
        return scope.cancelled_caught

    assert run_virtual(1, main)


PATHS = StorePaths("/store")
SEGMENT_BYTES = 4096
ENTRIES = 40


def filled() -> tuple[SimDisk, EntryLog]:
    disk = SimDisk(rng_stream(1))
    log = EntryLog.open(disk.mount(), "/store", segment_bytes=SEGMENT_BYTES)
    for _ in range(ENTRIES):
        log.append(next_frame(log, 200))
    log.flush()
    return disk, log


def doubtful(disk: SimDisk, log: EntryLog) -> bool:
    return is_doubtful(disk, PATHS, log, SEGMENT_BYTES, 0, log.end_position)


def test_entries_that_are_not_flushed_are_uncertain() -> None:
    disk, log = filled()
    assert not doubtful(disk, log)
    log.append(next_frame(log, 200))
    assert doubtful(disk, log)
    log.flush()
    assert not doubtful(disk, log)


@pytest.mark.parametrize("index", [1, 2, ENTRIES // 2, ENTRIES])
def test_claims_leave_out_only_what_is_known_damaged(index: int) -> None:
    disk, log = filled()
    frame = bytes(log.frame(index))
    position = log.position_at(index)
    base = position - position % SEGMENT_BYTES
    disk.flip(PATHS.segment(base), position - base + 100, position - base + 101)
    log.repair.mark_damaged(index)
    log.repair.write_copies([(log.repair.accept(frame), frame)])  # written, and not flushed
    assert not doubtful(disk, log)
    log.repair.mark_whole(index)
    assert doubtful(disk, log)
    log.flush()
    assert not doubtful(disk, log)


@pytest.mark.parametrize(("saved", "is_covered"), [(8, False), (9, True)])
def test_what_is_removed_is_in_a_checkpoint(saved: int, is_covered: bool) -> None:
    found: list[str] = []
    world = SimpleNamespace(violate=lambda name, _text: found.append(name))
    store = SimpleNamespace(log=SimpleNamespace(first_index=10), saved_index=saved)
    node, group = SimpleNamespace(name="n0"), SimpleNamespace(store=store)
    Promises(cast(Any, world), {})._check_covered(cast(Any, node), cast(Any, group))
    assert found == ([] if is_covered else ["removed_before_checkpoint"])


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


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_change_after_a_committed_one_is_right(scene: Scene) -> None:
    assert scene.write(6, members("a", "b")) == []
    scene.raft.commit_index = 6
    assert scene.write(7, members("a", "b", "c")) == []


def test_a_change_before_the_last_is_committed_is_found(scene: Scene) -> None:
    scene.write(6, members("a", "b"))
    assert scene.write(7, members("a", "b", "c")) == ["change_too_early"]


def test_a_change_before_the_term_has_a_commit_is_found(scene: Scene) -> None:
    scene.raft.commit_index = FIRST_OF_TERM - 1
    assert scene.write(6, members("a", "b")) == ["change_too_early"]


def test_the_first_list_of_a_group_comes_at_once(scene: Scene) -> None:
    scene.write(0, members("a", "b", "c"))
    scene.raft.commit_index = 0
    assert scene.write(6, members("a", "b", "c")) == []


def test_a_list_that_a_follower_takes_is_not_its_own(scene: Scene) -> None:
    scene.raft.is_leader = False
    scene.write(6, members("a", "b"))
    assert scene.write(7, members("a", "b", "c")) == []


def test_a_list_whose_majority_is_away_is_found(scene: Scene) -> None:
    scene.peers["b"].is_connected = False
    assert scene.write(6, members("a", "b", "c")) == []
    scene.raft.commit_index = 6
    assert scene.write(7, members("a", "b")) == ["list_without_majority"]


def test_a_learner_that_has_caught_up_gets_its_vote(scene: Scene) -> None:
    scene.learner_holds(FIRST_OF_TERM)
    scene.raft.commit_index = FIRST_OF_TERM + 1
    assert scene.write(7, members("a", "b", "c", "d")) == []


def test_a_vote_of_a_learner_that_lacks_entries_is_found(scene: Scene) -> None:
    scene.learner_holds(FIRST_OF_TERM - 1)
    assert scene.write(6, members("a", "b", "c", "d")) == ["vote_before_caught_up"]


def test_a_learner_that_was_wiped_since_is_another_member(scene: Scene) -> None:
    scene.learner_holds(0, incarnation="d-1")
    assert scene.write(6, members("a", "b", "c", "d")) == []


def test_a_leader_that_leads_on_with_a_hole_is_found(scene: Scene) -> None:
    scene.damaged.append(4)
    scene.raft.state.has_hole = True
    assert scene.step() == ["leads_with_hole"]


def test_a_leader_that_finds_a_hole_and_ceases_is_right(scene: Scene) -> None:
    scene.damaged.append(4)
    scene.raft.state.has_hole, scene.raft.is_leader = True, False
    assert scene.step() == []


def test_a_candidate_that_wins_with_a_hole_found_none(scene: Scene) -> None:
    scene.raft.is_leader = False
    scene.damaged.append(4)
    scene.raft.state.has_hole = True
    scene.step()
    scene.raft.is_leader = True
    assert scene.step() == []


def test_damage_at_a_start_needs_a_disk_that_lost_something(scene: Scene) -> None:
    scene.group.store.damaged = True
    scene.node.is_trusted = False
    scene.lists.watch(scene.node, scene.group)
    assert scene.found == []
    scene.node.is_trusted = True
    scene.lists.watch(scene.node, scene.group)
    assert scene.found == ["damaged_without_loss"]


def test_a_member_that_comes_back_keeps_what_it_had(scene: Scene) -> None:
    """The leader has followed it all the time."""
    scene.learner_holds(FIRST_OF_TERM)
    scene.raft.commit_index = 6
    assert scene.write(7, members("a", "b", "c")) == []
    scene.raft.commit_index = 7
    assert scene.write(8, members("a", "b", "c", learner="d")) == []
    scene.raft.commit_index = 8
    assert scene.write(9, members("a", "b", "c", "d")) == []
