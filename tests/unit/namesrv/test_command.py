"""The daemon as a process: settings printed, errors in one line, a clean stop on SIGTERM."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dledger.namesrv.config import SCHEMA

NAMESRV = (str(Path(sys.executable).with_name("dledger-namesrv")),)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NAMESRV, *arguments], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.slow
def test_print_settings_shows_each_with_its_source_and_exits_0(tmp_path: Path) -> None:
    file = tmp_path / "namesrv.conf"
    file.write_text("listenPort=9999\n")
    done = run("-c", str(file), "--listen-host", "0.0.0.0", "-p")
    assert done.returncode == 0
    lines = {line.split()[0]: line.partition(" = ")[2] for line in done.stdout.splitlines()}
    assert set(lines) == set(SCHEMA.settings)
    assert lines["server.listen_port"].split() == ["9999", "#", str(file)]
    assert lines["server.listen_host"].split() == ["0.0.0.0", "#", "command", "line"]
    assert lines["namesrv.broker_expiry_ms"].split() == ["120000", "#", "default"]


@pytest.mark.slow
def test_a_bad_setting_is_one_line_and_exit_2(tmp_path: Path) -> None:
    file = tmp_path / "namesrv.conf"
    file.write_text("listenPort=9999\nlistenprot=1\n")
    done = run("-c", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"error: {file}:2: unknown setting listenprot (did you mean listenPort?)\n"
    )


@pytest.mark.slow
def test_a_damaged_key_value_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    file = tmp_path / "kvConfig.json"
    file.write_text("{")
    done = run("--listen-port", "0", "--kv-config-path", str(file))
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {file} is damaged")


@pytest.mark.slow
def test_a_taken_port_is_one_line_and_exit_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--listen-port", str(port), "--kv-config-path", str(tmp_path / "kv.json"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"error: cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.slow
def test_it_serves_until_sigterm_and_logs_json(tmp_path: Path) -> None:
    file = tmp_path / "namesrv.toml"
    file.write_text(f'[server]\nlisten_port = 0\n[namesrv]\nkv_config_path = "{tmp_path}/kv"\n')
    with subprocess.Popen([*NAMESRV, "-c", str(file)], stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        events = []
        for line in daemon.stderr:
            events.append(json.loads(line))
            if events[-1]["event"] == "namesrv_started":
                socket.create_connection(("127.0.0.1", events[-1]["port"]), timeout=5).close()
                daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(10) == 0
    names = [event["event"] for event in events]
    assert names == ["settings", "namesrv_started", "signal", "namesrv_stopped"]
    assert events[0]["server.listen_port"] == f"0 ({file})"
