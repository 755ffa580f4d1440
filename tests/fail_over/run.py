"""One run: a cluster, a load program of each client beside it, one fault, and what came of it."""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import trio

from dledger.cli.commands import open_admin
from dledger.cli.local_cluster import DEFAULT_GROUP, LocalCluster, local_cluster
from dledger.cli.ports import free_ports
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig
from tests.fail_over.figures import (
    CONSUMED,
    ORDERED,
    SENT,
    STREAMS,
    Event,
    Figures,
    Window,
    event_of,
    figures_of,
    is_steady,
)
from tests.fail_over.machines import Machines, cluster_on_machines
from tests.fail_over.tables import FAULTS, Client, Fault
from tests.harness.cluster_questions import create_topic
from tests.harness.deployed_files import DEPLOY
from tests.harness.foreign_client import ForeignClient, foreign_client
from tests.harness.grpc_clients import create_group
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import bodies_at

SETTINGS: Mapping[str, object] = {**SMALL_FILES, "server.drain_timeout_ms": 30_000}
"""Members go on for old clients as they do by default; those of a local cluster end together."""

WAYS = ("haproxy", "keepalived", "listen")
"""What makes `broker.leader_address` lead to the leader."""

PLAIN_QUEUES = 4

POLL_S = 30.0
"""How often remoting clients read their route: a fault meets them at any phase of it."""

START_S = 90.0
"""For a client until all its streams run; one starts after the other, since Java's give up when two
processors do not carry all at once. One whose first heartbeat is late consumes 30 s later."""

STEADY_S = 5.0
STEADY_GAP_MS = 1000
"""A client has recovered when no stream of it stood so long within `STEADY_S`."""

OBSERVE_S = 45.0
"""From the fault on at least: a client may go on at first and stop when it reads its route."""

RECOVER_S = 120.0
"""From the end of the fault on at most."""

STOP_S = 60.0
"""For a member that is ended by SIGTERM; then it is killed."""

CONSUME_S = 60.0
"""For what is stored and not consumed when sending ends: a message may be invisible that long."""

BETWEEN_S = 3.0
"""Between two faults of several."""

LOOK_S = 1.0


