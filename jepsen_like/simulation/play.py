"""Play a plan in a world: set up, load and faults, heal, demand progress, read, judge.

A correct cluster gives a valid verdict for every plan, whatever is in it. The run is a function of
the plan alone: the same plan gives the same history, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.client.core.errors import ClientError
from dledger.jepsen_like.checkers import consumer_offsets, producer_order
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.fault_record import HEALED, SERVED
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import NEVER, Event, F, History, Outcome, RunHeader
from dledger.jepsen_like.nemesis.nemesis import Nemesis
from dledger.jepsen_like.plans.modes import SETTING_MODES
from dledger.jepsen_like.plans.plan import Kind, Plan, encode_plan
from dledger.jepsen_like.plans.promised import (
    SIMULATED_SLACK_NS,
    clock_error_ns,
    merge_for,
    promised,
)
from dledger.jepsen_like.simulation.liveness import StallWatch, go_on_without
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.side_services import Strangers
from dledger.jepsen_like.simulation.side_work import NAME as SIDE_MACHINE
from dledger.jepsen_like.simulation.side_work import SideWork
from dledger.jepsen_like.simulation.sim_ground import SimGround
from dledger.jepsen_like.simulation.world import Violation as Broken
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from dledger.jepsen_like.workloads.clients import WorkloadClients
from dledger.jepsen_like.workloads.final_read import read_replica
from dledger.jepsen_like.workloads.producers import due_within_s
from dledger.jepsen_like.workloads.push_groups import PushGroup
from dledger.jepsen_like.workloads.recorder import BROKER, TOPIC
from dledger.jepsen_like.workloads.transactions import (
    INTERVAL_MS,
    PATIENCE_S,
    TIMEOUT_MS,
    broker_settings,
)
from dledger.services.timer import LOAD_UNITS
from dledger.state.producer_sessions import SESSIONS_MAX

LEADER_WITHIN_ELECTIONS: Final = 3
"""After the faults a leader must lead within this number of the longest election timeouts."""

AGREE_WITHIN_S: Final = 180.0
"""And all replicas must hold the same within this."""

SETTLED_WITHIN_S: Final = 400.0
"""Above the deadlines of every operation, the longest delay and the wait for agreement."""

CALM_S: Final = 10.0
"""For how long clients go on when everything serves again: what they are answered then is judged,
once the longest election timeout has passed."""

TRANSACTIONS_WITHIN_S: Final = 2 * PATIENCE_S + 60.0
"""And no transaction may be open after this; a new leader may have to hear of producers first."""

RPC_TIMEOUT_S: Final = 5.0
"""Longer than a broker waits for a majority."""

MESSAGE_BYTES_MAX: Final = 20_480
"""With it an entry fits into half of the smallest segment."""

SCRUB_BYTES_PER_S: Final = 64 << 10
"""Every log is read through within a minute or so, so that rot is found before the final read."""

LONG_LOG_FACTOR: Final = 4
"""Likewise, of a log that grows as long as a plan lasts: how much faster it is read."""

PULL_LIMITS: Final = ("store.max_transfer_count_in_memory", "store.max_transfer_count_in_disk")

Program = Callable[[ClientNode], Awaitable[None]]

PRODUCERS: Final = "c0"
"""The machine of producers, consumers and the like; readers have another."""

LAST_READER: Final = "c9"
"""A client that was not there before: it reads everything when the run is over."""

INVARIANTS: Final = "invariants"
LIVENESS: Final = "liveness"


@dataclass(slots=True)
class Played:
    """What came of a plan.

    Attributes:
        sometimes: How often the interesting things happened.
        operations: Rows by kind and outcome.
        world: As it was at the end, for drawing what happened.
    """

    plan: Plan
    verdict: Verdict
    verdicts: list[Verdict]
    history: History
    simulated_s: float
    digest: str
    sometimes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    world: World | None = None

    @property
    def is_valid(self) -> bool:
        """Whether every guarantee was kept."""
        return self.verdict.is_valid

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What was broken."""
        return self.verdict.violations


