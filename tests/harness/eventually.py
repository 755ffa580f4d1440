"""What is true of real processes only after a while: waited for, with a generous bound.

A busy machine stands still for seconds. A question with a timeout is then not answered, a log line
not written yet, or written by half.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from dledger.cli.local_cluster import LocalCluster, Node

WAIT_S = 60.0
LOOK_S = 0.05


async def eventually(
    what: str, holds: Callable[[], Awaitable[bool]], timeout_s: float = WAIT_S
) -> None:
    """Wait until *holds*; fail with *what* when it does not come true in time."""
    with trio.move_on_after(timeout_s):
        while not await holds():
            await trio.sleep(LOOK_S)
        return
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


async def all_statuses(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    """Return the Raft status of every broker that runs, by name; each is asked until it answers."""
    found: dict[str, dict[str, Any]] = {}

    async def all_answer() -> bool:
        found.clear()
        found.update({name: dict(said) for name, said in (await cluster.statuses()).items()})
        return found.keys() == {name for name, node in cluster.brokers.items() if node.running}

    await eventually("every broker answers", all_answer)
    return found


def logged(node: Node, event: str, since: int = 0) -> list[dict[str, Any]]:
    """Return the lines of an event in a broker's log, behind its byte *since*, oldest first."""
    with node.log_path.open("rb") as log:
        log.seek(since)
        # The last line may be on its way.
        *whole, _ = log.read().split(b"\n")
    lines = [json.loads(line) for line in whole if line.startswith(b"{")]
    return [line for line in lines if line["event"] == event]


async def wait_logged(node: Node, event: str, count: int = 1, since: int = 0) -> dict[str, Any]:
    """Return the line of an event that is the *count*-th in a broker's log, once it is there."""

    async def is_there() -> bool:
        return len(logged(node, event, since)) >= count

    await eventually(f"{node.name} logs {event}, {count} times", is_there)
    return logged(node, event, since)[count - 1]
