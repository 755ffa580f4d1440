"""Real processes: a cluster starts, survives its leader, stops clean, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from dledger.cli.cluster_command import health
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.commitlog.entry import KIND_NO_OP
from dledger.log_report import entries_of, verify_store
from dledger.spark_jobs.audit.folder import open_folder
from tests.harness.cluster_questions import create_topic, queue_ends
from tests.harness.eventually import WITHIN_S, look_until
from tests.harness.local_settings import SMALL_FILES
from tests.harness.one_term import in_one_term

pytestmark = pytest.mark.slow


async def test_a_cluster_survives_its_leader_and_stops_clean(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        namesrvs = [cluster.namesrv_address]
        assert await create_topic(namesrvs, "t", queues=3) == ["broker-a"]
        first = await cluster.wait_leader()
        await cluster.kill(first)
        second = await cluster.wait_leader(other_than=first)
        assert second != first
        assert [queue.queue_id for queue in await queue_ends(namesrvs, "t")] == [0, 1, 2]
        await cluster.start(first)
        await cluster.wait_caught_up(first)
        await in_one_term(cluster, lambda leader: healthy_under(cluster, leader))
    for node in cluster.nodes:
        assert node.process is not None
        assert node.process.returncode == 0, node.last_log_lines()
    ends, logs, entries = [], [], []
    for node in cluster.brokers.values():
        assert node.store_path is not None
        report = verify_store(node.store_path)
        assert report.problems == []
        ends.append(report.end_position)
        segment = min((node.store_path / "commitlog").glob("0*"))
        logs.append(segment.read_bytes())
        entries.append(list(entries_of(open_folder(node.store_path))))
    # Those that stopped first may lack no-ops of leaders that the other stops made, nothing else.
    common = min(ends)
    longest = entries[ends.index(max(ends))]
    lacking = [entry.header for entry in longest if entry.header.position >= common]
    assert [header for header in lacking if header.kind != KIND_NO_OP] == []
    assert len({log[:common] for log in logs}) == 1


async def healthy_under(cluster: LocalCluster, leader: str) -> None:
    """Wait until the cluster is healthy; it is so under that leader, and the command reports it."""
    assert await cluster.wait_healthy() == leader
    await look_until(
        lambda: health(namesrv=cluster.namesrv_address, output="json"), lambda status: status == 0
    )


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
