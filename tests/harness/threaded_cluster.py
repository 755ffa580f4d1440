"""A local cluster for blocking tests: its event loop runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from tests.harness.loop_thread import opened_in_a_thread

T = TypeVar("T")


class ThreadedCluster:
    """A running cluster; `call` runs a coroutine function beside it."""

    def __init__(self, cluster: LocalCluster, token: trio.lowlevel.TrioToken) -> None:
        self.cluster = cluster
        self._token = token

    @property
    def namesrv(self) -> str:
        """Address of the NameServer."""
        return self.cluster.namesrv_address

    @property
    def stores(self) -> list[Path]:
        """Data folders of the brokers."""
        return [node.store_path for node in self.cluster.brokers.values() if node.store_path]

    def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run *work* in the cluster's loop and return what it returns."""
        return trio.from_thread.run(work, *args, trio_token=self._token)

    def stop(self) -> None:
        """Stop all brokers cleanly; the folders stay."""
        self.call(self.cluster.stop_all)


@contextmanager
def threaded_cluster(folder: Path, settings: Mapping[str, object]) -> Iterator[ThreadedCluster]:
    """Run three brokers while the block runs."""
    with opened_in_a_thread(local_cluster(folder, settings=settings)) as (cluster, token):
        yield ThreadedCluster(cluster, token)
