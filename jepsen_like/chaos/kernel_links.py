"""Links that the kernel cuts: packets vanish, and neither side is told.

What a proxy cannot do: a connection over a cut link stays as it is on both sides, what was sent
waits for its acknowledgement and is sent again ever more rarely, and a new connection gets no
answer to its first packet. So programs find out by their own time limits alone.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import trio

from jepsen_like.chaos.namespaces import RunNetwork, rule_lines
from jepsen_like.nemesis.ground import CannotBeDone
from jepsen_like.plans.link_fault import HEALTHY, LinkFault


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
