"""Every checker over one history."""

from __future__ import annotations

from jepsen_like.checkers import consumer_offsets, delayed, queue_log, replicas, total_queue
from jepsen_like.checkers.verdict import Verdict, checked
from jepsen_like.history.operation import History


def check_everything(
    history: History, *, settled: bool = True, clock_error_ns: int = 0
) -> list[Verdict]:
    """Return one verdict per checker.

    Args:
        settled: Faults were over, everything was drained and every replica read.
        clock_error_ns: How far a broker's clock may have been ahead.
    """
    operations = history.operations
    verdicts = [
        checked(queue_log.NAME, lambda: queue_log.check_history(operations)),
        checked(consumer_offsets.NAME, lambda: consumer_offsets.check_history(operations)),
        checked(
            delayed.NAME,
            lambda: delayed.check_history(history, clock_error_ns=clock_error_ns, drained=settled),
        ),
        checked(replicas.NAME, lambda: replicas.check_history(history, settled=settled)),
    ]
    if settled:
        verdicts.append(checked(total_queue.NAME, lambda: total_queue.check_history(history)))
    return verdicts
