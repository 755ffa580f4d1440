"""The nodes of the world: machines with a NameServer, a broker or a client program on them.

`NodeWorld` is what nodes need of their world, `CheckedWorld` what checks of a group need of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NoReturn, Protocol

import trio

from dledger.broker import Broker, serve_broker
from dledger.broker import World as BrokerWorld
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.commitlog.entry_log import EntryLog
from dledger.group import Group
from dledger.jepsen_like.nemesis.ground import CannotBeDone
from dledger.jepsen_like.simulation.machine import MachineWorld, Node, Process
from dledger.jepsen_like.simulation.platter import IDENTITY, KEY_INDEX, QUEUES
from dledger.jepsen_like.simulation.virtual_time import SimClock
from dledger.jepsen_like.simulation.world_settings import ACCOUNTS_PATH, WorldSettings
from dledger.namesrv.config import NamesrvConfig, NamesrvTable, ServerTable
from dledger.namesrv.name_server import NameServer, RouteCache
from dledger.namesrv.route_table import RouteInfoManager
from dledger.namesrv.server import serve_namesrv
from dledger.remoting.addresses import join_address
from dledger.remoting.protocol.signature import Credentials
from dledger.settings.config import BrokerConfig

POINT_WAIT_S: Final = 10.0
"""How long a kill waits for the disk to do something."""


class NodeWorld(MachineWorld, Protocol):
    """What brokers and clients need of their world, beside what a machine needs."""

    settings: WorldSettings

    @property
    def name_servers(self) -> Mapping[str, NameServerNode]:
        """The NameServers by name."""

    def watch(self, node: BrokerNode, group: Group) -> None:
        """Check a replica that has just started, and every step that it makes."""

    def watch_client(self, node: ClientNode) -> None:
        """Check what a client that has just started learns of the group."""


class NameServerNode(Node):
    """A machine with the product's NameServer on it.

    Attributes:
        routes: The route tables of the running process; None while there is none.
        answers: The encoded routes that it answers with; None while there is none.
    """

    kind = "name_server"

    def __init__(self, world: MachineWorld, name: str, number: int, address: str) -> None:
        super().__init__(world, name, number, address)
        self.routes: RouteInfoManager | None = None
        self.answers: RouteCache | None = None

    @property
    def endpoint(self) -> str:
        """``host:port``."""
        return join_address(self.address, 9876)

    async def _serve(self, process: Process) -> None:
        accounts = ACCOUNTS_PATH if ACCOUNTS_PATH in self.files else ""
        config = NamesrvConfig(
            server=ServerTable(
                listen_host=self.address,
                listen_port=9876,
                open_admin=True,  # plans delete topics from machines of their own
                acl_enable=bool(accounts),
                acl_file=accounts,
            ),
            namesrv=NamesrvTable(kv_config_path="/namesrv/kvConfig.json"),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(self._run_server, process, config)
            self._is_up(process)

    async def _run_server(
        self,
        process: Process,
        config: NamesrvConfig,
        *,
        task_status: trio.TaskStatus[tuple[str, int]],
    ) -> None:
        name_server = NameServer(config, process.mount)
        if self.process is process:
            self.routes, self.answers = name_server.routes, name_server.route_cache
        await serve_namesrv(
            config,
            name_server=name_server,
            clock=process.clock,
            rng=process.rng,
            network=process.network,
            disk=process.mount,
            task_status=task_status,
        )

    def _take_process_away(self, *, silent: bool) -> None:
        self.routes = self.answers = None
        super()._take_process_away(silent=silent)


class BrokerNode(Node):
    """A machine with the product's broker on it.

    Attributes:
        seen_commit: Newest commit index this node has shown.
        seen_voters: Names of the voters in the list it followed last.
        seen_durable_end: Position up to which its log was seen to be on its disk.
        promised_vote: Newest term in which a vote of it has left, and the candidate.
        promised_entry: Term, index and chain of the newest entry it has acknowledged, or shown as
            committed; zeros where its log may end earlier without a sign of that.
        began_doubtful: Its process took what it had acknowledged for lost when it started.
        has_rotten_queues: A bit of a queue file has flipped; the scrub finds it.
        has_rotten_keys: A bit of the key index has flipped: the query that meets it lacks keys.
    """

    kind = "broker"

    def __init__(
        self, world: NodeWorld, name: str, number: int, address: str, config: BrokerConfig
    ) -> None:
        super().__init__(world, name, number, address)
        self.world: NodeWorld = world
        self.config = config
        self.broker: Broker | None = None
        self.seen_commit = 0
        self.seen_truncations = 0
        self.seen_voters: tuple[str, ...] = ()
        self.seen_list = -1
        self.seen_led_term = 0
        self.seen_end = (0, 0)
        self.seen_claim = (0, 0)
        self.seen_log: EntryLog | None = None
        self.seen_durable_end = 0
        self.led_s = 0.0
        self.promised_vote = (0, "")
        self.promised_entry = (0, 0, 0)
        self.began_doubtful = False
        self.has_rotten_queues = False
        self.has_rotten_keys = False
        self._stop = trio.Event()

    @property
    def group(self) -> Group | None:
        """The replica; None while there is none."""
        return None if self.broker is None else self.broker.group

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return self.config.advertised_address

    @property
    def leads(self) -> bool:
        """Whether its process believes it leads, running or paused."""
        return self.broker is not None and self.broker.group.node.is_leader

    async def _serve(self, process: Process) -> None:
        self._stop = stop = trio.Event()
        async with trio.open_nursery() as nursery:
            broker: Broker = await nursery.start(self._run_broker, process, stop)
            if self.process is process:
                self.broker = broker
                self.world.watch(self, broker.group)
                self._is_up(process)

    async def _run_broker(
        self, process: Process, stop: trio.Event, *, task_status: trio.TaskStatus[Broker]
    ) -> None:
        await serve_broker(
            self.config,
            BrokerWorld(
                process.clock,
                process.rng,
                process.network,
                process.mount,
                process.executor,
                pid=self.number * 1000 + process.number,
                timer_load_units=self.world.settings.timer_load_units,
            ),
            stop=stop,
            sessions_max=self.world.settings.sessions_max,
            task_status=task_status,
        )

    def _take_process_away(self, *, silent: bool) -> None:
        self.broker = None
        super()._take_process_away(silent=silent)

    def _ask_to_stop(self, process: Process) -> None:
        self._stop.set()

    async def restart_newer(self) -> None:
        """Say why not."""
        raise CannotBeDone("all simulated brokers are one program, of one version")

    async def kill_at_point(self, skip: int, *, power: bool) -> str:
        """End the process inside the product's own disk call."""
        left, where = skip, ""
        struck = trio.Event()

        def observe(kind: str, path: str) -> None:
            nonlocal left, where
            left -= 1
            if left < 0 and not struck.is_set():
                struck.set()
                where = f"{kind} {path}"
                (self.power_cut_now if power else self.kill_now)()

        self.disk_watchers.append(observe)
        try:
            with trio.move_on_after(POINT_WAIT_S):
                await struck.wait()
        finally:
            self.disk_watchers.remove(observe)
        return where

    async def _no_descriptors(self, *_: object) -> NoReturn:
        """State why not."""
        raise CannotBeDone("descriptors are those of real processes")

    limit_files = flood = _no_descriptors

    async def wipe(self) -> None:
        """Lose the disk; the process is killed before."""
        await super().wipe()
        self.seen_commit = 0
        self.seen_voters = ()
        self.promised_vote = (0, "")
        self.promised_entry = (0, 0, 0)
        self.has_rotten_queues = self.has_rotten_keys = False

    async def rot_file(self, arg: int) -> str:
        """Let a file go bad; a process that refuses its identity gets an empty disk."""
        where = await super().rot_file(arg)
        self.has_rotten_queues |= QUEUES in f"/{where}"
        self.has_rotten_keys |= KEY_INDEX in f"/{where}"
        if IDENTITY in f"/{where}":
            with trio.CancelScope(shield=True):
                if await self.start():
                    self.world.violate("identity", f"{self.name} serves with a damaged identity")
            await self.wipe()
        return where

    async def spoil_sectors(self, sectors: int) -> str:
        """Let reads of sectors of the log, or of what is made from it, fail; return where."""
        group = self.group
        if group is not None:
            self.spoiled = (self.incarnation, group.scrub.passes)
        return await super().spoil_sectors(sectors)

    def power_cut_now(self) -> None:
        """End process and machine; with ``ASYNC_FLUSH`` it loses what it had acknowledged, too."""
        super().power_cut_now()
        self._lost_pages()

    def _lost_pages(self) -> None:
        """With ``ASYNC_FLUSH`` the process had acknowledged what was in them."""
        if self.config.store.flush_disk_type == "ASYNC_FLUSH":
            self.harmed_s = self.world.elapsed_s

    async def undo_lied_flushes(self) -> str:
        """Lose by chance what these flushes wrote; the machine is down. Return how much."""
        self.promised_entry = (0, 0, 0)
        return await super().undo_lied_flushes()

    async def tear_tail(self, size_bytes: int) -> str:
        """Write over the log's newest bytes above the commit mark; return where."""
        where = await super().tear_tail(size_bytes)
        if where:
            self.promised_entry = (0, 0, 0)
        return where


