"""A cluster of real processes with a console, for tests that drive a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio
from hypercorn.config import Config

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.console.command import serve
from dledger.console.console import ConsoleSettings
from tests.harness.console_content import SETTINGS, filled
from tests.harness.loop_thread import opened_in_a_thread

T = TypeVar("T")


@dataclass
class ConsoleCluster:
    """A cluster with something on every page, and the address of its console."""

    cluster: LocalCluster
    address: str
    token: trio.lowlevel.TrioToken

    def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run *work* in the cluster's loop and return what it returns."""
        return trio.from_thread.run(work, *args, trio_token=self.token)


@asynccontextmanager
async def console_beside_cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, str]]:
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    config.graceful_timeout = 0.5
    settings = ConsoleSettings(allow_changes=True)
    async with (
        local_cluster(folder, settings=SETTINGS) as cluster,
        filled(cluster.namesrv_address),
        trio.open_nursery() as nursery,
    ):
        address = await nursery.start(partial(serve, cluster.namesrv_address, settings, config, ()))
        yield cluster, address
        nursery.cancel_scope.cancel()


@contextmanager
def console_cluster(folder: Path) -> Iterator[ConsoleCluster]:
    """Run three brokers, their clients, and a console that allows changes."""
    with opened_in_a_thread(console_beside_cluster(folder)) as ((cluster, address), token):
        yield ConsoleCluster(cluster, address, token)
