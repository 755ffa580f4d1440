"""A history from rows that were written more than once: each as it was when it was written last.

Who records a real run writes an operation or a fault when it begins and again when it has ended,
so that the recorder's own death loses nothing. Whoever reads keeps the later row. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from jepsen_like.history.operation import Event, History, Operation, Row, RunHeader


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
