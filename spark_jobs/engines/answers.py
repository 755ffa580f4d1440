"""What comes back from Spark's tasks, and what their errors mean for a verdict."""

from __future__ import annotations

import re
from typing import Any

from pyspark.sql import DataFrame

from jepsen_like.checkers.kernel.source import TooManyRowsError
from jepsen_like.checkers.verdict import BadInputError

_BAD = re.compile(r"BadInputError: (.+)")


def arrow_of(place: str, rows: DataFrame, rows_max: int = 0) -> Any:
    """Return rows as an Arrow table.

    Args:
        place: What is read, for a sentence.
        rows: What is computed.
        rows_max: More rows than this do not fit into the results of a job.

    Raises:
        BadInputError: A task met input that gives no verdict, or Spark cannot read the tables.
        TooManyRowsError: The result is larger than this process takes.
    """
    try:
        return rows.toArrow()
    except Exception as error:  # what Spark raises has many types, of which a JVM's are no API
        text = str(error)
        bad = _BAD.search(text)
        if bad:
            raise BadInputError(bad[1].strip()) from error
        if "spark.driver.maxResultSize" in text:
            raise TooManyRowsError(rows_max) from error
        first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason")
        raise BadInputError(
            f"Spark ended without an answer while it read {place} ({first[:200]}): see its log, or "
            "check with --engine local"
        ) from error
