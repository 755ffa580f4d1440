"""Which read proves most that a queue still ended before an offset: one row out of all reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from jepsen_like.history.columns import OBS, operations_of
from jepsen_like.history.operation import NOTHING, F, Level, Operation, Outcome

READS: Final = (int(F.PULL), int(F.MAX_OFFSET))


def latest_before(rows: Any, offs: Iterable[int]) -> list[Operation]:
    """Return, of reads that saw a queue end at an offset or before, the one called last.

    Args:
        rows: A table of reads of one queue.
        offs: The offsets; what no read proves of one is left out.
    """
    columns = {
        name: rows.column(name).to_numpy()
        for name in ("op_id", "outcome", "level", "call_ns", "max_off")
    }
    proves = np.flatnonzero(
        (columns["outcome"] == Outcome.OK)
        & (columns["level"] == Level.LINEARIZABLE)
        & (columns["max_off"] != NOTHING)
    )
    op_id, call, end = (columns[name][proves] for name in ("op_id", "call_ns", "max_off"))
    order = np.argsort(end, kind="stable")
    by_call = np.lexsort((op_id, call))
    rank = np.empty(len(proves), dtype=np.int64)
    rank[by_call] = np.arange(len(proves))
    last = np.maximum.accumulate(rank[order])
    wanted = np.unique(np.fromiter(offs, np.int64))
    place = np.searchsorted(end[order], wanted, side="right")
    chosen = np.unique(proves[by_call[last[place[place > 0] - 1]]])
    return operations_of(rows.take(pa.array(chosen)), OBS.empty_table())
