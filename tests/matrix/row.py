"""A row of the matrix: a service, and one round of using it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.matrix.ground import Ground

Round = Callable[[int], Awaitable[None]]
"""Plays one round, by its number; raises when what it finds is not what must be there."""

Row = Callable[[Ground], AbstractAsyncContextManager[Round]]
"""Sets a service up and gives the round."""

ROWS: dict[str, Row] = {}


def row(service: str) -> Callable[[Callable[[Ground], AsyncIterator[Round]]], Row]:
    """Enter the row of *service*."""

    def enter(work: Callable[[Ground], AsyncIterator[Round]]) -> Row:
        made = ROWS[service] = asynccontextmanager(work)
        return made

    return enter
