"""The rows of a run that goes on, as far as they are written: whole records only, each end once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from jepsen_like.checkers.kernel.facts import NOT_YET
from jepsen_like.history.operation import NEVER, Operation, Outcome
from jepsen_like.history.parquet import NoHistoryError
from jepsen_like.history.sequence import iter_rows

BATCH_BYTES: Final = 1 << 22
"""Bytes of a file read at once; the rest of a longer one comes with the next batch."""

GIVEN_UP_NS: Final = 60_000_000_000
"""An operation open for so long has lost its client: no row of it follows."""


class Batch(NamedTuple):
    """What was written since the last time.

    Attributes:
        ended: Operations that have ended.
        horizon_ns: No row to come was called, or returns, before.
        open: How many operations are under way.
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
        folder: Of the run.
        read: Returns bytes of a file from a place on, at most so many.

    Raises:
        NoHistoryError: There is none yet.
    """

    def __init__(self, folder: Path, read: Callable[[Path, int, int], bytes] | None = None) -> None:
        self._history = folder / "history"
        if not self._history.is_dir():
            raise NoHistoryError(f"{folder} holds no history yet: name the folder of a run")
        self.read = read
        self.at: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._now_ns = NOT_YET

    def next(self) -> Batch:
        """Return what came since the last call; nothing, if nothing did."""
        ended: list[Operation] = []
        present = self._now_ns
        for path in sorted(self._history.glob("*.cbor")):
            at = self.at.get(path.name, 0)
            end = 0
            for row, end in iter_rows((self.read or _read)(path, at, BATCH_BYTES)):  # noqa: B007
                if isinstance(row, Operation):
                    self._take(row, ended)
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
