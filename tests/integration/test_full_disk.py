"""A full disk: sends are refused as not stored, nothing acknowledged is lost, space heals it.

Real processes on a file system of a few megabytes, where this may be mounted (root). With a replica
whose disk is full: tests/simulation/test_full_disk.py.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, lay_out, status_of
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.log_report import verify_store
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.headers import SendMessageHeader
from tests.harness.cluster_questions import ask, create_topic
from tests.harness.eventually import WITHIN_S
from tests.harness.stored_messages import bodies_at

BODY_BYTES = 60_000
SMALL_BYTES = 256 << 10
SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 1 << 20,
    "store.mapped_file_size_consume_queue": 20_000,
}
SEND = {
    name: str(value)
    for name, value in SendMessageHeader("g", "t", "TBW102", 4, 0, 0, 1, 0, "").encode_v2().items()
}


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system of a given size, and give it another size later."""
    place = tmp_path / "small"

    def mount(size: str) -> Path:
        place.mkdir(exist_ok=True)
        options = f"{'remount,' if place.is_mount() else ''}size={size}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "dledger-test", str(place)],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def lay_out_small(folder: Path, place: Path) -> LocalCluster:
    settings = {**SETTINGS, "store.path_root_dir": str(place / "store")}
    cluster = lay_out(folder / "cluster", brokers=1, settings=settings)
    cluster.brokers["n0"].store_path = place / "store"
    return cluster


async def fill_up(cluster: LocalCluster) -> list[bytes]:
    """Send until the broker refuses; return what was acknowledged."""
    stored: list[bytes] = []
    for number in range(1_000):
        body = str(number).encode().ljust(BODY_BYTES, b".")
        answer = await ask(cluster.brokers["n0"].address, 310, SEND, body, timeout_s=30)
        if answer.code != ResponseCode.SUCCESS:
            assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert answer.ext["outcome"] == "not_stored"
            # The file system reported it, or the check that comes every second.
            assert "space" in (answer.remark or "").lower()
            return stored
        stored.append(body)
    raise AssertionError("the disk was never full")


def fill_rest(place: Path) -> None:
    """Leave space for small files alone: a broker that is slow to fill a disk refuses early."""
    with (place / "filler").open("wb", buffering=0) as filler:
        with suppress(OSError):
            while True:
                filler.write(bytes(4_096))
        filler.truncate(filler.tell() - SMALL_BYTES)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
async def test_full_disk_refuses_sends_and_serves_reads(
    tmp_path: Path, small_mount: Callable[[str], Path]
) -> None:
    cluster = lay_out_small(tmp_path, small_mount("20m"))
    try:
        for node in cluster.nodes:
            await cluster.start(node.name)
        await cluster.wait_healthy()
        await create_topic([cluster.namesrv_address], "t", queues=1)
        stored = await fill_up(cluster)
        assert len(stored) > 50
        node = cluster.brokers["n0"]
        assert node.running, node.last_log_lines()
        assert await bodies_at(cluster.namesrv_address, "t") == stored
        # Started on the full disk it leads only where its newest segment has space for its entry.
        before = await status_of(node.address)
        assert before is not None
        await cluster.kill("n0")
        fill_rest(tmp_path / "small")
        await cluster.start("n0")
        with trio.fail_after(WITHIN_S):
            while (status := await status_of(node.address)) is None:
                await trio.sleep(0.01)
        assert node.running, node.last_log_lines()
        assert not status["serving"] or status["commit_index"] > before["commit_index"]
        refused = await ask(node.address, 310, SEND, b"refused", timeout_s=30)
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert refused.ext["outcome"] == "not_stored"
        # Stopped on the full disk it reports what it could not write, and it has lost nothing.
        status_code = await cluster.stop("n0")
        assert status_code == 0 or node.last_log_lines(1).startswith("error: no space ")
        await cluster.start("n0")
        small_mount("64m")
        await cluster.wait_healthy()
        assert await bodies_at(cluster.namesrv_address, "t") == stored
        config = ProducerConfig(send_timeout_s=30)
        async with (
            connect([cluster.namesrv_address]) as client,
            Producer(client, "p", config) as producer,
        ):
            await producer.send(Message("t", b"after"))
        assert await bodies_at(cluster.namesrv_address, "t") == [*stored, b"after"]
        assert await cluster.stop("n0") == 0
        assert node.store_path is not None
        assert verify_store(node.store_path).problems == []
    finally:
        await cluster.stop_all()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
async def test_broker_without_space_for_its_files_does_not_start(
    tmp_path: Path, small_mount: Callable[[str], Path]
) -> None:
    cluster = lay_out_small(tmp_path, small_mount("4m"))
    node = cluster.brokers["n0"]
    try:
        await cluster.start("n0")
        assert node.process is not None
        with trio.fail_after(WITHIN_S):
            while node.process.poll() is None:
                await trio.sleep(0.01)
        assert node.process.returncode == 1
        assert node.last_log_lines(1).startswith("error: no space for ")
        small_mount("64m")
        await cluster.start("namesrv")
        await cluster.start("n0")
        await cluster.wait_healthy()
    finally:
        await cluster.stop_all()
