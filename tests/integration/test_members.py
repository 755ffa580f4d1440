"""Members come and go under load: nothing fails, nothing is lost. Real processes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.cli.local_cluster import LocalCluster, Node, lay_out, local_cluster, status_of
from dledger.cli.ports import free_ports
from dledger.cli.raft_command import add, remove, replace, transfer_leader
from dledger.client.producer.config import ProducerConfig
from dledger.spark_jobs.audit.folder import follow, open_folder
from tests.harness.eventually import all_statuses, eventually
from tests.harness.load import loaded
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running
from tests.harness.present import present

pytestmark = pytest.mark.slow

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
