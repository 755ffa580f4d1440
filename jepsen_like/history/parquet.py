"""`RUN/parquet`: the histories of a run folder as tables, what could not be read kept apart.

Every record of `history/*.cbor` is counted once: it is in a table, or a later row of the same
operation or event took its place, or it is in `bad.parquet` with the reason and its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from os import SEEK_END
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import cbor2
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dledger.commitlog.errors import MQError
from dledger.jepsen_like.history.columns import (
    RowOutOfRangeError,
    check_numbers,
    check_operation,
    check_replica_read,
    events_table,
    nodes_table,
    obs_table,
    ops_table,
)
from dledger.jepsen_like.history.operation import (
    PUSH_RECORD,
    Event,
    FloorMove,
    History,
    LatestRows,
    Operation,
    ReplicaRead,
    ReplicaState,
    Row,
    RunHeader,
    Sample,
    read_samples,
)
from dledger.jepsen_like.history.sums import as_text, sum_of_file

FOLDER: Final = "parquet"
SUMMARY: Final = "ingest.json"
ROW_GROUP_ROWS: Final = 1 << 20
"""Rows of a row group: statistics narrow a look at one witness down to one of these."""
COMPRESSION: Final = "zstd"
KEPT_BYTES_MAX: Final = 4096
"""Bytes kept of a bad record; a person reads its beginning."""

TORN: Final = "torn: the file ends within it"
"""Reason of a piece of a last record: its writer died, nothing is wrong with the rest."""

TABLES: Final = ("ops", "obs", "events", "nodes")
FOOTER_MAX: Final = 1 << 26
"""Bytes of a footer; a length beyond it is damage."""
_FOOTER_END: Final = 8
"""Length of the footer, and Parquet's mark."""

SORT: Final = ("topic", "queue", "off", "op_id")
BAD: Final = pa.schema(
    [("file", pa.string()), ("at", pa.int64()), ("reason", pa.string()), ("record", pa.binary())]
)


class NoHistoryError(MQError):
    """The folder holds no history, neither `history/*.cbor` nor `parquet/`, or two runs'."""


class Ingested(msgspec.Struct):
    """What became of the records of a run. `records` is the sum of all other counts but `obs`.

    Attributes:
        plan: Likewise, as JSON; empty: it had none.
        records: Records read, a torn piece included.
        replaced: Rows in whose place a later one of the same operation or event came.
        bad: Records that are none of these; `torn` of them are pieces of a last one.
        torn_bytes: Their bytes.
        samples: What brokers reported of themselves; from another file.
        footers: By table, the size of its file and the checksum of its footer, which Parquet does
            not have.
        sums: By table, the sum of its rows (`sums`).
    """

    run_id: str = ""
    seed: int = 0
    plan: str = ""
    versions: dict[str, str] = {}
    records: int = 0
    ops: int = 0
    events: int = 0
    reads: int = 0
    states: int = 0
    headers: int = 0
    replaced: int = 0
    bad: int = 0
    torn: int = 0
    torn_bytes: int = 0
    obs: int = 0
    samples: int = 0
    floors: int = 0
    footers: dict[str, tuple[int, int]] = {}
    sums: dict[str, str] = {}

    @property
    def lost_records(self) -> int:
        """Records of unknown content: a verdict without them is no pass."""
        return self.bad - self.torn


class BadRecord(msgspec.Struct):
    """A record that is no row: where it begins, why, and its first bytes."""

    file: str
    at: int
    reason: str
    record: bytes


def ingest(folder: Path) -> Ingested:
    """Write the tables of the run in *folder* and return what became of its records.

    Raises:
        NoHistoryError: There is no history, or files of another run are among it.
        OSError: A file cannot be read or written.
    """
    paths = sorted((folder / "history").glob("*.cbor"))
    if not paths:
        raise NoHistoryError(f"{folder} holds no history/*.cbor: name the folder of a run")
    counts, bad = Ingested(), list[BadRecord]()
    latest, run_id = LatestRows(), ""
    for path in paths:
        for row in _rows(path, counts, bad):
            if isinstance(row, RunHeader):
                check_header(run_id, row, folder)
                run_id = row.run_id
            latest.add((row,))
    history = latest.history()
    counts.ops, counts.events = len(history.operations), len(history.events)
    counts.replaced -= counts.ops + counts.events
    counts.bad = len(bad)
    counts.run_id = history.header.run_id or folder.resolve().name
    counts.seed, counts.versions = history.header.seed, history.header.versions
    counts.plan = history.header.plan
    path = folder / "samples.cbor"
    samples, _ = read_samples(path.read_bytes() if path.is_file() else b"")
    counts.samples = len(samples)
    into = folder / FOLDER
    counts.obs = write_history(into, history, counts.run_id, samples)
    _take_over(folder / "history" / PUSH_RECORD, into / PUSH_RECORD)
    pq.write_table(_bad_table(bad), into / "bad.parquet", compression=COMPRESSION)
    write_summary(into, counts)
    return counts


