"""A file that Jepsen wrote, from its text to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.foreign import list_append, log, register, sets
from dledger.jepsen_like.foreign.edn import EdnError
from dledger.jepsen_like.foreign.recorded import Attempt, RecordError, read_text, workload_of

Chosen = Literal["kafka", "register", "set", "linearizable-set", "list-append"]

SUFFIXES: Final = (".edn", ".json", ".jsonl")
STORED: Final = ("history.edn", "history.json")
"""Names of a history in the folder of a test that Jepsen stored."""

CHECKS: Final[dict[Chosen, Callable[[list[Attempt]], Verdict]]] = {
    "kafka": log.check,
    "register": register.check,
    "set": sets.check,
    "linearizable-set": lambda attempts: sets.check(attempts, is_linearizable=True),
    "list-append": list_append.check,
}
assert tuple(CHECKS) == get_args(Chosen)


class Judgement(NamedTuple):
    """The verdict over a foreign history, and how many operations it has."""

    verdict: Verdict
    operations: int


def history_file(path: Path) -> Path | None:
    """Return the history of Jepsen's at *path*, a file or the folder of a stored test, or None."""
    if path.is_file():
        return path if path.suffix in SUFFIXES else None
    return next((path / name for name in STORED if (path / name).is_file()), None)


def judge_text(text: str, workload: Chosen | None = None) -> Judgement:
    """Judge a history; one that cannot be read is unknown, with a sentence.

    Args:
        workload: What made it; None: it shows by its operations.
    """
    name: str = workload or "history"
    attempts: list[Attempt] = []
    try:
        attempts = read_text(text)
        chosen: Chosen = workload or workload_of(attempts)
        name = chosen
        return Judgement(CHECKS[chosen](attempts), len(attempts))
    except (EdnError, RecordError) as error:
        return Judgement(Verdict(name, "unknown", reason=str(error)), len(attempts))


def judge_file(path: Path, workload: Chosen | None = None) -> Judgement:
    """Judge the history in a file.

    Raises:
        OSError: It cannot be read.
    """
    try:
        text = path.read_text("utf-8-sig")  # with the mark that some editors put in front
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} of {path.name} is no UTF-8"
        return Judgement(Verdict(workload or "history", "unknown", reason=reason), 0)
    return judge_text(text, workload)
