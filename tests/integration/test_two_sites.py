"""Two sites and a cut link between them, with real processes: what is listed, what acknowledges.

::

    site A                                site B
    ns0   two brokers   client "left"  ┊  ns1   the leader   client "right"

The kernel cuts the link where that can be done; packets vanish then, and NameServers must notice by
the time that passed. Behind the proxy all clients are one machine, so only site A has some.
Every division of the sites, on virtual time: tests/simulation/test_two_sites.py.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final
from unittest.mock import patch

import msgspec
import pytest
import trio
from trio._core import _thread_cache

from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.route import LEADER_ID
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.chaos import namespaces
from dledger.jepsen_like.chaos.cluster import (
    CLIENTS,
    GROUP,
    ChaosCluster,
    broker_names,
    lay_out,
    name_server_names,
)
from dledger.jepsen_like.chaos.namespaces import Host, entered, run_network
from dledger.jepsen_like.chaos.plan_draw import SETTINGS
from dledger.jepsen_like.chaos.proxy import LinkProxy
from dledger.jepsen_like.chaos.real_ground import KernelLinks, RunLinks
from dledger.jepsen_like.plans.plan import Plan
from dledger.remoting.protocol.bodies import ClusterInfo
from dledger.remoting.protocol.codes import RequestCode
from tests.harness.cluster_questions import ask, create_topic

pytestmark = pytest.mark.slow

TOPIC: Final = "Sites"
RIGHT: Final = "right"
REGISTER_MS: Final = 1_000
PLAN: Final = Plan(
    seed=1,
    duration_ms=1,
    members=3,
    name_servers=2,
    settings=msgspec.structs.replace(SETTINGS, register_ms=REGISTER_MS),
)

NOTICED_S: Final = 5.0
"""Orders to cut are carried out well within this."""

PATIENCE_S: Final = 60.0
"""A busy machine gets so long for anything; the longest known wait is that of a NameServer, 4 s."""

PACE_S: Final = 0.05
"""Between two sends of one client."""

needs_namespaces = pytest.mark.skipif(
    namespaces.why_not() is not None, reason=str(namespaces.why_not())
)


@dataclass
class Sent:
    """One send; times of `time.monotonic`."""

    body: bytes
    called_s: float
    returned_s: float = float("inf")
    is_acknowledged: bool = False


@dataclass
class Sender:
    """A client that sends until it is stopped, and reads its route meanwhile."""

    name: str
    addresses: tuple[str, ...]
    sends: list[Sent] = field(default_factory=list)
    listed: set[str] = field(default_factory=set)
    """Addresses of brokers, as the route it got last has them."""
    over: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> None:
        config = ClientConfig(name_servers=self.addresses, rpc_timeout_s=2.0)
        async with (
            connect(config=config) as client,
            Producer(
                client, self.name, ProducerConfig(send_timeout_s=2.0, retry_unknown=False)
            ) as producer,
        ):
            for number in itertools.count():
                if self.over.is_set():
                    return
                sent = Sent(b"%s-%d" % (self.name.encode(), number), time.monotonic())
                self.sends.append(sent)
                try:
                    await producer.send(Message(TOPIC, sent.body))
                    sent.is_acknowledged = True
                    if number % 20 == 0:
                        await self._look(client)
                except ClientError:
                    await self._look(client)
                sent.returned_s = time.monotonic()
                await trio.sleep(PACE_S)

    async def _look(self, client: ClientInstance) -> None:
        try:
            route = await client.route(TOPIC, fresh=True)
        except MQError:
            return
        self.listed = set(route.addresses.get(GROUP, {}).values())

    def acknowledged_between(self, begin_s: float, end_s: float) -> list[bytes]:
        """Bodies of sends that began and ended within."""
        return [
            sent.body
            for sent in self.sends
            if sent.is_acknowledged and sent.called_s > begin_s and sent.returned_s < end_s
        ]


@dataclass
class World:
    """Both sites."""

    cluster: ChaosCluster
    links: RunLinks
    left: Sender
    right: Sender | None

    @property
    def senders(self) -> list[Sender]:
        return [self.left, *([self.right] if self.right else [])]

    async def listing(self, name_server: str) -> Mapping[int, str]:
        """Return what a NameServer lists: broker id → address; asked past every cut."""
        address = self.cluster.name_servers[name_server].address
        answer = await ask(address, RequestCode.GET_BROKER_CLUSTER_INFO, timeout_s=5.0)
        groups = ClusterInfo.decode(answer.body).broker_addr_table
        listed = groups[GROUP].broker_addrs if GROUP in groups else {}
        return {int(number): address for number, address in listed.items()}

    def reported(self, names: Sequence[str]) -> set[str]:
        """Return the addresses of brokers as NameServers list them."""
        return {self.cluster.ports[name].client_address(CLIENTS) for name in names}

    def cut(self, left: Sequence[str], right: Sequence[str]) -> None:
        for one in left:
            for other in right:
                self.links.cut(one, other)
                self.links.cut(other, one)


@asynccontextmanager
async def behind_the_proxy(folder: Path) -> AsyncIterator[World]:
    cluster = lay_out(folder, PLAN)
    links = LinkProxy(Random(1), cluster.targets())
    left = Sender(CLIENTS, cluster.namesrv_addresses)
    async with living(cluster, links), trio.open_nursery() as nursery:
        await create_topic(list(cluster.namesrv_addresses), TOPIC, queues=2)
        nursery.start_soon(left.run)
        yield World(cluster, links, left, None)
        left.over.set()


@contextmanager
def own_workers() -> Iterator[None]:
    """Let no worker thread outlive the block that begins in it: its network stays that of then."""
    before = set(threading.enumerate())
    with patch.object(_thread_cache, "IDLE_TIMEOUT", 0.01):
        try:
            yield
        finally:
            for thread in set(threading.enumerate()) - before:
                if thread.name.startswith("Trio"):
                    thread.join(60)


@asynccontextmanager
async def in_namespaces(folder: Path) -> AsyncIterator[World]:
    names = [*broker_names(PLAN), *name_server_names(PLAN), CLIENTS, RIGHT]
    with own_workers(), run_network(names) as network, entered(inside(network.hosts[CLIENTS])):
        cluster = lay_out(folder, PLAN, hosts=network.hosts)
        links = KernelLinks(network)
        addresses = cluster.namesrv_addresses
        left, right = Sender(CLIENTS, addresses), Sender(RIGHT, addresses)
        async with living(cluster, links), trio.open_nursery() as nursery:
            await create_topic(list(addresses), TOPIC, queues=2)
            nursery.start_soon(left.run)
            elsewhere = functools.partial(run_at, network.hosts[RIGHT], right.run)
            nursery.start_soon(trio.to_thread.run_sync, elsewhere)
            try:
                yield World(cluster, links, left, right)
            finally:
                right.over.set()  # the thread is waited for
            left.over.set()


def inside(host: Host) -> Path:
    assert host.namespace is not None
    return host.namespace


def run_at(host: Host, program: Callable[[], Awaitable[None]]) -> None:
    """Run *program* on *host*, in this thread."""
    with entered(inside(host)):
        trio.run(program)


@asynccontextmanager
async def living(cluster: ChaosCluster, links: RunLinks) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(links.serve)
        try:
            for node in cluster.nodes:
                await cluster.start(node.name)
            await cluster.wait_leader(timeout_s=PATIENCE_S)
            yield
        finally:
            await cluster.stop_all()
        nursery.cancel_scope.cancel()


async def until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again; other processes notify no client."""
    with trio.move_on_after(PATIENCE_S):
        while not await holds():
            await trio.sleep(0.1)
        return
    pytest.fail(f"not within {PATIENCE_S} s: {what}")


