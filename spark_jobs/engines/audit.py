"""An audit spread over Spark: a task for each segment and for each index file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from spark_jobs.audit.folder import ReplicaFolder, open_folder
from spark_jobs.audit.work import Done, Work, do

SCHEMA = "number long, done binary"


class SparkDoer:
    """Does pieces of work in Spark's tasks; every worker must be able to read the folders."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, folders: Sequence[ReplicaFolder], works: Sequence[Work]) -> list[Done]:
        """Return the result of each piece of work, in their order."""
        roots = [str(folder.root) for folder in folders]
        marks = [folder.mark for folder in folders]

        def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            opened = [open_folder(Path(root)) for root in roots]
            for folder, mark in zip(opened, marks, strict=True):
                # All tasks look at one commit point, also when a broker goes on meanwhile.
                folder.mark = mark
            for batch in batches:
                numbers = batch.column("id").to_pylist()
                dones = [msgspec.msgpack.encode(do(opened, works[number])) for number in numbers]
                yield pa.RecordBatch.from_pydict(
                    {"number": pa.array(numbers, pa.int64()), "done": dones}
                )

        rows = self._spark.range(0, len(works), 1, max(1, len(works)))
        table = rows.mapInArrow(tasks, SCHEMA).toArrow()
        found = dict(
            zip(table.column("number").to_pylist(), table.column("done").to_pylist(), strict=True)
        )
        return [msgspec.msgpack.decode(found[number], type=Done) for number in range(len(works))]
