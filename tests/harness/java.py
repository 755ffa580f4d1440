"""What tests need that start Spark."""

import pytest


def need_java() -> None:
    """Skip the test, with the reason, where Spark is not installed or finds no Java."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: make setup")
    from dledger.spark_jobs.engines.session import why_no_java

    why = why_no_java()
    if why is not None:
        pytest.skip(why)  # Spark runs on Java, which a machine may lack
