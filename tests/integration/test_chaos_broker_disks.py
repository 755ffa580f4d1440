"""A real broker on disks that break: failed flushes, damage. Power cuts: test_chaos.py."""

import random
import subprocess
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import local_cluster
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.commitlog.mark import decode_slot
from dledger.commitlog.store_paths import StorePaths
from dledger.jepsen_like.chaos.file_damage import (
    Filling,
    Part,
    Place,
    files_at,
    flip_bits,
    tear_tail,
    wipe,
    written_in,
)
from dledger.jepsen_like.chaos.strace_inject import fail_one_flush
from dledger.jepsen_like.nemesis.ground import FaultError
from dledger.log_report import verify_store
from tests.harness.broken_disks import is_traced, needs_strace
from tests.harness.cluster_questions import create_topic
from tests.harness.present import present
from tests.harness.stored_messages import bodies_at

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 1 << 20,
    "store.mapped_file_size_consume_queue": 20_000,
}


WITHIN_S = 60
"""For what a busy machine takes long to do."""


@pytest.mark.slow
@needs_strace
async def test_a_broker_whose_flush_fails_stops_without_acknowledging(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, brokers=1, settings=SETTINGS) as cluster:
        await create_topic([cluster.namesrv_address], "t", queues=1)
        node = cluster.brokers["n0"]
        pid = present(node.pid)
        failed = -1

        async def fail() -> None:
            nonlocal failed
            failed = await trio.to_thread.run_sync(lambda: fail_one_flush(pid, within_s=60))

        acknowledged: list[bytes] = []

        async def send(producer: Producer, body: bytes) -> None:
            try:
                await producer.send(Message("t", body))
            except MQError:
                return
            acknowledged.append(body)

        async with (
            connect([cluster.namesrv_address]) as client,
            Producer(client, "p") as producer,
            trio.open_nursery() as nursery,
        ):
            await send(producer, b"before")
            nursery.start_soon(fail)
            with trio.fail_after(WITHIN_S):
                while not is_traced(pid):
                    await trio.sleep(0.01)
                nursery.start_soon(send, producer, b"on a flush that fails")
                while node.running:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert failed >= 1
        assert acknowledged == [b"before"]
        assert node.process is not None
        assert (node.process.returncode or 0) > 0, "it was not killed, it stopped"
        assert "flush" in node.last_log_lines()
        await cluster.start("n0")
        await cluster.wait_healthy()
        assert (await bodies_at(cluster.namesrv_address, "t"))[0] == b"before"


@pytest.fixture(scope="module")
def stopped_broker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a broker that has run and stopped; 40 messages are in its log."""
    folder = tmp_path_factory.mktemp("stopped")

    async def make() -> Path:
        async with local_cluster(folder, brokers=1, settings=SETTINGS) as cluster:
            await create_topic([cluster.namesrv_address], "t", queues=1)
            async with (
                connect([cluster.namesrv_address]) as client,
                Producer(client, "p") as producer,
            ):
                for number in range(40):
                    await producer.send(Message("t", b"%d" % number, keys=f"k{number}"))
            store = present(cluster.brokers["n0"].store_path)
            with pytest.raises(FaultError, match="stop its broker first"):
                wipe(store)
        return store

    return trio.run(make)


@pytest.fixture
def paths(stopped_broker: Path, tmp_path: Path) -> StorePaths:
    """The files of a stopped broker, for this test to damage."""
    subprocess.run(["cp", "-a", "--sparse=always", stopped_broker, tmp_path / "store"], check=True)
    return StorePaths(str(tmp_path / "store"))


@pytest.mark.slow
def test_damage_changes_exactly_the_named_bytes(paths: StorePaths) -> None:
    root = Path(paths.root)
    rng = random.Random(3)
    assert verify_store(root).problems == []
    for place in Place:
        for part in Part:
            before = {path: path.read_bytes() for path in files_at(paths, place)}
            assert before, place
            (damage,) = flip_bits(root, rng, place, part)
            path = Path(damage.path)
            old, new = before.pop(path), path.read_bytes()
            assert [at for at in range(len(old)) if old[at] != new[at]] == [damage.offset]
            assert (old[damage.offset] ^ new[damage.offset]).bit_count() == 1
            assert damage.path in str(damage)
            assert str(damage.offset) in str(damage)
            assert all(other.read_bytes() == data for other, data in before.items())
            path.write_bytes(old)
    assert verify_store(root).problems == []


@pytest.mark.slow
@pytest.mark.hunt
def test_chaos_sees_a_flipped_bit_a_torn_tail_and_a_wipe(paths: StorePaths) -> None:
    root = Path(paths.root)
    (segment,) = [path for path in files_at(paths, Place.SEGMENT) if written_in(path)]
    sound = segment.read_bytes()
    written = len(sound.rstrip(b"\0"))
    for part in Part:
        flip_bits(root, random.Random(4), Place.SEGMENT, part)
        assert verify_store(root).problems != [], part
        segment.write_bytes(sound)
    for filling in Filling:
        damage = present(tear_tail(root, random.Random(4), 100, filling))
        assert (damage.path, damage.offset) == (str(segment), written - 100)
        torn = segment.read_bytes()
        assert torn[: written - 100] == sound[: written - 100]
        assert torn[written - 100 : written] == damage.after != damage.before
        assert filling is Filling.GARBAGE or not any(damage.after)
        assert verify_store(root).problems != []
        segment.write_bytes(sound)
    vote = Path(paths.vote)
    slots = [decode_slot(vote.read_bytes()[at : at + 512]) for at in (0, 4096)]
    first, second = slots
    assert first is not None
    assert second is not None
    assert first[1] == second[1], "both hold the newest"
    flip_bits(root, random.Random(4), Place.VOTE, Part.TAIL)
    damaged = [decode_slot(vote.read_bytes()[at : at + 512]) for at in (0, 4096)]
    assert damaged == [first, None]
    flip_bits(root, random.Random(4), Place.VOTE, Part.MIDDLE, bits=5)
    hit = [decode_slot(vote.read_bytes()[at : at + 512]) for at in (0, 4096)]
    assert hit in ([first, None], [None, None])
    assert wipe(root) > 5
    assert root.is_dir()
    assert list(root.iterdir()) == []
