"""The options of a run that are no part of its plan."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from jepsen_like.chaos.runner import LinksBy


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
