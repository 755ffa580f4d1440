"""The sentences of a page: the verdict, operations, times. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome
from dledger.jepsen_like.report.run_folder import Result

PROOF_OF_ALL: Final = frozenset({"total_queue", "replicas"})
"""Checkers whose pass means that nothing is lost: they compare acknowledgements with the end."""

VALUES_SHOWN: Final = 4
"""Of a pull; the rest is in the history."""

KIND_CHARACTERS: Final = 16
"""Of a line: beside a plot there is no space for more."""

QUOTED_MAX: Final = 2
"""Witnesses in the first sentence; the table has all."""


def verdict_sentence(
    result: Result,
    counts: Mapping[str, Mapping[str, int]],
    faults: Mapping[str, int],
    witnesses: Mapping[int, Operation],
    begin_ns: int,
    *,
    is_whole: bool = True,
) -> str:
    """Return what a reader needs to know if he reads nothing else.

    A verdict *valid* over a history without an acknowledged operation is reported as unknown.
    """
    acked = sum(by_outcome.get("ok", 0) for by_outcome in counts.values())
    over = f"{many(acked, 'acknowledged operation')} over {many(sum(faults.values()), 'fault')}"
    over += f" of {many(len(faults), 'kind')}" if faults else ""
    first = next((v for verdict in result.verdicts for v in verdict.violations), None)
    if result.verdict == "invalid":
        if first is None:
            return f"invalid: {result.reason or 'no violation was written down'} ({over})"
        quoted = [describe(witnesses[at], begin_ns) for at in first.operations if at in witnesses]
        said = f"invalid: {first.name} in {first.subject}: {first.detail}"
        return said + "".join(f" [{text}]" for text in quoted[:QUOTED_MAX])
    if result.verdict == "unknown":
        return f"unknown: {result.reason or 'no reason was given'} ({over})"
    if not acked:
        return "unknown: the result is valid, but no acknowledged operation is in the history"
    damaged = "" if is_whole else "; the history shown here is torn or damaged"
    return f"valid: {over}; {_what_was_proved(result.verdicts)}{damaged}"


def _what_was_proved(verdicts: tuple[Verdict, ...]) -> str:
    if not verdicts:
        return "the verdicts of the checkers were not kept"
    if any(verdict.is_valid and verdict.checker in PROOF_OF_ALL for verdict in verdicts):
        return "nothing lost, nothing doubled"
    return "every check passed"


def many(count: int, noun: str) -> str:
    """Return a number of things."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def describe(op: Operation, begin_ns: int) -> str:
    """Return one operation as a person would quote it."""
    where = f" {op.topic}/{op.queue}" if op.topic else ""
    said = f"operation {op.op_id}: {F(op.f).name.lower()}{where} by client {op.process}"
    said += f", called at {seconds_text(op.call_ns - begin_ns)}"
    if op.f == F.SEND:
        said += f", value {op.value}"
    elif op.f in (F.PULL, F.COMMIT) and op.off != NOTHING:
        said += f", offset {op.off}"
    if op.group:
        said += f", group {op.group}"
    return f"{said}; {_answer(op)}"


def _answer(op: Operation) -> str:
    took = "" if op.ret_ns == NEVER else f" after {(op.ret_ns - op.call_ns) / 1e6:,.1f} ms"
    if op.outcome == Outcome.INFO:
        return f"its outcome is not known{took}{_because(op)}"
    if op.outcome == Outcome.FAIL:
        return f"failed{took}{_because(op)}"
    facts: list[str] = []
    if op.f == F.SEND and op.off != NOTHING:
        facts.append(f"stored at offset {op.off}")
    elif op.f == F.FETCH_COMMIT:
        facts.append(f"committed offset {op.off}")
    elif op.f == F.PULL:
        some = ", ".join(map(str, op.values[:VALUES_SHOWN]))
        more = " …" if len(op.values) > VALUES_SHOWN else ""
        facts.append(f"found {len(op.values)}" + (f" ({some}{more})" if some else ""))
    if op.max_off != NOTHING:
        facts.append(f"end at {op.max_off}")
    return f"{', '.join(facts) or 'done'}{took}"


def _because(op: Operation) -> str:
    return f" ({op.err})" if op.err else ""


def seconds_text(ns: int) -> str:
    """Return a moment in seconds, to the millisecond."""
    return f"{ns / 1e9:,.3f} s"


def clock_text(at_s: float) -> str:
    """Return ``m:ss`` below an hour and ``h:mm`` above it."""
    minutes, seconds = divmod(round(at_s), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02}"
    return f"{minutes // 60}:{minutes % 60:02}"


def kind_text(kind: str) -> str:
    """Return *kind* as people write it."""
    return kind.replace("_", " ")


def kind_lines(kind: str) -> str:
    """Return *kind* as it stands in a picture: on two lines where it is long."""
    return textwrap.fill(kind_text(kind), KIND_CHARACTERS)


def duration_text(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{clock_text(seconds)} {'min' if seconds < 3600 else 'h'}"


def when_text(violation: Violation, begin_ns: int) -> str:
    """Return when *violation* showed; nothing when it has no time."""
    return seconds_text(violation.at_ns - begin_ns) if violation.at_ns else ""
