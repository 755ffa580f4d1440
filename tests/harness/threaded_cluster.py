"""A local cluster for blocking tests: its event loop runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster

T = TypeVar("T")
JOIN_S = 60.0


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
    started: SimpleQueue[ThreadedCluster | BaseException] = SimpleQueue()
    stop = trio.Event()

    async def main() -> None:
        async with local_cluster(folder, settings=settings) as cluster:
            started.put(ThreadedCluster(cluster, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            started.put(error)

    thread = threading.Thread(target=run, name="cluster")
    thread.start()
    found = started.get()
    if isinstance(found, BaseException):
        thread.join()
        raise found
    try:
        yield found
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=found._token)
        thread.join(JOIN_S)
