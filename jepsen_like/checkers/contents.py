"""Every message that was read is what was sent: body, tag, keys, properties, time of birth.

And messages that one pull finds were stored one after the other: the store time that brokers give
them never goes back along the log, whatever dates are set.

Readers compare each message with what was sent under its value, and write what differs into the
error of their row, which has the outcome that it had. Compared are pulls, pulls with an expression,
and what came of messages that were given back; so through delays, transactions, retries and dead
letters. A history whose last client has read nothing was not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import F, Operation

NAME: Final = "contents"

BODY: Final = "body altered"
PROPERTIES: Final = "properties altered"
BORN: Final = "time of birth altered"
STORED: Final = "store time went back"
ANOMALIES: Final = (BODY, PROPERTIES, BORN, STORED)
REPORTED_MAX: Final = 8


def check(rows: Iterable[Operation], compared: int) -> Verdict:
    """Return the verdict over rows with an error.

    Args:
        compared: Messages that the last client of the run has read.
    """
    altered = sorted((op for op in rows if op.err in ANOMALIES), key=_by_call)
    found = [
        Violation(
            op.err,
            f"{op.topic}/{op.queue}",
            f"a {F(op.f).name.lower()} at offset {op.off} has a message that was "
            + ("stored before the one in front of it" if op.err == STORED else "sent otherwise"),
            (op.op_id,),
            at_ns=op.call_ns,
        )
        for op in altered[:REPORTED_MAX]
    ]
    counts = {"altered": len(altered), "compared": compared}
    return judge(NAME, found, counts, looked_at=compared + len(altered))


def _by_call(op: Operation) -> tuple[int, int]:
    return op.call_ns, op.op_id
