"""Before each acknowledgement a majority has flushed: real processes, watched by strace.

What is guaranteed in each mode: tests/simulation/test_flush_before_ack.py.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientConfig
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.one_term import in_one_term

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    # No flush but those of the log while it is watched.
    "raft.checkpoint_interval_ms": 600_000,
}
SENDS = 40
SENDING = ("sendto", "write")
_CALL = re.compile(
    r"^\d+ +(?P<at>[\d.]+) (?P<call>\w+)\(.*?\) += (?P<result>-?\d+)\D.*<(?P<took>[\d.]+)>$"
)
_BEGUN = re.compile(r"^\d+ +(?P<at>[\d.]+) (?:sendto|write)\(.* <unfinished \.\.\.>$")
_RESUMED = re.compile(
    r"^\d+ +(?P<at>[\d.]+) <\.\.\. (?P<call>\w+) resumed>.* = (?P<result>-?\d+)\D.*<[\d.]+>$"
)


@dataclass
class Trace:
    """System calls of one broker."""

    flush_ends: list[float]
    ack_begins: list[float]


@asynccontextmanager
async def straced(cluster: LocalCluster, folder: Path) -> AsyncIterator[dict[str, Path]]:
    """Watch flushes and socket writes of all brokers while the block runs."""
    tracers = []
    files = {}
    for name, node in cluster.brokers.items():
        files[name] = folder / f"{name}.strace"
        command = ["strace", "-f", "-ttt", "-T", "-yy", "-s", "0"]
        command += [
            "-e",
            "trace=fdatasync,sendto,write",
            "-o",
            str(files[name]),
            "-p",
            str(node.pid),
        ]
        tracers.append(subprocess.Popen(command, stderr=subprocess.PIPE))
    try:
        for tracer in tracers:
            assert tracer.stderr is not None
            said = await trio.to_thread.run_sync(tracer.stderr.readline)
            if b"attached" not in said:
                pytest.skip(f"processes cannot be watched here: {said!r}")
        yield files
    finally:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate()


def read_trace(path: Path, client_ports: set[int]) -> Trace:
    trace = Trace([], [])
    for line in path.read_text().splitlines():
        if found := _CALL.match(line):
            at, took = float(found["at"]), float(found["took"])
            if found["call"] == "fdatasync" and found["result"] == "0":
                trace.flush_ends.append(at + took)
            elif found["call"] in SENDING and any(f":{p}]>" in line for p in client_ports):
                trace.ack_begins.append(at)
        elif found := _BEGUN.match(line):
            if any(f":{port}]>" in line for port in client_ports):
                trace.ack_begins.append(float(found["at"]))
        elif (found := _RESUMED.match(line)) and found["call"] == "fdatasync":
            trace.flush_ends.append(float(found["at"]))
    return trace


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
async def test_leader_and_a_follower_flush_before_each_ack(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SETTINGS) as cluster:
        await create_topic([cluster.namesrv_address], "t", queues=1)
        await in_one_term(cluster, lambda leader: each_ack_is_flushed(cluster, leader))


async def each_ack_is_flushed(cluster: LocalCluster, leader: str) -> None:
    """Send while all are watched: before each acknowledgement two have flushed, one leads."""
    # Nothing but acknowledgements comes from the leader while it is watched.
    quiet = ClientConfig(heartbeat_period_s=3_600.0, route_poll_period_s=3_600.0)
    # A slow answer is waited for: asked for again, it would come twice.
    patient = ProducerConfig(send_timeout_s=60, attempt_timeout_s=60)
    client = connect([cluster.namesrv_address], quiet)
    async with client, Producer(client, "p", patient) as producer:
        await producer.send(Message("t", b"connections stand"))
        ports = local_ports_to(cluster.brokers[leader].address)
        async with straced(cluster, cluster.folder) as files:
            for number in range(SENDS):
                await producer.send(Message("t", b"%d" % number))
    traces = {name: read_trace(path, ports) for name, path in files.items()}
    acks = traces[leader].ack_begins
    assert len(acks) == SENDS
    for before, ack in zip([0.0, *acks], acks, strict=False):
        flushed = [
            name
            for name, trace in traces.items()
            if any(before < ended <= ack for ended in trace.flush_ends)
        ]
        assert leader in flushed
        assert len(flushed) >= 2


def local_ports_to(address: str) -> set[int]:
    """Return the ports of this process's connections to *address*."""
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    inodes = set()
    for link in Path(f"/proc/{os.getpid()}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in inodes and int(fields[2].split(":")[1], 16) == int(port):
            found.add(int(fields[1].split(":")[1], 16))
    return found
