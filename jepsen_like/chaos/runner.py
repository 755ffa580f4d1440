"""One run against real processes: set up, load and faults, heal, demand progress, read, judge.

The same phases, plans, clients and checkers as the simulator's; see `jepsen_like.simulation.play`.
Everything the run made is in its folder; every process it started has ended when it returns.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import trio

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.chaos import loop_disk, namespaces
from dledger.jepsen_like.chaos.cluster import (
    CLIENTS,
    GROUP,
    ChaosCluster,
    broker_names,
    lay_out,
    name_server_names,
)
from dledger.jepsen_like.chaos.machines import RealClient, RealMember
from dledger.jepsen_like.chaos.namespaces import RunNetwork, entered, run_network
from dledger.jepsen_like.chaos.proxy import LinkProxy
from dledger.jepsen_like.chaos.real_ground import KernelLinks, RealGround
from dledger.jepsen_like.chaos.recorder import Recorder, write_push_record, write_rest, write_tables
from dledger.jepsen_like.chaos.run_result import read_logs
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.fault_record import HEALED, SERVED
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import Event, History, RunHeader
from dledger.jepsen_like.nemesis.nemesis import Nemesis
from dledger.jepsen_like.plans.plan import Kind, Plan, encode_plan
from dledger.jepsen_like.plans.promised import clock_ahead_ns, promised
from dledger.jepsen_like.workloads.clients import WorkloadClients
from dledger.jepsen_like.workloads.final_read import read_replica
from dledger.jepsen_like.workloads.producers import due_within_s
from dledger.jepsen_like.workloads.push_groups import PushGroup
from dledger.jepsen_like.workloads.through import Through
from dledger.jepsen_like.workloads.transactions import PATIENCE_S
from dledger.settings.config import load_config
from dledger.settings.parts import empty_tables
from dledger.settings.schema import ConfigFile
from dledger.store import ReplicaStore

READERS: Final = "readers"
LAST_READER: Final = "last-reader"
"""A client that was not there before: it reads everything when the run is over."""
DOUBLES: Final = "doubles"

DISK_BYTES: Final = 1 << 30
"""File system of one broker; sparse, so it costs what is written."""

SERVE_WITHIN_S: Final = 60.0
"""A healed cluster must have a leader and serve within this, on a busy machine."""

SETTLED_WITHIN_S: Final = 240.0
"""Every operation must end, every replica agree, within this once all that is delayed is due.

What is left to read grows with a run: a longer one may take as long as its load took.
"""

RPC_TIMEOUT_S: Final = 5.0
LIVENESS: Final = "liveness"
FINAL_READ: Final = "final_read"

DISK_KINDS: Final = frozenset({Kind.POWER_CUT, Kind.POWER_CUT_ALL, Kind.DISK_FULL})
"""Faults that need a file system of the broker's own."""


LinksBy = Literal["proxy", "kernel"]
"""What breaks links: the runner's own proxy, or the kernel in a network of the run's own."""


class DidNotSettle(Exception):  # noqa: N818  # a finding about the cluster, not an error here
    """The healed cluster does not do what it must; the text names it."""


@dataclass(slots=True)
class Ran:
    """What came of a run.

    Attributes:
        faults: Steps done, by kind; ``skipped`` and ``restarted_by_supervisor`` beside them.
        settled: The healed cluster served, agreed and was read.
        clock_error_ns: How far brokers' dates may have been apart.
    """

    plan: Plan
    folder: Path
    verdicts: list[Verdict] = field(default_factory=list)
    history: History = field(default_factory=lambda: History(RunHeader("")))
    faults: Counter[str] = field(default_factory=Counter)
    sometimes: Counter[str] = field(default_factory=Counter)
    settled: bool = False
    duration_s: float = 0.0


