"""Histories of any length checked with Spark or without; ``register`` makes topics DataFrames."""


def register(spark: object) -> None:
    """Make ``format("dledger")`` known to a Spark session; doing it again is harmless.

    *spark*: a `pyspark.sql.SparkSession`, classic or Connect.
    """
    from dledger.spark_jobs.datasource.source import register as make_known

    make_known(spark)