WORLDS: Final = [
    pytest.param(behind_the_proxy, id="proxy"),
    pytest.param(in_namespaces, id="kernel", marks=needs_namespaces),
]


@pytest.mark.parametrize("make", WORLDS)
async def test_one_of_two_partitions_acknowledges(
    tmp_path: Path, make: Callable[[Path], AbstractAsyncContextManager[World]]
) -> None:
    async with make(tmp_path) as world:
        acknowledged, attempted = await the_story(world)
        read = await read_all(world)
    assert len(acknowledged) == len(set(acknowledged)) > 30
    assert [body for body in acknowledged if read.count(body) != 1] == [], "lost or doubled"
    assert set(read) <= set(attempted)
    assert len(read) == len(set(read))


async def the_story(world: World) -> tuple[list[bytes], list[bytes]]:
    """Live through it; return what was acknowledged and what was attempted."""
    cluster = world.cluster
    everybody = world.reported(list(cluster.brokers))

    async def all_listed() -> bool:
        return all([set((await world.listing(ns)).values()) == everybody for ns in ("ns0", "ns1")])

    async def all_acknowledge(since_s: float = 0.0) -> bool:
        now_s = time.monotonic()
        return all(len(sender.acknowledged_between(since_s, now_s)) > 5 for sender in world.senders)

    await until("both NameServers list all", all_listed)
    await until("both clients send", all_acknowledge)

    leader = await cluster.wait_leader()
    here = [name for name in cluster.brokers if name != leader]
    left, right = [*here, "ns0", CLIENTS], [leader, "ns1", RIGHT]
    if world.right is None:
        right.remove(RIGHT)
    world.cut(left, right)
    cut_s = time.monotonic()

    async def sites_listed() -> bool:
        a, b = await world.listing("ns0"), await world.listing("ns1")
        return (
            set(a.values()) == world.reported(here)
            and LEADER_ID in a
            and set(b.values()) == world.reported([leader])
            and LEADER_ID not in b
        )

    async def left_goes_on() -> bool:
        now_s = time.monotonic()
        return len(world.left.acknowledged_between(cut_s + NOTICED_S, now_s)) > 20

    async def routes_are_the_sites() -> bool:
        there = world.right is None or world.right.listed == world.reported([leader])
        return world.left.listed == world.reported(here) and there

    async def other_site_tried() -> bool:
        return world.right is None or any(
            sent.called_s > cut_s + NOTICED_S and sent.returned_s < float("inf")
            for sent in world.right.sends
        )

    await until("each NameServer lists its site, and a leader where there can be one", sites_listed)
    await until("the site of the majority goes on", left_goes_on)
    await until("clients use what their NameServer lists", routes_are_the_sites)
    await until("the other site tries in vain", other_site_tried)
    assert await cluster.leader() in here
    if world.right is not None:
        stored = world.right.acknowledged_between(cut_s + NOTICED_S, time.monotonic())
        assert stored == [], "two leaders acknowledge"

    world.links.mend_all()
    healed_s = time.monotonic()
    await until("both NameServers list all again", all_listed)
    await until("both clients send again", functools.partial(all_acknowledge, healed_s))
    for sender in world.senders:
        sender.over.set()
    await until("the clients end", functools.partial(have_ended, world))
    return (
        [s.body for sender in world.senders for s in sender.sends if s.is_acknowledged],
        [s.body for sender in world.senders for s in sender.sends],
    )


async def have_ended(world: World) -> bool:
    return all(sender.sends[-1].returned_s < float("inf") for sender in world.senders)


async def read_all(world: World) -> list[bytes]:
    found: list[bytes] = []
    async with (
        connect(list(world.cluster.namesrv_addresses)) as client,
        PullConsumer(client, "readers") as consumer,
    ):
        queues = await consumer.fetch_message_queues(TOPIC)
        async for _, result in consumer.drain(queues):
            found += [bytes(message.body) for message in result.messages]
    return found
