"""The whole cluster in one `trio.run`: NameServers, brokers and SDK clients from one seed.

::

    async def main(world: World) -> None:
        leader = await world.wait_for_leader()
        await leader.kill()
        await world.sleep_until(10)
        await leader.start()

    run_world(42, main)

The nodes run the product's own `serve_namesrv`, `serve_broker` and `ClientInstance`; only clock,
randomness, disk, network and executor are simulated. Everything a node does passes the trace, and
every step of a replica the checks. The first violation ends the run.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import structlog
import trio

from dledger.group import Group
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.checks import Checks
from dledger.jepsen_like.simulation.event_trace import Trace
from dledger.jepsen_like.simulation.machine import Node, State, current_node
from dledger.jepsen_like.simulation.node import BrokerNode, ClientNode, NameServerNode
from dledger.jepsen_like.simulation.sim_network import PEER_PORT, SimNetwork
from dledger.jepsen_like.simulation.steadiness import (
    LOOK_S,
    DueHeads,
    RedirectWatch,
    RouteWatch,
    Steadiness,
)
from dledger.jepsen_like.simulation.virtual_time import START_S, VirtualTime, run_virtual
from dledger.jepsen_like.simulation.world_settings import (
    ACCOUNTS_PATH,
    CREDENTIALS_PATH,
    OWNER,
    SECRET_PATH,
    WorldSettings,
    account_files,
)
from dledger.remoting.addresses import join_address
from dledger.settings.config import BrokerConfig, load_config

T = TypeVar("T")

LOG_LINES: Final = 2000
"""Newest log lines of all nodes that are kept."""

COUNTED_LINES: Final = {
    "snapshot_installed": "snapshot_install",
    "entries_repaired": "repair",
    "members_changed": "membership_change",
    "transfer_ends": "transfer",
    "doubt_ended": "doubt_ended",
    "log_damaged": "log_damaged",
    "clock_is_off": "clock_is_off",
    "key_index_file_unreadable": "key_index_unreadable",
    "key_index_is_whole": "key_index_made_again",
    "entry_index_unreadable": "entry_index_unreadable",
}
"""Log lines that are interesting things, and what they count as."""

MEMBERS_AT_ODDS: Final = frozenset({"peer_contradicts", "peer_link_failed"})
"""Log lines of a member that has refused another's frames and went on. Here all members are honest,
and none of them receives from strangers: so one of the two is wrong."""

COLLECT_S: Final = 3600.0
"""How often the cyclic collector runs, in virtual time; it never runs by itself. What half an hour
leaves to it are a few megabytes, and it reads much more that stays."""

_ACCESS_OPTIONS: Final = {
    "server.acl_enable": "true",
    "server.acl_file": ACCOUNTS_PATH,
    "client.credentials_file": CREDENTIALS_PATH,
}

LOG_LEVEL: Final = 20
"""Lines below info are not even made."""


class Violation(Exception):  # noqa: N818  # what was violated is the point, not that it is an error
    """Something that must hold did not.

    *world*: the world as it was; its trace and logs tell how it came to this.
    """

    def __init__(self, invariant: str, text: str, world: World) -> None:
        super().__init__(f"{invariant} after {world.elapsed_s:.6f} s of seed {world.seed}: {text}")
        self.invariant = invariant
        self.at_s = world.elapsed_s
        self.world = world


class World:
    """Everything there is.

    Attributes:
        brokers, name_servers, clients: The nodes by name: ``n0`` …, ``ns0`` …, as they were named.
        network: Cuts and link faults are made here, by node name.
        promises: What members acknowledged to each other.
        logs: Newest log lines: time since the begin, node, event, facts.
        last_leader, last_term: The newest leader anybody has seen.
    """

    def __init__(
        self, seed: int, settings: WorldSettings, time: VirtualTime, nursery: trio.Nursery
    ) -> None:
        self.seed = seed
        self.settings = settings
        self.time = time
        self.nursery = nursery
        self.rng = rng_stream(seed, "world")
        self.trace = Trace(time)
        self.network = SimNetwork(time, rng_stream(seed, "network"), self.trace)
        self.checks = Checks(self)
        self.promises = self.checks.promises
        self.store_time = self.checks.store_time
        self.reference = self.checks.reference
        self.steadiness = Steadiness(self)
        self.due = DueHeads(self, self.reference, self.steadiness)
        self.routes = RouteWatch(self, self.steadiness)
        self.redirects = RedirectWatch(self, self.steadiness, self.routes)
        self.network.on_members_send = self.promises.frames_left
        self.logs: deque[tuple[float, str, str, dict[str, Any]]] = deque(maxlen=LOG_LINES)
        self.brokers: dict[str, BrokerNode] = {}
        self.name_servers: dict[str, NameServerNode] = {}
        self.clients: dict[str, ClientNode] = {}
        self.last_leader: BrokerNode | None = None
        self.last_term = 0
        self.violation: Violation | None = None
        self.is_over = False
        self._numbers = 0
        for index in range(settings.name_servers):
            name = f"ns{index}"
            address = f"fd00:1::{index + 1}" if settings.has_ipv6 else f"10.0.1.{index + 1}"
            self.name_servers[name] = NameServerNode(self, name, self._number(), address)
        for index in range(settings.brokers):
            name = f"n{index}"
            config = self._broker_config(name)
            address = self._broker_address(index)
            self.brokers[name] = BrokerNode(self, name, self._number(), address, config)
        for node in (*self.name_servers.values(), *self.brokers.values()):
            node.files = {SECRET_PATH: bytes(64)} if settings.has_ipv6 else {}
            node.files |= account_files() if settings.has_accounts else {}

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _broker_address(self, index: int) -> str:
        """On loopback, where a group needs no secret; IPv6 has one address there."""
        is_ipv6 = self.settings.has_ipv6 and not index % 2
        return f"fd00::{index + 1}" if is_ipv6 else f"127.0.0.{index + 1}"

    def _broker_config(self, name: str) -> BrokerConfig:
        settings = self.settings
        index = int(name[1:])
        address = self._broker_address(index)
        peers = ";".join(
            f"n{number}-{join_address(self._broker_address(number), PEER_PORT)}"
            for number in range(settings.brokers)
        )
        options: dict[str, object] = {
            "broker.cluster_name": "Sim",
            "broker.broker_name": "sim",
            "broker.broker_ip1": address,
            "broker.namesrv_addr": ";".join(n.endpoint for n in self.name_servers.values()),
            "server.listen_host": address,
            "server.fast_listen_port": "0",
            "server.open_admin": "true",  # plans change members from machines of their own
            "client.register_timeout_ms": "3000",
            "store.path_root_dir": "/store",
            "store.mapped_file_size_commit_log": str(settings.segment_bytes),
            "store.mapped_file_size_consume_queue": str(20 * 512),
            "store.max_message_size": str(64 * 1024),
            "raft.group": "sim",
            "raft.self_id": name,
            "raft.peers": peers,
            "raft.election_timeout_ms": str(settings.election_timeout_ms),
            "raft.heartbeat_interval_ms": str(settings.heartbeat_ms),
            "raft.max_entry_bytes": str(settings.segment_bytes // 2),
            "raft.checkpoint_interval_ms": str(settings.checkpoint_interval_ms),
            **({"raft.secret_file": SECRET_PATH} if settings.has_ipv6 else {}),
            **(_ACCESS_OPTIONS if settings.has_accounts else {}),
            **settings.options,
        }
        return load_config(options=options)

    # -- time ------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.time.now_s

    @property
    def elapsed_s(self) -> float:
        """Virtual time since the begin."""
        return self.time.now_s - START_S

    async def sleep(self, seconds: float) -> None:
        """Let *seconds* pass for everybody."""
        await self.time.sleep(seconds)

    async def sleep_until(self, elapsed_s: float) -> None:
        """Let time pass up to *elapsed_s* after the begin."""
        await self.time.sleep(max(0.0, START_S + elapsed_s - self.time.now_s))

    # -- nodes -----------------------------------------------------------------------------

    @property
    def nodes(self) -> dict[str, Node]:
        """All nodes by name."""
        return {**self.name_servers, **self.brokers, **self.clients}

    def node(self, name: str) -> Node:
        """Return a node by name."""
        return self.nodes[name]

    async def start(self) -> None:
        """Start all NameServers and brokers; they need not agree on anything yet."""
        async with trio.open_nursery() as nursery:
            for node in (*self.name_servers.values(), *self.brokers.values()):
                nursery.start_soon(node.start)

    def client(self, name: str) -> ClientNode:
        """Return the client machine of that name, made now if there is none."""
        node = self.clients.get(name)
        if node is None:
            number = self._number()
            address = f"10.0.{2 + number // 256}.{number % 256}"
            if self.settings.has_ipv6 and number % 2:
                address = f"fd00:2::{number:x}"
            node = self.clients[name] = ClientNode(self, name, number, address)
            node.credentials = OWNER if self.settings.has_accounts else None
        return node

    def leader(self) -> BrokerNode | None:
        """Return the running broker that may act as leader in the highest term, if any."""
        found: BrokerNode | None = None
        term = -1
        for node in self.brokers.values():
            group = node.group
            leadership = None if group is None else group.leadership
            if leadership is not None and node.is_up and leadership.term > term:
                found, term = node, leadership.term
        return found

    async def wait_for_leader(self, timeout_s: float = 60.0) -> BrokerNode:
        """Wait until some broker may act as leader, and return it.

        Raises Violation: ``liveness``: There was none in time.
        """
        end_s = self.now_s + timeout_s
        while (leader := self.leader()) is None:
            if self.now_s > end_s:
                raise Violation("liveness", f"no leader within {timeout_s} s", self)
            await self.sleep(0.1)
        return leader

    def replicas(self) -> list[BrokerNode]:
        """Return the brokers that are up, by name."""
        return [node for node in self.brokers.values() if node.is_up and node.broker is not None]

    def followers(self) -> list[BrokerNode]:
        """Return the brokers that are up and do not lead."""
        leader = self.leader()
        return [node for node in self.replicas() if node is not leader]

    async def heal(self, *, clients: bool = False, away: Collection[str] = ()) -> None:
        """End all faults; start what is down, with *clients* also their programs.

        *away*: brokers that stay as they are: down, or cut off from the other brokers.
        """
        self.network.mend_all()
        for name in away:
            for other in self.brokers:
                if other != name:
                    self.network.cut(name, other)
                    self.network.cut(other, name)
        for node in self.nodes.values():
            await node.slow_disk(0.0)
            await node.begin_work_late(0.0)
            await node.fail_flushes(0)
            await node.fill_disk(None)
            node.resume()
        servers = (*self.name_servers.values(), *self.brokers.values())
        for node in self.nodes.values() if clients else servers:
            if node.name in away:
                continue
            if node.state is State.STOPPING:
                await node.stop()
            if node.state is State.DOWN:
                await node.start()

    async def wait_for_agreement(self, timeout_s: float = 120.0) -> None:
        """Wait until a leader leads, all brokers run and all have applied the same entries.

        Raises Violation: ``liveness``: They had not in time.
        """
        end_s = self.now_s + timeout_s
        while not self._agree():
            if self.now_s > end_s:
                raise Violation("liveness", f"no agreement in {timeout_s} s: {self.status()}", self)
            await self.sleep(0.25)
        for node in self.brokers.values():
            group = node.group
            assert group is not None
            self.reference.feed(node, group)
            self.checks.compare_state(node, group.state.applied_index, group.state)
            self.reference.compare_queues(node, group)
            self.reference.compare_keys(node, group)
            self.reference.compare_times(node, group)

    async def wait_for_scrub(self, timeout_s: float = 180.0) -> None:
        """Wait until every log that rotted was read through once since, and is whole.

        Raises Violation: ``liveness``: It was not in time.
        """
        end_s = self.now_s + timeout_s
        while waiting := [node for node in self.brokers.values() if not _is_scrubbed(node)]:
            if self.now_s > end_s:
                names = ", ".join(node.name for node in waiting)
                raise Violation("liveness", f"not scrubbed in {timeout_s} s: {names}", self)
            await self.sleep(1.0)

    def _agree(self) -> bool:
        leader = self.leader()
        if leader is None or leader.group is None:
            return False
        end = leader.group.node.journal.last_index
        for node in self.brokers.values():
            group = node.group
            if group is None or not node.is_up or group.state.applied_index != end:
                return False
        return True

    def status(self) -> str:
        """Return the state of all brokers in one line."""
        parts = []
        for node in self.brokers.values():
            group = node.group
            if group is None:
                parts.append(f"{node.name} {node.state.value}")
            else:
                raft = group.node
                parts.append(
                    f"{node.name} {node.state.value} {raft.core.role.value} term {raft.term} "
                    f"last {raft.journal.last_index} commit {raft.commit_index} "
                    f"applied {group.state.applied_index}"
                )
        return "; ".join(parts)

    def watch(self, node: BrokerNode, group: Group) -> None:
        """Check a replica that has just started, and every step that it makes from now on."""
        self.checks.watch(node, group)

    def watch_client(self, node: ClientNode) -> None:
        """Check what a client that has just started learns of the group."""
        assert node.instance is not None
        self.redirects.watch(node.name, node.instance)

    # -- verdicts --------------------------------------------------------------------------

    @property
    def sometimes(self) -> Counter[str]:
        """How often the interesting things happened."""
        return self.trace.sometimes

    def violate(self, invariant: str, text: str, cause: BaseException | None = None) -> None:
        """Note that something that must hold did not; the first one ends the run."""
        if self.violation is None and not self.is_over:
            self.violation = Violation(invariant, text, self)
            self.violation.__cause__ = cause
            self.nursery.cancel_scope.cancel()

    @property
    def digest(self) -> str:
        """Digest over every event so far."""
        return self.trace.digest

    # -- log and collector ---------------------------------------------------------------------

    def take_log(self, event: Mapping[str, Any]) -> None:
        """Keep a log line of whichever node is running."""
        facts = dict(event)
        name = facts.pop("event", "")
        counted = COUNTED_LINES.get(name)
        if counted is not None:
            self.sometimes[counted] += 1
        self.logs.append((self.elapsed_s, current_node.get(), str(name), facts))
        if name in MEMBERS_AT_ODDS:
            why = facts.get("error") or facts.get("exc_info")
            self.violate("contradiction", f"{current_node.get()}: {name}: {why}")

    def _look(self, _: object) -> None:
        if not self.is_over and self.violation is None:
            leader = self.steadiness.look()
            self.due.look(leader)
            self.routes.look(leader)
            self.redirects.look(leader)
            self.time.call_later(LOOK_S, self._look, None)

    def _collect(self, _: object) -> None:
        # Only what was made since: what has lasted once mostly lasts as long as the world.
        gc.collect(0)
        self.time.call_later(COLLECT_S, self._collect, None)

    def end(self) -> None:
        """End every process, as a kill does, and look at nothing any more."""
        self.is_over = True
        for node in self.nodes.values():
            node.kill_now()


def _is_scrubbed(node: BrokerNode) -> bool:
    group = node.group
    if node.is_trusted or group is None:
        return True
    # Rot comes with a kill: this process began to read after it. Sectors go bad at any time.
    spoiled_in, passes = node.spoiled
    wanted = passes + 2 if spoiled_in == node.incarnation else 1
    if node.has_rotten_queues and group.store.derived.is_behind:
        return False
    return group.scrub.passes >= wanted and not len(group.log.damaged)


def run_world(
    seed: int,
    main: Callable[[World], Awaitable[T]],
    settings: WorldSettings | None = None,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> T:
    """Make a world, start it, run *main* in it and return what that returns.

    Raises Violation: something that must hold did not. The world is in it.
    """
    results: list[T] = []
    worlds: list[World] = []

    async def run(time: VirtualTime) -> None:
        with _logs_to(worlds):
            async with trio.open_nursery() as nursery:
                world = World(seed, settings or WorldSettings(), time, nursery)
                worlds.append(world)
                time.call_later(COLLECT_S, world._collect, None)
                time.call_later(LOOK_S, world._look, None)
                await world.start()
                results.append(await main(world))
                world.end()
                nursery.cancel_scope.cancel()

    gc.collect()
    # What was there before is not looked at again; some have seen to that for all their runs.
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        run_virtual(seed, run, instruments)
    except BaseExceptionGroup as group:
        if worlds and worlds[0].violation is None and len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        if not (worlds and worlds[0].violation):
            raise
    finally:
        if is_ours:
            gc.unfreeze()
    if worlds[0].violation is not None:
        raise worlds[0].violation
    return results[0]


@contextmanager
def _logs_to(worlds: list[World]) -> Iterator[None]:
    before = structlog.get_config()

    def take_log(
        logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if worlds:
            worlds[0].take_log(event)
        raise structlog.DropEvent

    structlog.configure(
        processors=[take_log],
        wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVEL),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
