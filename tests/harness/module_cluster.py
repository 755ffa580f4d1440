"""A cluster of real processes that the tests of a module share.

A test has topics of its own, and leaves every process that it ended running again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from dledger.cli.local_cluster import LocalCluster


@contextmanager
def running(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Run a cluster that is laid out, healthy at the begin of the block, until its end."""

    async def start() -> None:
        for node in cluster.nodes:
            await cluster.start(node.name)
        await cluster.wait_healthy()

    try:
        trio.run(start)
        yield cluster
    finally:
        trio.run(cluster.stop_all)


async def heal(cluster: LocalCluster) -> None:
    """Start what does not run, and wait until the cluster is as healthy as at first."""
    for node in cluster.nodes:
        if not node.running:
            await cluster.start(node.name)
    await cluster.wait_healthy()
