"""The law of one queue, over tables in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dledger.jepsen_like.checkers.kernel.facts import OBS_COLUMNS, OPS_COLUMNS
from dledger.jepsen_like.checkers.kernel.judge import Judged, judge_queue
from dledger.jepsen_like.checkers.kernel.tables import gather, table_to_numpy
from dledger.jepsen_like.checkers.queue_log import name_violations
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import Operation


def check_tables(
    ops: Any, obs: Any, subject: str = "", appends: Sequence[Operation] = ()
) -> tuple[Judged, list[Violation]]:
    """Return the judgement and the violations of one queue whose tables are in memory."""
    rows, seen = table_to_numpy(ops, OPS_COLUMNS), table_to_numpy(obs, OBS_COLUMNS)
    judged = judge_queue(gather([rows], [seen], appends))
    if judged.is_valid:
        return judged, []
    return judged, name_violations(judged, rows, seen, subject, tuple(appends))
