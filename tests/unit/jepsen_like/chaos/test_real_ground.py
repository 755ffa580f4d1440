"""Which links of a real run a step may break: those of NameServers too, so rooms have some."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
import trio

from jepsen_like.chaos.cluster import CLIENTS, lay_out
from jepsen_like.chaos.machines import RealMember
from jepsen_like.chaos.namespaces import RunNetwork
from jepsen_like.chaos.real_ground import RealGround
from jepsen_like.chaos.run_links import KernelLinks
from jepsen_like.history.operation import Event
from jepsen_like.nemesis.nemesis import Nemesis
from jepsen_like.plans.plan import Kind, Plan, Step

NAMES = ["n0", "n1", "n2", "ns0", "ns1", CLIENTS]
"""In the order in which a split counts them, but for clients, which come before NameServers."""

# Bits: n0, n1, n2, clients, ns0, ns1.
ROOM_OF_N2_AND_NS1 = 0b100100


class Network(RunNetwork):
    """Keeps what the router was told."""

    def __init__(self) -> None:
        super().__init__("chaos-1-2-3-", NAMES)
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

    monkeypatch.setattr("jepsen_like.chaos.machines.raft_status", status)
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
