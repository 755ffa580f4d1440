"""The shipped configuration files, started by hand as the README says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@contextmanager
def running(commands: list[list[str]], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run console scripts until the block ends; then SIGTERM and wait."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen([str(BIN / command[0]), *command[1:]], stderr=log, cwd=folder)
                )
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def healthy() -> dict[str, object]:
    """Wait until the cluster of the default NameServer is healthy and return what it says."""
    done = subprocess.run(
        [str(BIN / "dledger"), "cluster", "health", "--wait", "--timeout-s", "60", "-o", "json"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done
    health: dict[str, object] = json.loads(done.stdout)
    return health


def start_group(folder: Path, names: list[str], texts: list[str]) -> None:
    """Start a NameServer and a broker per file; send one message; stop all."""
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_text(text)
    (folder / "namesrv.toml").write_text(f'[namesrv]\nkv_config_path = "{folder}/kv.json"\n')
    commands = [["dledger-namesrv", "-c", "namesrv.toml"]]
    commands += [["dledger-broker", "-c", name] for name in names]
    with running(commands, folder) as processes:
        groups = healthy()["groups"]
        assert isinstance(groups, list)
        assert [group["members"] for group in groups] == [3]
        sent = subprocess.run(
            [str(BIN / "dledger"), "send", "--topic", "hello", "a message", "-o", "json"],
            capture_output=True,
            check=False,
        )
        assert sent.returncode == 0, sent
        assert json.loads(sent.stdout)[0]["status"] == "SEND_OK"
    assert [process.returncode for process in processes] == [0, 0, 0, 0]


def test_three_brokers_start_from_the_toml_samples(tmp_path: Path) -> None:
    names = ["n0.toml", "n1.toml", "n2.toml"]
    texts = [(ROOT / "examples" / "three-nodes" / name).read_text() for name in names]
    start_group(
        tmp_path, names, [text.replace("/tmp/dledger-three-nodes", str(tmp_path)) for text in texts]
    )


def test_three_brokers_start_from_rocketmq_files_edited_only_for_paths(tmp_path: Path) -> None:
    names = ["broker-n0.conf", "broker-n1.conf", "broker-n2.conf"]
    texts = [(ROOT / "examples" / "rocketmq-dledger" / name).read_text() for name in names]
    start_group(tmp_path, names, [text.replace("/tmp/rmqstore", str(tmp_path)) for text in texts])