@dataclass(slots=True)
class Options:
    """What is no part of the plan.

    Attributes:
        settings: Of every broker, over those of the plan.
        links: Where the kernel cannot, steps that want it are skipped.
        on_progress: Called a few times a second with the phase, rows by kind and outcome, and
            faults by kind.
        on_event: Called with every fault when it begins and, with true, when it has ended, and with
            every change of role.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    tree: Path | None = None
    links: LinksBy = "proxy"
    on_progress: Callable[[str, Counter[str], Counter[str]], None] = lambda *_: None
    on_event: Callable[[Event, bool], None] = lambda *_: None


async def run_plan(plan: Plan, folder: Path, options: Options | None = None) -> Ran:
    """Play *plan* against processes of its own in *folder*.

    Raises:
        CliError: The cluster did not even start; nothing was tested.
    Cancellation: Every process is ended; the history so far is on disk.
    """
    return await _Run(plan, folder, options or Options()).run()


class _Run:
    def __init__(self, plan: Plan, folder: Path, options: Options) -> None:
        self.plan = plan
        self.options = options
        self.begin_ns = time.monotonic_ns()
        self.rng = Random(f"chaos {plan.seed}")
        header = RunHeader(folder.name, plan.seed, encode_plan(plan), versions())
        self.ran = Ran(plan, folder, history=History(header))
        self.recorder = Recorder(folder / "history", header)
        self.nemesis: Nemesis | None = None
        self.found: list[Verdict] = []
        self.why_no_links: str | None = None
        self.push_group: PushGroup | None = None
        self.through: Through | None = None
        self.phase = "load and faults"

    async def run(self) -> Ran:
        ran = self.ran
        with ExitStack() as stack:
            network = self._own_network(stack)
            cluster, members = self._lay_out(stack, network)
            links = self._links(cluster, network)
            self.through = self._through_proxies(stack, cluster)
            try:
                await self._live(cluster, members, links)
            finally:
                self.recorder.close()
            self._read_replicas(cluster)
        logs = {name: node.log_path for name, node in cluster.brokers.items()}
        self.found += read_logs(logs)
        ran.duration_s = (time.monotonic_ns() - self.begin_ns) / 1e9
        ran.verdicts = [
            *self.found,
            *check_everything(ran.history, promised(self.plan, ran.settled)),
        ]
        write_rest(ran.folder, ran.history)
        if self.push_group is not None and self.push_group.is_settled:
            write_push_record(ran.folder, self.push_group.record)
        write_tables(ran.folder)
        return ran

    def _own_network(self, stack: ExitStack) -> RunNetwork | None:
        """Make a network and move into it, with all clients, where links are the kernel's."""
        if self.options.links == "proxy":
            return None
        self.why_no_links = namespaces.why_not()
        if self.why_no_links is not None:
            return None
        names = [*broker_names(self.plan), *name_server_names(self.plan), CLIENTS]
        network = stack.enter_context(run_network(names))
        inside = network.hosts[CLIENTS].namespace
        assert inside is not None
        stack.enter_context(entered(inside))
        return network

    def _links(self, cluster: ChaosCluster, network: RunNetwork | None) -> LinkProxy | KernelLinks:
        if network is not None:
            return KernelLinks(network)
        rng = Random(f"proxy {self.plan.seed}")
        return LinkProxy(rng, cluster.targets(), self.why_no_links)

    def _through_proxies(self, stack: ExitStack, cluster: ChaosCluster) -> Through | None:
        """Return what clients go through; None: their plan has no proxies."""
        if not cluster.proxies:
            return None
        from dledger.jepsen_like.chaos.grpc_calls import grpc_calls  # needs an extra of its own

        addresses = [node.address for node in cluster.proxies.values()]
        return stack.enter_context(grpc_calls(addresses, self.plan.workload.queues))

    def _lay_out(
        self, disks: ExitStack, network: RunNetwork | None
    ) -> tuple[ChaosCluster, dict[str, RealMember]]:
        folder, plan = self.ran.folder, self.plan
        wanted = any(step.kind in DISK_KINDS for step in plan.steps)
        why = loop_disk.why_not() if wanted else "the plan asks for no disk of its own"
        own: dict[str, loop_disk.LoopDisk] = {}
        (folder / "nodes").mkdir(exist_ok=True)
        if why is None:
            for name in broker_names(plan):
                place = folder / "nodes" / name
                own[name] = disks.enter_context(
                    loop_disk.loop_disk(
                        folder / "nodes" / f"{name}.img", place, size_bytes=DISK_BYTES
                    )
                )
        cluster = lay_out(
            folder / "nodes",
            plan,
            hosts=network.hosts if network else None,
            stores={name: disk.place / "store" for name, disk in own.items()},
            settings=self.options.settings,
            tree=self.options.tree,
        )
        members = {
            name: RealMember(cluster, node, own.get(name), why or "", Random(f"{plan.seed} {name}"))
            for name, node in cluster.brokers.items()
        }
        return cluster, members

    async def _live(
        self,
        cluster: ChaosCluster,
        members: Mapping[str, RealMember],
        links: LinkProxy | KernelLinks,
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.recorder.run)
            await nursery.start(links.serve)
            try:
                async with _running(cluster):
                    ground = RealGround(
                        cluster,
                        members,
                        links,
                        {},
                        begin_ns=self.begin_ns,
                        on_event=self._note,
                        on_sample=self.recorder.sample,
                    )
                    nursery.start_soon(ground.watch)
                    await cluster.wait_leader(timeout_s=SERVE_WITHIN_S)
                    await cluster.wait_proxies(SERVE_WITHIN_S)
                    await self._play(cluster, ground, nursery)
            finally:
                for member in members.values():
                    member.release()
            nursery.cancel_scope.cancel()

    async def _play(self, cluster: ChaosCluster, ground: RealGround, nursery: trio.Nursery) -> None:
        ran = self.ran
        clients = WorkloadClients(
            ground,
            self.plan,
            ran.history,
            broker=GROUP,
            record=self.recorder.note,
            through=self.through,
        )
        addresses = cluster.namesrv_addresses

        def machine(name: str, program: Any) -> RealClient:
            return RealClient(name, addresses, program, nursery, rpc_timeout_s=RPC_TIMEOUT_S)

        writing, reading = machine(CLIENTS, clients.run), machine(READERS, clients.run_readers)
        await writing.start()
        await clients.ready.wait()
        await reading.start()
        if self.plan.workload.push_members:
            self.push_group = PushGroup(clients, self.plan, machine)
            nursery.start_soon(self.push_group.run)
        doubles = machine(DOUBLES, clients.run_doubles)
        ground.set_clients({CLIENTS: writing, READERS: reading}, clients, doubles)
        nemesis = self.nemesis = Nemesis(ground, self.plan, self._note)
        nursery.start_soon(self._tell, clients, nemesis)
        last: RealClient | None = None
        try:
            await nemesis.run()
            self._mark(HEALED, ground)
            self.phase = "healing"
            clients.release_consumers()
            await ground.end_doubles()
            await self._heal(ground)
            load_s = self.plan.duration_ms / 1000
            within_s = max(SETTLED_WITHIN_S, load_s) + due_within_s(
                self.plan, clock_ahead_ns(self.plan)
            )
            with trio.move_on_after(within_s):
                last = machine(LAST_READER, _stay)
                await self._demand_progress(ground, clients, writing, last)
                await _stop_in_order(ground)
                ran.settled = True
            if not ran.settled:
                raise DidNotSettle(f"not settled within {within_s:.0f} s: {_status(ground)}")
        except DidNotSettle as finding:
            violation = Violation(LIVENESS, "cluster", str(finding), checker=LIVENESS)
            self.found.append(Verdict(LIVENESS, "invalid", (violation,)))
        finally:
            ran.faults, ran.sometimes = nemesis.done, ground.sometimes
            if last is not None:
                await last.kill()
            await doubles.kill()
            await reading.kill()
            await writing.kill()
        self.found += clients.outcome_verdicts()

    async def _tell(self, clients: WorkloadClients, nemesis: Nemesis) -> None:
        while True:
            self.options.on_progress(self.phase, clients.counts, nemesis.done)
            await trio.sleep(0.5)

    async def _heal(self, ground: RealGround) -> None:
        ground.network.mend_all()
        for member in ground.brokers.values():
            await trio.to_thread.run_sync(member.release)
            member.resume()
            if member.is_newer:
                await member.stop()
            if member.disk is not None:
                await trio.to_thread.run_sync(member.disk.release)
            member.set_clock_right()
        for proxy in ground.proxies.values():
            proxy.resume()
        for machine in (
            *ground.name_servers.values(),
            *ground.brokers.values(),
            *ground.proxies.values(),
            *ground.clients.values(),
        ):
            await machine.start()
        with trio.move_on_after(SERVE_WITHIN_S):
            while not ground.leads_now():  # noqa: ASYNC110  # the cluster is another process
                await trio.sleep(0.05)
            return
        raise DidNotSettle(f"no leader within {SERVE_WITHIN_S} s: {_status(ground)}")

    async def _demand_progress(
        self, ground: RealGround, clients: WorkloadClients, machine: RealClient, last: RealClient
    ) -> None:
        assert self.nemesis is not None
        self.phase = "settling"
        while not await self.nemesis.members.add_missing():  # noqa: ASYNC110  # likewise
            await trio.sleep(0.5)
        self._mark(SERVED, ground)
        await clients.finish()
        await trio.sleep(due_within_s(self.plan, clock_ahead_ns(self.plan)))
        if self.plan.workload.transactions_per_mille:
            await trio.sleep(PATIENCE_S + 2.0)
        await last.start()
        await clients.drain_on(last)  # the settled time is the limit
        if self.push_group is not None:
            assert machine.instance is not None
            self.found.append(await self.push_group.settle(machine.instance))
        while not await _all_sound(ground):
            for node in ground.brokers.values():
                if node.is_down:
                    await node.start()
            await trio.sleep(0.2)

    def _note(self, event: Event, is_over: bool = False) -> None:
        if not is_over:
            self.ran.history.events.append(event)
        self.recorder.note(event)
        self.options.on_event(event, is_over)

    def _mark(self, kind: str, ground: RealGround) -> None:
        self._note(Event(ground.now_ns, ground.now_ns, kind))

    def _read_replicas(self, cluster: ChaosCluster) -> None:
        """Open every replica's files, now that no process has them, and read all there is."""
        if self.ran.settled:
            now_ns = time.monotonic_ns() - self.begin_ns
            configs = {name: node.config_path for name, node in cluster.brokers.items()}
            self.found += read_replicas(configs, self.ran.history, now_ns)


