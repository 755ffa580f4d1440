"""One address leads to the leader of real processes, which run a hook as it moves."""

from pathlib import Path

from dledger.cli.commands import open_admin
from dledger.cli.local_cluster import DEFAULT_GROUP, local_cluster, namesrv_leaders
from dledger.cli.ports import free_ports
from dledger.commitlog.errors import MQError
from tests.harness.eventually import eventually
from tests.harness.local_settings import SMALL_FILES

HOOK = """#!/bin/sh
echo "$PPID $1 $2" >> "$0.log"
"""


async def test_address_leads_to_the_leader_after_a_kill_and_a_transfer(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address, hook = f"127.0.0.9:{port}", tmp_path / "hook"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    settings = {
        **SMALL_FILES,
        "broker.leader_address": address,
        "broker.leader_address_listen": True,
        "broker.leader_hook": str(hook),
    }
    async with (
        local_cluster(tmp_path / "cluster", settings=settings) as cluster,
        open_admin([cluster.namesrv_address]) as admin,
    ):

        async def leads() -> bool:
            try:
                status = await admin.raft_status(address)
            except MQError:
                return False
            found: bool = status["role"] == "leader" and status["self"] == await cluster.leader()
            return found

        async def is_listed_once() -> bool:
            table = (await admin.cluster_info()).broker_addr_table
            return len(table[DEFAULT_GROUP].broker_addrs) == len(cluster.brokers)

        first = await cluster.wait_healthy()
        await eventually("the address leads to the first leader", leads)
        assert await namesrv_leaders(cluster.namesrv_address) == {DEFAULT_GROUP: address}
        await cluster.kill(first)
        await eventually("the address leads to the next leader", leads)
        await cluster.restart(first)
        await cluster.wait_healthy()
        await admin.change_members(DEFAULT_GROUP, "transfer", "", "")
        await eventually("the address leads to the third leader", leads)
        await eventually("each member is listed once", is_listed_once)
    calls: dict[str, list[str]] = {}
    for line in Path(f"{hook}.log").read_text().splitlines():
        pid, event, moved = line.split()
        calls.setdefault(pid, []).append(event)
        assert moved == address
    assert len(calls) == 4, "processes, one of them started after the kill"
    for events in calls.values():
        assert events == [("loss", "gain")[place % 2] for place in range(len(events))]
