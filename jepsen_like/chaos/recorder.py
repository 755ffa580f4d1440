"""The history of a real run on its way to disk: what is flushed survives the runner's death.

A row is written when it is called and again when it has ended, so a file cut off anywhere holds
every attempt that was made; a later row of the same operation takes the place of the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import cbor2
import msgspec
import trio

from dledger.jepsen_like.checkers.push_group import PushRecord, encode_record
from dledger.jepsen_like.history.operation import (
    PUSH_RECORD,
    Event,
    History,
    LatestRows,
    Operation,
    Row,
    RunHeader,
    encode_row,
    iter_rows,
)

WRITE_INTERVAL_S: Final = 0.05
"""What the runner's death may cost; below what a person could have looked at."""


class Recorder:
    """Takes rows as they change and writes them in the order in which they changed first."""

    def __init__(self, folder: Path, header: RunHeader) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: BinaryIO = (folder / "runner.cbor").open("wb", buffering=0)
        self._samples: BinaryIO = (folder.parent / "samples.cbor").open("wb", buffering=0)
        self._pending: dict[int, Operation | Event] = {}
        self._pending_samples: list[bytes] = []
        self._rows.write(encode_row(header))

    def note(self, row: Operation | Event, _is_over: bool = False) -> None:
        """Take a row that was made or has changed."""
        self._pending[id(row)] = row

    def sample(self, sample: Mapping[str, Any]) -> None:
        """Add a broker's report of itself."""
        self._pending_samples.append(cbor2.dumps(dict(sample)))

    async def run(self) -> None:
        """Write every `WRITE_INTERVAL_S` until cancelled; `close` writes the rest."""
        while True:
            await trio.sleep(WRITE_INTERVAL_S)
            self.write()

    def write(self) -> None:
        """Write what has changed since the last time."""
        pending, self._pending = self._pending, {}
        samples, self._pending_samples = self._pending_samples, []
        if pending:
            self._rows.write(b"".join(map(encode_row, pending.values())))
        if samples:
            self._samples.write(b"".join(samples))

    def close(self) -> None:
        """Write the rest and close. Idempotent."""
        self.write()
        self._rows.close()
        self._samples.close()


def read_run(folder: Path) -> tuple[History, int]:
    """Return the history of a run folder, and how many bytes of torn rows were left over.

    Raises:
        CorruptHistoryError: A record in the middle of a file is damaged.
        OSError: A file cannot be read.
    """
    latest, left = LatestRows(), 0
    for path in sorted((folder / "history").glob("*.cbor")):
        data, end = path.read_bytes(), 0
        for row, end in iter_rows(data):  # noqa: B007  # the last end is wanted
            latest.add((row,))
        left += len(data) - end
    return latest.history(), left


def write_rest(folder: Path, history: History) -> None:
    """Write what was read from the replicas when the run was over, beside the rows."""
    rows: list[Row] = [*history.replica_reads, *history.replica_states, *history.floors]
    (folder / "history" / "replicas.cbor").write_bytes(b"".join(map(encode_row, rows)))


def write_push_record(folder: Path, record: PushRecord) -> None:
    """Write what a push group came to, beside the rows."""
    (folder / "history" / PUSH_RECORD).write_bytes(encode_record(record))


def write_tables(folder: Path) -> None:
    """Write `parquet/`, the same history as tables; what cannot be read is in `bad.parquet`."""
    from dledger.jepsen_like.history.parquet import ingest

    ingest(folder)


def encode_json(value: object) -> bytes:
    """Return *value* as JSON that people read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
