"""Modes of long runs: they break nothing, and answers that contradict what is stored are found.

Clusters in which one date is two years off, and back: store time stays near the right one.
"""

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
from dledger.jepsen_like.plans.plan import ASKED_FOR, Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.plans.promised import promised
from dledger.jepsen_like.simulation import play as playing
from dledger.jepsen_like.simulation import side_services, side_work
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.virtual_time import EPOCH_MS
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from dledger.jepsen_like.worker import Order, plan_of
from dledger.log_clock import JUMP_MAX_MS
from dledger.processors import groups
from dledger.processors.wiring import REPEATABLE
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.state.apply import apply_entry
from dledger.state.state_record import with_hosts
from dledger.state.tables import StateTables
from tests.harness.fast_part import gate_part
from tests.harness.judged import broken
from tests.mutants.patches import read_patches

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


YEARS_MS = 2 * 365 * 86_400_000
WORKLOAD = Workload(
    producers=4,
    consumers=1,
    readers=1,
    interval_ms=700,
    delayed_per_mille=200,
    transactions_per_mille=200,
    idempotent=True,
)


@pytest.fixture
def stored_ms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the store times that are applied anywhere, from the beginning of the run on."""
    seen: list[int] = []

    def watched(tables: StateTables, *rest: Any) -> Any:
        applied = apply_entry(tables, *rest)
        if tables.last_store_time_ms:
            seen.append(tables.last_store_time_ms - EPOCH_MS)
        return applied

    monkeypatch.setattr("dledger.store.apply_entry", watched)
    return seen


@pytest.mark.parametrize("sign", gate_part([1, -1], 1))
def test_a_leader_two_years_off_takes_the_group_along_nowhere(
    sign: int, stored_ms: list[int]
) -> None:
    """Each member in turn, so that one of them leads when its date jumps."""
    steps = tuple(
        Step(at_ms + 8_000 * number, Kind.CLOCK_JUMP, str(number), 0, by_ms)
        for number in range(3)
        for at_ms, by_ms in ((8_000, sign * YEARS_MS), (14_000, -sign * YEARS_MS))
    )
    run = play(Plan(11, 45_000, steps, workload=WORKLOAD))
    assert run.faults[Kind.CLOCK_JUMP.value] == 6
    assert run.is_valid, run.violations
    assert len(stored_ms) > 300
    assert min(stored_ms) > -JUMP_MAX_MS
    assert max(stored_ms) < int(run.simulated_s * 1000) + JUMP_MAX_MS


@pytest.fixture
def segments_expire_at_any_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let expired segments go whenever there are some; by the default date none is."""
    usual = playing.world_settings
    hours = ";".join(f"{hour:02}" for hour in range(24))

    def settings(plan: Plan) -> WorldSettings:
        found = usual(plan)
        return WorldSettings(
            found.brokers,
            found.name_servers,
            found.heartbeat_ms,
            found.election_timeout_ms,
            found.segment_bytes,
            found.checkpoint_interval_ms,
            rpc_timeout_s=found.rpc_timeout_s,
            options={**found.options, "store.delete_when": hours},
        )

    monkeypatch.setattr(playing, "world_settings", settings)


@pytest.mark.usefixtures("segments_expire_at_any_hour")
@pytest.mark.parametrize("years", gate_part([-2, 2], 1))
def test_nothing_expires_or_comes_early_by_one_of_two_dates(
    years: int, stored_ms: list[int]
) -> None:
    """One of three is away all the time; of the other two the one that leads is years off."""
    steps = (
        Step(6_000, Kind.KILL, "follower", 60_000),
        *(Step(at, Kind.CLOCK_YEARS, "leader", 14_000, years) for at in (12_000, 36_000)),
        Step(56_000, Kind.CLOCK_YEARS, "0", 20_000, -years),
    )
    workload = msgspec.structs.replace(WORKLOAD, timer_per_mille=200)
    settings = Settings(segment_bytes=131_072)
    run = play(Plan(13, 62_000, steps, workload=workload, settings=settings))
    assert run.faults[Kind.CLOCK_YEARS.value] == 3
    assert run.is_valid, run.violations
    assert run.sometimes["clock_is_off"] >= 2
    assert run.sometimes["floor_moved"] == 0
    assert run.world is not None
    logs = [node.group.node.journal.log for node in run.world.brokers.values() if node.group]
    assert all(log.first_index == 1 and log.end_position > 3 * 131_072 for log in logs)
    assert max(stored_ms) < int(run.simulated_s * 1000) + JUMP_MAX_MS


def test_only_plans_that_ask_for_it_have_a_date_years_off() -> None:
    order = Order(duration_s=300, preset="years")
    steps = [step for seed in range(12) for step in plan_of(seed, order).steps]
    years = {step.arg for step in steps if step.kind is Kind.CLOCK_YEARS}
    assert {-2, 2} <= years <= {-2, -1, 0, 1, 2}
    assert Kind.CLOCK_YEARS in ASKED_FOR
    assert read_patches()[841].preset == "years"
