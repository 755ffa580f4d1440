"""Ports: free ones are found, and one that is taken is named."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.cli.broker_command import check_ports
from dledger.cli.main import main
from dledger.cli.ports import free_ports
from dledger.output import CliError
from dledger.remoting.tcp import TcpNetwork
from dledger.settings.config import load_config

pytestmark = pytest.mark.real_time

FIRST_EPHEMERAL_PORT = 32_768


@pytest.fixture
def taken() -> Iterator[int]:
    """A loopback port that this process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def options(listen_port: int, peer_port: int) -> dict[str, object]:
    peers = f"n0-127.0.0.1:{peer_port};n1-127.0.0.1:1"
    return {
        "server.listen_host": "127.0.0.1",
        "server.listen_port": listen_port,
        "raft.self_id": "n0",
        "raft.peers": peers,
    }


async def test_check_ports_names_the_setting_and_the_address(taken: int) -> None:
    (free,) = free_ports(1)
    for setting, chosen in (
        ("server.listen_port", options(taken, free)),
        ("raft.peers", options(free, taken)),
    ):
        with pytest.raises(CliError) as caught:
            await check_ports(load_config(options=chosen), TcpNetwork())
        said = f"{setting}: cannot listen on 127.0.0.1:{taken}: Address already in use; "
        assert str(caught.value).startswith(said)
        assert f":{taken}" in str(caught.value).split("; ")[1]


async def test_check_ports_leaves_free_ports_free() -> None:
    config = load_config(options=options(*free_ports(2)))
    for _ in range(2):
        await check_ports(config, TcpNetwork())


def test_a_broker_whose_port_is_taken_leaves_no_folder(taken: int, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    command = [sys.executable, "-m", "dledger", "broker", "--store", str(folder)]
    options = ["--listen-port", str(taken), "--set", "server.listen_host=127.0.0.1"]
    done = subprocess.run(
        [*command, *options, "--log-level", "error"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: server.listen_port: cannot listen on 127.0.0.1:{taken}: ")
    assert not folder.exists()


def test_up_on_a_taken_port_is_one_sentence(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", str(taken)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: --port {taken}: address already in use; leave --port out, or take another"
    )


def test_own_ports_lie_outside_the_ephemeral_range() -> None:
    assert max(free_ports(50)) < FIRST_EPHEMERAL_PORT
    (peer,) = load_config().raft.peers
    assert peer.port < FIRST_EPHEMERAL_PORT


CHOOSER = """\
import json, sys
from dledger.cli.ports import free_ports
print(json.dumps(free_ports(200)), flush=True)
sys.stdin.read()
"""


def test_free_ports_are_distinct_and_never_two_apart() -> None:
    ports = [*free_ports(20), *free_ports(150)]
    assert len(set(ports)) == len(ports)
    assert not {port - 2 for port in ports} & set(ports)


@pytest.mark.skipif(sys.platform != "linux", reason="claims are Linux' abstract names")
def test_processes_that_run_at_once_choose_different_ports() -> None:
    command = [sys.executable, "-c", CHOOSER]
    choosers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)
    ]
    chosen: list[int] = free_ports(200)
    for chooser in choosers:
        assert chooser.stdout is not None
        chosen += json.loads(chooser.stdout.readline())
    for chooser in choosers:
        chooser.communicate()
    assert len(set(chosen)) == 1_000
