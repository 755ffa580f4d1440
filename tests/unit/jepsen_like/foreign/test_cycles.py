"""Cycles of dependencies are found and named however large their component is."""

from __future__ import annotations

from dledger.jepsen_like.foreign.cycles import SEARCHED_MAX, Graph, cycles_of


def test_cycle_behind_many_edges_of_its_kind_is_named() -> None:
    graph, last = Graph(), SEARCHED_MAX + 100
    for node in range(last):
        graph.link(node, node + 1, "ww", "overwrote")
    graph.link(last, last - 1, "ww", "overwrote")
    graph.link(last, 0, "rw", "read before")
    found = {cycle.name: cycle.nodes for cycle in cycles_of(graph)}
    assert found.keys() == {"G0", "G-single"}
    assert sorted(found["G0"]) == [last - 1, last]


def test_cycle_of_write_reads_alone_is_named() -> None:
    graph, last = Graph(), SEARCHED_MAX + 100
    for node in range(last):
        graph.link(node, node + 1, "wr", "was read by")
        graph.link(node + 1, node, "ww", "was overwritten by")
    assert [cycle.name for cycle in cycles_of(graph)] == ["G1c"]
