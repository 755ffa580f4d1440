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
    done = dledger("cluster", "health", "--wait", "--timeout-s", "60")
    health: dict[str, object] = json.loads(done)
    return health


def dledger(*tokens: str) -> bytes:
    """Run a command and return what it printed as JSON."""
    done = subprocess.run(
        [str(BIN / "dledger"), *tokens, "--output", "json"], capture_output=True, check=False
    )
    assert done.returncode == 0, done
    return done.stdout


def start_group(folder: Path, names: list[str], texts: list[str]) -> None:
    """Start a NameServer and a broker per file; use each command once; stop all."""
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_text(text)
    (folder / "namesrv.toml").write_text(f'[namesrv]\nkv_config_path = "{folder}/kv.json"\n')
    commands = [["dledger-namesrv", "-c", "namesrv.toml"]]
    commands += [["dledger-broker", "-c", name] for name in names]
    with running(commands, folder) as processes:
        groups = healthy()["groups"]
        assert isinstance(groups, list)
        assert [group["members"] for group in groups] == [3]
        sent = dledger("send", "--topic", "hello", "a message", "--tag", "x", "--queue", "1")
        (result,) = json.loads(sent)
        assert (result["status"], result["queue"], result["offset"]) == ("SEND_OK", 1, 0)
        consumed = json.loads(dledger("consume", "--topic", "hello", "--from", "earliest"))
        assert (consumed["body"], consumed["tags"], consumed["queue"]) == ("a message", "x", 1)
        assert json.loads(dledger("msg", "by-offset", "hello", "1", "0")) == consumed
        viewed = json.loads(dledger("msg", "by-id", result["offset_message_id"]))
        assert {**viewed, "broker": consumed["broker"]} == consumed
        raft = json.loads(dledger("raft", "status"))
        assert sorted(member["role"] for member in raft) == ["follower", "follower", "leader"]
        info = json.loads(dledger("topic", "info", "hello"))
        assert info["messages"] == 1
        dledger("topic", "create", "other", "--queues", "2")
        topics = json.loads(dledger("topic", "ls"))
        assert [row["topic"] for row in topics] == ["hello", "other"]
        route = json.loads(dledger("topic", "route", "other"))
        assert (route[0]["write_queues"], len(route[0]["followers"])) == (2, 2)
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
