"""A full disk: sends are refused as not stored, nothing acknowledged is lost, space heals it.

Real processes on a file system of a few megabytes, where this may be mounted (root). With a replica
whose disk is full: tests/simulation/test_full_disk.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, lay_out, status_of
from dledger.cli.raft_command import transfer_leader
from dledger.cli.topic_command import retention
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.log_report import verify_store
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import SendMessageHeader
from tests.harness.cluster_questions import ask, create_topic, queue_ends
from tests.harness.eventually import WITHIN_S, all_statuses, eventually
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
def small_mounts(tmp_path: Path) -> Iterator[Callable[[Path, str], None]]:
    """Mount file systems of a given size, and give them another size later."""
    mounted: list[Path] = []

    def mount(place: Path, size: str) -> None:
        place.mkdir(parents=True, exist_ok=True)
        options = f"{'remount,' if place in mounted else ''}size={size}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "dledger-test", str(place)],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
        if place not in mounted:
            mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def small_mount(tmp_path: Path, small_mounts: Callable[[Path, str], None]) -> Callable[[str], Path]:
    """Mount one, and give it another size later."""

    def mount(size: str) -> Path:
        small_mounts(tmp_path / "small", size)
        return tmp_path / "small"

    return mount


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


SHORT = "short"

RETENTION_SOON: dict[str, object] = {
    # Everything about what is kept is as by default; it is looked at more often.
    "store.retention_interval_ms": 300,
    "raft.checkpoint_interval_ms": 300,
}


async def send_while_it_lasts(cluster: LocalCluster, number: int) -> tuple[list[bytes], list[str]]:
    """Send to the leader until ten sends in a row are refused; return what was acknowledged.

    With it come the outcomes of those that were not.
    """
    stored: list[bytes] = []
    others: list[str] = []
    refused = 0
    while refused < 10:
        leader = await cluster.wait_leader()
        number += 1
        body = str(number).encode().ljust(BODY_BYTES, b".")
        answer = await ask(cluster.brokers[leader].address, 310, SEND, body, timeout_s=30)
        if answer.code == ResponseCode.SUCCESS:
            stored.append(body)
            refused = 0
            assert len(stored) < 2_000, "the disks were never full"
        else:
            others.append(answer.ext["outcome"])
            refused += 1
    return stored, others


async def let_retention_look(cluster: LocalCluster) -> None:
    """Wait for a whole pass of retention: the queue of a topic with a short one begins later."""
    await retention(SHORT, "1ms", namesrv=cluster.namesrv_address, yes=True)

    async def has_begun_later() -> bool:
        ((first, end),) = (await queue_ends([cluster.namesrv_address], SHORT)).values()
        return first == end

    await eventually("the queue of a topic with a short retention begins later", has_begun_later)


async def wait_for_ratio(cluster: LocalCluster, name: str, wanted: Callable[[float], bool]) -> None:
    async def look() -> bool:
        answer = await ask(cluster.brokers[name].address, RequestCode.GET_BROKER_RUNTIME_INFO)
        table = json.loads(bytes(answer.body))["table"]
        return wanted(float(table["commitLogDiskRatio"]))

    await eventually(f"{name} sees its disk", look)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
async def test_two_full_disks_of_three_give_up_nothing(
    tmp_path: Path, small_mounts: Callable[[Path, str], None]
) -> None:
    settings = {**SETTINGS, **RETENTION_SOON}
    cluster = lay_out(tmp_path / "cluster", brokers=3, settings=settings)
    small = ("n0", "n1")
    for name in small:
        place = cluster.brokers[name].store_path
        assert place is not None
        small_mounts(place, "24m")
    try:
        for node in cluster.nodes:
            await cluster.start(node.name)
        await cluster.wait_healthy()
        for topic in ("t", SHORT):
            await create_topic([cluster.namesrv_address], topic, queues=1)
        async with connect([cluster.namesrv_address]) as client, Producer(client, "p") as producer:
            await producer.send(Message(SHORT, b"goes"))
        if await cluster.wait_leader() not in small:
            await transfer_leader("n0", namesrv=cluster.namesrv_address)
            await cluster.wait_leader(other_than="n2")
        stored, others = await send_while_it_lasts(cluster, 0)
        assert len(stored) > 50
        assert set(others) == {"not_stored"}
        for name in small:
            await wait_for_ratio(cluster, name, lambda ratio: ratio >= 0.85)
        await let_retention_look(cluster)
        statuses = await all_statuses(cluster)
        assert {name: status["first_index"] for name, status in statuses.items()} == dict.fromkeys(
            cluster.brokers, 1
        )
        assert await bodies_at(cluster.namesrv_address, "t") == stored
        for name in small:
            place = cluster.brokers[name].store_path
            assert place is not None
            small_mounts(place, "96m")
        await wait_for_ratio(cluster, await cluster.wait_leader(), lambda ratio: ratio < 0.85)
        config = ProducerConfig(send_timeout_s=30)
        async with (
            connect([cluster.namesrv_address]) as client,
            Producer(client, "p", config) as producer,
        ):
            await producer.send(Message("t", b"after"))
        assert await bodies_at(cluster.namesrv_address, "t") == [*stored, b"after"]
        for name in cluster.brokers:
            await cluster.wait_caught_up(name)
        ends = {
            (status["first_index"], status["applied_index"], status["applied_chain"])
            for status in (await all_statuses(cluster)).values()
        }
        assert len(ends) == 1, "every replica has the same log, from its first entry on"
        assert all(node.running for node in cluster.brokers.values())
    finally:
        await cluster.stop_all()