def world_settings(plan: Plan) -> WorldSettings:
    """Return the world that a plan asks for."""
    settings = plan.settings
    scrub_factor = LONG_LOG_FACTOR if "long_logs" in plan.modes else 1
    return WorldSettings(
        brokers=plan.members,
        name_servers=plan.name_servers,
        heartbeat_ms=settings.heartbeat_ms,
        election_timeout_ms=settings.election_ms,
        segment_bytes=settings.segment_bytes,
        has_accounts="access_control" in plan.modes,
        has_ipv6="ipv6" in plan.modes,
        checkpoint_interval_ms=settings.checkpoint_ms,
        rpc_timeout_s=RPC_TIMEOUT_S,
        sessions_max=settings.sessions_max or SESSIONS_MAX,
        timer_load_units=settings.timer_load_units or LOAD_UNITS,
        options={
            "store.mapped_file_size_consume_queue": str(20 * settings.queue_units),
            "store.max_message_size": str(MESSAGE_BYTES_MAX),
            "store.message_delay_level": settings.delay_levels,
            "store.flush_disk_type": "SYNC_FLUSH" if settings.sync_flush else "ASYNC_FLUSH",
            **({"broker.broker_role": "ASYNC_MASTER"} if settings.async_master else {}),
            "raft.append_bytes": str(settings.append_bytes),
            "store.keep_bytes": str(settings.keep_segments * settings.segment_bytes),
            "store.scrub_bytes_per_s": str(SCRUB_BYTES_PER_S * scrub_factor),
            **(
                dict.fromkeys(PULL_LIMITS, str(pulled))
                if (pulled := settings.pull_messages)
                else {}
            ),
            "client.register_interval_ms": str(settings.register_ms),
            "broker.lock_lease_ms": str(settings.lock_lease_ms),
            **broker_settings(plan.workload),
        },
    )


def play(plan: Plan, *, prepare: Callable[[World], None] | None = None) -> Played:
    """Play *plan* and judge what came of it.

    *prepare*: called with the world before anything happens in it. What it does has no record of
    faults, so clients are not demanded to be answered meanwhile.
    """
    run = _Run(plan, prepare)
    try:
        run_world(plan.seed, run.main, world_settings(plan))
    except Broken as broken:
        run.note_broken(broken)
    return run.played()


