"""One Spark session for all tests: two cores, a small heap, loopback only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.java import need_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    need_java()
    from dledger.spark_jobs.engines.session import open_session

    folder: Path = tmp_path_factory.mktemp("spark")
    session = open_session(
        "local[2]",
        memory="1g",
        partitions=2,
        settings={
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder / "local"),
        },
    )
    yield session
    session.stop()
