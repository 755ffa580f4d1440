"""Real processes start, stop and are killed, groups of every size, and members come and go.

SIGTERM under load: what is in work is answered, nothing is lost, the next start replays nothing.
A cluster survives its leader, stops clean, and leaves no process.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from dledger.cli.local_cluster import LocalCluster, Node, lay_out, local_cluster, status_of
from dledger.cli.ports import free_ports
from dledger.cli.raft_command import add, remove, replace, transfer_leader
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.log_report import verify_store
from dledger.spark_jobs.audit.folder import follow, open_folder
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import (
    WITHIN_S,
    all_statuses,
    eventually,
    logged,
    wait_logged,
)
from tests.harness.groups import running_groups
from tests.harness.load import loaded, stored
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running
from tests.harness.present import present
from tests.harness.stored_messages import bodies_at

pytestmark = pytest.mark.slow

SENDERS = 32
ENOUGH = 500
"""Acknowledged sends before and after the signal, so that it comes under load."""


def abort_file(node: Node) -> Path:
    assert node.store_path is not None
    return node.store_path / "abort"


async def second_start(node: Node) -> dict[str, object]:
    return await wait_logged(node, "broker_started", 2)


async def test_sigterm_of_the_leader_fails_no_send(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        leader = await cluster.wait_leader()
        node = cluster.brokers[leader]
        async with loaded(cluster, senders=SENDERS, calm=ENOUGH) as load:
            assert abort_file(node).exists()
            assert await cluster.stop(leader) == 0
            assert not abort_file(node).exists()
            await load.more(ENOUGH)
        assert load.failed == []
        await load.is_stored(cluster)
        await cluster.start(leader)
        await cluster.wait_caught_up(leader, WITHIN_S)
        started = await second_start(node)
        assert (started["replayed"], started["unclean"]) == (0, False)
    for node in cluster.brokers.values():
        assert not abort_file(node).exists()
        assert node.store_path is not None
        assert verify_store(node.store_path).problems == []


async def test_sigterm_of_a_broker_alone_answers_every_send(tmp_path: Path) -> None:
    """No member takes over: a send is acknowledged or not stored. Unknown would be a loss."""
    async with local_cluster(tmp_path, brokers=1, settings=SMALL_FILES) as cluster:
        # Long enough for a disk that is slow: an answer that comes too late is an unknown outcome.
        config = ProducerConfig(send_timeout_s=8, retry_unknown=False)
        async with loaded(cluster, senders=SENDERS, calm=ENOUGH, config=config) as load:
            assert await cluster.stop("n0") == 0
        assert {error.outcome for error in load.failed} <= {"not_stored"}, load.failed
        await cluster.start("n0")
        await cluster.wait_healthy()
        assert (await second_start(cluster.brokers["n0"]))["replayed"] == 0
        # All that was acknowledged, and nothing that was refused.
        assert await stored(cluster) == load.acknowledged


async def test_kill_leaves_the_abort_file_for_the_next_start(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, brokers=1, settings=SMALL_FILES) as cluster:
        node = cluster.brokers["n0"]
        await cluster.kill("n0", signal.SIGKILL)
        assert abort_file(node).read_text().isdigit()
        await cluster.start("n0")
        await cluster.wait_healthy()
        assert (await second_start(node))["unclean"] is True


async def test_a_second_signal_does_not_wait_and_still_loses_nothing(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, brokers=1, settings=SMALL_FILES) as cluster:
        config = ProducerConfig(send_timeout_s=1.5)
        node = cluster.brokers["n0"]
        async with loaded(cluster, senders=SENDERS, calm=ENOUGH, config=config) as load:
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
            await cluster.kill("n0", signal.SIGTERM)
        await cluster.start("n0")
        await cluster.wait_healthy()
        await load.is_stored(cluster)


async def test_no_process_outlives_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from dledger.cli.local_cluster import lay_out\n"
        "async def main():\n"
        "    cluster = lay_out(Path(sys.argv[1]), brokers=1)\n"
        "    await cluster.start('namesrv')\n"
        "    print(cluster.namesrv.pid, flush=True)\n"
        "    await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout as out:
        child = int(await trio.to_thread.run_sync(out.readline))
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    with trio.fail_after(WITHIN_S):
        while Path(f"/proc/{child}").exists() and not _is_zombie(child):
            await trio.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


SENDS = 50


def warnings_of(cluster: LocalCluster, name: str) -> list[str]:
    log_path = cluster.brokers[name].log_path
    return [str(event["text"]) for event in logged(log_path, "config_warning")]


async def send_and_read(cluster: LocalCluster, first: int = 0) -> None:
    """Send some messages and read all that were ever sent, and nothing else."""
    wanted = [b"%d" % number for number in range(first + SENDS)]
    async with (
        connect([cluster.namesrv_address]) as client,
        Producer(client, "p", ProducerConfig(send_timeout_s=20)) as producer,
    ):
        for number in range(first, first + SENDS):
            await producer.send(Message("t", b"%d" % number))
    assert await bodies_at(cluster.namesrv_address, "t") == wanted


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_group_of_each_size_survives_a_minority(tmp_path: Path, size: int) -> None:
    async with local_cluster(tmp_path, brokers=size, settings=SMALL_FILES) as cluster:
        await create_topic([cluster.namesrv_address], "t", queues=1)
        await send_and_read(cluster)
        for name in cluster.brokers:
            assert [
                text.startswith("raft.peers: a group of 2 ") for text in warnings_of(cluster, name)
            ] == ([True] if size == 2 else [])
        minority = (size - 1) // 2
        for _ in range(minority):
            leader = await cluster.wait_leader()
            await cluster.kill(leader)
            await cluster.wait_leader(other_than=leader)
        await send_and_read(cluster, SENDS)
        for name, node in cluster.brokers.items():
            if not node.running:
                await cluster.start(name)
        await cluster.wait_healthy()
    for node in cluster.nodes:
        assert node.process is not None
        assert node.process.returncode == 0, node.last_log_lines()


async def test_a_member_alone_does_not_wait_for_a_leader(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    for _ in range(2):  # a new folder, then one that is known
        async with running_groups(tmp_path, 1) as groups:
            began = trio.current_time()
            await groups.leader()
            assert trio.current_time() - began < 0.25


UNHIDDEN = ProducerConfig(send_timeout_s=60, retry_unknown=False)
"""Without retries after an unknown outcome, so that none can hide."""


async def wait_leads(cluster: LocalCluster, name: str) -> None:
    """Wait until *name* leads: until then the one before it may still say that it does."""

    async def leads() -> bool:
        return await cluster.leader() == name

    await eventually(f"{name} leads", leads)


def logs_are_equal(cluster: LocalCluster, statuses: dict[str, dict[str, object]]) -> None:
    last = min(int(str(status["last_index"])) for status in statuses.values())
    chains = set()
    for name in statuses:
        store = present(cluster.brokers[name].store_path)
        folder = open_folder(store)
        entries = follow(folder, folder.anchor.first_index - 1, folder.anchor.position)
        chains |= {entry.header.chain for entry in entries if entry.header.index == last}
    assert len(chains) == 1, "the chain ties an entry to all before it"


async def wait_answers(node: Node) -> None:
    """Wait until a broker was started to its end, however busy the machine is."""

    async def answers() -> bool:
        return await status_of(node.address) is not None

    await eventually(f"{node.name} answers", answers)


def newcomer(cluster: LocalCluster, like: str, name: str, folder: str) -> tuple[Node, str]:
    """Return a broker configured like *like* under its own name, ports and folder, not started."""
    client_port, peer_port = free_ports(2)
    model = present(cluster.brokers[like].config_path)
    tables = tomllib.loads(model.read_text())
    others = [p for p in tables["raft"]["peers"].split(";") if not p.startswith(f"{name}-")]
    tables["raft"]["peers"] = ";".join([*others, f"{name}-127.0.0.1:{peer_port}"])
    tables["raft"]["self_id"] = name
    tables["server"]["listen_port"] = client_port
    store = cluster.folder / folder / "store"
    tables["store"]["path_root_dir"] = str(store)
    path = cluster.folder / f"{folder}.toml"
    lines = []
    for table, rows in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in rows.items()]
    path.write_text("\n".join(lines))
    node = Node(
        name,
        f"127.0.0.1:{client_port}",
        ("broker", "-c", str(path), "--log-form", "json"),
        cluster.folder / f"{folder}.log",
        store_path=store,
        config_path=path,
    )
    return node, f"127.0.0.1:{peer_port}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of which every test leaves all members running, and none changed."""
    with running(lay_out(tmp_path_factory.mktemp("whole"), settings=SMALL_FILES)) as cluster:
        yield cluster


