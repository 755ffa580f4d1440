"""A history as a CBOR sequence: rows one after the other, appended and flushed as they come.

A crash of the writer leaves all flushed rows and perhaps a piece of the last one; the reader
returns the rows and how many bytes were left over. A writer of a real run writes an operation or a
fault when it begins and again when it has ended, so that its own death loses nothing; `LatestRows`
keeps the later row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any, Final

import cbor2
import msgspec
from typing_extensions import Buffer

from commitlog.errors import MQError
from jepsen_like.history.operation import Event, History, Operation, Row, RunHeader

_DECODE_ERRORS = (cbor2.CBORDecodeError, ValueError, TypeError, OverflowError, RecursionError)


class CorruptHistoryError(MQError):
    """A record in the middle of a history is damaged; what was before it is good."""


def encode_row(row: Row) -> bytes:
    """Return *row* as one CBOR data item."""
    encoded: bytes = cbor2.dumps(msgspec.to_builtins(row))
    return encoded


def encode_history(history: History) -> bytes:
    """Return a whole history as a CBOR sequence."""
    rows: Iterable[Row] = (
        history.header,
        *history.operations,
        *history.events,
        *history.replica_reads,
        *history.replica_states,
        *history.floors,
    )
    return b"".join(map(encode_row, rows))


def iter_rows(data: Buffer) -> Iterator[tuple[Row, int]]:
    """Yield each row and the byte after it, up to a torn last record.

    Raises:
        CorruptHistoryError: A record in the middle is damaged; the rows before it were yielded.
    """
    raw = bytes(data)
    source = BytesIO(raw)
    decoder = cbor2.CBORDecoder(source, read_size=1)
    start = 0
    while start < len(raw):
        try:
            item: Any = decoder.decode()
        except cbor2.CBORDecodeEOF:
            return
        except _DECODE_ERRORS as error:
            raise CorruptHistoryError(f"no record at byte {start}: {error}") from error
        try:
            row: Row = msgspec.convert(item, type=Row)
        except msgspec.ValidationError as error:
            raise CorruptHistoryError(f"no row at byte {start}: {error}") from error
        start = source.tell()
        yield row, start


def read_history(data: Buffer) -> tuple[History, int]:
    """Return the history in *data* and how many bytes at its end are a torn record.

    Raises:
        CorruptHistoryError: A record in the middle is damaged.
    """
    history = History(RunHeader(run_id=""))
    end = 0
    for row, end in iter_rows(data):  # noqa: B007  # the last end is wanted
        history.add(row)
    return history, memoryview(data).nbytes - end


class LatestRows:
    """Takes rows in the order in which they were written."""

    def __init__(self) -> None:
        self._rest = History(RunHeader(run_id=""))
        self._operations: dict[int, Operation] = {}
        self._events: dict[tuple[int, str, str], Event] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Take *rows*; one that was there already takes the place of the earlier one."""
        for row in rows:
            if isinstance(row, Operation):
                self._operations[row.op_id] = row
            elif isinstance(row, Event):
                # Which node a target was is known only later; a change of role has no target.
                self._events[row.at_ns, row.kind, row.target or row.node] = row
            else:
                self._rest.add(row)

    def history(self) -> History:
        """Return what there is, each row once, in the order in which they came first."""
        self._rest.operations = list(self._operations.values())
        self._rest.events = list(self._events.values())
        return self._rest


PUSH_RECORD: Final = "push_group.json"
"""What is known of a push group when a run is over, so that it can be judged again."""
