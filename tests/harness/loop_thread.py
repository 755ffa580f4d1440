"""An event loop in a thread of its own, for blocking tests: a cluster is open in it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from queue import SimpleQueue
from typing import TypeVar

import trio

T = TypeVar("T")
JOIN_S = 60.0


@contextmanager
def opened_in_a_thread(
    context: AbstractAsyncContextManager[T],
) -> Iterator[tuple[T, trio.lowlevel.TrioToken]]:
    """Hold *context* open in another thread's loop while the block runs.

    Yields:
        What it gave, and the token of the loop.
    """
    started: SimpleQueue[tuple[T, trio.lowlevel.TrioToken] | BaseException] = SimpleQueue()
    stop = trio.Event()

    async def main() -> None:
        async with context as opened:
            started.put((opened, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            started.put(error)

    thread = threading.Thread(target=run, name="event loop")
    thread.start()
    found = started.get()
    if isinstance(found, BaseException):
        thread.join()
        raise found
    try:
        yield found
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=found[1])
        thread.join(JOIN_S)
