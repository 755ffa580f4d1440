"""Links between the processes of a run: those that exist, and those that the kernel cuts.

What a proxy (`jepsen_like.chaos.proxy`) cannot do: over a link that the kernel cuts, packets
vanish and a connection stays as it is on both sides; what was sent waits for its acknowledgement
and is sent again ever more rarely, and a new connection gets no answer to its first packet. So
programs find out by their own time limits alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from jepsen_like.chaos.namespaces import RunNetwork, rule_lines
from jepsen_like.nemesis.ground import CannotBeDone, Links
from jepsen_like.plans.link_fault import HEALTHY, LinkFault


class RunLinks(Links, Protocol):
    """All links of a run; see `proxy.LinkProxy` and `KernelLinks`."""

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
        """Damage what passes."""
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


class KernelLinks:
    """The links between the hosts of a network; see `jepsen_like.nemesis.ground.Links`.

    What is asked for happens some milliseconds later, in `serve`. Hosts that the network has not
    are left alone.

    Attributes:
        sometimes: link_cut: how often one direction was.
    """

    def __init__(self, network: RunNetwork) -> None:
        self.sometimes: Counter[str] = Counter()
        self._network = network
        self._wanted: set[tuple[str, str]] = set()
        self._there: frozenset[tuple[str, str]] = frozenset()
        self._changed = trio.Event()

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from *source* to *target*."""
        pair = self._addresses(source, target)
        if pair is not None and pair not in self._wanted:
            self._wanted.add(pair)
            self.sometimes["link_cut"] += 1
            self._changed.set()

    def mend(self, source: str, target: str, *, reset: float = 0.0) -> None:
        """Let everything through again; connections go on when their senders try again.

        Args:
            reset: Not heeded: the kernel resets no connection of others.
        """
        pair = self._addresses(source, target)
        if pair is not None:
            self._wanted.discard(pair)
            self._changed.set()

    def mend_all(self) -> None:
        """Heal every cut."""
        self._wanted.clear()
        self._changed.set()

    def set_fault(self, source: str, target: str, fault: LinkFault) -> None:
        """Only whole links and cut ones can be had here.

        Raises:
            CannotBeDone: *fault* is another one.
        """
        if fault != HEALTHY:
            raise CannotBeDone("links of the kernel can be cut only; the proxy does more to them")

    def reset_between(self, one: str, other: str) -> object:
        """Connections are left half open here, never reset.

        Raises:
            CannotBeDone: Always.
        """
        raise CannotBeDone("only the proxy resets connections")

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry out what is asked for, until cancelled; started at once.

        Raises:
            FaultError: The kernel refused; which links are cut is not known.
        """
        task_status.started()
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            wanted = frozenset(self._wanted)
            lines = rule_lines(self._there, wanted)
            await trio.to_thread.run_sync(partial(self._network.route, lines))
            self._there = wanted

    def _addresses(self, source: str, target: str) -> tuple[str, str] | None:
        hosts = self._network.hosts
        if source not in hosts or target not in hosts:
            return None
        return hosts[source].address, hosts[target].address
