"""Cycles of dependencies between transactions, and the names that Adya and Elle gave them.

An edge a → b means that a comes before b in every order that explains what was seen: b overwrote a
(ww), b read what a wrote (wr), a read what b overwrote (rw), a had completed before b was invoked
(rt). A cycle means that there is no such order; its name is that of the strongest kinds it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dledger.jepsen_like.foreign.recorded import Attempt
from dledger.jepsen_like.history.operation import NEVER

SEARCHED_MAX: Final = 512
"""Edges of a component from which a cycle is searched, for each name; a search visits the component
once, and the shortest cycle found is reported. No component passes by this: G0 and G1c are searched
only from edges that lie on such a cycle, and so is the last name, G2-item. What is a G-single or a
G-nonadjacent from a later edge alone is named G2-item."""

REALTIME: Final = "-realtime"


@dataclass(slots=True)
class Graph:
    """Dependencies: from → to → kind → why, in words that name neither end."""

    edges: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict)

    def link(self, begin: int, end: int, kind: str, why: str) -> None:
        """Add an edge, unless it is from a node to itself."""
        if begin != end:
            self.edges.setdefault(begin, {}).setdefault(end, {}).setdefault(kind, why)

    def after(self, node: int, kinds: Collection[str]) -> Iterator[int]:
        """Yield what an edge of one of *kinds* leads to."""
        for end, found in self.edges.get(node, {}).items():
            if not found.keys().isdisjoint(kinds):
                yield end


@dataclass(slots=True, frozen=True)
class Cycle:
    """A cycle: its name, its nodes in order (the first follows the last), the kind of each edge."""

    name: str
    nodes: tuple[int, ...]
    kinds: tuple[str, ...]

    def steps(self, graph: Graph) -> list[tuple[int, int, str]]:
        """Return each edge: from, to, why."""
        ends = (*self.nodes[1:], self.nodes[0])
        return [
            (begin, end, graph.edges[begin][end][kind])
            for begin, end, kind in zip(self.nodes, ends, self.kinds, strict=True)
        ]


def link_real_time(graph: Graph, attempts: Iterable[tuple[int, Attempt]]) -> None:
    """Add an rt edge from each attempt to those invoked after it, as few as imply the others."""
    events: list[tuple[int, int, int, int]] = []
    for node, one in attempts:
        events.append((one.call, 0, node, one.index))
        if one.ret != NEVER:
            events.append((one.ret, 1, node, one.index))
    frontier: dict[int, int] = {}
    before: dict[int, list[int]] = {}
    for _, is_end, node, _ in sorted(events):
        if is_end:
            for other in before.pop(node):
                frontier.pop(other, None)
            frontier[node] = node
        else:
            before[node] = list(frontier)
            for other in frontier:
                graph.link(other, node, "rt", "completed before the other was invoked")


def components(graph: Graph, kinds: Collection[str]) -> list[list[int]]:
    """Return the strongly connected components of two nodes or more; Tarjan, without recursion."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    found: list[list[int]] = []
    for root in sorted(graph.edges):
        if root in number:
            continue
        work = [(root, graph.after(root, kinds))]
        number[root] = low[root] = len(number)
        path.append(root)
        on_path.add(root)
        while work:
            node, rest = work[-1]
            for end in rest:
                if end not in number:
                    number[end] = low[end] = len(number)
                    path.append(end)
                    on_path.add(end)
                    work.append((end, graph.after(end, kinds)))
                    break
                if end in on_path:
                    low[node] = min(low[node], number[end])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    at = path.index(node) if node == path[0] else _last(path, node)
                    group, path[at:] = path[at:], []
                    on_path.difference_update(group)
                    if len(group) > 1:
                        found.append(sorted(group))
    return found


def _last(path: list[int], node: int) -> int:
    at = len(path) - 1
    while path[at] != node:
        at -= 1
    return at


