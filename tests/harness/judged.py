"""Verdicts of histories in memory, and what they state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dledger.jepsen_like.checkers.all_checks import Settings, check_everything
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import History, Operation, RunHeader

if TYPE_CHECKING:
    from dledger.jepsen_like.simulation.play import Played


def comparable(verdicts: Iterable[Verdict]) -> dict[str, object]:
    """Return all that verdicts state, in an order of its own."""
    return {
        verdict.checker: (
            verdict.validity,
            verdict.counts,
            sorted(
                (v.name, v.subject, v.detail, v.at_ns, v.operations) for v in verdict.violations
            ),
        )
        for verdict in verdicts
    }


def judged(checker: str, history: History | Iterable[Operation], **settings: Any) -> Verdict:
    """Return the verdict of *checker*."""
    if not isinstance(history, History):
        history = History(RunHeader("r"), list(history))
    (found,) = [
        v
        for v in check_everything(history, Settings(**{"settled": True, **settings}))
        if v.checker == checker
    ]
    return found


def broken(played: Played) -> set[str]:
    """Return the names of what was violated in a play."""
    return {violation.name for violation in played.violations}
