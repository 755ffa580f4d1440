"""The links between real processes as a nemesis sees them, whoever carries the faults out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import trio

from jepsen_like.nemesis.ground import CannotBeDone, Links
from jepsen_like.plans.link_fault import HEALTHY, LinkFault


class RunLinks(Links, Protocol):
    """All links of a run; see `proxy.LinkProxy` and `kernel_links.KernelLinks`."""

    @property
    def sometimes(self) -> Counter[str]:
        """What happened how often."""

    def mend_all(self) -> None:
        """Heal everything."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry out what is asked for, until cancelled."""


class RealLinks:
    """The links of a run that there are; others are left alone.

    Args:
        known: Whether there is a link between two names.
        why_not: Why links cannot be broken as it was asked for; None when they can.
    """

    def __init__(
        self, links: RunLinks, known: Callable[[str, str], bool], why_not: str | None = None
    ) -> None:
        self._links = links
        self._known = known
        self._why_not = why_not

    def cut(self, source: str, target: str) -> None:
        """Let nothing through."""
        self._must_be_possible()
        if self._known(source, target):
            self._links.cut(source, target)

    def mend(self, source: str, target: str, *, reset: float = 0.0) -> None:
        """Let everything through again."""
        if self._known(source, target):
            self._links.mend(source, target, reset=reset)

    def set_fault(self, source: str, target: str, fault: LinkFault) -> None:
        """Spoil what passes."""
        if fault != HEALTHY:
            self._must_be_possible()
        if self._known(source, target):
            self._links.set_fault(source, target, fault)

    def reset_between(self, one: str, other: str) -> object:
        """Reset all connections between the two."""
        self._must_be_possible()
        return self._links.reset_between(one, other) if self._known(one, other) else 0

    def _must_be_possible(self) -> None:
        if self._why_not is not None:
            raise CannotBeDone(self._why_not)
