"""Tables that no verdict may come from: one change each, and the file that a sentence names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dledger.jepsen_like.history.operation import F

Change = Callable[[Path], str]
"""Changes a folder of tables, and returns the name of the file that is bad now."""
BAD: Final[dict[str, Change]] = {}


def bad(name: str) -> Callable[[Change], Change]:
    def keep(change: Change) -> Change:
        BAD[name] = change
        return change

    return keep


def rewrite(file: Path, change: Callable[[Any], Any]) -> str:
    """Write the table in *file* again, changed."""
    pq.write_table(change(pq.read_table(file)), file, write_page_checksum=True)
    return file.name


def with_column(table: Any, name: str, column: Any) -> Any:
    return table.set_column(table.schema.get_field_index(name), name, column)


def changed(table: Any, name: str, rows: slice, number: int) -> Any:
    column = table.column(name).to_numpy().copy()
    column[rows] = number
    return with_column(table, name, pa.array(column, table.schema.field(name).type))


@bad("operations are lost")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda table: table.slice(500))


@bad("half of what was seen is lost")
def _(folder: Path) -> str:
    return rewrite(folder / "obs.parquet", lambda table: table.slice(table.num_rows // 2))


@bad("a final read is lost")
def _(folder: Path) -> str:
    return rewrite(folder / "nodes.parquet", lambda table: table.slice(1))


@bad("the summary counts more")
def _(folder: Path) -> str:
    path = folder / "ingest.json"
    counts = json.loads(path.read_bytes())
    path.write_text(json.dumps({**counts, "ops": counts["ops"] + 500}))
    return "ops.parquet"


@bad("the summary is missing")
def _(folder: Path) -> str:
    (folder / "ingest.json").unlink()
    return "ingest.json"


@bad("the summary is damaged")
def _(folder: Path) -> str:
    (folder / "ingest.json").write_bytes(b'{"ops": ')
    return "ingest.json"


@bad("operations of a newer kind")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "f", slice(10, 50), 99))


@bad("an outcome of a newer kind")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "outcome", slice(7, 8), 3))


@bad("a decision of a newer kind")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "decision", slice(3, 5), 9))


@bad("counts below nothing")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "cnt", slice(0, 4), -4))


@bad("offsets that nothing can stand behind")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "off", slice(3, 9), (1 << 63) - 1))


@bad("counts of more than was ever sent")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "cnt", slice(3, 9), (1 << 31) - 1))


@bad("queues that are none")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "queue", slice(0, 2), -9))


@bad("a report of a newer kind")
def _(folder: Path) -> str:
    return rewrite(folder / "nodes.parquet", lambda t: changed(t, "kind", slice(1), 9))


@bad("returns before calls")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "ret_ns", slice(0, 9), -5))


@bad("an operation of another kind")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "f", slice(0, 1), F.MIN_OFFSET))


@bad("a row is there twice and another is lost")
def _(folder: Path) -> str:
    def twice(table: Any) -> Any:
        return pa.concat_tables([table.slice(0, table.num_rows - 1), table.slice(0, 1)])

    return rewrite(folder / "ops.parquet", twice)


@bad("found by no pull")
def _(folder: Path) -> str:
    return rewrite(folder / "obs.parquet", lambda t: changed(t, "op_id", slice(0, 5), 999_999_999))


@bad("calls before the run")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "call_ns", slice(0, 2), -(1 << 62)))


@bad("operations with one number")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda t: changed(t, "op_id", slice(0, 6), 1))


@bad("no operations, and none counted")
def _(folder: Path) -> str:
    path = folder / "ingest.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "ops": 0}))
    return rewrite(folder / "ops.parquet", lambda table: table.slice(0, 0))


@bad("an offset before the first")
def _(folder: Path) -> str:
    return rewrite(folder / "obs.parquet", lambda t: changed(t, "off", slice(0, 3), -7))


@bad("a replica has another name")
def _(folder: Path) -> str:
    def renamed(table: Any) -> Any:
        words = table.column("node").to_pylist()
        return with_column(table, "node", pa.array(["other", *words[1:]]).dictionary_encode())

    return rewrite(folder / "nodes.parquet", renamed)


@bad("nulls")
def _(folder: Path) -> str:
    def holes(table: Any) -> Any:
        column = table.column("off").to_pylist()
        column[::7] = [None] * len(column[::7])
        names = [
            pa.field(f.name, f.type, nullable=f.name == "off" or f.nullable) for f in table.schema
        ]
        at = table.schema.get_field_index("off")
        columns = [*table.columns[:at], pa.array(column, pa.int64()), *table.columns[at + 1 :]]
        return pa.Table.from_arrays(columns, schema=pa.schema(names))

    return rewrite(folder / "ops.parquet", holes)


@bad("kinds as words")
def _(folder: Path) -> str:
    def words(table: Any) -> Any:
        return with_column(table, "f", table.column("f").cast(pa.string()))

    return rewrite(folder / "ops.parquet", words)


@bad("times as fractions")
def _(folder: Path) -> str:
    def fractions(table: Any) -> Any:
        return with_column(table, "call_ns", pa.array(table.column("call_ns").to_numpy() / 1.0))

    return rewrite(folder / "ops.parquet", fractions)


@bad("a column is missing")
def _(folder: Path) -> str:
    return rewrite(folder / "ops.parquet", lambda table: table.drop_columns(["max_off"]))


@bad("a column has another name")
def _(folder: Path) -> str:
    def renamed(table: Any) -> Any:
        return table.rename_columns([{"value": "worth"}.get(n, n) for n in table.column_names])

    return rewrite(folder / "obs.parquet", renamed)


def _missing(name: str) -> Change:
    def change(folder: Path) -> str:
        (folder / name).unlink()
        return name

    return change


for _name in ("ops", "obs", "nodes", "events"):
    BAD[f"{_name} is missing"] = _missing(f"{_name}.parquet")


@bad("a table is cut short")
def _(folder: Path) -> str:
    path = folder / "ops.parquet"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path.name


@bad("a page is damaged")
def _(folder: Path) -> str:
    """Flip bits in every column, so that each scan meets one."""
    path = folder / "ops.parquet"
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    group = pq.read_metadata(path).row_group(0)
    for at in range(group.num_columns):
        column = group.column(at)
        data[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    path.write_bytes(data.tobytes())
    return path.name


@bad("a footer is damaged")
def _(folder: Path) -> str:
    """Parquet has no checksum of it, and its reader ends the process for some damage."""
    path = folder / "ops.parquet"
    data = bytearray(path.read_bytes())
    data[-100] ^= 0x10
    path.write_bytes(bytes(data))
    return path.name


@bad("a table is no Parquet")
def _(folder: Path) -> str:
    (folder / "obs.parquet").write_bytes(b"no table at all")
    return "obs.parquet"
