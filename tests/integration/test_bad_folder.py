"""A data folder that is not this broker's: one clear line, and the folder stays as it was.

Real processes. The folder is one that a broker filled and left cleanly; after each refusal it
must be byte for byte the same, and its own broker must go on from it as after a clean stop.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, Node, lay_out
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import WITHIN_S, logged, look_until
from tests.harness.module_cluster import running
from tests.harness.stored_messages import bodies_at

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("bad-folder")]

SETTINGS: dict[str, object] = {"store.mapped_file_size_commit_log": 1 << 20}
BODIES = [b"%d" % number for number in range(50)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A NameServer that runs, and one broker that was filled and stopped."""
    cluster = lay_out(tmp_path_factory.mktemp("bad-folder"), brokers=1, settings=SETTINGS)

    async def fill() -> None:
        namesrvs = [cluster.namesrv_address]
        await create_topic(namesrvs, "t", queues=1)
        async with connect(namesrvs) as client, Producer(client, "p") as producer:
            for body in BODIES:
                await producer.send(Message("t", body))
        assert await cluster.stop("n0") == 0

    with running(cluster):
        trio.run(fill)
        yield cluster


def store_of(node: Node) -> Path:
    assert node.store_path is not None
    return node.store_path


def content(root: Path) -> dict[str, str]:
    """Return the hash of every file below *root*."""
    return {
        str(path.relative_to(root)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


async def refused_start(cluster: LocalCluster, *options: str) -> tuple[int | None, str]:
    """Start the broker with other settings; return its exit status and its last line."""
    node = cluster.brokers["n0"]
    other = Node("other", node.address, (*node.arguments, *options), cluster.folder / "other.log")
    other.log_path.unlink(missing_ok=True)
    cluster.brokers["other"] = other
    try:
        await cluster.start("other")
        assert other.process is not None
        with trio.fail_after(WITHIN_S):
            while other.process.poll() is None:
                await trio.sleep(0.01)
    finally:
        await cluster.stop("other")
        del cluster.brokers["other"]
    return other.process.returncode, other.last_log_lines(1)


async def goes_on_cleanly(cluster: LocalCluster) -> None:
    """Start the folder's own broker: nothing is replayed, everything is there; stop it."""
    log_path = cluster.brokers["n0"].log_path

    async def starts() -> list[dict[str, Any]]:
        return logged(log_path, "broker_started")

    before = len(await starts())
    await cluster.start("n0")
    await cluster.wait_healthy()
    *_, started = await look_until(starts, lambda found: len(found) > before)
    assert (started["replayed"], started["unclean"]) == (0, False)
    assert await bodies_at(cluster.namesrv_address, "t") == BODIES
    assert await cluster.stop("n0") == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "broker.cluster_name=Other"), ["DefaultCluster", "not to n0", "in Other"]),
        (("--set", "raft.group=other"), ["member n0 of group broker-a", "of other"]),
        (
            ("--set", "raft.self_id=n7", "--set", "raft.peers=n7-127.0.0.1:1"),
            ["belongs to member n0", "not to n7"],
        ),
        (
            ("--set", "store.mapped_file_size_commit_log=2097152"),
            ["segments of 1048576 bytes, not 2097152"],
        ),
        (
            ("--set", "store.mapped_file_size_consume_queue=200"),
            ["consumequeue/", "has 6000000 bytes in place of 200"],
        ),
    ],
    ids=["cluster", "group", "member", "segment size", "consume queue size"],
)
async def test_broker_refuses_the_folder_of_another_node(
    cluster: LocalCluster, options: tuple[str, ...], words: list[str]
) -> None:
    before = content(store_of(cluster.brokers["n0"]))
    status, line = await refused_start(cluster, *options)
    assert status == 1
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert content(store_of(cluster.brokers["n0"])) == before
    await goes_on_cleanly(cluster)


async def test_broker_refuses_a_folder_in_use(cluster: LocalCluster) -> None:
    await cluster.start("n0")
    await cluster.wait_healthy()
    status, line = await refused_start(cluster, "--listen-port", "0")
    assert status == 1
    assert line.startswith("error: another process holds ")
    async with connect([cluster.namesrv_address]) as client, Producer(client, "p") as producer:
        result = await producer.send(Message("still-there", b"x"))
    assert result.queue_offset == 0
    assert await cluster.stop("n0") == 0
    await goes_on_cleanly(cluster)


async def test_broker_refuses_files_of_another_program(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    foreign = tmp_path / "store" / "commitlog" / "00000000000000000000"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"somebody else's" * 100)
    status, line = await refused_start(cluster, "--store", str(tmp_path / "store"))
    assert status == 1
    assert "holds files of another program" in line
    found = content(tmp_path / "store")
    found.pop("lock", None)
    assert list(found) == ["commitlog/00000000000000000000"]
    assert foreign.read_bytes() == b"somebody else's" * 100
