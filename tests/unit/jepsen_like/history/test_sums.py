"""The sum of a table: of its rows in any order and split, and no other rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dledger.jepsen_like.checkers.kernel.tables import Batch
from dledger.jepsen_like.history.columns import OPS, SCHEMAS, table_of
from dledger.jepsen_like.history.sums import added, as_text, sum_of_file, sum_of_table, sum_rows

ROWS = 40


def made(table: str, seed: int = 1) -> Any:
    """A table whose every column has different values."""
    rng = random.Random(seed)
    columns: dict[str, Any] = {}
    for field in SCHEMAS[table]:
        if pa.types.is_integer(field.type):
            top = (1 << (field.type.bit_width - 1)) - 1
            columns[field.name] = [rng.randint(-top, top) for _ in range(ROWS)]
        else:
            columns[field.name] = [f"{field.name}-{rng.randrange(9)}" for _ in range(ROWS)]
    return table_of(SCHEMAS[table], columns)


def with_value(table: Any, name: str, row: int, value: Any) -> Any:
    column = table.column(name).to_pylist()
    column[row] = value
    columns = {other: table.column(other).to_pylist() for other in table.column_names}
    return table_of(table.schema, {**columns, name: column})


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_sum_is_of_rows_in_any_order_and_split(name: str, tmp_path: Path) -> None:
    table = made(name)
    whole = sum_of_table(name, table)
    order = list(range(ROWS))
    random.Random(3).shuffle(order)
    assert sum_of_table(name, table.take(pa.array(order))) == whole
    parts = [table.slice(0, 7), table.slice(7, 0), table.slice(7, 20), table.slice(27)]
    assert added(sum_of_table(name, part) for part in parts) == whole
    pq.write_table(table, tmp_path / "again.parquet", row_group_size=11, compression="gzip")
    assert sum_of_file(name, tmp_path / "again.parquet") == whole
    assert sum_of_table(name, table.slice(0, 0)) == 0


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_sum_is_another_if_any_one_value_changes(name: str) -> None:
    table = made(name)
    seen = {sum_of_table(name, table)}
    changes = 0
    for field in table.schema:
        for row in (0, ROWS // 2, ROWS - 1):
            value = table.column(field.name)[row].as_py()
            bits = range(field.type.bit_width - 1) if pa.types.is_integer(field.type) else range(1)
            for bit in bits:
                other = value ^ (1 << bit) if isinstance(value, int) else f"{value}x"
                seen.add(sum_of_table(name, with_value(table, field.name, row, other)))
                changes += 1
    assert len(seen) == changes + 1


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_sum_is_another_if_rows_swap_values(name: str) -> None:
    table = made(name)
    whole = sum_of_table(name, table)
    for field in table.schema:
        column = table.column(field.name).to_pylist()
        rows = [row for row in range(ROWS) if column[row] != column[0]]
        swapped = with_value(table, field.name, 0, column[rows[0]])
        swapped = with_value(swapped, field.name, rows[0], column[0])
        assert sum_of_table(name, swapped) != whole, field.name


def test_a_sum_is_another_if_a_row_takes_the_place_of_one() -> None:
    table = made("ops")
    whole = sum_of_table("ops", table)
    assert sum_of_table("ops", table.slice(1)) != whole
    twice = pa.concat_tables([table.slice(1), table.slice(1, 1)])
    assert sum_of_table("ops", twice) != whole


def test_columns_that_were_not_decoded_count_as_their_value() -> None:
    same: dict[str, int | str] = {"f": 3, "topic": "t", "off": -1, "run_id": "r"}
    columns: dict[str, Any] = {name: made("ops").column(name).to_pylist() for name in OPS.names}
    columns |= {name: [value] * ROWS for name, value in same.items()}
    table = table_of(OPS, columns)
    (read,) = table.drop_columns(list(same)).to_batches()
    assert sum_rows("ops", Batch(read, same, OPS)) == sum_of_table("ops", table)


def test_a_sum_is_another_if_signs_of_two_rows_change() -> None:
    table = made("ops")
    whole = sum_of_table("ops", table)
    for name in ("off", "value", "call_ns", "cnt"):
        changed = table
        for row in (3, 8):
            value = table.column(name)[row].as_py()
            top = table.schema.field(name).type.bit_width - 1
            other = value - (1 << top) if value >= 0 else value + (1 << top)
            changed = with_value(changed, name, row, other)
        assert sum_of_table("ops", changed) != whole, name


def test_the_sum_of_a_written_table_stays_what_it_is() -> None:
    """Tables of earlier versions are compared with it."""
    assert as_text(sum_of_table("obs", made("obs"))) == "7ad60066c2dbd3a9"
    assert as_text(sum_of_table("events", made("events"))) == "927a7ed45175d286"
    assert as_text(5) == "0000000000000005"