async def test_a_rolling_restart_of_all_three_under_load_fails_no_send(whole: LocalCluster) -> None:
    async with loaded(whole, config=UNHIDDEN) as load:
        for name in list(whole.brokers):
            assert await whole.stop(name) == 0
            await whole.start(name)
            await whole.wait_caught_up(name)
            await load.more(1_000)
    assert load.failed == []
    await load.is_stored(whole)


async def test_members_change_by_command_under_load(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        async with loaded(cluster) as load:
            await load.more(18_000)
            leader = await cluster.wait_leader()
            first, second = (name for name in cluster.brokers if name != leader)
            # One dies for good; another machine takes its place.
            await cluster.kill(first)
            node, address = newcomer(cluster, second, first, f"{first}-again")
            cluster.brokers[first] = node
            await cluster.start(first)
            await wait_answers(node)
            await replace(first, address, wait=True, namesrv=namesrv)
            await load.more(1_000)
            # A fourth one joins, leads, and the third goes.
            node, address = newcomer(cluster, first, "n3", "n3")
            cluster.brokers["n3"] = node
            await cluster.start("n3")
            await wait_answers(node)
            await add("n3", address, wait=True, namesrv=namesrv)
            await transfer_leader("n3", namesrv=namesrv)
            await wait_leads(cluster, "n3")
            await remove(second, namesrv=namesrv)
            await cluster.stop(second)
            del cluster.brokers[second]
            await load.more(1_000)
            for name in cluster.brokers:
                await cluster.wait_caught_up(name)
        assert load.failed == []
        await load.is_stored(cluster)
        statuses = await all_statuses(cluster)
        assert sorted(statuses) == sorted([leader, first, "n3"])
        assert all(status["voter"] for status in statuses.values())
        logs_are_equal(cluster, statuses)
