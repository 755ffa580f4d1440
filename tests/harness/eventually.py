"""Waiting, within a bound, for what comes true in other processes; and what they have logged."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import trio

from commitlog.errors import MQError
from dledger.cli.local_cluster import LocalCluster
from dledger.cli.probe import NoAnswerError

T = TypeVar("T")

WITHIN_S = 60.0
"""A busy machine may stand still for ten seconds, and an election or two come after that."""

LOOK_S = 0.05

REIGNS = 5
"""So often is played what wants one leader from its begin to its end."""


async def eventually(look: Callable[[], Awaitable[T]], good: Callable[[T], bool]) -> T:
    """Look again until what is found is *good*; return it. No answer is no find.

    Raises:
        AssertionError: Not within `WITHIN_S`; names what was found last.
    """
    found: object = "nothing"
    with trio.move_on_after(WITHIN_S):
        while True:
            try:
                found = seen = await look()
            except (NoAnswerError, MQError) as error:
                if not (isinstance(error, NoAnswerError) or error.retriable):
                    raise
                found = error
            else:
                if good(seen):
                    return seen
            await trio.sleep(LOOK_S)
    raise AssertionError(f"not within {WITHIN_S:g} s; last there was {found!r}")


async def in_one_reign(cluster: LocalCluster, play: Callable[[str], Awaitable[T]]) -> T:
    """Return what *play* returns that is told who leads; play again when another one came to.

    Raises:
        Exception: What *play* raised under one leader.
        AssertionError: No leader stayed for as long as it takes.
    """
    for _ in range(REIGNS):
        before = await _reign(cluster)
        try:
            result = await play(before[0])
        except Exception:
            if await _reign(cluster) == before:
                raise
        else:
            if await _reign(cluster) == before:
                return result
    raise AssertionError(f"the leader changed {REIGNS} times")


async def _reign(cluster: LocalCluster) -> tuple[str, object]:
    """Return who leads, and the term."""
    while True:
        leader = await cluster.wait_leader()
        status = (await cluster.statuses()).get(leader)
        if status is not None and status.get("serving"):
            return leader, status["term"]


def logged(log: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of that name; a line that is being written does not count."""
    whole, _, _ = log.read_text(errors="replace").rpartition("\n")
    lines = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == event]
