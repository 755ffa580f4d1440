"""A full disk: sends are refused as not stored, nothing acknowledged is lost, space heals it.

With real processes on a file system of a few megabytes where this may be mounted (root), and in
any case with a replica whose disk says no.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from client.connect import connect
from client.message import Message
from client.producer import Producer, ProducerConfig
from client.pull_consumer import PullConsumer
from commitlog.disk import OsDisk
from commitlog.errors import DiskFullError, MQError
from commitlog.record import decode_record
from commitlog.seams import DiskFile
from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.cli.log_verify import verify_store
from dledger.cli.probe import ask, raft_status
from dledger.cli.topic_command import create_topic
from dledger.group import Group
from dledger.group_api import Proposed
from remoting.protocol.codes import ResponseCode
from remoting.protocol.headers import SendMessageHeader
from tests.harness.eventually import WITHIN_S
from tests.harness.groups import running_groups
from tests.harness.raft_cluster import batch

BODY_BYTES = 60_000
SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 1 << 20,
    "store.mapped_file_size_consume_queue": 20_000,
    "store.max_hash_slot_num": 1_000,
    "store.max_index_num": 4_000,
}
SEND = {
    name: str(value)
    for name, value in SendMessageHeader("g", "t", "TBW102", 4, 0, 0, 1, 0, "").encode_v2().items()
}

# ------------------------------------------------------------------------------ in one process


class SmallDisk(OsDisk):
    """A disk that has room for no new file while it is full."""

    full = False

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        if self.full and reserve:
            raise DiskFullError(f"no space for {path} of {size} bytes")
        return super().create(path, size, reserve=reserve)


def bodies(group: Group) -> list[bytes]:
    units = group.queues.queue("T", 0).read(0, group.state.max_offset("T", 0))
    return [
        bytes(decode_record(group.log.record_at(int(unit["phy_offset"]))).body) for unit in units
    ]


async def test_a_leader_without_space_refuses_as_not_stored_and_heals(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_groups(tmp_path, disks=SmallDisk) as groups:
        leader = await groups.leader()
        disk = groups.disks[leader.name]
        assert isinstance(disk, SmallDisk)
        stored: list[bytes] = []
        disk.full = True
        refused: MQError | None = None
        for number in range(100):
            body = str(number).encode().ljust(BODY_BYTES, b".")
            try:
                await leader.group.submit(batch(body))
            except DiskFullError as error:
                refused = error
                break
            stored.append(body)
        assert refused is not None
        assert (refused.outcome, refused.retriable) == ("not_stored", True)
        assert len(stored) > 20
        assert leader.group.leadership is not None
        disk.full = False
        with trio.fail_after(30):
            while True:
                try:
                    await leader.group.submit(batch(b"after"))
                    break
                except DiskFullError:
                    await trio.sleep(0.1)
        await groups.settle()
        for replica in groups.replicas.values():
            assert bodies(replica.group) == [*stored, b"after"]


async def test_a_follower_without_space_holds_nobody_up_and_catches_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_groups(tmp_path, disks=SmallDisk) as groups:
        leader = await groups.leader()
        follower = groups.others(leader.name)[0]
        disk = groups.disks[follower]
        assert isinstance(disk, SmallDisk)
        disk.full = True
        sent = [str(number).encode().ljust(BODY_BYTES, b".") for number in range(60)]
        for body in sent:
            await leader.group.submit(batch(body))
        behind = groups.replicas[follower].group
        assert behind.state.max_offset("T", 0) < 60
        disk.full = False
        await groups.settle()
        assert bodies(behind) == sent


class NoQueuesDisk(OsDisk):
    """A disk that has room for the log but, while it is full, for no consume queue."""

    full = False

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        if self.full and "/consumequeue/" in path:
            raise DiskFullError(f"no space for {path} of {size} bytes")
        return super().create(path, size, reserve=reserve)


async def test_no_space_for_a_derived_file_stops_the_node_unacknowledged_and_loses_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    answers: list[Proposed] = []
    with pytest.RaisesGroup(DiskFullError, flatten_subgroups=True):
        async with running_groups(tmp_path, 1, disks=NoQueuesDisk) as groups:
            leader = await groups.leader()
            disk = groups.disks["n0"]
            assert isinstance(disk, NoQueuesDisk)
            disk.full = True
            leader.group.propose(batch(b"stored but not acknowledged"), answers.append)
            leader.group.kick()
            await trio.sleep(1)
    leader.kill()
    assert [answer.outcome for answer in answers if answer.outcome == "stored"] == []
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        await leader.group.submit(batch(b"after"))
        assert bodies(leader.group) == [b"stored but not acknowledged", b"after"]


# ------------------------------------------------------------------------------ real processes


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system of a given size, and give it another size later."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = False

    def mount(size: str) -> Path:
        nonlocal mounted
        options = f"{'remount,' if mounted else ''}size={size}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "dledger-test", str(place)],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
        mounted = True
        return place

    yield mount
    if mounted:
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
            assert "space" in (answer.remark or "")
            return stored
        stored.append(body)
    raise AssertionError("the disk was never full")


async def read_all(cluster: LocalCluster) -> list[bytes]:
    async with connect([cluster.namesrv_address]) as client, PullConsumer(client, "c") as consumer:
        queues = await consumer.fetch_message_queues("t")
        found = []
        async for _, result in consumer.drain(queues):
            found += [bytes(message.body) for message in result.messages]
        return found


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
async def test_a_broker_on_a_full_disk_says_so_serves_reads_and_goes_on_with_space(
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
        assert await read_all(cluster) == stored
        # Started on the full disk it does not lead, for it could not append.
        await cluster.kill("n0")
        await cluster.start("n0")
        with trio.fail_after(WITHIN_S):
            while (status := await raft_status(node.address)) is None:
                await trio.sleep(0.01)
        assert node.running, node.last_log_lines()
        assert not status["serving"]
        refused = await ask(node.address, 310, SEND, b"refused", timeout_s=30)
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert refused.ext["outcome"] == "not_stored"
        # Stopped on the full disk it says what it could not write, and it has lost nothing.
        status_code = await cluster.stop("n0")
        assert status_code == 0 or node.last_log_lines(1).startswith("error: no space ")
        await cluster.start("n0")
        small_mount("64m")
        await cluster.wait_healthy()
        assert await read_all(cluster) == stored
        config = ProducerConfig(send_timeout_s=30)
        async with (
            connect([cluster.namesrv_address]) as client,
            Producer(client, "p", config) as producer,
        ):
            await producer.send(Message("t", b"after"))
        assert await read_all(cluster) == [*stored, b"after"]
        assert await cluster.stop("n0") == 0
        assert node.store_path is not None
        assert verify_store(node.store_path).problems == []
    finally:
        await cluster.stop_all()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
async def test_a_broker_without_room_for_its_first_files_does_not_start(
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
