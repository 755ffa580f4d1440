"""What a checker returns: valid, invalid or unknown, and for each violation its witnesses.

Unknown is no pass: a checker that saw nothing, or broke, has proved nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from dledger.commitlog.errors import MQError
from dledger.jepsen_like.history.operation import NEVER, Operation

Validity = Literal["valid", "invalid", "unknown"]

REPORTED_MAX: Final = 8
"""Violations of each kind that a checker names."""


class BadInputError(MQError):
    """Input that gives no verdict: the sentence names the file and what to do."""


class Violation(msgspec.Struct, frozen=True):
    """One violation.

    Attributes:
        name: Which anomaly, by the name it has in docs/internals/simulation/checkers.md.
        subject: Where, e.g. ``orders/3``.
        detail: One sentence a person can act on.
        operations: Op ids of the witnesses, as few as prove it.
    """

    name: str
    subject: str
    detail: str
    operations: tuple[int, ...] = ()
    checker: str = ""
    at_ns: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """What one checker, or all of them, found.

    *violations*: at most a few of each kind; `counts` has how many there were.
    """

    checker: str
    validity: Validity
    violations: tuple[Violation, ...] = ()
    counts: dict[str, int] = {}
    reason: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether no violation was found."""
        return self.validity == "valid"


def few_of_each(violations: Iterable[Violation]) -> list[Violation]:
    """Return the first violations of each kind."""
    counts: Counter[str] = Counter()
    kept: list[Violation] = []
    for violation in violations:
        counts[violation.name] += 1
        if counts[violation.name] <= REPORTED_MAX:
            kept.append(violation)
    return kept


def violation_of(name: str, subject: str, text: str, *witnesses: Operation) -> Violation:
    """Return a violation that operations prove, at the time at which the last one was over."""
    times_ns = [op.ret_ns for op in witnesses if op.ret_ns != NEVER]
    times_ns = times_ns or [op.call_ns for op in witnesses]
    ids = tuple(op.op_id for op in witnesses)
    return Violation(name, subject, text, ids, at_ns=max(times_ns, default=0))


def judge(
    checker: str, violations: Iterable[Violation], counts: dict[str, int], *, looked_at: int
) -> Verdict:
    """Return the verdict of a checker that ran to its end: it names the first of each kind."""
    found = tuple(
        msgspec.structs.replace(violation, checker=checker) for violation in few_of_each(violations)
    )
    if found:
        return Verdict(checker, "invalid", found, counts)
    if looked_at == 0:
        return Verdict(checker, "unknown", (), counts, "nothing to check")
    return Verdict(checker, "valid", (), counts)


def checked(checker: str, run: Callable[[], Verdict]) -> Verdict:
    """Return the verdict of *run*; unknown, with the error, when it breaks.

    Raises BadInputError: the tables cannot be judged, by this check or another.
    """
    try:
        return run()
    except BadInputError:
        raise
    except Exception as error:  # noqa: BLE001  # a checker that breaks proves nothing: its verdict is unknown, with the error
        return Verdict(checker, "unknown", reason=f"{type(error).__name__}: {error}")


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return one verdict: invalid before unknown before valid."""
    every = list(verdicts)
    validity: Validity = "valid"
    if any(verdict.validity == "invalid" for verdict in every):
        validity = "invalid"
    elif not every or any(verdict.validity == "unknown" for verdict in every):
        validity = "unknown"
    counts: dict[str, int] = {}
    for verdict in every:
        for key, count in verdict.counts.items():
            counts[f"{verdict.checker}.{key}"] = count
    return Verdict(
        "all",
        validity,
        tuple(violation for verdict in every for violation in verdict.violations),
        counts,
        "; ".join(f"{v.checker}: {v.reason}" for v in every if v.reason),
    )


def digest_of(verdicts: Iterable[Verdict]) -> str:
    """Return a hash of everything that was found; equal for every engine and every split."""
    found = [
        {
            "checker": verdict.checker,
            "validity": verdict.validity,
            "counts": dict(sorted(verdict.counts.items())),
            "violations": sorted(
                [v.name, v.subject, v.detail, list(v.operations), v.at_ns]
                for v in verdict.violations
            ),
        }
        for verdict in sorted(verdicts, key=lambda verdict: verdict.checker)
    ]
    return hashlib.sha256(msgspec.json.encode(found)).hexdigest()
