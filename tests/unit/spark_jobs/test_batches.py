"""Columns with one value are not decoded, and are there all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dledger.jepsen_like.checkers.kernel.tables import Batch
from dledger.jepsen_like.history.columns import OPS, ops_table
from dledger.jepsen_like.history.operation import F, Operation, Outcome
from dledger.spark_jobs.engines.local import constants


def rows(topic: str, count: int) -> list[Operation]:
    return [
        Operation(at, at, at, 3, F.SEND, Outcome.OK, at, at + 1, topic, 0, at, value=at)
        for at in range(count)
    ]


def test_column_constant_only_if_so_in_each_row_group(tmp_path: Path) -> None:
    pq.write_table(ops_table("r", rows("a", 10)), tmp_path / "1.parquet", row_group_size=3)
    same = constants(ds.dataset(tmp_path, schema=OPS))
    assert (same["topic"], same["node"], same["queue"], same["err"]) == ("a", 3, 0, "")
    assert not {"op_id", "off", "call_ns", "value", "process"} & set(same)
    pq.write_table(ops_table("r", rows("b", 2)), tmp_path / "2.parquet")
    assert set(same) - set(constants(ds.dataset(tmp_path, schema=OPS))) == {"topic"}


def test_long_words_are_read_because_statistics_may_be_cut(tmp_path: Path) -> None:
    pq.write_table(ops_table("r", rows("t" * 200, 4)), tmp_path / "1.parquet")
    assert "topic" not in constants(ds.dataset(tmp_path, schema=OPS))


def test_a_batch_gives_back_the_rows_it_was_not_given(tmp_path: Path) -> None:
    table = ops_table("r", rows("a", 10))
    pq.write_table(table, tmp_path / "1.parquet")
    dataset = ds.dataset(tmp_path, schema=OPS)
    same = constants(dataset)
    (read,) = dataset.to_batches(columns=[name for name in OPS.names if name not in same])
    batch = Batch(read, same, OPS)
    taken = pa.Table.from_batches([batch.rows(np.array([1, 7]))])
    assert taken.to_pylist() == [table.to_pylist()[at] for at in (1, 7)]
    assert batch.numbers("node").tolist() == [3] * 10
    words, codes = batch.words("topic")
    assert [words[code] for code in codes] == ["a"] * 10