class _Run:
    """One play."""

    def __init__(self, plan: Plan, prepare: Callable[[World], None] | None) -> None:
        self.plan = plan
        self.prepare = prepare
        self.history = History(RunHeader(f"seed-{plan.seed}", plan.seed, encode_plan(plan)))
        self.found: list[Verdict] = []
        self.settled = False
        self.world: World | None = None
        self.nemesis: Nemesis | None = None
        self.clients: WorkloadClients | None = None
        self.push_group: PushGroup | None = None

    async def main(self, world: World) -> None:
        """Live through the plan."""
        self.world = world
        self.history.floors = world.checks.floors.rows
        if self.prepare is not None:
            self.prepare(world)
        if any(step.kind is Kind.CLOCK_YEARS for step in self.plan.steps):
            world.store_time.allow(self._clock_error_ns())
        workload = self.plan.workload
        if workload.transactions_per_mille and not workload.hostile_per_mille:
            world.due.check_after_ms = (TIMEOUT_MS, INTERVAL_MS)
        strangers = {Kind.NAME_THIEF, Kind.PEER_STRANGER}
        world.routes.has_strangers = any(step.kind in strangers for step in self.plan.steps)
        await world.wait_for_leader()
        stall = StallWatch(world, PRODUCERS)
        clients = self.clients = WorkloadClients(world, self.plan, self.history, record=stall.note)
        machine = world.client(PRODUCERS)
        await machine.run(clients.run)
        await clients.ready.wait()
        if self.plan.workload.producers:
            stall.begin()
        await world.client("c1").run(clients.run_readers)
        if self.plan.workload.push_members:
            self.push_group = PushGroup(clients, self.plan, _installed_in(world))
            world.nursery.start_soon(self.push_group.run)
            if "slow_listeners" in self.plan.modes:
                world.nursery.start_soon(self._kill_slow_listeners, self.push_group)
        side = SideWork(world, self.plan)
        if side.is_needed:
            await world.client(SIDE_MACHINE).run(side.run)
        if "access_control" in self.plan.modes:
            await Strangers(world, TOPIC).start()
        for mode in SETTING_MODES:
            world.sometimes[f"mode_{mode}"] += mode in self.plan.modes
        nemesis = self.nemesis = Nemesis(SimGround(world, clients), self.plan, self._note_act)
        await nemesis.run()
        clients.release_consumers()
        if away := sorted(+nemesis.members.away):
            await go_on_without(world, nemesis, away, self._election_s)
        stall.end()
        self._event(HEALED)
        await world.heal(clients=True)
        await self._demand_progress(world, clients, machine)

    async def _kill_slow_listeners(self, group: PushGroup) -> None:
        assert self.world is not None
        while True:
            await group.kill_slow_listener()
            self.world.sometimes["slow_listener_killed"] += 1

    @property
    def _election_s(self) -> float:
        """The longest election timeout."""
        return 2 * self.plan.settings.election_ms / 1000

    async def _demand_progress(
        self, world: World, clients: WorkloadClients, machine: ClientNode
    ) -> None:
        await world.wait_for_leader(LEADER_WITHIN_ELECTIONS * self._election_s)
        with trio.move_on_after(SETTLED_WITHIN_S):
            assert self.nemesis is not None
            while not await self.nemesis.members.add_missing():
                await world.sleep(1.0)
        if self.prepare is None:  # what else acts on the world leaves no record
            self._event(SERVED)
        await world.sleep(self._election_s + CALM_S)
        with trio.move_on_after(SETTLED_WITHIN_S):
            if SIDE_MACHINE in world.clients:
                await world.clients[SIDE_MACHINE].kill()
            await clients.finish()
            await world.sleep(due_within_s(self.plan, self._clock_error_ns()))
            await self._wait_for_transactions(world)
            reader = world.client(LAST_READER)
            await reader.run(_stay)
            assert machine.instance is not None
            assert reader.instance is not None
            try:
                await clients.drain(reader.instance)
            except ClientError as error:
                raise Broken(
                    LIVENESS, f"the healed cluster does not serve: {error}", world
                ) from None
            if self.push_group is not None:
                self.found.append(await self.push_group.settle(machine.instance))
            await world.wait_for_scrub()
            await world.wait_for_agreement(AGREE_WITHIN_S)
            unreadable: list[Violation] = []
            for node in world.brokers.values():
                store = None if node.group is None else node.group.store
                unreadable += read_replica(node.name, store, self.history, clients.now_ns)
            if unreadable:
                self.found.append(Verdict("final_read", "invalid", tuple(unreadable)))
            self.settled = True
            return
        raise Broken(LIVENESS, f"the run did not end: {world.status()}", world)

    def _clock_error_ns(self) -> int:
        return clock_error_ns(self.plan, SIMULATED_SLACK_NS)

    async def _wait_for_transactions(self, world: World) -> None:
        """Check-back decides what no producer did."""
        if not self.plan.workload.transactions_per_mille:
            return
        end_s = world.elapsed_s + TRANSACTIONS_WITHIN_S
        while True:
            leader = world.leader()
            group = None if leader is None else leader.group
            still_open = None if group is None else group.state.transactions.open
            if still_open is not None and not still_open:
                return
            if world.elapsed_s > end_s:
                raise Broken(
                    LIVENESS,
                    f"transactions are open {TRANSACTIONS_WITHIN_S} s later: {still_open}",
                    world,
                )
            await world.sleep(1.0)

    def _note_act(self, event: Event, is_over: bool) -> None:
        if not is_over:
            self.history.events.append(event)

    def _event(self, kind: str) -> None:
        assert self.world is not None
        now_ns = round(self.world.elapsed_s * 1e9)
        self.history.events.append(Event(now_ns, now_ns, kind))

    def note_broken(self, broken: Broken) -> None:
        """An invariant broke: the run ended there."""
        self.world = broken.world
        checker = LIVENESS if broken.invariant == LIVENESS else INVARIANTS
        violation = Violation(
            broken.invariant,
            "cluster",
            str(broken),
            checker=checker,
            at_ns=round(broken.at_s * 1e9),
        )
        self.found.append(Verdict(checker, "invalid", (violation,)))

    def played(self) -> Played:
        """Return what came of it."""
        world, clients = self.world, self.clients
        assert world is not None
        verdicts = [
            *self.found,
            *check_everything(
                self.history, promised(self.plan, self.settled, slack_ns=SIMULATED_SLACK_NS)
            ),
        ]
        if clients is not None:
            verdicts += clients.outcome_verdicts()
        sometimes = Counter(world.sometimes)
        if world.reference.tables is not None:
            sometimes["session_forgotten"] = world.reference.tables.producers.forgotten
        sometimes.update(_seen_unknown(self.history))
        return Played(
            self.plan,
            self._merged(verdicts),
            verdicts,
            self.history,
            world.elapsed_s,
            world.digest,
            sometimes,
            clients.counts if clients is not None else Counter(),
            self.nemesis.done if self.nemesis is not None else Counter(),
            world,
        )

    def _merged(self, verdicts: list[Verdict]) -> Verdict:
        # No producer may have sent anything twice, and few runs are long enough to read a commit.
        left_out = (producer_order.NAME, consumer_offsets.NAME)
        return merge_for(self.plan.workload, verdicts, left_out=left_out)


async def _stay(_: ClientNode) -> None:
    await trio.sleep_forever()


def _installed_in(world: World) -> Callable[[str, Program], ClientNode]:
    def make(name: str, program: Program) -> ClientNode:
        node = world.client(name)
        node.install(program)
        return node

    return make


def _seen_unknown(history: History) -> Counter[str]:
    """Count sends with unknown outcome that later appeared, and that never did."""
    there: set[int] = set()
    for read in history.replica_reads:
        there.update(read.values)
    counts: Counter[str] = Counter()
    if not there:
        return counts
    for op in history.operations:
        if op.f == F.PULL and op.outcome == Outcome.OK:
            there.update(op.values)
    for op in history.operations:
        if op.f == F.SEND and op.outcome == Outcome.INFO:
            counts["unknown_send_appeared" if op.value in there else "unknown_send_vanished"] += 1
    return counts


__all__ = ["BROKER", "NEVER", "TOPIC", "Played", "play", "world_settings"]