def now_ms() -> int:
    """Return the time of the machine's monotonic clock, as load programs write it."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True)
class Load:
    """A running load program, and what its topics begin with."""

    prefix: str
    program: ForeignClient

    @property
    def events(self) -> Iterator[Event]:
        """What happened so far."""
        return map(event_of, self.program.lines)

    @property
    def silent(self) -> str:
        """What it has not done yet: of each stream, one is sent and one is consumed."""
        seen = {(event.kind, event.stream) for event in self.events}
        wanted = ((kind, stream) for kind in (SENT, CONSUMED) for stream in STREAMS)
        return ", ".join(
            f"{kind} {stream}" for kind, stream in wanted if (kind, stream) not in seen
        )

    @property
    def has_consumed(self) -> bool:
        """True when whatever was acknowledged was consumed."""
        sent, consumed = (
            {line["key"] for line in self.program.lines if line["kind"] == kind}
            for kind in (SENT, CONSUMED)
        )
        return sent <= consumed

    def is_steady(self) -> bool:
        """True when no stream stood within the last `STEADY_S`."""
        now = now_ms()
        return is_steady(self.events, now - int(STEADY_S * 1000), now, STEADY_GAP_MS)


async def until(limit_s: float, holds: Callable[[], bool]) -> bool:
    """Return True as soon as it holds, False when it did not in time."""
    with trio.move_on_after(limit_s):
        while not holds():
            await trio.sleep(LOOK_S)
        return True
    return False


async def play_all(cluster: LocalCluster, fault: Fault) -> None:
    """Let other faults happen in turn; members that were killed start again."""
    ends = trio.current_time() + fault.for_s
    for name in cycle(fault.others):
        await play(cluster, FAULTS[name])
        for member, node in cluster.brokers.items():
            if not node.running:
                await cluster.start(member)
        await cluster.wait_healthy()
        if trio.current_time() >= ends:
            return
        await trio.sleep(BETWEEN_S)


async def play(cluster: LocalCluster, fault: Fault) -> None:
    """Let a fault happen; return when it is over."""
    leader = await cluster.wait_leader()
    for name in [leader] if fault.members == "leader" else list(cluster.brokers):
        if not fault.signal:
            async with open_admin([cluster.namesrv_address]) as admin:
                await admin.change_members(DEFAULT_GROUP, "transfer", "", "")
            continue
        process = cluster.brokers[name].process
        assert process is not None
        process.send_signal(signal.Signals[fault.signal])
        if fault.after_s:
            await trio.sleep(fault.after_s)
            process.send_signal(signal.Signals[fault.then])
        else:
            with trio.move_on_after(STOP_S):
                await process.ended()
            await cluster.kill(name)
        if fault.then == "start":
            await cluster.start(name)
            await cluster.wait_healthy()


@asynccontextmanager
async def balanced(cluster: LocalCluster) -> AsyncIterator[None]:
    """Give each member a metrics port, and run HAProxy before them as `deploy/` has it."""
    there = {"LEADER_BIND": cluster.leader_address}
    for place, name in enumerate(cluster.brokers):
        node = cluster.brokers[name]
        (port,) = free_ports(1)
        node.arguments = (*node.arguments, "--set", f"metrics.listen_port={port}")
        there |= {f"MEMBER_{place}": node.address, f"METRICS_{place}": str(port)}
        await cluster.restart(name)
        await cluster.wait_healthy()
    command = ("haproxy", "-db", "-f", str(DEPLOY / "haproxy" / "haproxy.cfg"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.run_process, command, env={**os.environ, **there}))
        yield
        nursery.cancel_scope.cancel()


async def prepare(cluster: LocalCluster, prefix: str) -> None:
    """Create the topics and groups of a client."""
    namesrv = cluster.namesrv_address
    for stream in STREAMS:
        topic = f"{prefix}-{stream}"
        is_ordered = stream == ORDERED
        await create_topic([namesrv], topic, queues=1 if is_ordered else PLAIN_QUEUES)
        config = SubscriptionGroupConfig(topic, consume_message_orderly=is_ordered)
        await create_group(namesrv, topic, config)


async def judged(load: Load, namesrv: str, window: Window) -> dict[str, Figures]:
    """Return the figures of each stream."""
    found = {}
    for stream in STREAMS:
        bodies = await bodies_at(namesrv, f"{load.prefix}-{stream}")
        stored = [int(body.rpartition(b"-")[2]) for body in bodies]
        found[stream] = figures_of(load.events, stream, stored, window)
    return found


async def run(
    clients: Mapping[str, Client],
    fault: Fault,
    notes: list[str],
    phase_s: float,
    period_ms: int,
    way: str | None,
    spaces: Machines | None,
    folder: Path,
) -> dict[str, dict[str, Figures]]:
    """Return the figures of each stream of each client that came to send and consume.

    Args:
        notes: Gets what a reader of the table has to know.
        phase_s: How long after the first client's read of the route the fault begins, about.
        period_ms: Between the sends of a stream.
        way: How the address of `WAYS` leads to the leader; None: clients get the leader's own.
        spaces: Where members run, for keepalived.
        folder: A new one, for the cluster and the clients.
    """
    async with AsyncExitStack() as stack:
        (bind, proxy) = free_ports(2)
        address = {
            "broker.leader_address": f"127.0.0.9:{bind}" if way else "",
            "broker.leader_address_listen": way == "listen",
        }
        if spaces is not None:
            running = cluster_on_machines(folder / "cluster", spaces, SETTINGS, proxy)
        else:
            settings = {**SETTINGS, **address}
            running = local_cluster(folder / "cluster", settings=settings, proxies=[proxy])
        cluster = await stack.enter_async_context(running)
        if way == "haproxy":
            await stack.enter_async_context(balanced(cluster))
        for name in clients:
            await prepare(cluster, name)
        ports = {"namesrv": cluster.namesrv_address, "proxy": cluster.proxies["proxy0"].address}
        began = trio.current_time()
        loads = []
        for name, client in clients.items():
            command = client.started_in(folder / name)
            words = ("load", ports[client.port], name, str(period_ms))
            program = foreign_client(folder / name, *words, wait_ready=False, command=command)
            loads.append(Load(name, await stack.enter_async_context(program)))
            await until(START_S, lambda: not loads[-1].silent)
        for load in [load for load in loads if load.silent]:
            notes.append(f"{load.prefix}: nothing {load.silent} within {START_S:.0f} s")
            loads.remove(load)
        if not await until(START_S, lambda: all(load.is_steady() for load in loads)):
            notes.append(f"gaps of {STEADY_GAP_MS} ms and more before the fault")
        steady_ms = now_ms()
        soonest = trio.current_time() + STEADY_S
        await trio.sleep_until(soonest + (began + phase_s - soonest) % POLL_S)

        fault_ms = now_ms()
        least = trio.current_time() + OBSERVE_S
        await (play_all if fault.others else play)(cluster, fault)
        over = trio.current_time()
        await trio.sleep_until(max(least, over + STEADY_S))
        if not await until(RECOVER_S, lambda: all(load.is_steady() for load in loads)):
            late = [load.prefix for load in loads if not load.is_steady()]
            notes.append(f"not recovered within {RECOVER_S:.0f} s: {', '.join(late)}")
        window = Window(steady_ms, fault_ms, now_ms())
        for load in loads:
            await load.program.tell({})  # the line that ends its sending
        await until(CONSUME_S, lambda: all(load.has_consumed for load in loads))
        return {load.prefix: await judged(load, ports["namesrv"], window) for load in loads}
