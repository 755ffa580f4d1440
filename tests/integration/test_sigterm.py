"""SIGTERM under load: what is in work is answered, nothing is lost, the next start replays nothing.

Real processes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dledger.cli.local_cluster import Node, local_cluster
from dledger.client.producer.config import ProducerConfig
from dledger.log_report import verify_store
from tests.harness.eventually import WITHIN_S, wait_logged
from tests.harness.load import loaded, stored
from tests.harness.local_settings import SMALL_FILES

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
