"""The same cluster as `embedded_cluster` in processes of its own: here a kill is a SIGKILL."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from client.admin.admin import Admin
from client.connect import connect
from client.core.client_instance import ClientConfig, ClientInstance
from dledger.cli.local_cluster import LocalCluster, local_cluster


class ProcessCluster:
    """The cluster that `process_cluster` runs."""

    can_partition: Final = False

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    @property
    def name_server_addr(self) -> str:
        """``host:port`` for clients."""
        return self._cluster.namesrv_address

    @property
    def brokers(self) -> tuple[str, ...]:
        """Names of all brokers, running or not."""
        return tuple(self._cluster.brokers)

    async def leader(self, *, other_than: str | None = None) -> str:
        """Return the name of the leader as soon as there is one.

        Raises:
            CliError: None in time.
        """
        return await self._cluster.wait_leader(other_than=other_than)

    async def start(self, name: str) -> None:
        """Start a broker that does not run; returns when its process exists."""
        await self._cluster.start(name)

    async def kill(self, name: str) -> None:
        """SIGKILL a broker."""
        await self._cluster.kill(name)

    async def stop(self, name: str) -> None:
        """Stop a broker cleanly."""
        await self._cluster.stop(name)

    async def restart(self, name: str) -> None:
        """Stop a broker cleanly if it runs, and start it again."""
        await self._cluster.restart(name)

    async def partition(self, sides: Sequence[Iterable[str]]) -> None:
        """Refuse: what parts processes needs root and belongs to ``dledger-chaos``."""
        raise NotImplementedError("processes cannot be parted here: use embedded_cluster")

    def heal(self) -> None:
        """Do nothing: there is no partition."""

    def client(self, config: ClientConfig | None = None) -> ClientInstance:
        """Return a client of this cluster, not yet open."""
        return connect(self.name_server_addr, config)

    async def create_topic(self, topic: str, *, queue_nums: int = 4) -> None:
        """Create a topic; it can be written and read when this returns."""
        async with self.client() as client:
            await Admin(client).create_topic(topic, queue_nums=queue_nums)


@asynccontextmanager
async def process_cluster(
    *,
    brokers: int = 3,
    topics: Mapping[str, int] | None = None,
    settings: Mapping[str, object] | None = None,
    folder: Path | None = None,
) -> AsyncIterator[ProcessCluster]:
    """Run a cluster of processes while the block runs; they have ended when it is left.

    Args: as for `embedded_cluster`.

    Raises:
        CliError: It did not become healthy.
    """
    with tempfile.TemporaryDirectory(prefix="dledger-") as scratch:
        async with local_cluster(
            folder or Path(scratch), brokers=brokers, settings=settings
        ) as local:
            cluster = ProcessCluster(local)
            for topic, queue_nums in (topics or {}).items():
                await cluster.create_topic(topic, queue_nums=queue_nums)
            yield cluster
