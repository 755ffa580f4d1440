"""A process that is no member is after the broker name while clients send: it gets no message."""

import dataclasses
from collections.abc import Callable

import pytest

from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

SECRET_FILE = "/etc/secret"

THIEF_MS = 4_000


def stranger(kind: Kind, seed: int, arg: int, more: tuple[Step, ...]) -> Plan:
    """Return a plan with a stranger; with faults beside it, it stays for longer."""
    for_ms = 30_000 if more else 15_000
    return Plan(
        seed=seed,
        duration_ms=THIEF_MS + for_ms + 4_000,
        steps=(Step(THIEF_MS, kind, "all", for_ms, arg), *more),
        workload=Workload(producers=3, interval_ms=300, producer_life_s=6, delayed_per_mille=0),
    )


def with_a_secret(world: World) -> None:
    """Give all members the same secret."""
    for node in world.brokers.values():
        mount = node.disk.mount()
        mount.make_dir("/etc")
        mount.replace(SECRET_FILE, b"thirty-two bytes that none of us has")
        raft = dataclasses.replace(node.config.raft, secret_file=SECRET_FILE)
        node.config = dataclasses.replace(node.config, raft=raft)


@pytest.mark.parametrize(
    "prepare", gate_part([None, with_a_secret], 1), ids=["no secret", "secret"]
)
def test_a_stranger_at_the_peer_ports_changes_nothing(
    prepare: Callable[[World], None] | None,
) -> None:
    worlds: list[World] = []

    def prepared(world: World) -> None:
        worlds.append(world)
        if prepare is not None:
            prepare(world)

    played = play(stranger(Kind.PEER_STRANGER, 12, 0, ()), prepare=prepared)
    assert played.is_valid, played.verdict.reason
    assert played.faults["peer_stranger"] == 1
    assert played.sometimes["stranger_refused"] > 25
    assert {node.incarnation for node in worlds[0].brokers.values()} == {1}
    for taken in ("stranger_told", "stranger_named", "stranger_called"):
        assert not played.sometimes[taken], taken
    assert played.operations["send_ok"] > 25


@pytest.mark.hunt
def test_a_stranger_gets_nothing_while_members_change() -> None:
    faults = (
        Step(8_000, Kind.KILL, "leader", 3_000),
        Step(16_000, Kind.POWER_CUT_ALL, "all", 2_000),
        Step(24_000, Kind.WIPE, "follower", 2_000),
    )
    played = play(stranger(Kind.PEER_STRANGER, 13, 0, faults))
    assert played.is_valid, played.verdict.reason
    # A wiped member names itself to all that claim to be configured, until it has a list.
    for taken in ("stranger_told", "stranger_called"):
        assert not played.sometimes[taken], taken
    assert played.operations["send_ok"] > 30


@pytest.mark.parametrize("arg", gate_part([0, 1], 1), ids=["names_no_group", "second_group"])
def test_a_stranger_that_wants_the_name_gets_no_message(arg: int) -> None:
    played = play(stranger(Kind.NAME_THIEF, 11, arg, ()))
    assert played.is_valid, played.verdict.reason
    assert played.faults["name_thief"] == 1
    assert played.sometimes["thief_register_refused"] > 5
    assert played.sometimes["thief_unregister_refused"] > 5
    assert played.sometimes["thief_topic_refused"] > 5
    for taken in ("thief_registered", "thief_unregistered", "thief_topic_entered", "thief_taken"):
        assert not played.sometimes[taken], taken
    assert played.operations["send_ok"] > 25


def test_a_stranger_gets_no_message_while_leaders_are_killed() -> None:
    # A NameServer that starts again knows no broker: a stranger may be first, the group comes back.
    kills = (
        Step(8_000, Kind.NAMESRV_KILL, "all", 1_500),
        Step(14_000, Kind.KILL, "leader", 3_000),
        Step(20_000, Kind.NAMESRV_KILL, "all", 100),
        Step(26_000, Kind.POWER_CUT_ALL, "all", 2_000),
    )
    played = play(stranger(Kind.NAME_THIEF, 11, 0, kills))
    assert played.is_valid, played.verdict.reason
    assert not played.sometimes["thief_taken"]
    assert played.operations["send_ok"] > 30
