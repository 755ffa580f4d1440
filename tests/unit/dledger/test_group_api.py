"""A service that fails begins again, later each time; what proves a broken node goes on.

`dledger raft secret` makes what a group starts with, and pages name it where they must.
Reads of a group that must not be stale.
"""

import re
import stat
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from dledger.broker_errors import NotLeaderError
from dledger.cli.main import main
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import FlushFailedError, InvariantBroken
from dledger.group_api import LONGEST_PAUSE_S, LeaderService, ServiceCounts, fenced
from dledger.output import ExitCode
from dledger.raft.identity import GroupSecret
from dledger.settings.config import BrokerConfig, load_config
from dledger.settings.parts import group_secret
from dledger.settings.schema import ConfigFile
from dledger.testing.doubles import VirtualClock
from dledger.waiting import Future
from tests.harness.groups import LATENCY_S, Groups, Replica, running_groups
from tests.harness.leader_services import LeaderServices
from tests.harness.raft_cluster import batch
from tests.harness.shipped_files import ROOT


class Failing:
    """A service that raises each time it runs, at virtual times that are remembered."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.began: list[float] = []

    async def run(self) -> None:
        self.began.append(trio.current_time())
        if self.errors:
            raise self.errors.pop(0)
        await trio.sleep_forever()


async def test_fence_pause_doubles_up_to_a_minute(nursery: trio.Nursery) -> None:
    failing, counts = Failing(*[ValueError("x")] * 9), ServiceCounts()
    nursery.start_soon(fenced, "timer", failing.run, VirtualClock(), counts)
    await trio.sleep(1000)
    pauses = [later - earlier for earlier, later in pairwise(failing.began)]
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert counts.restarts == Counter({"timer": 9})
    nursery.cancel_scope.cancel()


async def test_after_a_calm_time_the_pause_is_short_again(nursery: trio.Nursery) -> None:
    began: list[float] = []

    async def run() -> None:
        began.append(trio.current_time())
        await trio.sleep(200 if len(began) == 4 else 0)
        raise OSError("x")

    nursery.start_soon(fenced, "timer", run, VirtualClock(), ServiceCounts())
    await trio.sleep(210)
    assert began[4] - began[3] == 201
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("error", [InvariantBroken("x"), FlushFailedError("x")])
async def test_what_proves_that_the_node_is_broken_goes_on(error: Exception) -> None:
    counts = ServiceCounts()
    with pytest.raises(type(error)):
        await fenced("timer", Failing(error).run, VirtualClock(), counts)
    with pytest.RaisesGroup(type(error)):
        group = ExceptionGroup("both", [ValueError("x"), error])
        await fenced("timer", Failing(group).run, VirtualClock(), counts)
    assert counts.restarts == Counter({"timer": 1}), "the other half of the group"


async def test_the_end_of_the_leadership_passes_while_a_service_fails() -> None:
    counts = ServiceCounts()

    async def fails_late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("on the way out")

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_late)
            nursery.start_soon(trio.sleep_forever)

    with trio.move_on_after(1) as scope:
        await fenced("timer", run, VirtualClock(), counts)
    assert scope.cancelled_caught
    assert counts.restarts == Counter({"timer": 1})


async def test_a_service_that_ends_is_not_run_again() -> None:
    ran: list[int] = []

    async def run() -> None:
        ran.append(1)

    await fenced("timer", run, VirtualClock(), ServiceCounts())
    assert ran == [1]
    await LeaderService("timer", run)(object())
    assert ran == [1, 1]


@pytest.mark.parametrize(
    ("number", "wait"),
    [
        pytest.param(0, "DELAY\x011\x02", id="delay levels"),
        pytest.param(1, "TIMER_DELAY_SEC\x012\x02", id="timer"),
    ],
)
async def test_failed_service_delivers_in_flight_once(
    tmp_path: Path, nursery: trio.Nursery, number: int, wait: str
) -> None:
    leader = LeaderServices(tmp_path)
    group, service = leader.group, leader.services[number]
    assert leader.send(wait).code == 0
    group.commit_latency_s = 5
    inner = trio.CancelScope()

    async def run() -> None:
        nonlocal inner
        with trio.CancelScope() as inner:
            await service.run()
        raise RuntimeError("broken off")

    counts = ServiceCounts()
    nursery.start_soon(fenced, service.name, run, leader.clock, counts)
    nursery.start_soon(leader.settle_kicked, 6)
    await trio.sleep(4)
    assert (group.waiting, counts.restarts) == (1, Counter())
    inner.cancel()
    group.commit_latency_s = 0.001
    await trio.sleep(10)
    assert counts.restarts == Counter({service.name: 1})
    assert [bytes(record.body) for record in leader.read("T")] == [b"body"]
    assert leader.send(wait).code == 0
    await trio.sleep(10)
    assert len(leader.read("T")) == 2, "the claim of the first try is given back"
    nursery.cancel_scope.cancel()
    group.close()


def made(path: Path) -> GroupSecret:
    """Return what a broker reads from the file that the command writes."""
    assert main(["raft", "secret", str(path)]) == ExitCode.OK
    config = load_config(options={"raft.secret_file": str(path)})
    secret = group_secret(config, OsDisk())
    assert secret is not None
    return secret


async def test_a_group_starts_with_the_secret_of_the_command(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    groups = Groups(tmp_path, nursery)
    file = tmp_path / "peers.secret"
    secret = made(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    groups.secrets = dict.fromkeys(groups.names, secret)
    for name in groups.names:
        await groups.start(name)
    leader = await groups.leader()
    await trio.sleep(2)
    rows = leader.group.status()["peers"].values()
    assert [row["connected"] for row in rows] == [True, True]


def test_each_run_of_the_command_makes_another_secret(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        made(file)
    one, two = (file.read_text().strip() for file in files)
    assert one != two
    assert min(len(one), len(two)) >= 32


def test_a_secret_that_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.secret"
    made(file)
    before = file.read_bytes()
    assert main(["raft", "secret", str(file)]) == ExitCode.USAGE
    assert file.read_bytes() == before
    said = capsys.readouterr()
    assert "exists already" in said.err
    assert before.decode().strip() not in said.out + said.err


# -- examples on pages ---------------------------------------------------------------------

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
_BLOCK = re.compile(r"^```(?:text|toml|properties|ini|conf)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PEERS = re.compile(r"^(dLegerPeers|peers|raft\.peers)\s*=", re.MULTILINE)


def examples() -> list[tuple[str, str]]:
    """Return page and text of every block that is a broker's configuration with members."""
    found = [
        (page.relative_to(ROOT).as_posix(), block)
        for page in PAGES
        for block in _BLOCK.findall(page.read_text())
        if _PEERS.search(block)
    ]
    shipped = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".conf", ".toml")]
    found += [
        (path.relative_to(ROOT).as_posix(), text)
        for path in sorted(shipped)
        if _PEERS.search(text := path.read_text())
    ]
    return found


def loaded(text: str) -> BrokerConfig:
    suffix = "conf" if "dLegerPeers" in text else "toml"
    return load_config([ConfigFile(f"example.{suffix}", text)])


def test_every_example_of_members_is_taken_by_a_broker() -> None:
    configs = {where: loaded(text) for where, text in examples()}
    assert "docs/operate/from-master-slave.md" in configs
    assert len(configs) >= 10
    far = {
        where: config.raft.secret_file
        for where, config in configs.items()
        if any(not peer.host.startswith("127.") for peer in config.raft.peers)
    }
    assert far == {"docs/operate/from-master-slave.md": "/etc/dledger/broker-a.secret"}


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
