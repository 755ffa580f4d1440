"""What wants one leader from its begin to its end; on a busy machine any second may elect one."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from dledger.cli.local_cluster import LocalCluster

T = TypeVar("T")

REIGNS = 5
"""So often it is played."""


async def in_one_term(cluster: LocalCluster, play: Callable[[str], Awaitable[T]]) -> T:
    """Return what *play* returns which is given the leader; play again when another one came to.

    Raises:
        Exception: What *play* raised under one leader.
        AssertionError: No leader stayed for as long as it takes.
    """
    for _ in range(REIGNS):
        before = await _term(cluster)
        try:
            result = await play(before[0])
        except Exception:
            if await _term(cluster) == before:
                raise
        else:
            if await _term(cluster) == before:
                return result
    raise AssertionError(f"the leader changed {REIGNS} times")


async def _term(cluster: LocalCluster) -> tuple[str, object]:
    """Return the leader and the term."""
    while True:
        leader = await cluster.wait_leader()
        status = (await cluster.statuses()).get(leader)
        if status is not None and status.get("serving"):
            return leader, status["term"]
