"""Links that the kernel cuts, between programs of a few lines and between real brokers.

Where no network of its own can be made, tests are skipped with the reason.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import trio

from dledger.cli.local_cluster import lay_out
from dledger.jepsen_like.chaos import namespaces
from dledger.jepsen_like.chaos.namespaces import (
    Host,
    RunNetwork,
    entered,
    rule_lines,
    run_network,
)
from dledger.jepsen_like.chaos.plan_draw import SETTINGS
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, encode_plan
from dledger.jepsen_like.workloads.presets import workload_for

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not())),
]

PORT = 7_000
CUT_S = 1.0
"""What would come, comes within milliseconds."""

PATIENCE_S = 20.0
"""A sender tries again after a fifth of a second, then twice that, and so on."""


def socket_on(host: Host) -> socket.socket:
    """Return a socket of that host; it stays there."""
    assert host.namespace is not None
    with entered(host.namespace):
        made = socket.socket()
    made.settimeout(PATIENCE_S)
    return made


@pytest.fixture
def network() -> Iterator[RunNetwork]:
    with run_network(("a", "b")) as made:
        yield made


@pytest.fixture
def listener(network: RunNetwork) -> Iterator[socket.socket]:
    with socket_on(network.hosts["b"]) as made:
        made.bind(("0.0.0.0", PORT))
        made.listen()
        yield made


def cut(
    network: RunNetwork, *pairs: tuple[str, str], before: tuple[tuple[str, str], ...] = ()
) -> None:
    """Cut the links between these hosts; *before*: those that are cut."""

    def addresses(names: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
        return [(network.hosts[a].address, network.hosts[b].address) for a, b in names]

    network.route(rule_lines(addresses(before), addresses(pairs)))


def test_kernel_cut_leaves_a_connection_half_open(
    network: RunNetwork, listener: socket.socket
) -> None:
    ours = socket_on(network.hosts["a"])
    ours.connect((network.hosts["b"].address, PORT))
    theirs, _ = listener.accept()
    theirs.settimeout(CUT_S)
    with ours, theirs:
        ours.sendall(b"before ")
        assert theirs.recv(99) == b"before "
        cut(network, ("a", "b"))
        ours.sendall(b"meanwhile")  # no error: neither end is informed
        with pytest.raises(TimeoutError):
            theirs.recv(99)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        cut(network, before=(("a", "b"),))
        theirs.settimeout(PATIENCE_S)
        assert theirs.recv(99) == b"meanwhile"


def test_a_cut_one_way_lets_the_other_way_through(
    network: RunNetwork, listener: socket.socket
) -> None:
    ours = socket_on(network.hosts["a"])
    ours.connect((network.hosts["b"].address, PORT))
    theirs, _ = listener.accept()
    with ours, theirs:
        cut(network, ("a", "b"))
        theirs.sendall(b"heard")
        assert ours.recv(99) == b"heard"
        theirs.settimeout(CUT_S)
        ours.sendall(b"unheard")
        with pytest.raises(TimeoutError):
            theirs.recv(99)


def test_kernel_cut_leaves_a_new_connection_unanswered(
    network: RunNetwork, listener: socket.socket
) -> None:
    cut(network, ("b", "a"))  # what comes back is lost
    with socket_on(network.hosts["a"]) as ours:
        ours.settimeout(CUT_S)
        with pytest.raises(TimeoutError):
            ours.connect((network.hosts["b"].address, PORT))
    with socket_on(network.hosts["a"]) as watching:  # at the second address nothing is cut
        watching.connect((network.hosts["b"].watch_address, PORT))


def test_nothing_of_it_is_in_the_machines_own_network(network: RunNetwork) -> None:
    own = addresses_here()
    reported = {host.address for host in network.hosts.values()}
    assert own
    assert not reported & {address for _, address in own}
    inside = network.hosts["a"].namespace
    assert inside is not None
    with pytest.raises(ValueError, match="left early"), entered(inside):
        raise ValueError("left early")
    assert addresses_here() == own


def addresses_here() -> list[tuple[str, str]]:
    """Return links and their addresses where this process is; how long those last changes."""
    shown = subprocess.run(
        ["ip", "-json", "addr"], capture_output=True, text=True, timeout=60, check=True
    )
    return [
        (link["ifname"], address["local"])
        for link in json.loads(shown.stdout)
        for address in (link.get("addr_info") or [{"local": ""}])
    ]


def test_two_runs_at_a_time_do_not_meet() -> None:
    with run_network(("a", "b")) as one, run_network(("a", "b")) as other:
        hosts = [*one.hosts.values(), *other.hosts.values()]
        files = [host.namespace for host in hosts if host.namespace is not None]
        assert len({file.stat().st_ino for file in files}) == 4
    assert not any(file.exists() for file in files)


def network_of(task: str) -> int:
    return os.stat(f"/proc/{task}/ns/net").st_ino


async def test_child_is_in_the_network_of_the_thread_that_starts_it(tmp_path: Path) -> None:
    cluster = lay_out(tmp_path, brokers=1)
    with run_network(("a",)) as network:
        (host,) = network.hosts.values()
        assert host.namespace is not None
        for place in (nullcontext(), entered(host.namespace), nullcontext()):
            with place:
                await cluster.start("namesrv")
                with trio.fail_after(60):
                    while network_of(str(cluster.namesrv.pid)) != network_of("thread-self"):
                        await trio.sleep(0.01)
            await cluster.kill("namesrv")


@pytest.mark.hunt
def test_run_with_kernel_cuts_is_valid(tmp_path: Path) -> None:
    cuts = Plan(
        seed=3,
        duration_ms=20_000,
        steps=(
            Step(2_000, Kind.ISOLATE, "leader", 5_000),
            Step(8_000, Kind.SPLIT, "all", 3_000, 3),
            Step(11_500, Kind.MUTE, "leader", 3_000),
            Step(12_000, Kind.CLIENT_CUT, "follower", 2_000),
            Step(15_500, Kind.PARTIAL, "leader", 3_000, 1),
            Step(16_000, Kind.SWIZZLE, "all", 3_000),
        ),
        workload=workload_for("mixed", 400.0),
        settings=msgspec.structs.replace(SETTINGS, delay_levels="1s 2s"),
    )
    (tmp_path / "cuts.json").write_text(encode_plan(cuts))
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "dledger.cli.main", "chaos", "run"),
            *("--plan", str(tmp_path / "cuts.json"), "--links", "kernel"),
            *("--store", str(tmp_path / "runs"), "--output", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert (done.returncode, said["verdict"], said["lost"]) == (0, "valid", 0), said
    assert said["acknowledged"] > 500
    assert said["faults"] == 6
    assert said["skipped"] == []
    assert said["sometimes"]["link_cut"] >= 20
    assert said["failovers"] >= 1, "no cut was noticed"
    assert "--links kernel" in said["command"]
