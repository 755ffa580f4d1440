"""Links of a run: those the kernel cuts, and those that cannot be broken here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from jepsen_like.chaos.namespaces import RunNetwork
from jepsen_like.chaos.run_links import KernelLinks, RealLinks
from jepsen_like.nemesis.ground import CannotBeDone
from jepsen_like.plans.link_fault import HEALTHY

N0, N1, NS0 = "10.77.1.2", "10.77.2.2", "10.77.3.2"


class Network(RunNetwork):
    """Keeps what the router is told."""

    def __init__(self) -> None:
        super().__init__("chaos-1-2-3-", ["n0", "n1", "ns0"])
        self.orders: list[str] = []

    def route(self, lines: Iterable[str]) -> None:
        self.orders += [line.replace("rule ", "").replace("priority 10 ", "") for line in lines]


async def settled(network: Network, orders: int) -> list[str]:
    """Return what the router was told when there is so much of it, and forget it."""
    with trio.fail_after(10):
        while len(network.orders) < orders:  # a worker thread tells it
            await trio.sleep(0.001)
    told, network.orders = network.orders, []
    return told


async def test_router_gets_cuts_and_heals() -> None:
    network = Network()
    links = KernelLinks(network)
    async with trio.open_nursery() as nursery:
        await nursery.start(links.serve)
        links.cut("n0", "n1")
        links.cut("ns0", "n0")
        assert await settled(network, 2) == [
            f"add from {N0} to {N1} blackhole",
            f"add from {NS0} to {N0} blackhole",
        ]
        links.cut("n0", "n1")  # again
        links.cut("n0", "readers")  # no host of its own
        links.mend("ns0", "n0")
        links.cut("n1", "n0")
        assert await settled(network, 2) == [
            f"del from {NS0} to {N0} blackhole",
            f"add from {N1} to {N0} blackhole",
        ]
        links.mend_all()
        assert await settled(network, 2) == [
            f"del from {N0} to {N1} blackhole",
            f"del from {N1} to {N0} blackhole",
        ]
        await wait_all_tasks_blocked()
        assert network.orders == []
        assert links.sometimes["link_cut"] == 3
        nursery.cancel_scope.cancel()


def test_kernel_damages_and_resets_nothing() -> None:
    links = KernelLinks(Network())
    links.set_fault("n0", "n1", HEALTHY)
    with pytest.raises(CannotBeDone, match="cut only"):
        links.set_fault("n0", "n1", replace(HEALTHY, loss=0.1))
    with pytest.raises(CannotBeDone, match="only the proxy"):
        links.reset_between("n0", "n1")


def test_impossible_links_skip_with_the_reason() -> None:
    kernel = KernelLinks(Network())
    links = RealLinks(kernel, lambda *_: True, "only root may make network namespaces")
    with pytest.raises(CannotBeDone, match="only root may"):
        links.cut("n0", "n1")
    with pytest.raises(CannotBeDone, match="only root may"):
        links.set_fault("n0", "n1", replace(HEALTHY, delay_s=1.0))
    with pytest.raises(CannotBeDone, match="only root may"):
        links.reset_between("n0", "n1")
    links.mend("n0", "n1")
    links.set_fault("n0", "n1", HEALTHY)
    assert kernel.sometimes["link_cut"] == 0


def test_a_link_that_is_none_is_left_alone() -> None:
    kernel = KernelLinks(Network())
    links = RealLinks(kernel, lambda source, _: source != "n1")
    links.cut("n1", "n0")
    assert kernel.sometimes["link_cut"] == 0
    links.cut("n0", "n1")
    assert kernel.sometimes["link_cut"] == 1
