"""Modes of long runs: they break nothing, and answers that contradict what is stored are found."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from dledger import broker, forwarding, proposals
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.entry import RecordBatch
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.plans.draw import SHAPES
from dledger.jepsen_like.plans.modes import SETTING_MODES, SIDE_MODES, STEP_MODES, in_modes
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.plans.promised import promised
from dledger.jepsen_like.simulation import side_services, side_work
from dledger.jepsen_like.simulation.play import play
from dledger.processors import groups
from dledger.processors.wiring import REPEATABLE
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.state.state_record import with_hosts
from tests.harness.fast_part import gate_part
from tests.harness.judged import broken

pytestmark = pytest.mark.slow

SCENES = {"role_orders", "old_leaders", "late_promotions"}

PLAN = Plan(
    seed=8,
    duration_ms=150_000,
    steps=(Step(30_000, Kind.KILL, "leader", 5_000), Step(60_000, Kind.ISOLATE, "leader", 9_000)),
    workload=Workload(interval_ms=2_000, delayed_per_mille=0),
    modes=tuple(name for name in SIDE_MODES if name not in ("many_queues", "half_messages")),
)


def test_work_beside_the_workload_breaks_nothing() -> None:
    played = play(PLAN)
    assert played.is_valid, played.verdict.reason
    done = {mode for mode in SIDE_MODES if played.sometimes[f"mode_{mode}"]}
    assert len(done) >= 4, played.sometimes
    assert not any(played.sometimes[f"mode_{mode}"] for mode in SETTING_MODES)


def test_members_of_both_families_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: set[int] = set()

    def noted(batch: RecordBatch, store_host: bytes) -> RecordBatch:
        hosts.add(len(store_host))
        return with_hosts(batch, store_host)

    monkeypatch.setattr(proposals, "with_hosts", noted)
    played = play(in_modes(PLAN, (*PLAN.modes, "ipv6")))
    assert played.is_valid, played.verdict.reason
    assert 20 in hosts


def _only(mode: str, duration_ms: int = 60_000) -> Plan:
    return in_modes(Plan(8, duration_ms, workload=PLAN.workload), (mode,))


@pytest.mark.hunt
def test_a_tag_that_is_not_what_was_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = vars(MessageExt)["tags"].fget
    monkeypatch.setattr(MessageExt, "tags", property(lambda message: tags(message).strip()))
    assert broken(play(_only("hostile_contents", 200_000))) == {"side_work"}


@pytest.mark.hunt
def test_a_change_of_a_group_that_is_not_stored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(connection: Connection, command: RemotingCommand, *_: object) -> None:
        connection.reply(command, response_to(command))

    monkeypatch.setattr(groups, "propose_change", answered)
    monkeypatch.setattr(side_work, "PAUSE_S", 1.0)
    assert broken(play(_only("administration", 200_000))) == {"side_work"}


@pytest.mark.hunt
def test_send_that_is_repeated_without_a_stamp_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_can_be_stamped", lambda _: False)
    monkeypatch.setattr(broker, "REPEATABLE", REPEATABLE | forwarding.STAMPED)
    monkeypatch.setattr(side_work, "PAUSE_S", 0.2)
    steps = tuple(
        Step(at, Kind.ISOLATE if at % 2 else Kind.KILL, "leader", 3_000)
        for at in range(10_001, 100_000, 4_001)
    )
    plans = (
        in_modes(Plan(n, 100_000, steps, workload=PLAN.workload), ("old_routes",))
        for n in range(8, 16)
    )
    assert any(broken(play(plan)) == {"side_work"} for plan in plans)


@pytest.mark.hunt
def test_a_message_in_another_of_many_queues_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_services, "FILLED_TOPICS", 4)
    monkeypatch.setattr(side_services, "QUEUES", 8)
    send_to = Producer.send_to

    async def send_beside(
        producer: Producer, queue: MessageQueue, message: Message, **more: Any
    ) -> SendResult:
        number = queue.queue_id ^ queue.topic.startswith("side-many")
        beside = MessageQueue(queue.topic, queue.broker_name, number)
        return await send_to(producer, beside, message, **more)

    monkeypatch.setattr(Producer, "send_to", send_beside)
    assert "side_work" in broken(play(_only("many_queues")))


@pytest.mark.hunt
def test_open_half_messages_outlast_retention() -> None:
    played = play(_only("half_messages", 120_000))
    assert played.is_valid, played.violations
    assert played.sometimes["retention_met_half_message"] > 0
    assert played.sometimes["floor_moved"] > 0


@pytest.mark.parametrize(
    ("mode", "counter"),
    [
        ("access_control", "stranger_refused"),
        pytest.param("slow_listeners", "slow_listener_killed", marks=pytest.mark.hunt),
        pytest.param("small_limits", "session_forgotten", marks=pytest.mark.hunt),
        pytest.param("hostile_contents", "hostile_refused", marks=pytest.mark.hunt),
    ],
)
def test_a_mode_meets_what_it_is_for_and_breaks_nothing(mode: str, counter: str) -> None:
    played = play(_only(mode, 300_000))
    assert played.is_valid, played.violations
    assert played.sometimes[counter] > 0


def test_reads_at_a_deposed_leader_are_never_stale() -> None:
    steps = tuple(
        Step(10_000 + 30_000 * number, Kind.READ_BURST, "leader", 20_000, 20 + number)
        for number in range(4)
    )
    played = play(Plan(9, 140_000, steps, workload=PLAN.workload))
    assert played.is_valid, played.violations
    assert played.sometimes["read_at_old_leader"] >= 3


def test_orders_come_within_50_ms_of_a_change_of_role() -> None:
    steps = tuple(
        step
        for at_ms in range(10_000, 130_000, 30_000)
        for step in (
            Step(at_ms, Kind.ROLE_ORDER, "all", 25_000, at_ms // 1_000),
            Step(at_ms + 500, Kind.ISOLATE, "leader", 9_000, 1),
        )
    )
    played = play(Plan(9, 150_000, steps, workload=PLAN.workload))
    assert played.is_valid, played.violations
    assert played.sometimes["order_at_role_change"] >= 3


@pytest.mark.parametrize("mode", gate_part([name for name in STEP_MODES if name not in SCENES], 3))
def test_steps_of_a_mode_break_nothing(mode: str) -> None:
    rng, kinds = Random(mode), STEP_MODES[mode]
    steps = tuple(
        Step(at_ms, kind, target, 6_000, rng.randint(*SHAPES[kind].arg))
        for at_ms, target in ((10_000, "leader"), (40_000, "follower"), (70_000, "most_ahead"))
        for kind in kinds
    )
    played = play(Plan(10, 100_000, steps, name_servers=3, workload=PLAN.workload))
    assert played.is_valid, played.verdict.reason
    assert sum(played.faults[kind] for kind in kinds) >= 1
    if mode == "lying_flushes":
        assert played.sometimes["flushes_undone"] > 0


def _power(seed: int, settings: Settings) -> Plan:
    kinds = (Kind.POWER_CUT, Kind.KILL, Kind.POWER_CUT_ALL, Kind.ISOLATE, Kind.BUGGIFY_KILL)
    steps = tuple(
        Step(10_000 + 12_000 * number, kind, "leader", 6_000, 2 * number)
        for number, kind in enumerate(kinds * 2)
    )
    workload = Workload(interval_ms=700, delayed_per_mille=0)
    return Plan(seed, 135_000, steps, workload=workload, settings=settings)


@pytest.mark.hunt
def test_flushes_that_come_late_lose_nothing_of_a_majority() -> None:
    played = play(in_modes(_power(3, Settings()), ("async_flush",)))
    assert played.is_valid, played.violations
    assert played.sometimes["doubt_ended"] > 0
    assert sum(played.faults[kind] for kind in (Kind.POWER_CUT, Kind.POWER_CUT_ALL)) >= 2


@pytest.mark.parametrize("seed", gate_part([3, 4, 5], 1))
def test_a_power_cut_of_all_loses_what_is_not_flushed(seed: int) -> None:
    """Sends every 30 ms: at a cut most seeds have what no disk keeps; a loss ends the play."""
    steps = tuple(
        Step(6_000 + 10_000 * number, Kind.POWER_CUT_ALL, "all", 3_000, 2 * number)
        for number in range(20)
    )
    settings, workload = Settings(sync_flush=False), Workload(interval_ms=30)
    played = play(Plan(seed, 210_000, steps, workload=workload, settings=settings))
    assert played.faults[Kind.POWER_CUT_ALL] >= 1
    assert not played.is_valid
    assert "leader_incomplete" in broken(played)


def test_a_leader_that_acknowledges_alone_keeps_the_weaker_law() -> None:
    plan = _power(3, Settings(async_master=True))
    played = play(plan)
    assert played.is_valid, played.violations
    whole = check_everything(
        played.history, msgspec.structs.replace(promised(plan, settled=True), late_effect_ns=0)
    )
    assert "acknowledged message lost" in {v.name for verdict in whole for v in verdict.violations}
