"""Batches of Parquet rows whose columns with a single value are never decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

WORD_MAX: Final = 48
"""Characters of a word whose statistics are believed: some writers cut longer ones."""


def constants(dataset: Any) -> dict[str, int | str]:
    """Return columns that have one value in all files, as the statistics of the files say it."""
    same: dict[str, int | str] | None = None
    for fragment in dataset.get_fragments():
        told = fragment.metadata
        for group in range(told.num_row_groups):
            here = _of_group(told.row_group(group))
            if same is None:
                same = here
            else:
                same = {name: value for name, value in same.items() if here.get(name) == value}
    same = same or {}
    # An engine counts the rows of a batch: something is left to read.
    return {name: value for name, value in same.items() if name != "op_id"}


def _of_group(group: Any) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for at in range(group.num_columns):
        column = group.column(at)
        told = column.statistics
        if told is None or not told.has_min_max or told.null_count or told.min != told.max:
            continue
        value = told.min
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= WORD_MAX):
            found[column.path_in_schema] = value
    return found


class Batch:
    """Rows of a table, as numpy or as Arrow.

    Args:
        batch: The columns that were decoded.
        same: Those that have one value.
        schema: Of the table.
    """

    def __init__(self, batch: Any, same: Mapping[str, int | str], schema: Any) -> None:
        self._batch, self.same, self._schema = batch, same, schema
        self.num_rows: int = batch.num_rows

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """Return a column; without a copy where it was decoded, without memory where it was not."""
        if name in self.same:
            kind = self._schema.field(name).type.to_pandas_dtype()
            return np.broadcast_to(np.asarray(self.same[name], dtype=kind), self.num_rows)
        column: npt.NDArray[Any] = self._batch.column(name).to_numpy()
        return column

    def words(self, name: str) -> tuple[list[str], npt.NDArray[Any]]:
        """Return the different words of a column, and for each row which one it has."""
        if name in self.same:
            return [str(self.same[name])], np.broadcast_to(np.int32(0), self.num_rows)
        column = self._batch.column(name)
        return column.dictionary.to_pylist(), column.indices.to_numpy()

    def rows(self, rows: npt.NDArray[np.int64]) -> Any:
        """Return some rows with all columns of the schema."""
        taken = self._batch.take(pa.array(rows))
        columns = [
            self._repeated(field, len(rows))
            if field.name in self.same
            else taken.column(field.name)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _repeated(self, field: Any, count: int) -> Any:
        value = self.same[field.name]
        if pa.types.is_dictionary(field.type):
            codes = pa.array(np.zeros(count, dtype=np.int32))
            return pa.DictionaryArray.from_arrays(codes, pa.array([value]))
        return pa.array(np.full(count, value), field.type)
