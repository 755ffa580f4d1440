"""A NameServer and brokers as child processes of this one, on loopback ports, in one folder.

For ``dledger up``, the demo, the bench and tests with real processes. Children die with this
process: the kernel kills them when their parent goes. Only processes started here are signalled.
"""

from __future__ import annotations

import functools
import os
import signal
import tomllib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import trio

from dledger.cli.commands import open_admin
from dledger.cli.fork_server import Child, start_child
from dledger.cli.ports import free_ports, is_free
from dledger.cli.secret_file import make_secret
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import StoreLockedError
from dledger.output import CliError, ExitCode
from dledger.remoting.addresses import join_address, split_address
from dledger.settings.config import stored_sizes
from dledger.settings.text import Peer

HEALTHY_TIMEOUT_S = 60.0
"""Seven interpreters on a busy machine take half a minute to start; an election a second or two."""

STOP_TIMEOUT_S = 15.0
"""A clean stop drains and flushes; after this the process is killed."""

POLL_S = 0.05

DEFAULT_GROUP = "broker-a"

SECRET_FILE = "raft.secret"
"""Shared by all members in the folder; made with it."""

GROUP_LETTERS = "abcdefgh"

MAX_GROUPS = len(GROUP_LETTERS)
"""Three processes each: more would only be slow on one machine."""


T = TypeVar("T")
Status = Mapping[str, Any]


async def status_of(address: str, *, timeout_s: float = 1.0) -> Status | None:
    """Return what a broker reports of its part in the group; None when it does not answer."""
    return (await _statuses_of([address], timeout_s))[address]


async def _statuses_of(
    addresses: Sequence[str], timeout_s: float = 1.0
) -> Mapping[str, Status | None]:
    from dledger.client.admin.admin import member_statuses

    # No NameServer is asked.
    async with open_admin(addresses) as admin:
        return await member_statuses(admin, addresses, timeout_s=timeout_s)


async def namesrv_leaders(namesrv: str) -> dict[str, str]:
    """Return the address a NameServer has as id 0 of each broker group that has one."""
    from dledger.client.core.errors import ClientError

    async with open_admin([namesrv]) as admin:
        try:
            info = await admin.cluster_info()
        except ClientError:
            return {}
    return {
        name: group.broker_addrs[0]
        for name, group in info.broker_addr_table.items()
        if 0 in group.broker_addrs
    }


@dataclass(slots=True)
class Node:
    """One child process: how it is started, where it writes, and whether it runs."""

    name: str
    address: str
    arguments: tuple[str, ...]
    log_path: Path
    store_path: Path | None = None
    config_path: Path | None = None
    module: str = "dledger"
    group: str = DEFAULT_GROUP
    """Of a broker: what clients see as its name."""
    tree: Path | None = None
    """Source tree that it runs; None: the one of this process."""
    process: Child | None = None

    @property
    def running(self) -> bool:
        """True while the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id, also of one that has ended."""
        return self.process.pid if self.process is not None else None

    @property
    def ending(self) -> str:
        """How the process ended: the signal, or its status and the end of its log."""
        status = None if self.process is None else self.process.poll()
        if status is not None and status < 0:
            return f"by {signal.Signals(-status).name}"
        return f"with status {status}: {self.last_log_lines(1)}"

    def last_log_lines(self, count: int = 5) -> str:
        """Return the end of what it logged, for an error message."""
        if not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return " | ".join(lines[-count:])

    @property
    def failure(self) -> str:
        """What it printed at its end for people; its last log line if that is nothing."""
        printed = [line for line in self.last_log_lines(3).split(" | ") if not line.startswith("{")]
        return " ".join(printed) or self.last_log_lines(1)


