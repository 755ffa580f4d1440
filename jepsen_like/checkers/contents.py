"""Every message that was read is what was sent: body, tag, keys, properties, time of birth.

Readers compare each message with what was sent under its value, and write what differs into the
error of their row, which keeps its outcome. The store times of the messages of one pull never go
back, whatever dates are set. A history whose last client has read nothing was not compared to its
end: what differs is named, and where nothing does there is no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, judge, violation_of
from dledger.jepsen_like.history.operation import F, Operation

NAME: Final = "contents"

BODY: Final = "body altered"
PROPERTIES: Final = "properties altered"
BORN: Final = "time of birth altered"
STORED: Final = "store time went back"
ALTERED: Final = (BODY, PROPERTIES, BORN, STORED)


def altered(rows: Iterable[Operation]) -> list[Operation]:
    """Return the rows with a message that stands otherwise than it was sent, in order of calls."""
    return sorted((op for op in rows if op.err in ALTERED), key=_by_call)


def check(rows: Iterable[Operation], compared: int) -> Verdict:
    """Return the verdict over rows with an error."""
    every = altered(rows)
    found = [
        violation_of(
            op.err,
            op.place,
            f"a {F(op.f).name.lower()} at offset {op.off} has a message that was "
            + ("stored before the one in front of it" if op.err == STORED else "sent otherwise"),
            op,
        )
        for op in every
    ]
    counts = {"altered": len(every), "compared": compared}
    return judge(NAME, found, counts, looked_at=compared + len(every))


def _by_call(op: Operation) -> tuple[int, int]:
    return op.call_ns, op.op_id