def cycles_of(graph: Graph) -> list[Cycle]:
    """Return the cycles that prove an anomaly: of each component the shortest of each name.

    A name with `-realtime` needs the order of time; it is searched where no cycle does without.
    """
    found: list[Cycle] = []
    explained: set[int] = set()
    for extra in ((), ("rt",)):
        for group in components(graph, ("ww", "wr", "rw", *extra)):
            if explained.isdisjoint(group):
                named = list(_named(graph, set(group), extra))
                found += named
                explained.update(group if named else ())
    return found


def _named(graph: Graph, group: set[int], extra: tuple[str, ...]) -> Iterator[Cycle]:
    suffix = REALTIME if extra else ""
    is_found = False
    for name, first, rest in (
        ("G0", "ww", ("ww", *extra)),
        ("G1c", "wr", ("ww", "wr", *extra)),
        ("G-single", "rw", ("ww", "wr", *extra)),
    ):
        cycle = shortest_cycle(graph, group, first, rest)
        if cycle is not None:
            is_found = True
            yield Cycle(name + suffix, *cycle)
    if is_found:
        return
    for name, apart in (("G-nonadjacent", True), ("G2-item", False)):
        cycle = shortest_cycle(graph, group, "rw", ("ww", "wr", "rw", *extra), apart=apart)
        if cycle is not None:
            yield Cycle(name + suffix, *cycle)
            return


def shortest_cycle(
    graph: Graph, group: set[int], first: str, rest: tuple[str, ...], *, apart: bool = False
) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """Return the shortest cycle that begins with an edge of kind *first* and goes on by *rest*.

    Args:
        apart: No two rw edges may follow each other.
    """
    best: tuple[tuple[int, ...], tuple[str, ...]] | None = None
    part = _parts(graph, group, {first, *rest})
    begins = (
        (begin, end)
        for begin in sorted(part)
        for end, kinds in sorted(graph.edges.get(begin, {}).items())
        if part.get(end) == part[begin] and first in kinds
    )
    for _, (begin, end) in zip(range(SEARCHED_MAX), begins, strict=False):
        back = _path(graph, group, (end, begin), rest, apart=apart)
        if back is not None and (best is None or len(back[0]) + 1 < len(best[0])):
            best = ((begin, *back[0]), (first, *back[1]))
    return best


def _parts(graph: Graph, group: set[int], kinds: Collection[str]) -> dict[int, int]:
    """Return node to component, of the nodes of *group* that lie on a cycle of *kinds*."""
    inside = Graph(
        {
            begin: {end: found for end, found in graph.edges.get(begin, {}).items() if end in group}
            for begin in group
        }
    )
    found = components(inside, kinds)
    return {node: number for number, nodes in enumerate(found) for node in nodes}


def _path(
    graph: Graph, group: set[int], ends: tuple[int, int], kinds: tuple[str, ...], *, apart: bool
) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """Return the shortest path: its nodes without the last, and the kinds of its edges."""
    begin, goal = ends
    start = (begin, apart)  # the edge before the path was an rw
    reached: dict[tuple[int, bool], tuple[tuple[int, bool], str]] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        node, after_rw = state
        for end, found in graph.edges.get(node, {}).items():
            kind = next((k for k in kinds if k in found and not (after_rw and k == "rw")), None)
            if kind is None or end not in group:
                continue
            if end == goal and not (apart and kind == "rw"):
                return _back(reached, start, state, kind)
            then = (end, apart and kind == "rw")
            if then not in reached and then != start and end != goal:
                reached[then] = (state, kind)
                queue.append(then)
    return None


def _back(
    reached: dict[tuple[int, bool], tuple[tuple[int, bool], str]],
    start: tuple[int, bool],
    state: tuple[int, bool],
    kind: str,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    nodes, kinds = [state[0]], [kind]
    while state != start:
        state, kind = reached[state]
        nodes.append(state[0])
        kinds.append(kind)
    return tuple(reversed(nodes)), tuple(reversed(kinds))
