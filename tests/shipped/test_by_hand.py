"""The shipped configuration files, started by hand as the README describes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dledger.remoting.properties import read_properties
from tests.harness.shipped_files import ROOT, Shipped, lay_out_examples

pytestmark = pytest.mark.slow

WITHIN_S = 60.0
BIN = Path(sys.executable).parent
# RocketMQ's own sample for the first node of a Dledger group, key by key.
ROCKETMQ_SAMPLE = {
    "brokerClusterName": "RaftCluster",
    "brokerName": "RaftNode00",
    "listenPort": "30911",
    "namesrvAddr": "127.0.0.1:9876",
    "storePathRootDir": "/tmp/rmqstore/node00",
    "storePathCommitLog": "/tmp/rmqstore/node00/commitlog",
    "enableDLegerCommitLog": "true",
    "dLegerGroup": "RaftNode00",
    "dLegerPeers": "n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913",
    "dLegerSelfId": "n0",
    "sendMessageThreadPoolNums": "16",
}
# What differs between the three files.
ROCKETMQ_NODES = [
    ("n0", "30911", "/tmp/rmqstore/node00"),
    ("n1", "30921", "/tmp/rmqstore/node01"),
    ("n2", "30931", "/tmp/rmqstore/node02"),
]


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
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Tools:
    """The command line, pointed at one NameServer."""

    def __init__(self, shipped: Shipped) -> None:
        self._environment = {**os.environ, "NAMESRV_ADDR": f"127.0.0.1:{shipped.namesrv_port}"}

    def dledger(self, *tokens: str) -> bytes:
        """Run a command and return what it printed as JSON."""
        done = self._run(*tokens)
        assert done.returncode == 0, done
        return done.stdout

    def _run(self, *tokens: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(BIN / "dledger"), *tokens, "--output", "json"],
            capture_output=True,
            check=False,
            env=self._environment,
        )

    def until(self, good: Callable[[Any], bool], *tokens: str) -> Any:
        """Run a command again until it succeeds and its JSON is *good*."""
        end = time.monotonic() + WITHIN_S
        while True:
            done = self._run(*tokens)
            if done.returncode == 0 and good(found := json.loads(done.stdout)):
                return found
            assert time.monotonic() < end, done
            time.sleep(0.2)

    def healthy(self) -> dict[str, object]:
        """Wait until the cluster is healthy with all its members and return its status."""
        health: dict[str, object] = self.until(
            lambda said: [group["members"] for group in said["groups"]] == [3],
            *("cluster", "health", "--wait", "--timeout-s", "60"),
        )
        return health


@contextmanager
def started_group(folder: Path, examples: str, names: list[str]) -> Iterator[Tools]:
    """Start a NameServer and a broker per file; stop all."""
    shipped = lay_out_examples(folder)
    tools = Tools(shipped)
    (folder / "namesrv.toml").write_text(f'[namesrv]\nkv_config_path = "{folder}/kv.json"\n')
    port = str(shipped.namesrv_port)
    commands = [["dledger-namesrv", "-c", "namesrv.toml", "--listen-port", port]]
    commands += [["dledger-broker", "-c", f"examples/{examples}/{name}"] for name in names]
    with running(commands, folder) as processes:
        groups = tools.healthy()["groups"]
        assert isinstance(groups, list)
        assert [group["members"] for group in groups] == [3]
        yield tools
    assert [process.returncode for process in processes] == [0, 0, 0, 0]


def send_and_consume(tools: Tools) -> tuple[Any, Any]:
    """Send a message and consume it; return the result of the send and what was consumed."""
    dledger = tools.dledger
    sent = dledger("send", "--topic", "hello", "a message", "--tag", "x", "--queue", "1")
    (result,) = json.loads(sent)
    assert (result["status"], result["queue"], result["offset"]) == ("SEND_OK", 1, 0)
    # A NameServer learns of a topic that a send made after the sender is answered.
    tools.until(bool, "topic", "route", "hello")
    consumed = json.loads(dledger("consume", "--topic", "hello", "--from", "earliest"))
    assert (consumed["body"], consumed["tags"], consumed["queue"]) == ("a message", "x", 1)
    return result, consumed


def test_three_brokers_start_from_the_toml_samples(tmp_path: Path) -> None:
    with started_group(tmp_path, "three-nodes", ["n0.toml", "n1.toml", "n2.toml"]) as tools:
        dledger = tools.dledger
        result, consumed = send_and_consume(tools)
        assert json.loads(dledger("msg", "by-offset", "hello", "1", "0")) == consumed
        viewed = json.loads(dledger("msg", "by-id", result["offset_message_id"]))
        assert {**viewed, "broker": consumed["broker"]} == consumed
        tools.until(
            lambda raft: (
                sorted(member["role"] for member in raft) == ["follower", "follower", "leader"]
            ),
            *("raft", "status"),
        )
        info = json.loads(dledger("topic", "info", "hello"))
        assert info["messages"] == 1
        dledger("topic", "create", "other", "--queues", "2")
        topics = json.loads(dledger("topic", "ls"))
        assert [row["topic"] for row in topics] == ["hello", "other"]
        tools.until(
            lambda route: (route[0]["write_queues"], len(route[0]["followers"])) == (2, 2),
            *("topic", "route", "other"),
        )


def test_brokers_start_from_rocketmq_configuration_files(tmp_path: Path) -> None:
    names = ["broker-n0.conf", "broker-n1.conf", "broker-n2.conf"]
    with started_group(tmp_path, "rocketmq-dledger", names) as tools:
        send_and_consume(tools)


@pytest.mark.parametrize(("self_id", "port", "store"), ROCKETMQ_NODES)
def test_the_rocketmq_files_are_the_original_ones(self_id: str, port: str, store: str) -> None:
    file = ROOT / "examples" / "rocketmq-dledger" / f"broker-{self_id}.conf"
    assert read_properties(file.read_text()) == {
        **ROCKETMQ_SAMPLE,
        "dLegerSelfId": self_id,
        "listenPort": port,
        "storePathRootDir": store,
        "storePathCommitLog": f"{store}/commitlog",
    }
