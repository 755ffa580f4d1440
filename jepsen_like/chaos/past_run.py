"""What the folder of a run that is over says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dledger.cli.output import CliError, ExitCode
from jepsen_like.chaos.extras import Extras
from jepsen_like.checkers.verdict import Verdict, Violation


def folder_of(name: str, store: Path) -> Path:
    """Return the folder of a run, by its path or by its name in *store*.

    Raises:
        CliError: There is none; a usage error.
    """
    for folder in (Path(name), store / name):
        if (folder / "plan.json").is_file():
            return folder
    raise CliError(
        f"{name} is no run, here or in {store}",
        next_step="name one, or its --store; dledger-chaos serve lists them",
        exit_code=ExitCode.USAGE,
    )


def verdicts_before(folder: Path) -> list[Verdict]:
    """Verdicts that no history holds: liveness, and files that could not be read."""
    path = folder / "result.json"
    if not path.is_file():
        gone = Violation("the run did not end", "runner", "it has no result.json")
        return [Verdict("run", "unknown", reason=gone.detail)]
    told = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    return msgspec.convert(told.get("verdicts", []), type=list[Verdict])


def extras_of(folder: Path) -> Extras:
    """Return what belonged to the run beside its plan, as far as it wrote that down."""
    path = folder / "result.json"
    if not path.is_file():
        return Extras()
    told: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return msgspec.convert(told.get("extras", {}), type=Extras)


def faults_of(folder: Path) -> dict[str, int]:
    """Return how often each fault was done, as the run counted."""
    path = folder / "result.json"
    if not path.is_file():
        return {}
    told: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return dict(told.get("faults", {}))