def read_replicas(
    configs: Mapping[str, Path | None],
    history: History,
    now_ns: int,
    stores: Mapping[str, Path] | None = None,
) -> list[Verdict]:
    """Add to *history* what each replica holds; return a verdict if one cannot be read.

    Args:
        configs: Name of each broker to its configuration file. No process may run on its folder.
        stores: Data folders that take the place of those in the configurations.
    """
    unreadable: list[Violation] = []
    for name, path in configs.items():
        assert path is not None
        options = {"store.path_root_dir": str(stores[name])} if stores else {}
        config = load_config([ConfigFile.read(path)], options=options)
        try:
            store = ReplicaStore(OsDisk(), config.store, partial(empty_tables, config))
        except MQError as error:
            unreadable += read_replica(f"{name} ({error})", None, history, now_ns)
            continue
        try:
            unreadable += read_replica(name, store, history, now_ns)
        finally:
            store.close(clean=True)
    return [Verdict(FINAL_READ, "invalid", tuple(unreadable))] if unreadable else []


async def _stay(_: RealClient) -> None:
    await trio.sleep_forever()


async def _stop_in_order(ground: RealGround) -> None:
    """Stop followers first: none stands for election then, and no log gets another entry."""
    leading = ground.leading()
    async with trio.open_nursery() as nursery:
        for name, member in ground.brokers.items():
            if name != leading:
                nursery.start_soon(member.stop)
    if leading is not None:
        await ground.brokers[leading].stop()


async def _all_sound(ground: RealGround) -> bool:
    await ground.look()
    sound = [ground.soundness(name) for name in ground.brokers]
    applied = {member.status.get("applied_index") for member in ground.brokers.values()}
    return all(known.is_sound for known in sound) and len(applied) == 1


def _status(ground: RealGround) -> str:
    return "; ".join(
        f"{name} {member.status.get('role', 'silent')} term {member.status.get('term')} "
        f"last {member.status.get('last_index')} commit {member.status.get('commit_index')}"
        for name, member in ground.brokers.items()
    )


@asynccontextmanager
async def _running(cluster: ChaosCluster) -> AsyncIterator[None]:
    try:
        for node in cluster.nodes:
            await cluster.start(node.name)
        yield
    finally:
        await cluster.stop_all()


def versions() -> dict[str, str]:
    """Return what ran."""
    from importlib.metadata import version

    return {
        "python": sys.version.split()[0],
        "trio": version("trio"),
        "pysyncobj": version("pysyncobj"),
        "kernel": os.uname().release,
    }
