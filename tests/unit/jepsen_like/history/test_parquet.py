"""The tables of a run: nothing is lost on the way, and every record is accounted for."""

from __future__ import annotations

from pathlib import Path

import cbor2
import msgspec
import pyarrow.parquet as pq
import pytest

from dledger.jepsen_like.history import parquet
from dledger.jepsen_like.history.columns import OPS, hash_range
from dledger.jepsen_like.history.operation import (
    NEVER,
    Event,
    F,
    FloorMove,
    History,
    Operation,
    Outcome,
    ReplicaState,
    Row,
    RunHeader,
    encode_history,
    encode_row,
)
from tests.harness.clean_histories import clean_history


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
    back = parquet.read_history(tmp_path / "parquet")
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
    back = parquet.read_history(tmp_path / "parquet")
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
    back = parquet.read_history(tmp_path / "parquet").events
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
    assert [op.op_id for op in parquet.read_history(tmp_path / "parquet").operations] == [1, 2]
    (row,) = bad_rows(tmp_path)
    assert (row["file"], row["at"], row["record"]) == ("0.cbor", len(before), record)
    assert reason in str(row["reason"])
    assert (counts.bad, counts.torn, counts.lost_records) == (1, 0, 1)
    assert sound(counts)


def test_torn_last_record_is_no_damage(tmp_path: Path) -> None:
    whole, torn = encode_row(operation(1)), encode_row(operation(2))[:-3]
    counts = parquet.ingest(run_of(tmp_path, whole + torn, encode_row(operation(3))))
    assert [op.op_id for op in parquet.read_history(tmp_path / "parquet").operations] == [1, 3]
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
        parquet.read_history(tmp_path / "half")


def test_the_hash_of_a_range_adds_up_and_is_bound_to_its_place() -> None:
    whole = hash_range(5, (10, 11, 12, 13))
    word = 1 << 64
    assert (hash_range(5, (10, 11)) + hash_range(7, (12, 13)) - whole) % word == 0
    assert hash_range(6, (10, 11, 12, 13)) != whole
    assert hash_range(5, (11, 10, 12, 13)) != whole
    assert hash_range(5, ()) == 0
