"""Makes the data source known to a session."""

from __future__ import annotations

from typing import Any

from spark_jobs.datasource.source import DledgerSource


def register(spark: Any) -> None:
    """Make ``format("dledger")`` known to *spark*; doing it again is harmless."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(DledgerSource)
