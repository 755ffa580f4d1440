"""One answer from the verdicts of one run: what its plan left out proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jepsen_like.checkers import consumer_offsets, delayed
from jepsen_like.checkers.verdict import Verdict, Violation, merge
from jepsen_like.history.parquet import Ingested
from jepsen_like.plans.plan import Plan
from jepsen_like.plans.promised import has_delayed_messages
from spark_jobs.checks.everything import digest_of


class Outcome(msgspec.Struct):
    """What `dledger check` says.

    Attributes:
        verdict: valid, invalid or unknown.
        reason: Why it is unknown.
        operations: Rows that were judged.
        anomalies: One object each: checker, name, where, what, witnesses.
        seconds: How long it took.
        digest: Of everything found; equal for every engine and every split.
        verdicts: One per checker.
    """

    verdict: str
    reason: str
    operations: int
    anomalies: list[dict[str, Any]]
    seconds: float
    digest: str
    verdicts: list[Verdict]


def outcome_of(
    verdicts: Sequence[Verdict],
    kept: Sequence[Verdict],
    counts: Ingested,
    plan: Plan | None,
    seconds: float,
) -> Outcome:
    """Return the answer.

    Args:
        verdicts: What the checks said.
        kept: Verdicts of the run itself, which no history holds.
        counts: What became of the records; those that could not be read make it no pass.
        plan: Of the run, where there was one.
        seconds: How long it took.
    """
    every = [*kept, *verdicts]
    if counts.lost_records:
        reason = f"{counts.lost_records} records of the history could not be read"
        every.append(Verdict("ingest", "unknown", reason=reason))
    workload = None if plan is None else plan.workload
    has_delayed = workload is not None and has_delayed_messages(workload)
    left_out = {
        delayed.NAME: not has_delayed,
        consumer_offsets.NAME: workload is None or not workload.consumers,
    }
    merged = merge(
        verdict
        for verdict in every
        if not (verdict.validity == "unknown" and left_out.get(verdict.checker))
    )
    return Outcome(
        merged.validity,
        merged.reason,
        counts.ops,
        [_anomaly(violation) for violation in merged.violations],
        round(seconds, 3),
        digest_of(verdicts),
        every,
    )


def _anomaly(violation: Violation) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(violation)
    return told
