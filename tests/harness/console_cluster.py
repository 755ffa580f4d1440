"""A cluster of real processes with a console, for tests that drive a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio
from hypercorn.config import Config

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.blocking import LoopThread
from dledger.console.command import serve
from dledger.console.console import ConsoleSettings
from tests.harness.console_content import SETTINGS, filled

JOIN_S = 60.0


class ConsoleCluster(NamedTuple):
    """A cluster with something on every page, the address of its console, and what calls them."""

    cluster: LocalCluster
    address: str
    call: Callable[..., Any]


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
    with LoopThread(console_beside_cluster(folder), "cluster", JOIN_S) as loop:
        yield ConsoleCluster(*loop.opened, loop.call)
