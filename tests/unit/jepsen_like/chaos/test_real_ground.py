"""Which links of a real run a step may break: those of NameServers too.

Links of a run: those the kernel cuts, and those that cannot be broken here.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dledger.jepsen_like.chaos.cluster import CLIENTS, lay_out
from dledger.jepsen_like.chaos.machines import RealMachine, RealMember
from dledger.jepsen_like.chaos.namespaces import RunNetwork
from dledger.jepsen_like.chaos.proxy import LinkProxy
from dledger.jepsen_like.chaos.real_ground import KernelLinks, RealGround
from dledger.jepsen_like.history.operation import Event
from dledger.jepsen_like.nemesis.ground import HEALTHY, CannotBeDone, LinkFault
from dledger.jepsen_like.nemesis.links import Links
from dledger.jepsen_like.nemesis.nemesis import Nemesis
from dledger.jepsen_like.plans.plan import PROXY_KINDS, Kind, Plan, Step, Workload

NAMES = ["n0", "n1", "n2", "ns0", "ns1", CLIENTS]
"""In the order in which a split counts them, but for clients, which come before NameServers."""

# Bits: n0, n1, n2, clients, ns0, ns1.
ROOM_OF_N2_AND_NS1 = 0b100100


class Network(RunNetwork):
    """Keeps what the router was sent."""

    def __init__(self) -> None:
        super().__init__(Path("router"), {name: Path(name) for name in NAMES})
        self.cuts: set[tuple[str, str]] = set()

    def route(self, lines: Iterable[str]) -> None:
        names = {host.address: name for name, host in self.hosts.items()}
        for line in lines:
            _, verb, _, _, _, source, _, target, _ = line.split()
            if verb == "add":
                self.cuts.add((names[source], names[target]))


async def test_answers_of_an_ended_broker_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = lay_out(tmp_path, Plan(seed=1, duration_ms=300))
    member = RealMember(cluster, cluster.brokers["n0"], None, "", Random(1))
    monkeypatch.setattr(RealMember, "is_up", True)
    asked, ended = trio.Event(), trio.Event()

    async def status(address: str, timeout_s: float) -> dict[str, object]:
        asked.set()
        await ended.wait()
        return {"commit_index": 7}

    monkeypatch.setattr("dledger.jepsen_like.chaos.machines.status_of", status)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member.look)
        await asked.wait()
        await member.kill()
        ended.set()
    assert member.status == {}
    await member.look()
    assert member.status == {"commit_index": 7}
    await member.kill()
    assert member.status == {}


async def test_split_assigns_name_servers(tmp_path: Path) -> None:
    plan = Plan(
        seed=1,
        duration_ms=300,
        steps=(Step(0, Kind.SPLIT, "all", 250, ROOM_OF_N2_AND_NS1),),
        name_servers=2,
    )
    network = Network()
    links = KernelLinks(network)
    cluster = lay_out(tmp_path, plan, hosts=network.hosts)
    ground = RealGround(
        cluster,
        {
            name: RealMember(cluster, node, None, "", Random(1))
            for name, node in cluster.brokers.items()
        },
        links,
        {CLIENTS: object()},
        begin_ns=0,
        on_event=lambda _: None,
        on_sample=lambda _: None,
    )
    done: list[Event] = []
    nemesis = Nemesis(ground, plan, lambda event, is_over: done.append(event) if is_over else None)
    async with trio.open_nursery() as nursery:
        await nursery.start(links.serve)
        nursery.start_soon(nemesis._do, plan.steps[0])
        with trio.fail_after(10):
            while len(network.cuts) < 16:
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    there, here = {"n2", "ns1"}, set(NAMES) - {"n2", "ns1"}
    assert network.cuts == {(a, b) for a in here for b in there} | {
        (b, a) for a in here for b in there
    }


N0, N1, NS0 = "10.77.1.2", "10.77.2.2", "10.77.3.2"


class LinkNetwork(RunNetwork):
    """Keeps what the router is sent."""

    def __init__(self) -> None:
        super().__init__(Path("router"), {name: Path(name) for name in ("n0", "n1", "ns0")})
        self.orders: list[str] = []

    def route(self, lines: Iterable[str]) -> None:
        self.orders += [line.replace("rule ", "").replace("priority 10 ", "") for line in lines]


async def settled(network: LinkNetwork, orders: int) -> list[str]:
    """Return what the router was sent when there is that much of it, and forget it."""
    with trio.fail_after(10):
        while len(network.orders) < orders:  # a worker thread reports it
            await trio.sleep(0.001)
    reported, network.orders = network.orders, []
    return reported


async def test_router_gets_cuts_and_heals() -> None:
    network = LinkNetwork()
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
    links = KernelLinks(LinkNetwork())
    links.set_fault("n0", "n1", HEALTHY)
    with pytest.raises(CannotBeDone, match="cut only"):
        links.set_fault("n0", "n1", replace(HEALTHY, loss=0.1))
    with pytest.raises(CannotBeDone, match="only the proxy"):
        links.reset_between("n0", "n1")


def test_impossible_links_skip_with_the_reason() -> None:
    links = LinkProxy(Random(1), {}, "only root may make network namespaces")
    with pytest.raises(CannotBeDone, match="only root may"):
        links.cut("n0", "n1")
    with pytest.raises(CannotBeDone, match="only root may"):
        links.set_fault("n0", "n1", replace(HEALTHY, delay_s=1.0))
    with pytest.raises(CannotBeDone, match="only root may"):
        links.reset_between("n0", "n1")
    links.mend("n0", "n1")
    links.set_fault("n0", "n1", HEALTHY)


async def test_a_refused_fault_of_links_is_forgotten() -> None:
    asked: list[LinkFault] = []

    def set_fault(_: str, __: str, fault: LinkFault) -> None:
        if not fault.is_plain:
            raise CannotBeDone("not here")
        asked.append(fault)

    ground: Any = SimpleNamespace(
        brokers=("n0", "n1"), network=SimpleNamespace(set_fault=set_fault), sleep=trio.sleep
    )
    nodes: Any = SimpleNamespace(resolve=lambda _: [SimpleNamespace(name="n0")])
    links = Links(ground, nodes)
    with pytest.raises(CannotBeDone):
        await links.spoil_links(Step(0, Kind.HOLD, "n0", 1, 100), Event(0, 0, "hold"))
    await links.spoil_links(Step(0, Kind.DELAY, "n0", 0, 100), Event(0, 0, "delay"))
    slow = LinkFault(delay_s=0.1, jitter_s=0.1)
    assert asked == [slow, slow, HEALTHY, HEALTHY]


async def done_to_proxies(folder: Path, step: Step, workload: Workload) -> tuple[Event, list[str]]:
    """Return the row of a step, and what it did to which proxy."""
    plan = Plan(seed=1, duration_ms=300, steps=(step,), workload=workload)
    network = Network()
    cluster = lay_out(folder, plan, hosts=network.hosts)
    acts: list[str] = []

    class Watched(RealMachine):
        is_killed = False

        @property
        def is_down(self) -> bool:
            return self.is_killed

        async def kill(self) -> None:
            acts.append(f"kill {self.name}")
            self.is_killed = True

        async def start(self) -> bool:
            acts.append(f"start {self.name} {self._node.address.partition(':')[0]}")
            self.is_killed = False
            return True

        def pause(self) -> None:
            acts.append(f"pause {self.name}")

        def resume(self) -> None:
            acts.append(f"resume {self.name}")

    ground = RealGround(
        cluster,
        {},
        KernelLinks(network),
        {},
        begin_ns=0,
        on_event=lambda _: None,
        on_sample=lambda _: None,
    )
    ground.proxies = {name: Watched(cluster, node) for name, node in cluster.proxies.items()}
    rows: list[Event] = []
    nemesis = Nemesis(ground, plan, lambda event, is_over: rows.append(event) if is_over else None)
    await nemesis._do(step)
    (row,) = rows
    return row, acts


THROUGH_TWO = Workload(delayed_per_mille=0, proxies=2)


async def test_killed_proxies_start_again(tmp_path: Path) -> None:
    one, acts = await done_to_proxies(tmp_path, Step(0, Kind.PROXY_KILL, "3", 50), THROUGH_TWO)
    assert (one.node, acts) == ("proxy1", ["kill proxy1", "start proxy1 127.0.0.1"])
    every, acts = await done_to_proxies(tmp_path, Step(0, Kind.PROXY_KILL, "all", 50), THROUGH_TWO)
    assert every.node == "proxy0,proxy1"
    assert [act.split()[:2] for act in acts] == [
        ["kill", "proxy0"],
        ["kill", "proxy1"],
        ["start", "proxy0"],
        ["start", "proxy1"],
    ]


async def test_paused_proxies_go_on(tmp_path: Path) -> None:
    one, acts = await done_to_proxies(tmp_path, Step(0, Kind.PROXY_PAUSE, "0", 50), THROUGH_TWO)
    assert (one.node, acts) == ("proxy0", ["pause proxy0", "resume proxy0"])


@pytest.mark.parametrize("kind", sorted(PROXY_KINDS))
async def test_without_proxies_their_faults_are_skipped(tmp_path: Path, kind: Kind) -> None:
    row, acts = await done_to_proxies(tmp_path, Step(0, kind, "all", 50), Workload())
    assert row.detail == "skipped: no client of this workload goes through a proxy"
    assert acts == []
