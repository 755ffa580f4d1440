"""Two sites and no link between them: which is listed, used and acknowledges, and the way back.

::

    site A                              site B
    ns0   two brokers   client "left" ┊ ns1   one broker   client "right"
    ns0   three brokers client "left" ┊ ns1                client "right"

A watcher in each site asks its NameServer every second what it lists. The cut is either silent, so
that NameServers must notice by the time that passed, or it breaks all connections over it. When it
ends, connections with bytes waiting go on, break, or do either, by the seed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import trio

from dledger.client.admin.admin import Admin
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.route import LEADER_ID
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.simulation.node import BrokerNode, ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from dledger.remoting.protocol.bodies import ClusterInfo
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import request
from tests.harness.extent import EXTENT
from tests.harness.present import present

pytestmark = pytest.mark.slow

TOPIC: Final = "Sites"
QUEUES: Final = 2
GROUP: Final = "sim"

HEARTBEAT_S: Final = 30.0
"""Between two registrations of a broker with a NameServer; the default of both sides."""

EXPIRY_S: Final = 120.0
SCAN_S: Final = 10.0
LOOK_S: Final = 1.0
"""How often watchers ask."""

ROUTE_POLL_S: Final = 30.0
ASK_S: Final = 5.0
"""A client finds out that its NameServer does not answer, and asks the next one."""

ELECTION_S: Final = 6.0
"""The longest election timeout."""

SHORT_S: Final = 5.0
"""Longer than a request waits, shorter than some election timeouts."""

CUT_AT_S: Final = 47.0
CALM_S: Final = 45.0
"""How long everything has to stay as it is after it has healed; a heartbeat and a half."""

Listing = Mapping[int, str]
"""Broker id → address, of the one group there is."""


@dataclass(frozen=True)
class Sites:
    """How the world is split.

    Attributes:
        right: Which brokers stand in the site of ns1: ``leader``, ``follower`` or ``none``.
        breaks: The cut breaks the connections over it; else neither is informed.
        short: It is over before everybody has noticed.
    """

    right: str
    breaks: bool
    short: bool = False

    def __str__(self) -> str:
        parts = [self.right, "broken" if self.breaks else "silent"]
        return "-".join([*parts, "short"] if self.short else parts)

    @property
    def cut_for_s(self) -> float:
        """Long enough for everybody to know, or not."""
        if self.short:
            return SHORT_S
        told_s = 0.0 if self.breaks else EXPIRY_S + SCAN_S
        return told_s + ROUTE_POLL_S + ASK_S + ELECTION_S


@dataclass
class Sent:
    """One send."""

    client: str
    called_s: float
    returned_s: float = float("inf")
    error: str = ""

    @property
    def is_acknowledged(self) -> bool:
        return not self.error and self.returned_s < float("inf")


@dataclass
class Seen:
    """What clients, watchers and brokers noted down."""

    sends: list[Sent] = field(default_factory=list)
    listings: dict[str, list[tuple[float, Listing]]] = field(default_factory=dict)

    def listed(self, name_server: str) -> tuple[float, Listing]:
        """Return the newest listing of a NameServer, and when it was."""
        return self.listings[name_server][-1]


class TwoRooms:
    """The course of events."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.seen = Seen()

    # -- programs of the client machines ---------------------------------------------------

    async def produce(self, node: ClientNode) -> None:
        assert node.instance is not None
        world = node.world
        config = ProducerConfig(send_timeout_s=6.0, retry_unknown=False)
        async with Producer(node.instance, f"{node.name}-producers", config) as producer:
            while True:
                sent = Sent(node.name, world.elapsed_s)
                self.seen.sends.append(sent)
                try:
                    await producer.send(Message(TOPIC, b"x"))
                except ClientError as error:
                    sent.error = error.outcome
                sent.returned_s = world.elapsed_s
                await node.clock.sleep(0.5)

    async def watch(self, node: ClientNode) -> None:
        """Ask the NameServer of the same site what it lists."""
        assert node.instance is not None
        name = node.name.removeprefix("watch-")
        endpoint = node.world.name_servers[name].endpoint
        listings = self.seen.listings.setdefault(name, [])
        while True:
            answer = await node.instance.name_servers.ask_at(
                endpoint, request(RequestCode.GET_BROKER_CLUSTER_INFO)
            )
            assert answer.code == ResponseCode.SUCCESS
            groups = ClusterInfo.decode(answer.body).broker_addr_table
            listed = groups[GROUP].broker_addrs if GROUP in groups else {}
            listings.append((node.world.elapsed_s, {int(k): v for k, v in listed.items()}))
            await node.clock.sleep(LOOK_S)

    async def set_up(self, node: ClientNode) -> None:
        assert node.instance is not None
        while True:
            try:
                await Admin(node.instance).create_topic(TOPIC, queue_nums=QUEUES)
                route = await node.instance.route(TOPIC, fresh=True)
                if len(route.publish_queues) == QUEUES:
                    return
            except MQError:
                pass
            await node.clock.sleep(0.5)

    # -- the course ------------------------------------------------------------------------

    async def run(self, world: World) -> None:
        leader = await world.wait_for_leader()
        await run_to_end(world, "set-up", self.set_up)
        for name in world.name_servers:
            await world.client(f"watch-{name}").run(self.watch)
        for name in ("left", "right"):
            await world.client(name).run(self.produce)
        await world.sleep_until(CUT_AT_S)
        for name in world.name_servers:
            assert_lists(world, self.seen.listed(name)[1], world.brokers, leader)

        left, right = self.split(world, leader)
        if self.sites.breaks:
            for one in left:
                for other in right:
                    world.network.reset_between(one, other)
        world.network.cut_between(left, right)
        await world.sleep(2 * LOOK_S)
        if self.sites.breaks:
            self.assert_sites_listed(world, left, right)
        await world.sleep_until(CUT_AT_S + self.sites.cut_for_s)
        if not self.sites.short:
            self.assert_sites_listed(world, left, right)
            self.assert_served()
            self.assert_used(world, left, right)

        healed_s = world.elapsed_s
        world.network.mend_all(reset=world.seed % 3 / 2)
        await world.sleep(HEARTBEAT_S)
        await self.assert_healed(world, healed_s)
        await world.sleep(CALM_S)
        self.assert_stays_healed(world, healed_s)

    def split(self, world: World, leader: BrokerNode) -> tuple[list[str], list[str]]:
        """Return the names in the two sites."""
        followers = [name for name in world.brokers if name != leader.name]
        moved = {"leader": [leader.name], "follower": followers[:1], "none": []}
        there = moved[self.sites.right]
        here = [name for name in world.brokers if name not in there]
        return ([*here, "ns0", "left", "watch-ns0"], [*there, "ns1", "right", "watch-ns1"])

    # -- while the sites are apart ---------------------------------------------------------

    def assert_sites_listed(self, world: World, left: list[str], right: list[str]) -> None:
        """Each NameServer lists the brokers of its site, and the leader where there can be one."""
        for name_server, site in (("ns0", left), ("ns1", right)):
            _, listing = self.seen.listed(name_server)
            here = {world.brokers[name].endpoint for name in site if name in world.brokers}
            assert set(listing.values()) == here, f"{name_server} lists {listing}"
        if world.elapsed_s > CUT_AT_S + 2 * ELECTION_S:
            leader = present(world.leader())
            assert leader.name in left
            assert self.seen.listed("ns0")[1][LEADER_ID] == leader.endpoint
            assert LEADER_ID not in self.seen.listed("ns1")[1], "a leader without a majority"

    def assert_served(self) -> None:
        """The site with the majority goes on, the other one stores nothing."""
        leader_lost = self.sites.right == "leader"
        again_s = CUT_AT_S + (3 * ELECTION_S if leader_lost else ASK_S)
        sends = [sent for sent in self.seen.sends if sent.called_s > CUT_AT_S]
        went_on = [sent for sent in sends if sent.client == "left" and sent.is_acknowledged]
        assert went_on, "nothing was acknowledged in the site of the majority"
        assert min(sent.returned_s for sent in went_on) < again_s
        refused = [s for s in sends if s.client == "left" and s.called_s > again_s and s.error]
        assert not refused, f"{len(refused)} sends failed beside a leader: {refused[0]}"
        stored = [sent for sent in sends if sent.client == "right" and sent.is_acknowledged]
        assert not stored, f"acknowledged without a majority: {stored[0]}"
        assert sum(sent.client == "right" for sent in sends) > 5

    def assert_used(self, world: World, left: list[str], right: list[str]) -> None:
        """Clients ask the NameServer of their site and go where that one sends them."""
        for client, name_server, site in (("left", "ns0", left), ("right", "ns1", right)):
            instance = present(world.clients[client].instance)
            route = present(instance.routes.table.get(TOPIC))
            asked = instance.name_servers.list.in_turn()[0]
            brokers = set(route.addresses.get(GROUP, {}).values())
            assert asked == world.name_servers[name_server].endpoint, f"{client} asks {asked}"
            here = {world.brokers[name].endpoint for name in site if name in world.brokers}
            # A NameServer that lists no broker has no route: a client keeps the last one it had.
            assert brokers == here or not here, f"{client} uses {brokers}"

    # -- the way back ----------------------------------------------------------------------

    async def assert_healed(self, world: World, healed_s: float) -> None:
        """Within one heartbeat everything is as if nothing had been."""
        leader = world.leader()
        assert leader is not None, world.status()
        for name in world.name_servers:
            at_s, listing = self.seen.listed(name)
            assert at_s > world.elapsed_s - 2 * LOOK_S
            assert_lists(world, listing, world.brokers, leader)
        for client in ("left", "right"):
            stored = [
                sent
                for sent in self.seen.sends
                if sent.client == client and sent.called_s > healed_s and sent.is_acknowledged
            ]
            assert stored, f"client {client} sends nothing"
            assert stored[-1].returned_s > world.elapsed_s - 2 * LOOK_S
        applied = [node.group.state.applied_index for node in world.replicas() if node.group]
        assert len(applied) == len(world.brokers)
        assert max(applied) - min(applied) <= 2, world.status()  # one may be on its way

    def assert_stays_healed(self, world: World, healed_s: float) -> None:
        """Nothing that was on its way during the cut changes a listing any more."""
        leader = present(world.leader())
        for listings in self.seen.listings.values():
            for at_s, listing in listings:
                if at_s > healed_s + HEARTBEAT_S:
                    assert_lists(world, listing, world.brokers, leader)
        late = [s for s in self.seen.sends if s.called_s > healed_s + HEARTBEAT_S and s.error]
        assert not late, f"a send failed long after the cut: {late[0]}"


