"""Tables of a history: words, batches, and columns as narrow as their values."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.jepsen_like.checkers.kernel.tables import Batch
from dledger.jepsen_like.checkers.verdict import BadInputError
from dledger.jepsen_like.history.columns import OPS, ops_table
from dledger.jepsen_like.history.operation import CLIENT_BITS, F, Operation, Outcome
from dledger.spark_jobs.engines.local import constants
from dledger.spark_jobs.engines.shares import narrowed, widened
from dledger.spark_jobs.tables import check_batch

FAULTS = """
import resource
import numpy as np
from dledger.spark_jobs.tables import keep_memory
if not keep_memory():
    raise SystemExit(3)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):  # 3 MB each: below what gets large pages
    arrays = [np.ones(400_000) for _ in range(20)]
    before = faults()
    del arrays
    arrays = [np.ones(400_000) for _ in range(20)]
print(faults() - before)
"""


def test_what_was_freed_costs_no_new_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], check=False, capture_output=True, text=True
    )
    if done.returncode == 3:
        pytest.skip("this C library cannot be made to keep memory")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_000, "64 MB are 16,000 pages"


@pytest.mark.parametrize(
    ("codes", "words"), [([0, 9], [b"a"]), ([0, -3], [b"a"]), ([0], [b"\xff"])]
)
def test_words_that_are_none_are_bad_input(codes: list[int], words: list[bytes]) -> None:
    text = pa.array(words).view(pa.string())
    column = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), text, safe=False)
    batch = pa.record_batch([column], names=["topic"])
    with pytest.raises(BadInputError, match="ops, column topic, cannot be read"):
        check_batch("ops", batch)


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


RNG = np.random.default_rng(5)
WORDS = RNG.integers(-(1 << 63), (1 << 63) - 1, 1_000)
CLIENTS = RNG.integers(0, 100, 1_000)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=200))
def test_any_array_comes_back(words: list[int]) -> None:
    array = np.array(words, dtype=np.int64)
    assert widened(narrowed(array)).tolist() == words


@pytest.mark.parametrize(
    ("array", "bytes_max"),
    [
        (np.zeros(0, np.int64), 32),
        (np.arange(7, 7 + 1_000), 64),
        (np.cumsum(RNG.integers(0, 200, 1_000)), 1_050),
        (np.cumsum(RNG.integers(-30_000, 30_000, 1_000)), 3_450),
        ((CLIENTS << CLIENT_BITS) + np.arange(1_000), 2_250),
        (WORDS, 8_050),
    ],
)
def test_an_array_takes_as_few_bytes_as_its_steps(array: np.ndarray, bytes_max: int) -> None:
    assert len(narrowed(array.astype(np.int64))) <= bytes_max
