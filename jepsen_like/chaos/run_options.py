"""The options of a run that are no part of its plan."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from jepsen_like.chaos.runner import LinksBy


class Extras(msgspec.Struct, frozen=True):
    """How a run differs from what its plan says; without it, it cannot be repeated.

    Attributes:
        set: Broker settings over those of the plan, each ``table.name=value``.
        mutant: Number of a planted bug; 0: none.
        namesrv: NameServers of somebody else's cluster; empty: the runner's own.
        links: Who breaks links.
    """

    set: tuple[str, ...] = ()
    mutant: int = 0
    namesrv: str = ""
    links: LinksBy = "proxy"

    def command(self, plan: Path) -> str:
        """Return the command that plays *plan* the same way."""
        words = ["dledger-chaos", "run", "--plan", str(plan)]
        for assignment in self.set:
            words += ["--set", assignment]
        if self.mutant:
            words += ["--mutant", str(self.mutant)]
        if self.namesrv:
            words += ["--namesrv", self.namesrv]
        if self.links != "proxy":
            words += ["--links", self.links]
        return shlex.join(words)