def assert_lists(
    world: World, listing: Listing, brokers: Iterable[str], leader: BrokerNode
) -> None:
    """All of *brokers* are listed, each with its id, the leader as 0."""
    expected = {
        LEADER_ID if name == leader.name else int(name[1:]) + 1: world.brokers[name].endpoint
        for name in brokers
    }
    assert dict(listing) == expected


async def run_to_end(world: World, name: str, program: Any) -> None:
    """Run a program on a client machine and wait for it; healthy, it takes seconds."""
    node = world.client(name)
    with trio.fail_after(60.0):
        await node.run(program)
        if node.process is not None:
            await node.process.ended.wait()
    if node.error is not None:
        raise node.error


def play(seed: int, sites: Sites) -> Seen:
    """Live through the cut; everything is asserted on the way."""
    scenario = TwoRooms(sites)
    try:
        run_world(seed, scenario.run, WorldSettings(name_servers=2))
    except BaseException as error:
        error.add_note(f"seed {seed}, sites {sites}")
        raise
    return scenario.seen


def healed_after_s(seen: Seen, sites: Sites) -> float:
    """Return how long after the cut NameServers listed what they list at the end and all sent."""
    end_s = CUT_AT_S + sites.cut_for_s
    right_from_s = [
        max(
            (at_s + LOOK_S for at_s, listing in listings if listing != listings[-1][1]), default=0.0
        )
        for listings in seen.listings.values()
    ]
    sent_s = [
        min(
            sent.returned_s
            for sent in seen.sends
            if sent.client == client and sent.called_s > end_s and sent.is_acknowledged
        )
        for client in ("left", "right")
    ]
    return max(*right_from_s, *sent_s) - end_s


SITES: Final = [
    pytest.param(
        Sites(right, breaks, short), marks=() if short and right == "leader" else pytest.mark.hunt
    )
    for right in ("leader", "follower", "none")
    for breaks, short in ((False, False), (True, False), (True, True))
]
SEEDS: Final = [1, *(pytest.param(seed, marks=pytest.mark.hunt) for seed in range(2, 2 + EXTENT))]


@pytest.mark.parametrize("sites", SITES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_part_is_apart_and_all_heals_within_a_heartbeat(seed: int, sites: Sites) -> None:
    seen = play(seed, sites)
    print(f"seed {seed}, {sites}: all healed after {healed_after_s(seen, sites):.1f} s")
    assert healed_after_s(seen, sites) <= HEARTBEAT_S, f"seed {seed}, sites {sites}"
