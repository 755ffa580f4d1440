"""The result of a run, as `result.json` and the report have it: from its history and brokers' logs.

A member that refuses another's words because they contradict its own log closes the connection and
goes on, so clients may see nothing of it. Here all members are honest: one of the two is wrong.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import (
    Event,
    F,
    History,
    Outcome,
)
from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.report.series import columns_of, counts_of, percentile, skipped_of
from dledger.jepsen_like.report.wording import many

# ---------------------------------------------------------------------------------- logs of brokers


CHECKER: Final = "broker_logs"

CONTRADICTS: Final = "peer_contradicts"
"""The event of a member that knows another's words to be wrong."""

SHOWN_MAX: Final = 4
"""Violations of one broker; the last one has the number of the others."""


def read_logs(logs: Mapping[str, Path]) -> list[Verdict]:
    """Return the verdict over the logs of brokers; none where there is no finding."""
    found: list[Violation] = []
    for name, path in logs.items():
        if path.exists():
            with path.open(errors="replace") as lines:
                found += contradictions(name, lines)
    return [Verdict(CHECKER, "invalid", tuple(found))] if found else []


def contradictions(name: str, lines: Iterable[str]) -> list[Violation]:
    """Return a violation for each of the first contradictions in the log of broker *name*. Pure."""
    texts = [text for line in lines if (text := _contradiction(line)) is not None]
    shown = [
        Violation("members contradict each other", name, text, checker=CHECKER)
        for text in texts[:SHOWN_MAX]
    ]
    if len(texts) > SHOWN_MAX:
        more = f"{shown.pop().detail} ({len(texts) - SHOWN_MAX + 1} like it)"
        shown.append(Violation("members contradict each other", name, more, checker=CHECKER))
    return shown


def _contradiction(line: str) -> str | None:
    """Return the contradiction that a line reports; None: it reports none."""
    if CONTRADICTS not in line:
        return None
    try:
        facts = json.loads(line)
    except ValueError:
        return line.strip()  # cut off by a kill: it was begun all the same
    if not isinstance(facts, dict) or facts.get("event") != CONTRADICTS:
        return None
    return f"{facts.get('error')} (from {facts.get('peer_address')})"


# ---------------------------------------------------------------------------------- the result


LEADER_LOSSES: Final = frozenset({Kind.KILL, Kind.POWER_CUT, Kind.PAUSE, Kind.ISOLATE})
"""Faults after which another one has to lead."""

LOST: Final = "acknowledged message lost"
DOUBLED: Final = frozenset({"message stored twice", "duplicate", "delivered twice"})

_BOOKKEEPING: Final = frozenset({"skipped", "restarted_by_supervisor", "failed"})
_NOT_A_FAULT: Final = frozenset({"role", "healed", "add_missing"})
_HOW_MANY: Final = re.compile(r"\((\d+) like it\)")


def failover_ms(history: History) -> list[float]:
    """Return, for each loss of a leader, how long until a send called since was acknowledged."""
    leads = _leaderships(history.events)
    acked = sorted(
        (op.call_ns, op.ret_ns)
        for op in history.operations
        if op.f == F.SEND and op.outcome == Outcome.OK
    )
    found: list[float] = []
    for event in history.events:
        hit = event.kind in LEADER_LOSSES and not event.detail.startswith("skipped")
        if not hit or _leader_at(leads, event.at_ns) != event.node:
            continue
        later = _first_ack(acked, event.at_ns)
        if later is not None:
            found.append((later - event.at_ns) / 1e6)
    return found


def _leaderships(events: Iterable[Event]) -> list[tuple[int, str]]:
    return [
        (event.at_ns, event.node)
        for event in events
        if event.kind == "role" and event.detail.startswith("leader")
    ]


def _leader_at(leads: Sequence[tuple[int, str]], at_ns: int) -> str:
    return next((node for since_ns, node in reversed(leads) if since_ns <= at_ns), "")


def _first_ack(acked: Sequence[tuple[int, int]], at_ns: int) -> int | None:
    low = bisect_left(acked, (at_ns,))
    return min((ret_ns for _, ret_ns in acked[low : low + 1000]), default=None)


def result_of(
    history: History, verdicts: Sequence[Verdict], verdict: Verdict, faults: Counter[str]
) -> dict[str, Any]:
    """Return the content of `result.json`, but for what only the runner knows."""
    counts = counts_of(columns_of(history.operations))
    times = failover_ms(history)
    done = {
        kind: count
        for kind, count in sorted(faults.items())
        if kind not in _BOOKKEEPING | _NOT_A_FAULT
    }
    return {
        "verdict": verdict.validity,
        "reason": verdict.reason,
        "acknowledged": sum(by["ok"] for by in counts.values()),
        "acknowledged_sends": counts.get("send", {}).get("ok", 0),
        "lost": _how_many(verdict, frozenset({LOST})),
        "duplicated": _how_many(verdict, DOUBLED),
        "faults_done": sum(done.values()),
        "fault_kinds": len(done),
        "aimed_at_leader": sum(
            event.target == "leader" and not event.detail.startswith("skipped")
            for event in history.events
        ),
        "failovers": len(times),
        "failover_p50_ms": _rounded(percentile(times, 50) if times else None),
        "failover_p99_ms": _rounded(percentile(times, 99) if times else None),
        "failover_max_ms": _rounded(max(times, default=None)),
        "failover_ms": [round(value, 3) for value in times],
        "counts": counts,
        "faults": done,
        "skipped": msgspec.to_builtins(skipped_of(history.events)),
        "versions": history.header.versions,
        "verdicts": msgspec.to_builtins(list(verdicts)),
    }


FEW_FAULTS: Final = 3
FEW_SENDS: Final = 100
"""Below these a run is a smoke test: nearly every bug outlives it."""


def too_little(result: Mapping[str, Any]) -> list[str]:
    """Return why a good verdict of this run proves little; nothing when enough has happened."""
    reasons = []
    if result["faults_done"] < FEW_FAULTS:
        reasons.append(f"{many(result['faults_done'], 'fault')} in all")
    if not result["aimed_at_leader"]:
        reasons.append("none of them at the leader")
    if not result["failovers"]:
        reasons.append("no fail-over")
    if result["acknowledged_sends"] < FEW_SENDS:
        reasons.append(f"{many(result['acknowledged_sends'], 'acknowledged send')}")
    return reasons


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _how_many(verdict: Verdict, names: frozenset[str]) -> int:
    """Count violations; checkers name the first few and say how many there are in all."""
    by_checker: Counter[str] = Counter()
    for violation in verdict.violations:
        if violation.name in names:
            reported = _HOW_MANY.search(violation.detail)
            by_checker[violation.checker] += 1
            if reported:
                by_checker[violation.checker] = max(
                    by_checker[violation.checker], int(reported.group(1))
                )
    return max(by_checker.values(), default=0)
