"""The tables of a run: nothing is lost on the way, and every record is accounted for.

A history survives the crash of its writer: whole rows, and a torn last one.
The sum of a table: of its rows in any order and split, and no other rows.
"""

import random
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.jepsen_like.checkers.kernel.tables import Batch
from dledger.jepsen_like.history import parquet
from dledger.jepsen_like.history.columns import OPS, SCHEMAS, hash_range, table_of
from dledger.jepsen_like.history.operation import (
    NEVER,
    CorruptHistoryError,
    Event,
    F,
    FloorMove,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    ReplicaState,
    Row,
    RunHeader,
    encode_history,
    encode_row,
    iter_rows,
)
from dledger.jepsen_like.history.sums import added, as_text, sum_of_file, sum_of_table, sum_rows
from tests.harness.clean_histories import clean_history
from tests.harness.generated import read_tables


def run_of(folder: Path, *pieces: bytes) -> Path:
    """Return a run folder whose history files hold *pieces*."""
    (folder / "history").mkdir()
    for number, piece in enumerate(pieces):
        (folder / "history" / f"{number}.cbor").write_bytes(piece)
    return folder


def operation(op_id: int, *, outcome: Outcome = Outcome.OK, ret_ns: int = 20) -> Operation:
    return Operation(op_id, op_id, 1, -1, F.SEND, outcome, 10, ret_ns, "orders", 0, op_id)


def sound(counts: parquet.Ingested) -> bool:
    """Whether every record is counted exactly once."""
    kinds = (counts.ops, counts.events, counts.reads, counts.states, counts.headers, counts.floors)
    return counts.records == sum(kinds) + counts.replaced + counts.bad


@pytest.mark.parametrize("seed", range(20))
def test_a_history_comes_back_from_its_tables_as_it_was(seed: int, tmp_path: Path) -> None:
    history = clean_history(seed)
    history.events.append(Event(5, 6, "kill", "leader", "n1", "process 7"))
    history.floors.append(FloorMove(9, "n9", 4, "t", 1, 5, "age", 6, 7, 8, 9, 10, 11))
    history.replica_states.append(ReplicaState(9, "n9", 3, (1 << 64) - 5, "abc"))
    counts = parquet.ingest(run_of(tmp_path, encode_history(history)))
    back = read_tables(tmp_path / "parquet")
    assert back.operations == sorted(history.operations, key=lambda op: op.op_id)
    assert back.events == history.events
    assert back.replica_reads == history.replica_reads
    assert back.replica_states == history.replica_states
    assert len(history.floors) >= 3
    assert back.floors == history.floors
    assert counts.floors == len(history.floors)
    assert (back.header.run_id, back.header.seed) == (history.header.run_id, history.header.seed)
    assert (counts.ops, counts.bad, counts.replaced) == (len(history.operations), 0, 0)
    assert sound(counts)


def test_later_row_of_an_operation_replaces_the_earlier(tmp_path: Path) -> None:
    called = operation(7, outcome=Outcome.INFO, ret_ns=NEVER)
    rows: list[Row] = [
        RunHeader("r"),
        called,
        Event(1, -1, "kill"),
        operation(7),
        Event(1, 2, "kill"),
    ]
    counts = parquet.ingest(run_of(tmp_path, b"".join(map(encode_row, rows))))
    back = read_tables(tmp_path / "parquet")
    assert [op.outcome for op in back.operations] == [Outcome.OK]
    assert [event.end_ns for event in back.events] == [2]
    assert (counts.ops, counts.events, counts.replaced, counts.bad) == (1, 1, 2, 0)
    assert sound(counts)


def test_events_of_one_moment_are_kept_by_node(tmp_path: Path) -> None:
    events = [
        Event(1, 2, "role", "", "n0", "leader"),
        Event(1, 2, "role", "", "n1", "follower"),
        Event(1, 3, "kill", "leader", "n0"),
        Event(1, 4, "kill", "follower", "n1"),
    ]
    rows: list[Row] = [RunHeader("r"), *events]
    counts = parquet.ingest(run_of(tmp_path, b"".join(map(encode_row, rows))))
    back = read_tables(tmp_path / "parquet").events
    assert sorted((event.node, event.end_ns) for event in back) == [
        ("n0", 2), ("n0", 3), ("n1", 2), ("n1", 4),
    ]  # fmt: skip
    assert (counts.events, counts.replaced) == (4, 0)