class ClientNode(Node):
    """A machine with a program on it that uses the product's SDK.

    Attributes:
        instance: The open client instance; None while there is none.
        credentials: What its requests are signed with; None: they are not.
    """

    kind = "client"

    def __init__(self, world: NodeWorld, name: str, number: int, address: str) -> None:
        super().__init__(world, name, number, address)
        self.world: NodeWorld = world
        self.instance: ClientInstance | None = None
        self.credentials: Credentials | None = None
        self._program: Callable[[ClientNode], Awaitable[None]] | None = None

    def install(self, program: Callable[[ClientNode], Awaitable[None]]) -> None:
        """Make *program* what this machine runs, when it is started."""
        self._program = program

    async def run(self, program: Callable[[ClientNode], Awaitable[None]]) -> bool:
        """Start *program* on this machine; it uses `instance`, and `restart` starts it again."""
        self.install(program)
        return await self.start()

    @property
    def clock(self) -> SimClock:
        """The clock of the program; the program must run."""
        assert self.process is not None
        return self.process.clock

    async def _serve(self, process: Process) -> None:
        assert self._program is not None
        settings = self.world.settings
        config = ClientConfig(
            name_servers=tuple(node.endpoint for node in self.world.name_servers.values()),
            client_ip=self.address,
            pid=self.number * 1000 + process.number,
            heartbeat_period_s=settings.client_heartbeat_s,
            route_poll_period_s=settings.route_poll_s,
            rpc_timeout_s=settings.rpc_timeout_s,
            credentials=self.credentials,
        )
        instance = ClientInstance(
            config,
            clock=process.clock,
            network=process.network,
            rng=process.rng,
            executor=process.executor,
            disk=process.mount,
        )
        async with instance:
            if self.process is process:
                self.instance = instance
                self.world.watch_client(self)
                self._is_up(process)
                await self._program(self)

    def _take_process_away(self, *, silent: bool) -> None:
        self.instance = None
        super()._take_process_away(silent=silent)


class CheckedWorld(NodeWorld, Protocol):
    """A world with one broker group; *last_leader, last_term*: the newest leader that was seen."""

    last_leader: BrokerNode | None
    last_term: int

    @property
    def brokers(self) -> Mapping[str, BrokerNode]:
        """The brokers by name."""

    def leader(self) -> BrokerNode | None:
        """Return the running broker that may act as leader in the highest term, if any."""
