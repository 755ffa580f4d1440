"""A sum over the rows of a table: equal in any order and split, another one if a value changes.

A row has a key, a word mixed from what names it. The sum has the key of every row, and times its
key every value of it. Keys are odd, so a change of one value always changes the sum; a change of
several does but for one in 2³² at most. Sums of parts of a table are added. It finds damage; it is
no signature.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dledger.jepsen_like.history.columns import SCHEMAS

KEYS: Final = {"ops": ("op_id",), "obs": ("op_id", "off", "value")}
"""Columns that name a row; of other tables, which are small, all."""
BATCH_ROWS: Final = 1 << 17
"""Rows of a file that are decoded at once."""
STRIDE_ROWS: Final = 1 << 14
"""Rows that are summed at once: what is computed of a column stays in the nearest cache."""
WORDS_MAX: Final = 1 << 16
"""Words whose number is kept: topics, groups and errors come again in every batch."""
_MASK: Final = (1 << 64) - 1
_U64 = npt.NDArray[np.uint64]
_SHIFT: Final = np.uint64(32)
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_FACTOR: Final = np.uint64(0xD6E8FEB86659FD93)


class Rows:
    """Some rows of a table."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.num_rows: int = batch.num_rows

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers, without a copy; one that is one value has the stride 0."""
        column: npt.NDArray[Any] = self._batch.column(name).to_numpy()
        return column

    def words(self, name: str) -> tuple[list[str], npt.NDArray[Any]]:
        """Return the different words of a column, and for each row which one it has."""
        column = self._batch.column(name)
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        return column.dictionary.to_pylist(), column.indices.to_numpy()


def sum_rows(table: str, rows: Rows) -> int:
    """Return the sum of some rows, 64 bits; 0: there are none."""
    if not rows.num_rows:
        return 0
    columns = {field.name: _column(rows, field) for field in SCHEMAS[table]}
    named_by = KEYS.get(table, tuple(columns))
    total = 0
    for at in range(0, rows.num_rows, STRIDE_ROWS):
        some = {name: column[at : at + STRIDE_ROWS] for name, column in columns.items()}
        total += _sum_of(some, named_by)
    return total & _MASK


def _sum_of(columns: dict[str, npt.NDArray[Any]], named_by: tuple[str, ...]) -> int:
    keys = np.zeros(1, dtype=np.uint64)
    for name in named_by:
        keys = _mixed(keys ^ _folded(columns[name]))
    keys = np.broadcast_to(keys, len(columns[named_by[0]])) | np.uint64(1)
    every = int(np.add.reduce(keys))
    total = every
    for name, column in columns.items():
        folded = _folded(column)
        part = int(np.dot(keys, folded)) if len(folded) > 1 else int(folded[0]) * every
        total += _number(name) * part
    return total


def sum_of_table(table: str, rows: Any) -> int:
    """Return the sum of an Arrow table or batch of *table*."""
    batches = [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()
    return added(sum_rows(table, Rows(batch)) for batch in batches)


def sum_of_file(table: str, file: Any) -> int:
    """Return the sum of a Parquet file of *table*. Raises OSError: it cannot be read."""
    batches = pq.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS)
    return added(sum_of_table(table, batch) for batch in batches)


def added(sums: Iterable[int]) -> int:
    """Return the sum of a table from those of its parts."""
    return sum(sums) & _MASK


def as_text(total: int) -> str:
    """Return a sum as a summary has it: 16 hexadecimal digits, which no reader of JSON rounds."""
    return f"{total:016x}"


def _column(rows: Rows, field: Any) -> npt.NDArray[Any]:
    """Return a column as numbers."""
    if pa.types.is_integer(field.type):
        return rows.numbers(field.name)
    words, codes = rows.words(field.name)
    numbers = np.array([_number(word) for word in words], dtype=np.uint64)
    if codes.strides == (0,):
        return np.broadcast_to(numbers[codes[0]], len(codes))
    found: _U64 = numbers[codes]
    return found


@lru_cache(WORDS_MAX)
def _number(word: str) -> int:
    """Return an odd number for a word."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little") | 1


def _folded(column: npt.NDArray[Any]) -> _U64:
    """Return a word for each number, in which no change is of high bits alone."""
    if column.strides == (0,):
        column = column[:1].copy()
    words = column if column.dtype == np.uint64 else column.astype(np.int64).view(np.uint64)
    words = words * _SPREAD
    words ^= words >> _SHIFT
    return words


def _mixed(word: _U64) -> _U64:
    """Return words of which each bit depends on all bits of those given."""
    word = word * _SPREAD
    for _ in range(2):
        word ^= word >> _SHIFT
        word *= _FACTOR
    word ^= word >> _SHIFT
    return word
