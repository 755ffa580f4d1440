"""What brokers write into their logs that no cluster of honest members writes.

A member that refuses another's words because they contradict its own log closes the connection and
goes on, so clients may see nothing of it. Here all members are honest: one of the two is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from jepsen_like.checkers.verdict import Verdict, Violation

CHECKER: Final = "broker_logs"

CONTRADICTS: Final = "peer_contradicts"
"""The event of a member that knows another's words to be wrong."""

SHOWN_MAX: Final = 4
"""Violations of one broker; the last one has the number of the others."""


def read_logs(logs: Mapping[str, Path]) -> list[Verdict]:
    """Return the verdict over the logs of brokers; none where there is no finding.

    Args:
        logs: The log file of each broker; a missing file has no findings.
    """
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
