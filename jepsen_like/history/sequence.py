"""A history as a CBOR sequence: rows one after the other, appended and flushed as they come.

A crash of whoever writes leaves all flushed rows and perhaps a piece of the last one; the reader
takes the rows and says how many bytes were left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any, Final

import cbor2
import msgspec
from typing_extensions import Buffer

from commitlog.errors import MQError
from jepsen_like.history.operation import History, Row, RunHeader

FLUSH_ROWS: Final = 256
"""Rows that a crash of the harness may cost."""

_DECODE_ERRORS = (cbor2.CBORDecodeError, ValueError, TypeError, OverflowError, RecursionError)


class CorruptHistoryError(MQError):
    """A record in the middle of a history is damaged; what was before it is good."""


class HistoryWriter:
    """Appends rows. Where the bytes go is the caller's: a file, a simulated disk, a list.

    Args:
        write: Takes bytes; called once per flush with whole rows only.
        flush: Makes what was written durable, or does nothing.
        flush_rows: Rows collected before they are written.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        flush: Callable[[], object] = lambda: None,
        *,
        flush_rows: int = FLUSH_ROWS,
    ) -> None:
        self._write = write
        self._flush = flush
        self._flush_rows = flush_rows
        self._buffer: list[bytes] = []

    def append(self, row: Row) -> None:
        """Take one row; every `flush_rows` of them are written and flushed."""
        self._buffer.append(encode_row(row))
        if len(self._buffer) >= self._flush_rows:
            self.flush()

    def flush(self) -> None:
        """Write and flush what is left."""
        if self._buffer:
            buffer, self._buffer = self._buffer, []
            self._write(b"".join(buffer))
            self._flush()


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
