"""Tasks that run beside what a test does."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def beside(*tasks: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Run *tasks* while the block runs, and end them with it."""
    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(task)
        yield
        nursery.cancel_scope.cancel()