def bad_rows(folder: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(folder / "parquet" / "bad.parquet").to_pylist()
    return rows


def changed(op: Operation, **fields: int) -> bytes:
    return encode_row(msgspec.structs.replace(op, **fields))


def test_kinds_of_operations_are_numbered_without_a_gap() -> None:
    """What reads a record takes each number below their count, and only those."""
    assert [F(number) for number in range(len(F))] == list(F)


BAD_RECORDS = {
    "a word where a number belongs": (
        cbor2.dumps([1, "seven", 7, 1, -1, 0, 0, 10, 20]),
        "Expected `int`",
    ),
    "no such row": (cbor2.dumps([99, 1]), "Invalid value 99"),
    "no such operation": (changed(operation(7), f=55), f"f is 55, beyond 0 … {len(F) - 1}"),
    "no such outcome": (changed(operation(7), outcome=3), "outcome is 3"),
    "a process beyond its column": (
        changed(operation(7), process=1 << 31),
        "process is 2147483648",
    ),
    "returned before its call": (changed(operation(7), ret_ns=3), "before its call at 10"),
    "nothing can stand behind its offset": (
        changed(operation(7), off=(1 << 63) - 1),
        "its offset 9223372036854775807 is beyond",
    ),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_bad_record_kept_with_reason_and_next_is_read(name: str, tmp_path: Path) -> None:
    record, reason = BAD_RECORDS[name]
    before, after = encode_row(operation(1)), encode_row(operation(2))
    counts = parquet.ingest(run_of(tmp_path, before + record + after))
    assert [op.op_id for op in read_tables(tmp_path / "parquet").operations] == [1, 2]
    (row,) = bad_rows(tmp_path)
    assert (row["file"], row["at"], row["record"]) == ("0.cbor", len(before), record)
    assert reason in str(row["reason"])
    assert (counts.bad, counts.torn, counts.lost_records) == (1, 0, 1)
    assert sound(counts)


def test_torn_last_record_is_no_damage(tmp_path: Path) -> None:
    whole, torn = encode_row(operation(1)), encode_row(operation(2))[:-3]
    counts = parquet.ingest(run_of(tmp_path, whole + torn, encode_row(operation(3))))
    assert [op.op_id for op in read_tables(tmp_path / "parquet").operations] == [1, 3]
    assert (counts.bad, counts.torn, counts.lost_records) == (1, 1, 0)
    assert counts.torn_bytes == len(torn)
    assert bad_rows(tmp_path)[0]["reason"] == parquet.TORN
    assert sound(counts)


def test_rest_after_foreign_bytes_is_one_bad_record(tmp_path: Path) -> None:
    before = encode_row(operation(1))
    junk = b"\xfc\xfd" + encode_row(operation(2)) * 1000
    counts = parquet.ingest(run_of(tmp_path, before + junk))
    (row,) = bad_rows(tmp_path)
    assert row["at"] == len(before)
    assert row["record"] == junk[: parquet.KEPT_BYTES_MAX]
    assert (counts.ops, counts.bad, counts.lost_records) == (1, 1, 1)
    assert sound(counts)


def test_rows_are_sorted_and_strings_are_dictionaries(tmp_path: Path) -> None:
    history = clean_history(4)
    parquet.ingest(run_of(tmp_path, encode_history(history)))
    table = pq.read_table(tmp_path / "parquet" / "ops.parquet")
    keys = [table.column(name).to_pylist() for name in parquet.SORT]
    rows = list(zip(*keys, strict=True))
    assert rows == sorted(rows)
    assert table.schema.equals(OPS)
    columns = pq.ParquetFile(tmp_path / "parquet" / "ops.parquet").metadata.row_group(0)
    assert {columns.column(at).compression for at in range(columns.num_columns)} == {"ZSTD"}
    assert all(columns.column(at).is_stats_set for at in range(columns.num_columns))


def test_folder_without_history_names_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(parquet.NoHistoryError, match="name the folder of a run"):
        parquet.ingest(tmp_path)
    parquet.write_history(tmp_path / "half", History(RunHeader("x")), "x")
    with pytest.raises(parquet.NoHistoryError, match="dledger history ingest"):
        parquet.read_summary(tmp_path / "half")


def test_the_hash_of_a_range_adds_up_and_is_bound_to_its_place() -> None:
    whole = hash_range(5, (10, 11, 12, 13))
    word = 1 << 64
    assert (hash_range(5, (10, 11)) + hash_range(7, (12, 13)) - whole) % word == 0
    assert hash_range(6, (10, 11, 12, 13)) != whole
    assert hash_range(5, (11, 10, 12, 13)) != whole
    assert hash_range(5, ()) == 0


HISTORY = History(
    RunHeader("r1", 7, "{}", {"python": "3.11"}),
    [
        Operation(0, 0, 3, 1, F.SEND, Outcome.OK, 1, 2, "orders", 4, 5, value=6),
        Operation(1, 0, 4, -1, F.PULL, Outcome.INFO, 3, NEVER, "orders", values=(6, 7), err="é"),
    ],
    [Event(1, 2, "power_cut", "leader", "n1")],
    [ReplicaRead(9, "n0", "orders", 4, 0, (1, 2, 3))],
    [ReplicaState(9, "n0", 12, (1 << 64) - 1, "ab")],
    [FloorMove(9, "n0", 4, "orders", 4, 1, "size", 6, 7, 8, 9, 10, 11)],
)


def read(data: bytes) -> tuple[History, int]:
    """Return the history in *data*, and how many bytes at its end are a torn record."""
    history, end = History(RunHeader(run_id="")), 0
    for row, end in iter_rows(data):  # noqa: B007  # the last end is wanted
        history.add(row)
    return history, len(data) - end


def test_what_was_written_is_read() -> None:
    assert read(encode_history(HISTORY)) == (HISTORY, 0)


@given(st.integers(0, len(encode_history(HISTORY))))
def test_a_torn_end_costs_the_last_row_only(end: int) -> None:
    whole = encode_history(HISTORY)
    history, torn = read(whole[:end])
    kept = encode_history(history) if end - torn else b""
    assert whole[: end - torn] == kept
    assert torn < 200


def test_damage_in_the_middle_is_no_torn_end() -> None:
    rows = [encode_row(HISTORY.header), *map(encode_row, HISTORY.operations)]
    with pytest.raises(CorruptHistoryError, match=f"at byte {len(rows[0])}"):
        read(rows[0] + b"\x83\x09\x01\x02" + rows[1])
    with pytest.raises(CorruptHistoryError):
        read(rows[0] + b"\xff" + rows[1])


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
