"""A cluster of real processes with a console, for tests and pictures that drive a browser."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import trio
from hypercorn.config import Config

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.console.command import serve
from dledger.console.console import ConsoleSettings
from tests.harness.console_content import SETTINGS, filled

T = TypeVar("T")
JOIN_S = 60.0


@dataclass
class ConsoleCluster:
    """A cluster with something on every page, and the address of its console."""

    cluster: LocalCluster
    address: str
    token: trio.lowlevel.TrioToken

    def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run *work* in the cluster's loop and return what it returns."""
        return trio.from_thread.run(work, *args, trio_token=self.token)


@contextmanager
def console_cluster(folder: Path, runs: Path | None = None) -> Iterator[ConsoleCluster]:
    """Run three brokers, their clients, and a console that allows changes."""
    started: SimpleQueue[ConsoleCluster | BaseException] = SimpleQueue()
    stop = trio.Event()

    async def main() -> None:
        config = Config()
        config.bind = ["127.0.0.1:0"]
        config.errorlog = None
        config.graceful_timeout = 0.5
        settings = ConsoleSettings(allow_changes=True, runs=runs)
        async with (
            local_cluster(folder, settings=SETTINGS) as cluster,
            filled(cluster.namesrv_address),
            trio.open_nursery() as nursery,
        ):
            address = await nursery.start(
                partial(serve, cluster.namesrv_address, settings, config, ())
            )
            started.put(ConsoleCluster(cluster, address, trio.lowlevel.current_trio_token()))
            await stop.wait()
            nursery.cancel_scope.cancel()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            started.put(error)

    thread = threading.Thread(target=run, name="console cluster")
    thread.start()
    found = started.get()
    if isinstance(found, BaseException):
        thread.join()
        raise found
    try:
        yield found
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=found.token)
        thread.join(JOIN_S)
