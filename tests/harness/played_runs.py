"""A history written as a runner writes it: each row when it is called and when it has ended."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from dledger.jepsen_like.history.operation import NEVER, NOTHING, Operation, Outcome, encode_row


def as_called(op: Operation) -> Operation:
    """Return the row of *op* before anybody knew how it ends."""
    return msgspec.structs.replace(
        op, outcome=Outcome.INFO, ret_ns=NEVER, off=NOTHING, cnt=0, max_off=NOTHING,
        min_off=NOTHING, values=(), err="",
    )  # fmt: skip


def as_ended(op: Operation) -> Operation:
    """Return the row of *op* with a reason, if it ended without an answer."""
    return msgspec.structs.replace(op, err="TimeoutError") if op.ret_ns == NEVER else op


def writes(operations: Sequence[Operation], count: int) -> Iterator[list[Operation]]:
    """Yield the rows of each of *count* writes, in the order in which they were changed."""
    ends = [op.ret_ns for op in operations if op.ret_ns != NEVER]
    rows = [(op.call_ns, 0, op.op_id, as_called(op)) for op in operations]
    rows += [
        (op.ret_ns if op.ret_ns != NEVER else op.call_ns + max(ends) // 100, 1, op.op_id, op)
        for op in map(as_ended, operations)
    ]
    rows.sort(key=lambda row: row[:3])
    for at in range(count):
        part = rows[len(rows) * at // count : len(rows) * (at + 1) // count]
        yield [op for *_, op in part]


class PlayedRun:
    """The folder of a run that goes on.

    A reader that runs beside the test sees each write as a whole or not at all: a reader that sees
    a part of it takes the write in two batches, and what is in flight depends on the batches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "history" / "runner.cbor"
        self.path.parent.mkdir(parents=True)
        self.ended: set[int] = set()
        self._kept = b""

    def write(self, rows: Sequence[Operation], *, torn: int = 0) -> None:
        """Append rows; the last *torn* bytes are kept back until the next write."""
        data = self._kept + b"".join(map(encode_row, rows))
        cut = len(data) - torn
        self._kept = data[cut:]
        before = self.path.read_bytes() if self.path.exists() else b""
        whole = self.folder / "runner.next"
        whole.write_bytes(before + data[:cut])
        whole.replace(self.path)
        self.ended |= {op.op_id for op in rows if op.outcome != Outcome.INFO or op.err}
