"""What is true of real processes only after a while: waited for, with a generous bound.

A busy machine stands still for seconds. A question with a timeout is then not answered, a log line
not written yet, or written by half.
"""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import trio

from dledger.cli.local_cluster import LocalCluster, Node
from dledger.commitlog.errors import MQError

T = TypeVar("T")

WITHIN_S = 60.0
"""A busy machine may stand still for ten seconds, and an election or two come after that."""

LOOK_S = 0.05


async def eventually(
    what: str, holds: Callable[[], Awaitable[bool]], timeout_s: float = WITHIN_S
) -> None:
    """Wait until *holds*; fail with *what* when it does not come true in time."""
    with trio.move_on_after(timeout_s):
        while not await holds():
            await trio.sleep(LOOK_S)
        return
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


async def look_until(look: Callable[[], Awaitable[T]], good: Callable[[T], bool]) -> T:
    """Look again until what is found is *good*; return it. No answer is no find.

    Raises:
        AssertionError: Not within `WITHIN_S`; names what was found last.
    """
    found: object = "nothing"
    with trio.move_on_after(WITHIN_S):
        while True:
            try:
                found = seen = await look()
            except MQError as error:
                if not error.retriable:
                    raise
                found = error
            else:
                if good(seen):
                    return seen
            await trio.sleep(LOOK_S)
    raise AssertionError(f"not within {WITHIN_S:g} s; last there was {found!r}")


async def all_statuses(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    """Return the Raft status of every broker that runs, by name; each is asked until it answers."""
    found: dict[str, dict[str, Any]] = {}

    async def all_answer() -> bool:
        found.clear()
        found.update({name: dict(said) for name, said in (await cluster.statuses()).items()})
        return found.keys() == {name for name, node in cluster.brokers.items() if node.running}

    await eventually("every broker answers", all_answer)
    return found


def logged(log: Path, event: str, since: int = 0) -> list[dict[str, Any]]:
    """Return the lines of an event in a log, behind its byte *since*, oldest first."""
    with log.open("rb") as file:
        file.seek(since)
        # The last line may be on its way.
        *whole, _ = file.read().split(b"\n")
    lines = [json.loads(line) for line in whole if line.startswith(b"{")]
    return [line for line in lines if line["event"] == event]


async def wait_logged(node: Node, event: str, count: int = 1, since: int = 0) -> dict[str, Any]:
    """Return the line of an event that is the *count*-th in a broker's log, once it is there."""

    async def is_there() -> bool:
        return len(logged(node.log_path, event, since)) >= count

    await eventually(f"{node.name} logs {event}, {count} times", is_there)
    return logged(node.log_path, event, since)[count - 1]
