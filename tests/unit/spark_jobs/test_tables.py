"""Memory that was freed is used again; words of a table are looked at."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from dledger.jepsen_like.checkers.verdict import BadInputError
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
