"""The options of a run that are no part of its plan, and the folder of a run that has ended."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from dledger.output import CliError, ExitCode
from jepsen_like.chaos.recorder import encode_json
from jepsen_like.chaos.runner import LinksBy
from jepsen_like.report.run_folder import RESULT_FILE, read_result


class Extras(msgspec.Struct, frozen=True):
    """How a run differs from its plan; without it, it cannot be repeated.

    Attributes:
        set: Broker settings over those of the plan, each ``table.name=value``.
        broker_tree: Source tree that the brokers run; empty: the one of the runner.
        namesrv: NameServers of a foreign cluster; empty: the runner's own.
        links: What breaks links.
    """

    set: tuple[str, ...] = ()
    broker_tree: str = ""
    namesrv: str = ""
    links: LinksBy = "proxy"

    @property
    def tree(self) -> Path | None:
        """The source tree that the brokers run; None: the one of the runner."""
        return Path(self.broker_tree) if self.broker_tree else None

    def command(self, plan: Path) -> str:
        """Return the command that plays *plan* the same way."""
        words = ["dledger-chaos", "run", "--plan", str(plan)]
        for assignment in self.set:
            words += ["--set", assignment]
        if self.broker_tree:
            words += ["--broker-tree", self.broker_tree]
        if self.namesrv:
            words += ["--namesrv", self.namesrv]
        if self.links != "proxy":
            words += ["--links", self.links]
        return shlex.join(words)


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


def extras_of(folder: Path) -> Extras:
    """Return the options of a run that are no part of its plan; the defaults if it did not end."""
    return msgspec.convert(read_result(folder).get("extras", {}), type=Extras)


def faults_of(folder: Path) -> dict[str, int]:
    """Return how often each fault was done, as the run counted; nothing if it did not end."""
    return dict(read_result(folder).get("faults", {}))


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Write `result.json` and the report of a run; return the page, also put into *result*."""
    from jepsen_like.report.run_report import report

    path = folder / RESULT_FILE
    path.write_bytes(encode_json(result))
    page = report(folder)
    result["report"] = str(page)
    path.write_bytes(encode_json(result))
    return page
