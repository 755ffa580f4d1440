"""Spark gives a Python process ten seconds to start, which no setting changes: it runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

STARTS_MAX = 10


def done(
    query: StreamingQuery,
    wait: Callable[[StreamingQuery], object],
    start: Callable[[], StreamingQuery],
) -> StreamingQuery:
    """Return the query, or the one that took its place, for which *wait* returned."""
    for _ in range(STARTS_MAX):
        try:
            wait(query)
        except Exception as error:
            if "Python worker failed to connect back" not in str(error):
                raise
            query = start()
        else:
            return query
    raise AssertionError(f"Spark started no Python process in {STARTS_MAX} tries")