@dataclass(slots=True)
class LocalCluster:
    """A NameServer and the brokers of one group or of several. Get it from `local_cluster`.

    *leader_address*: `broker.leader_address` of its members.
    """

    folder: Path
    namesrv: Node
    brokers: dict[str, Node] = field(default_factory=dict)
    proxies: dict[str, Node] = field(default_factory=dict)
    leader_address: str = ""

    @property
    def namesrv_address(self) -> str:
        """``host:port`` for clients."""
        return self.namesrv.address

    @property
    def groups(self) -> list[str]:
        """Names of the broker groups."""
        return list(dict.fromkeys(node.group for node in self.brokers.values()))

    def members(self, group: str) -> list[str]:
        """Return the names of the brokers of a group."""
        return [name for name, node in self.brokers.items() if node.group == group]

    @property
    def nodes(self) -> list[Node]:
        """The NameServer, the brokers and the proxies."""
        return [self.namesrv, *self.brokers.values(), *self.proxies.values()]

    async def start(self, name: str) -> None:
        """Start a node that does not run. Returns when the process exists, not when it serves."""
        node = self._node(name)
        if node.running:
            raise CliError(f"{name} is already running, process {node.pid}")
        node.process = await start_child(
            node.module, node.arguments, node.log_path, _child_environment(node.tree)
        )

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a node and wait until its process has ended."""
        node = self._node(name)
        if node.process is None or not node.running:
            return
        node.process.send_signal(number)
        await node.process.ended()

    async def restart(self, name: str) -> None:
        """Start a node again on its folder and ports, after stopping it if it runs."""
        await self.stop(name)
        await self.start(name)

    async def stop(self, name: str) -> int | None:
        """Stop a node cleanly and return its exit status; kill it when that takes too long."""
        node = self._node(name)
        if node.process is None:
            return None
        if node.running:
            node.process.send_signal(signal.SIGTERM)
            with trio.move_on_after(STOP_TIMEOUT_S):
                await node.process.ended()
            await self.kill(name)
        return node.process.returncode

    async def stop_all(self) -> None:
        """Stop brokers and proxies at once, then the NameServer. Runs even when cancelled."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for name in (*self.proxies, *self.brokers):
                    nursery.start_soon(self.stop, name)
            await self.stop(self.namesrv.name)

    async def statuses(self) -> dict[str, Status]:
        """Return the Raft status of every broker that answers, by name."""
        running = {name: node.address for name, node in self.brokers.items() if node.running}
        said = await _statuses_of(list(running.values())) if running else {}
        found = {name: said[address] for name, address in running.items()}
        return {name: status for name, status in found.items() if status is not None}

    async def leader(self, group: str | None = None) -> str | None:
        """Return the name of the broker that leads and serves, in the newest term; or None."""
        return self._leader_of(group or self.groups[0], await self.statuses())

    def _leader_of(self, group: str, statuses: Mapping[str, Status]) -> str | None:
        leading = [
            (int(statuses[name]["term"]), name)
            for name in self.members(group)
            if statuses.get(name, {}).get("serving")
        ]
        return max(leading)[1] if leading else None

    async def wait_leader(
        self,
        *,
        other_than: str | None = None,
        group: str | None = None,
        timeout_s: float = HEALTHY_TIMEOUT_S,
    ) -> str:
        """Return the leader as soon as there is one.

        Raises CliError: none within *timeout_s*, or a broker that should run has ended.
        """

        async def look() -> str | None:
            name = await self.leader(group)
            return None if name == other_than else name

        if (found := await self._until(look, timeout_s)) is not None:
            return found
        raise CliError(f"no leader within {timeout_s:.0f} s", next_step=f"see {self.folder}/*.log")

    async def wait_caught_up(self, name: str, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        """Wait until a member has applied what was committed when this was called.

        Raises CliError: not within *timeout_s*, or a broker that should run has ended.
        """
        target: int | None = None

        async def look() -> bool | None:
            nonlocal target
            statuses = await self.statuses()
            mine = [s for each, s in statuses.items() if each in members]
            if target is None and mine:
                target = _committed(mine)
            is_there = target is not None and name in statuses
            return (is_there and statuses[name]["applied_index"] >= target) or None

        members = self.members(self.brokers[name].group)
        if not await self._until(look, timeout_s):
            raise CliError(
                f"{name} did not catch up within {timeout_s:.0f} s",
                next_step=f"see {self.brokers[name].log_path}",
            )

    async def wait_healthy(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> str:
        """Wait until all started brokers answer, each group has a leader, the NameServer knows it.

        Returns:
            The name of the leader, of the first group's where there are several.
        Raises:
            CliError: Not within *timeout_s*; the message names what is missing.
        """
        missing = "nothing answered"

        async def look() -> str | None:
            nonlocal missing
            statuses = await self.statuses()
            known = await namesrv_leaders(self.namesrv.address)
            missing = self._what_is_missing(statuses, known)
            return None if missing else self._leader_of(self.groups[0], statuses) or ""

        if (leader := await self._until(look, timeout_s)) is not None:
            return leader
        raise CliError(
            f"not healthy within {timeout_s:.0f} s: {missing}",
            next_step=f"see the logs in {self.folder}",
        )

    async def wait_proxies(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        """Wait until every proxy takes connections.

        Raises CliError: not within *timeout_s*, or one has ended.
        """
        for node in self.proxies.values():
            host, port = split_address(node.address)

            async def look(host: str = host, port: int = port) -> bool | None:
                return None if is_free(port, host) else True

            if not await self._until(look, timeout_s):
                raise CliError(f"{node.name} does not listen", next_step=f"see {node.log_path}")

    async def _until(self, look: Callable[[], Awaitable[T | None]], timeout_s: float) -> T | None:
        """Return what *look* finds, as soon as there is something; None: not in time.

        Raises CliError: a node that should run has ended.
        """
        with trio.move_on_after(timeout_s):
            while (found := await look()) is None:
                self._complain_about_the_dead()
                await trio.sleep(POLL_S)
            return found
        return None

    def _what_is_missing(self, statuses: Mapping[str, Status], known: Mapping[str, str]) -> str:
        """Return why a client could not use every group now; nothing when it could."""
        running = {name for name, node in self.brokers.items() if node.running}
        if silent := sorted(running - set(statuses)):
            return f"{', '.join(silent)} do not answer"
        for group in self.groups:
            leader = self._leader_of(group, statuses)
            here = {name: statuses[name] for name in self.members(group) if name in statuses}
            committed = _committed(here.values())
            behind = [n for n, status in here.items() if status["applied_index"] < committed]
            if leader is None:
                return f"no broker of {group} leads"
            if known.get(group) != (self.leader_address or self.brokers[leader].address):
                return f"the NameServer knows {known.get(group, 'no member')} as leader of {group}"
            if behind:
                return f"{', '.join(behind)} are behind"
        return ""

    def _node(self, name: str) -> Node:
        if name == self.namesrv.name:
            return self.namesrv
        return self.brokers.get(name) or self.proxies[name]

    def _complain_about_the_dead(self) -> None:
        for node in self.nodes:
            code = node.process.poll() if node.process is not None else None
            if code is not None and code >= 0:
                raise CliError(
                    f"{node.name} ended with status {code}: {node.failure}",
                    next_step=f"see {node.log_path}",
                )


def _committed(statuses: Iterable[Status]) -> int:
    return max((status["commit_index"] for status in statuses), default=0)


@functools.cache
def _package_root() -> str:
    return str(Path(__file__).resolve().parents[2])


def _child_environment(tree: Path | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "NAMESRV_ADDR"}
    if tree is not None:
        # Without the second one ``python -m`` finds the packages of the working directory first.
        return {**own, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    path = os.environ.get("PYTHONPATH", "")
    root = _package_root()
    return {**own, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def lay_out(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    brokers: int = 3,
    settings: Mapping[str, object] | None = None,
    ports: Sequence[int] | None = None,
    group: str = DEFAULT_GROUP,
    groups: int = 1,
    proxies: Sequence[int] = (),
) -> LocalCluster:
    """Write the configuration files of a cluster and return it; nothing is started.

    Args:
        folder: Holds configuration, data and log files. With those of an earlier cluster in it the
            ports stay as they were and the data is used again.
        host: Address of loopback where everything listens.
        ports: NameServer, then client port and peer port of each broker; free ones otherwise.
        groups: How many; with more than one they are `broker-a`, `broker-b` and so on, and their
            members `a0`, `a1`, …, `b0`, ….
        proxies: Port of each proxy; they are `proxy0` and so on.
    """
    if not 1 <= groups <= MAX_GROUPS:
        raise CliError(f"from 1 to {MAX_GROUPS} groups", exit_code=ExitCode.USAGE)
    folder.mkdir(parents=True, exist_ok=True)
    members = {
        letter if groups > 1 else "n": f"broker-{letter}" if groups > 1 else group
        for letter in GROUP_LETTERS[:groups]
    }
    all_names = [f"{letter}{number}" for letter in members for number in range(brokers)]
    namesrv_port, *rest = (
        ports or _ports_before(folder, all_names) or free_ports(1 + 2 * len(all_names))
    )
    if not (folder / SECRET_FILE).exists():
        make_secret(folder / SECRET_FILE)
    values = {"raft.secret_file": str(folder / SECRET_FILE), **(settings or {})}
    namesrv_config = folder / "namesrv.toml"
    namesrv_config.write_text(
        "[server]\n"
        f'listen_host = "{host}"\n'
        f"listen_port = {namesrv_port}\n"
        "[namesrv]\n"
        f"kv_config_path = {_toml(str(folder / 'namesrv' / 'kvConfig.json'))}\n"
        f"group_secret_file = {_toml(str(values['raft.secret_file']))}\n"
    )
    cluster = LocalCluster(
        folder,
        Node(
            "namesrv",
            join_address(host, namesrv_port),
            ("namesrv", "-c", str(namesrv_config)),
            folder / "namesrv.log",
            config_path=namesrv_config,
        ),
        leader_address=str(values.get("broker.leader_address", "")),
    )
    for letter, name in members.items():
        own = [each for each in all_names if each[0] == letter]
        own_ports, rest = rest[: 2 * brokers], rest[2 * brokers :]
        for node in _lay_out_group(cluster, host, name, own, own_ports, values):
            cluster.brokers[node.name] = node
    for number, port in enumerate(proxies):
        name, address = f"proxy{number}", join_address(host, port)
        arguments = ("proxy", "--namesrv", cluster.namesrv_address, "--listen", address)
        cluster.proxies[name] = Node(name, address, arguments, folder / f"{name}.log")
    return cluster


def _lay_out_group(
    cluster: LocalCluster,
    host: str,
    group: str,
    names: Sequence[str],
    ports: Sequence[int],
    settings: Mapping[str, object],
) -> Iterator[Node]:
    """Write the configuration files of one group's members and yield them."""
    folder = cluster.folder
    peer_ports = enumerate(ports[1 : 2 * len(names) : 2])
    peers = ";".join(str(Peer(f"n{place}", host, port)) for place, port in peer_ports)
    # Of an earlier cluster, or of a restored member: the others have to be as it is.
    found = (stored_sizes(OsDisk(), str(folder / name / "store")) for name in names)
    sizes = next(filter(None, found), {})
    for place, name in enumerate(names):
        store = folder / name / "store"
        values: dict[str, object] = {
            "broker.cluster_name": "DefaultCluster",
            "broker.broker_name": group,
            "broker.namesrv_addr": cluster.namesrv_address,
            "server.listen_host": host,
            "server.listen_port": ports[2 * place],
            "server.drain_timeout_ms": 0,  # its members end together
            "store.path_root_dir": str(store),
            "raft.group": group,
            "raft.self_id": f"n{place}",
            "raft.peers": peers,
            **settings,
            **sizes,
        }
        config_path = folder / f"{name}.toml"
        config_path.write_text(settings_document(values))
        yield Node(
            name,
            join_address(host, ports[2 * place]),
            ("broker", "-c", str(config_path), "--log-form", "json"),
            folder / f"{name}.log",
            store_path=store,
            config_path=config_path,
            group=group,
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other clusters out of *folder* while the block runs.

    Raises CliError: one is there; none of its files was touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = OsDisk().lock(str(folder / "lock"))
    except StoreLockedError:
        raise CliError(
            f"a cluster runs in {folder} already; none of its files was touched",
            next_step="stop it, or take another folder",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _ports_before(folder: Path, names: Sequence[str]) -> list[int] | None:
    """Return the ports of the cluster that this folder held, None when it held none."""
    try:
        namesrv = tomllib.loads((folder / "namesrv.toml").read_text())
        ports: list[int] = [namesrv["server"]["listen_port"]]
        for name in names:
            config = tomllib.loads((folder / f"{name}.toml").read_text())
            peers = dict(peer.split("-", 1) for peer in config["raft"]["peers"].split(";"))
            peer = peers[config["raft"]["self_id"]]
            ports += [config["server"]["listen_port"], int(peer.rpartition(":")[2])]
    except FileNotFoundError:
        return None
    return ports


@asynccontextmanager
async def local_cluster(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    brokers: int = 3,
    groups: int = 1,
    settings: Mapping[str, object] | None = None,
    ports: Sequence[int] | None = None,
    wait: bool = True,
    progress: Callable[[str], None] | None = None,
    proxies: Sequence[int] = (),
) -> AsyncIterator[LocalCluster]:
    """Run a cluster while the block runs; all its processes have ended when it is left.

    Args:
        wait: Enter only when the cluster is healthy.
        progress: Called with a few words: what is being waited for.
    Raises:
        CliError: Another cluster runs in *folder*; or it did not become healthy; the message names
            the reason and the log files.
    Cancellation: The processes are stopped cleanly first.
    """
    with held(folder):
        cluster = lay_out(
            folder,
            host=host,
            brokers=brokers,
            settings=settings,
            ports=ports,
            groups=groups,
            proxies=proxies,
        )
        try:
            if progress:
                progress(f"starting a NameServer and {len(cluster.brokers)} brokers in {folder}")
            for node in cluster.nodes:
                await cluster.start(node.name)
            if wait:
                leader = await cluster.wait_healthy()
                await cluster.wait_proxies()
                if progress:
                    progress(f"healthy; {leader} leads")
            yield cluster
        finally:
            await cluster.stop_all()


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if any(char in text for char in '"\\\n\r') or not text.isprintable():
        raise CliError(f"{text!r} does not fit a configuration file", exit_code=ExitCode.USAGE)
    return f'"{text}"'


def settings_document(values: Mapping[str, object]) -> str:
    """Return a TOML document of ``table.name`` to value."""
    tables: dict[str, list[str]] = {}
    for path, value in values.items():
        table, _, name = path.partition(".")
        tables.setdefault(table, []).append(f"{name} = {_toml(value)}\n")
    return "\n".join(f"[{table}]\n{''.join(lines)}" for table, lines in tables.items())
