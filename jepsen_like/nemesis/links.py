"""The faults of links: cut, reset, slow, or with loss.

Faults overlap: a link is cut while any step wants it cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from dledger.jepsen_like.history.operation import Event
from dledger.jepsen_like.nemesis.ground import HEALTHY, CannotBeDone, Ground, LinkFault
from dledger.jepsen_like.nemesis.nodes import Nodes
from dledger.jepsen_like.plans.plan import Kind, Step

RESET_ON_MEND: Final = 0.3
"""How often a connection with bytes waiting breaks when its link is mended."""


class Links:
    """The links of one run."""

    def __init__(self, ground: Ground, nodes: Nodes) -> None:
        self._ground = ground
        self._nodes = nodes
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._qualities: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def forget(self) -> None:
        """Forget what is cut or slow: the world is healed as a whole."""
        self._cuts.clear()
        self._qualities.clear()

    def _pairs(self, step: Step, event: Event) -> list[tuple[str, str]]:
        """Return the directed links that a step cuts."""
        names = list(self._ground.brokers)
        node = self._nodes.one(step, event).name if step.target != "all" else names[0]
        others = [name for name in names if name != node]
        outside = [*self._ground.clients, *self._ground.name_servers]
        at = names.index(node)
        match step.kind:
            case Kind.ISOLATE:
                return both_ways([node], others)
            case Kind.MUTE:
                return [(node, other) for other in others]
            case Kind.DEAF:
                return [(other, node) for other in others]
            case Kind.PARTIAL:
                other = names[(at + 1 + step.arg % max(1, len(others))) % len(names)]
                return both_ways([node], [other]) if other != node else []
            case Kind.RING:
                size = len(names)
                far = [
                    (a, b)
                    for i, a in enumerate(names)
                    for j, b in enumerate(names)
                    if (i - j) % size not in (0, 1, size - 1)
                ]
                return far or both_ways([names[0]], [names[1 % size]])
            case Kind.BRIDGE:
                half = len(others) // 2
                return both_ways(others[:half], others[half:])
            case Kind.CLIENT_CUT:
                return both_ways([node], outside)
            case _:  # SPLIT
                every = [*names, *outside]
                left = [name for bit, name in enumerate(every) if step.arg >> bit % 10 & 1]
                event.detail = "|".join(left)
                return both_ways(left, [name for name in every if name not in left])

    async def cut_links(self, step: Step, event: Event) -> None:
        """Cut the links of a step, and mend them later."""
        pairs = self._pairs(step, event)
        if step.kind is Kind.ISOLATE and step.arg % 2:
            with suppress(CannotBeDone):
                for pair in pairs:
                    self._ground.network.reset_between(*pair)
        self.cut(pairs)
        await self._ground.sleep(step.for_ms / 1000)
        self.mend(pairs)

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Cut links; each is cut until every cut is mended."""
        for pair in pairs:
            if not self._cuts[pair]:
                self._ground.network.cut(*pair)
            self._cuts[pair] += 1

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Mend links that no other step wants cut."""
        for pair in pairs:
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                self._ground.network.mend(*pair, reset=RESET_ON_MEND)

    async def swizzle(self, step: Step, event: Event) -> None:
        """Cut all links one after the other, and mend them in another order."""
        names = list(self._ground.brokers)
        pairs = [(a, b) for a in names for b in names if a != b]
        if not pairs:
            raise CannotBeDone("one broker")
        pause_s = step.for_ms / 1000 / (2 * len(pairs))
        self._nodes.rng.shuffle(pairs)
        for pair in pairs:
            self.cut([pair])
            await self._ground.sleep(pause_s)
        self._nodes.rng.shuffle(pairs)
        for pair in pairs:
            self.mend([pair])
            await self._ground.sleep(pause_s)

    async def reset(self, step: Step, event: Event) -> None:
        """Break all connections of a node."""
        node = self._nodes.one(step, event)
        ground = self._ground
        for other in (*ground.name_servers, *ground.brokers, *ground.clients):
            if other != node.name:
                ground.network.reset_between(node.name, other)

    async def spoil_links(self, step: Step, event: Event) -> None:
        """Let links lose, delay, repeat, reorder, hold or change bytes."""
        share = step.arg / 1000
        change: dict[str, Any] = {
            Kind.LOSS: {"loss": share, "silent": step.arg % 2 == 0},
            Kind.DELAY: {"delay_s": share, "jitter_s": share},
            Kind.DUPLICATE: {"duplicate": share},
            Kind.REORDER: {"reorder": share},
            Kind.HOLD: {"hold": share},
            Kind.CORRUPT: {"corrupt": share},
            Kind.SLOW_LINK: {"bytes_per_s": float(step.arg)},
        }[step.kind]
        nodes = [node.name for node in self._nodes.resolve(step.target)]
        event.node = ",".join(nodes)
        ways = both_ways(nodes, self._ground.brokers)
        pairs = sorted({(one, other) for one, other in ways if one != other})
        await self._change_links(pairs, change, step)

    async def lose_at_name_servers(self, step: Step, event: Event) -> None:
        """Let links of NameServers lose bytes."""
        ground = self._ground
        event.node = ",".join(ground.name_servers)
        pairs = both_ways(ground.name_servers, [*ground.brokers, *ground.clients])
        await self._change_links(pairs, {"loss": step.arg / 1000}, step)

    async def _change_links(
        self, pairs: list[tuple[str, str]], change: dict[str, Any], step: Step
    ) -> None:
        for pair in pairs:
            self._qualities.setdefault(pair, []).append(change)
            try:
                self._set_quality(pair)
            except CannotBeDone:
                self._qualities[pair].pop()
                raise
        await self._ground.sleep(step.for_ms / 1000)
        for pair in pairs:
            active = self._qualities[pair]
            del active[next(at for at, item in enumerate(active) if item is change)]
            self._set_quality(pair)

    def _set_quality(self, pair: tuple[str, str]) -> None:
        active = self._qualities[pair]
        fault: LinkFault = HEALTHY
        for change in active:
            fault = replace(fault, **change)
        self._ground.network.set_fault(*pair, fault)

    def around(self, name: str) -> list[tuple[str, str]]:
        """Return the links of a broker with all others."""
        return both_ways([name], [other for other in self._ground.brokers if other != name])


def both_ways(left: Iterable[str], right: Iterable[str]) -> list[tuple[str, str]]:
    """Return the directed links between two sets of nodes."""
    theirs = list(right)
    return [pair for one in left for other in theirs for pair in ((one, other), (other, one))]
