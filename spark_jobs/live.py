"""A run that goes on, judged batch by batch: rows as far as they are written, and their violations.

`Tail` reads whole records only, each end once; `LiveCheck` judges them in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dledger.jepsen_like.checkers.kernel.facts import NOT_YET
from dledger.jepsen_like.checkers.queue_watch import QueueWatch
from dledger.jepsen_like.checkers.transactions import SYSTEM_TOPICS
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.columns import RowOutOfRangeError, check_operation
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    CorruptHistoryError,
    Operation,
    Outcome,
    RunHeader,
    iter_rows,
)
from dledger.jepsen_like.history.parquet import NoHistoryError, check_header

INTERVAL_S: Final = 0.5
"""Between two readings of the files."""


class Progress(msgspec.Struct):
    """How it stands after a batch.

    Attributes:
        in_flight: Offsets that are not closed.
        pending: Sends with an unknown outcome.
        kept: Things remembered, of all queues.
    """

    batch: int
    operations: int
    open: int
    in_flight: int
    pending: int
    kept: int
    violations: list[Violation]


class LiveCheck:
    """All queues of a run. Pure: it is given batches."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int], QueueWatch] = {}
        self._batch = 0

    def take(self, batch: Batch) -> Progress:
        """Judge a batch; also queues without a row in it may settle."""
        found: list[Violation] = []
        for (topic, queue), rows in sorted(by_queue(batch.ended).items()):
            fresh = QueueWatch(subject=f"{topic}/{queue}")
            found += self.queues.setdefault((topic, queue), fresh).take(rows, batch.horizon_ns)
        self._batch += 1
        watches = self.queues.values()
        return Progress(
            self._batch,
            sum(watch.rows for watch in watches),
            batch.open,
            sum(watch.in_flight for watch in watches),
            sum(watch.pending for watch in watches),
            sum(watch.size for watch in watches),
            found,
        )


def by_queue(rows: Iterable[Operation]) -> dict[tuple[str, int], list[Operation]]:
    """Return the rows of each queue that clients write to."""
    found: dict[tuple[str, int], list[Operation]] = {}
    for op in rows:
        if op.topic and op.queue != NOTHING and op.topic not in SYSTEM_TOPICS:
            found.setdefault((op.topic, op.queue), []).append(op)
    return found


def follow(
    folder: Path,
    report: Callable[[Progress], object],
    sleep: Callable[[float], object],
    is_over: Callable[[], bool],
) -> list[Violation]:
    """Judge the run in *folder* until *is_over*, and return what was found.

    Raises:
        NoHistoryError: There is no history yet.
        CorruptHistoryError: A record in the middle of a file is damaged.
        OSError: A file cannot be read.
    """
    tail, live = Tail(folder), LiveCheck()
    found: list[Violation] = []
    while True:
        over = is_over()
        batch = tail.next()
        if batch.ended:
            progress = live.take(batch)
            found += progress.violations
            report(progress)
        elif over:
            return found
        else:
            sleep(INTERVAL_S)


BATCH_BYTES: Final = 1 << 22
"""Bytes of a file read at once; the rest of a longer one comes with the next batch."""

GIVEN_UP_NS: Final = 60_000_000_000
"""An operation open for so long has lost its client: no row of it follows."""


class Batch(NamedTuple):
    """What was written since the last time.

    *horizon_ns*: no row to come was called, or returns, before.
    """

    ended: list[Operation]
    horizon_ns: int
    open: int


class Tail:
    """Reads on where it stopped.

    A runner writes a row when it is called and again when it has ended, in the order in which rows
    changed first; what ended without an answer then has the class of its error. A batch may end
    within one of its writes, so the present is that of the batch before: what comes later was
    called after it.

    Args:
        read: Returns bytes of a file from a place on, at most this many.

    Raises:
        NoHistoryError: There is none yet.
    """

    def __init__(self, folder: Path, read: Callable[[Path, int, int], bytes] | None = None) -> None:
        self._history = folder / "history"
        if not self._history.is_dir():
            raise NoHistoryError(f"{folder} holds no history yet: name the folder of a run")
        self.read = read
        self.at: dict[str, int] = {}
        self._run_id = ""
        self._open: dict[int, int] = {}
        self._now_ns = NOT_YET

    def next(self) -> Batch:
        """Return what came since the last call; nothing, if nothing did.

        Raises CorruptHistoryError: a record is damaged, a row that this version does not know, or
        one of another run.
        """
        ended: list[Operation] = []
        present = self._now_ns
        for path in sorted(self._history.glob("*.cbor")):
            at = self.at.get(path.name, 0)
            end = 0
            try:
                for row, after in iter_rows((self.read or _read)(path, at, BATCH_BYTES)):
                    end = after
                    if isinstance(row, Operation):
                        check_operation(row)
                        self._take(row, ended)
                    elif isinstance(row, RunHeader):
                        check_header(self._run_id, row, self._history.parent)
                        self._run_id = row.run_id
            except (CorruptHistoryError, RowOutOfRangeError, NoHistoryError) as error:
                raise CorruptHistoryError(f"{path}, after byte {at + end}: {error}") from error
            self.at[path.name] = at + end
        for op_id in [o for o, call in self._open.items() if call < present - GIVEN_UP_NS]:
            del self._open[op_id]
        horizon_ns = min(self._open.values(), default=NEVER)
        return Batch(ended, min(horizon_ns, present), len(self._open))

    def _take(self, row: Operation, ended: list[Operation]) -> None:
        self._now_ns = max(self._now_ns, row.call_ns)
        if row.ret_ns != NEVER:
            self._now_ns = max(self._now_ns, row.ret_ns)
        if row.outcome == Outcome.INFO and not row.err:
            self._open[row.op_id] = row.call_ns
        else:
            self._open.pop(row.op_id, None)
            ended.append(row)


def _read(path: Path, at: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(size)
