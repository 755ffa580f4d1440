"""Rows of histories that are written by hand: only what matters is named."""

from typing import Any

from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome


def row(op_id: int, f: F, call: int, ret: int, **fields: Any) -> Operation:
    """Return a row of one queue that ended well, but for *fields*; an unknown one has no end."""
    usual = {"parent_op_id": op_id, "process": 1, "node": NOTHING, "topic": "t", "queue": 0}
    fields = {**usual, "outcome": Outcome.OK, **fields}
    end = NEVER if fields["outcome"] == Outcome.INFO else ret
    return Operation(op_id, f=f, call_ns=call, ret_ns=end, **fields)
