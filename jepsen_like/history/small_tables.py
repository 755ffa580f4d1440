"""As much of an Arrow table as checks use, over numpy: for a history that is in memory.

What Arrow does once per table and column costs more than what is computed of a few hundred rows.
A number that the columns of Arrow cannot hold is none here either: see `SmallTable.of_operations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.history.operation import NOTHING, Operation, Outcome, ReplicaRead

I64 = npt.NDArray[np.int64]


class NotSmallError(Exception):
    """Rows hold something that is no number of 64 bits and no word: Arrow names what it is."""


class Words:
    """The different words of a column."""

    __slots__ = ("_words",)

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def to_pylist(self) -> list[str]:
        """Return the words; a row's number is a place in them."""
        return self._words


class Column:
    """Numbers, or words as their numbers."""

    __slots__ = ("_numbers", "_words")

    def __init__(self, numbers: I64, words: list[str] | None = None) -> None:
        self._numbers, self._words = numbers, words

    def to_numpy(self) -> I64:
        """Return the numbers."""
        return self._numbers

    def to_pylist(self) -> list[Any]:
        """Return numbers or words."""
        if self._words is None:
            numbers: list[int] = self._numbers.tolist()
            return numbers
        return [self._words[number] for number in self._numbers.tolist()]

    def combine_chunks(self) -> Column:
        """Return the column: it is in one piece."""
        return self

    @property
    def dictionary(self) -> Words:
        """The different words, those of rows that were left out among them."""
        return Words(self._words or [])

    @property
    def indices(self) -> Column:
        """The number of each row's word."""
        return Column(self._numbers)

    def rows(self, rows: I64) -> Column:
        """Return some rows."""
        return Column(self._numbers[rows], self._words)


class SmallTable:
    """Rows in memory as columns; a selection of rows copies a column when it is asked for."""

    __slots__ = ("_columns", "_operations", "_rows", "num_rows")

    def __init__(
        self,
        columns: Mapping[str, Column],
        operations: Sequence[Operation] = (),
        rows: I64 | None = None,
    ) -> None:
        self._columns, self._operations, self._rows = columns, operations, rows
        if rows is not None:
            self.num_rows = len(rows)
        else:
            self.num_rows = len(next(iter(columns.values())).to_numpy())

    @classmethod
    def of_operations(cls, operations: Sequence[Operation]) -> SmallTable:
        """Return operations as the columns of `ops`.

        Raises NotSmallError: a field of theirs fits no column of 64 bits.
        """
        columns: dict[str, Column] = {}
        fields = Operation.__struct_fields__
        given = list(zip(*map(msgspec.structs.astuple, operations), strict=True))
        for name, values in zip(fields, given or [()] * len(fields), strict=True):
            if name in _WORDS:
                columns[name] = words_of(values)
            elif name != "values":
                columns[name] = Column(numbers_of(values))
        return cls(columns, operations)

    @classmethod
    def of_looks(cls, operations: Iterable[Operation], reads: Iterable[ReplicaRead]) -> SmallTable:
        """Return what pulls and final reads found as the columns of `obs`.

        Raises NotSmallError: as `of_operations`.
        """
        looks = [
            (op.op_id, "", op.topic, op.queue, op.off, op.values)
            for op in operations
            if op.values and op.outcome == Outcome.OK
        ]
        looks += [(NOTHING, r.node, r.topic, r.queue, r.min_off, r.values) for r in reads]
        counts = np.array([len(look[5]) for look in looks], dtype=np.int64)
        first = counts.cumsum() - counts
        columns: dict[str, Column] = {}
        for name, at in (("op_id", 0), ("queue", 3), ("off", 4)):
            each = numbers_of([look[at] for look in looks])
            if name == "off":
                each = each - first
            columns[name] = Column(np.repeat(each, counts))
        total = int(counts.sum())
        columns["off"] = Column(columns["off"].to_numpy() + np.arange(total, dtype=np.int64))
        for name, at in (("replica", 1), ("topic", 2)):
            column = words_of([look[at] for look in looks])
            words = column.dictionary.to_pylist()
            columns[name] = Column(np.repeat(column.to_numpy(), counts), words)
        columns["value"] = Column(numbers_of([value for look in looks for value in look[5]]))
        return cls(columns)

    def column(self, name: str) -> Column:
        """Return a column."""
        column = self._columns[name]
        return column if self._rows is None else column.rows(self._rows)

    def take(self, rows: I64) -> SmallTable:
        """Return some rows by their numbers."""
        known = rows if self._rows is None else self._rows[rows]
        return SmallTable(self._columns, self._operations, known)

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return each row by the names of its columns."""
        columns = [self.column(name).to_pylist() for name in self._columns]
        return [dict(zip(self._columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def operations(self) -> list[Operation]:
        """Return the rows without what they found; not to be changed."""
        rows = range(len(self._operations)) if self._rows is None else self._rows.tolist()
        return [
            msgspec.structs.replace(op, values=()) if op.values else op
            for op in map(self._operations.__getitem__, rows)
        ]


class RowList:
    """The rows of a small table by the names of its columns."""

    __slots__ = ("_rows",)

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return them."""
        return self._rows


_WORDS: Final = frozenset({"topic", "group", "err"})


def numbers_of(values: Sequence[Any]) -> I64:
    """Return a column of numbers. Raises NotSmallError: one is none, or has more bits."""
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    try:
        found = np.array(values)
    except (OverflowError, ValueError, TypeError) as error:
        raise NotSmallError from error
    if found.dtype != np.int64 or found.ndim != 1:
        raise NotSmallError
    return found


def words_of(values: Sequence[Any]) -> Column:
    """Return a column of words. Raises NotSmallError: one is no text, or none that UTF-8 has."""
    place: dict[Any, int] = {}
    try:
        numbers = [place.setdefault(word, len(place)) for word in values]
        for word in place:
            if type(word) is not str:
                raise NotSmallError
            word.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise NotSmallError from error
    return Column(np.array(numbers, dtype=np.int64), list(place))