def check_header(run_id: str, header: RunHeader, folder: Path) -> None:
    """See that the file with *header* is of the run *run_id*, as those before it; empty: none was
    read.

    Raises NoHistoryError: it is of another: operations of both have the same numbers.
    """
    if run_id and header.run_id != run_id:
        raise NoHistoryError(
            f"{folder / 'history'} holds files of two runs, {run_id} and {header.run_id}: keep "
            "each run in a folder of its own"
        )


def _take_over(record: Path, into: Path) -> None:
    """Put what a push group left beside the tables: it is judged as it is."""
    into.unlink(missing_ok=True)
    if record.is_file():
        into.write_bytes(record.read_bytes())


def write_summary(into: Path, counts: Ingested) -> None:
    """Write `SUMMARY`, the last file of a whole folder of tables."""
    for table in TABLES:
        path = into / f"{table}.parquet"
        if path.is_file():
            with path.open("rb") as file:
                counts.footers[table] = footer_of(file)
            counts.sums[table] = as_text(sum_of_file(table, path))
    (into / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(counts)) + b"\n")


def footer_of(file: Any) -> tuple[int, int]:
    """Return the size of a Parquet file and the checksum of its footer."""
    size: int = file.seek(0, SEEK_END)
    file.seek(max(size - _FOOTER_END, 0))
    length = int.from_bytes(file.read(_FOOTER_END)[:4], "little")
    begin = max(size - _FOOTER_END - min(length, FOOTER_MAX), 0)
    file.seek(begin)
    return size, crc32(file.read(size - begin))


def read_summary(parquet: Path) -> Ingested:
    """Return what `write_summary` wrote. Raises NoHistoryError: the folder is not a whole one."""
    try:
        return msgspec.json.decode((parquet / SUMMARY).read_bytes(), type=Ingested)
    except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError) as error:
        text = (
            f"{parquet / SUMMARY} is missing or damaged, so the tables may not be whole: make them "
            "again with dledger history ingest"
        )
        raise NoHistoryError(text) from error


def write_history(into: Path, history: History, run_id: str, samples: Sequence[Sample] = ()) -> int:
    """Write the four tables of *history* and return how many rows `obs` has."""
    into.mkdir(parents=True, exist_ok=True)
    (into / SUMMARY).unlink(missing_ok=True)
    ops = _sorted(ops_table(run_id, history.operations))
    obs = obs_table(run_id, history.operations, history.replica_reads)
    nodes = nodes_table(
        run_id, history.replica_states, history.replica_reads, samples, history.floors
    )
    tables = {
        "ops": ops,
        "obs": _sorted(obs),
        "events": events_table(run_id, history.events),
        "nodes": nodes,
    }
    for name, table in tables.items():
        pq.write_table(
            table,
            into / f"{name}.parquet",
            row_group_size=ROW_GROUP_ROWS,
            compression=COMPRESSION,
            write_page_checksum=True,
        )
    return int(obs.num_rows)


def _sorted(table: Any) -> Any:
    """Return *table* in the order of `SORT`; dictionaries cannot be sorted as they are."""
    keys = {name: table.column(name) for name in SORT}
    plain = pa.table({**keys, "topic": keys["topic"].cast(pa.string())})
    order = pc.sort_indices(plain, sort_keys=[(name, "ascending") for name in SORT])
    return table.take(order)


def _rows(path: Path, counts: Ingested, bad: list[BadRecord]) -> Iterator[Row]:
    """Yield the good rows of a file; what is bad goes into *bad*."""
    data = path.read_bytes()
    source = BytesIO(data)
    decoder = cbor2.CBORDecoder(source, read_size=1)
    start = 0
    while start < len(data):
        counts.records += 1
        reason, row = "", None
        try:
            row = msgspec.convert(decoder.decode(), type=Row)
            end = source.tell()
            _count(row, counts)
        except cbor2.CBORDecodeEOF:
            reason, end = TORN, len(data)
            counts.torn += 1
            counts.torn_bytes += end - start
        except (msgspec.ValidationError, RowOutOfRangeError) as error:
            reason, end = str(error), source.tell()
        except (cbor2.CBORDecodeError, ValueError, TypeError, OverflowError, RecursionError) as e:
            # Where the next record begins is unknown: the rest of the file is one bad record.
            reason, end = f"no record, and so the rest of the file: {e}", len(data)
        if reason:
            kept = data[start : min(end, start + KEPT_BYTES_MAX)]
            bad.append(BadRecord(path.name, start, reason, kept))
        elif row is not None:
            yield row
        if end == len(data):
            return
        start = end


def _count(row: Row, counts: Ingested) -> None:
    match row:
        case Operation():
            check_operation(row)
            counts.replaced += 1  # those that stay are taken off in the end
        case Event():
            check_numbers(row)
            counts.replaced += 1
        case ReplicaRead():
            check_replica_read(row)
            counts.reads += 1
        case ReplicaState():
            check_numbers(row)
            counts.states += 1
        case FloorMove():
            check_numbers(row)
            counts.floors += 1
        case RunHeader():
            counts.headers += 1


def _bad_table(bad: Sequence[BadRecord]) -> Any:
    return pa.Table.from_pylist([msgspec.structs.asdict(record) for record in bad], schema=BAD)
