"""Injects the faults of a plan into a world and heals them: one task per step.

Faults overlap, so what they touch is counted: a link is cut while any step wants it cut, a node is
down while any step wants it down. A node that ended by itself is started again by a supervisor, as
an operator's would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import trio

from commitlog.errors import MQError
from jepsen_like.history.operation import Event
from jepsen_like.nemesis.ground import CannotBeDone, Ground, Machine, Member, Moment
from jepsen_like.nemesis.minority import Change, Chosen, choose
from jepsen_like.plans.budget import Budget, newest_of, others_of, tail_is_spare
from jepsen_like.plans.link_fault import HEALTHY, LinkFault
from jepsen_like.plans.plan import Kind, Plan, Step
from jepsen_like.seeded_rng import rng_stream

SUPERVISOR_S: Final = 2.0
"""Seconds between two searches of a supervisor for processes that ended by themselves."""

CATCH_UP_S: Final = 60.0
"""How long a rolling restart waits for a node before it goes on."""

RESET_ON_MEND: Final = 0.3
"""How often a connection with bytes waiting breaks when its link is mended."""

ORDER_S: Final = 60.0
"""How long an order to the group is waited for."""

CATCH_UP_TRIES: Final = 40
"""Times other members are asked whether they hold all that a torn log may have acknowledged."""

CATCH_UP_LOOK_S: Final = 0.5
"""Pause between two of these questions."""

MOMENT_S: Final = 10.0
"""How long a kill waits for clients to be where it is to hit them."""

CONNECTIONS: Final = 10_000
"""Connections of a flood unless the step has a number."""

YEARS_OFF: Final = 2
"""Years that a date is off unless the step has a number."""

YEAR_MS: Final = 365 * 86_400_000

ADD_TRIES: Final = 60
"""So often a group that lacks members is asked to add them again."""

ADD_LOOK_S: Final = 2.0
"""Pause between two of these orders."""

LEADER_GOES_S: Final = (0.0, 0.001, 0.002, 0.005, 0.01, 0.05)
"""Seconds a leader that goes away with a change has to write it and send it to a member."""

LEAST_STALL_S: Final = 0.01
"""Of a stall, and of the time between two."""

STEP_POINTS: Final = 40
"""Operations of the disk that a kill at a named point waits for, at most."""


class Nemesis:
    """Carries out the steps of one plan.

    Args:
        ground: The cluster.
        plan: The steps.
        record: Given a row for every act when it begins, and again, completed, with true, when it
            has ended.

    Attributes:
        done: How often each kind was done, and ``skipped``.
        away: Members that a change goes on without; after the run those that are away still.
    """

    def __init__(self, ground: Ground, plan: Plan, record: Callable[[Event, bool], None]) -> None:
        self._ground = ground
        self._plan = plan
        self._record = record
        self._rng = rng_stream(plan.seed, "nemesis")
        self._budget = Budget()
        self._held_down: Counter[str] = Counter()
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._qualities: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._begin_s = ground.elapsed_s
        self._wrong_dates: set[str] = set()
        self.done: Counter[str] = Counter()
        self.away: Counter[str] = Counter()
        self._acts: dict[Kind, Callable[[Step, Event], Awaitable[None]]] = {
            Kind.KILL: self._kill,
            Kind.CLEAN_RESTART: self._clean_restart,
            Kind.ROLLING_RESTART: self._rolling_restart,
            Kind.PAUSE: self._pause,
            Kind.POWER_CUT: self._power_cut,
            Kind.POWER_CUT_ALL: self._power_cut,
            Kind.WIPE: self._wipe,
            Kind.BUGGIFY_KILL: self._kill_at_point,
            Kind.VERSION_SKEW: self._skew_version,
            Kind.FD_LIMIT: self._limit_files,
            Kind.CONNECTIONS: self._flood,
            Kind.ISOLATE: self._cut_links,
            Kind.SPLIT: self._cut_links,
            Kind.MUTE: self._cut_links,
            Kind.DEAF: self._cut_links,
            Kind.PARTIAL: self._cut_links,
            Kind.RING: self._cut_links,
            Kind.BRIDGE: self._cut_links,
            Kind.SWIZZLE: self._swizzle,
            Kind.CLIENT_CUT: self._cut_links,
            Kind.RESET: self._reset,
            Kind.LOSS: self._spoil_links,
            Kind.DELAY: self._spoil_links,
            Kind.DUPLICATE: self._spoil_links,
            Kind.REORDER: self._spoil_links,
            Kind.HOLD: self._spoil_links,
            Kind.CORRUPT: self._spoil_links,
            Kind.SLOW_LINK: self._spoil_links,
            Kind.DISK_FULL: self._fill_disk,
            Kind.DISK_SLOW: self._slow_disk,
            Kind.FSYNC_ERROR: self._fail_flush,
            Kind.BIT_ROT: self._rot,
            Kind.TORN_TAIL: self._tear_tail,
            Kind.BAD_SECTOR: self._spoil_sectors,
            Kind.FILE_ROT: self._rot_file,
            Kind.LYING_FLUSH: self._lie_about_flushes,
            Kind.STALL: self._stall,
            Kind.NAMESRV_LOSS: self._lose_at_name_servers,
            Kind.CLOCK_JUMP: self._jump_clock,
            Kind.CLOCK_DRIFT: self._drift_clock,
            Kind.CLOCK_YEARS: self._lose_date,
            Kind.TRANSFER: self._transfer,
            Kind.MEMBER_ADD: self._add_members,
            Kind.MEMBER_REMOVE: self._remove_member,
            Kind.MEMBER_REPLACE: self._replace_member,
            Kind.CHANGE_WITHOUT_MINORITY: self._change_without_minority,
            Kind.NAMESRV_KILL: self._kill_name_server,
            Kind.CLIENT_KILL: self._kill_client,
            Kind.MID_SEND_KILL: self._kill_client_at,
            Kind.MID_BATCH_KILL: self._kill_client_at,
            Kind.ZOMBIE_CLIENT: self._double_consumers,
            Kind.NAME_THIEF: self._steal_name,
            Kind.PEER_STRANGER: self._attack_peers,
        }

    async def run(self) -> None:
        """Do every step at its time; return at the end of the plan with everything undone.

        The undoing leaves nodes that are down to `World.heal`.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._supervise)
            for step in self._plan.steps:
                nursery.start_soon(self._do, step)
            await self._until(self._plan.duration_ms)
            nursery.cancel_scope.cancel()
        self._cuts.clear()
        self._qualities.clear()

    async def _until(self, at_ms: int) -> None:
        await self._ground.sleep_until(self._begin_s + at_ms / 1000)

    async def _do(self, step: Step) -> None:
        await self._until(step.at_ms)
        event = Event(self._now_ns, self._now_ns, step.kind.value, step.target)
        self._record(event, False)
        try:
            await self._acts[step.kind](step, event)
        except (CannotBeDone, MQError) as reason:
            event.detail = f"skipped: {reason}"
        finally:  # also what the end of the plan cuts short was done, until then
            event.end_ns = self._now_ns
            self._record(event, True)
            word = "skipped" if event.detail.startswith("skipped") else step.kind.value
            self.done[word] += 1

    @property
    def _now_ns(self) -> int:
        return round(self._ground.elapsed_s * 1e9)

    # -- targets ---------------------------------------------------------------------------

    def resolve(self, target: str) -> list[Member]:
        """Return the brokers that *target* means now; there is always at least one."""
        brokers = list(self._ground.brokers.values())
        if target == "all":
            return brokers
        if target.isdecimal():
            return [brokers[int(target) % len(brokers)]]
        leading = self._ground.leading()
        leader = brokers[0] if leading is None else self._ground.brokers[leading]
        if target == "leader":
            return [leader]
        others = [node for node in brokers if node is not leader] or [leader]
        running = [node for node in others if node.is_up] or others
        if target == "most_behind":
            return [min(running, key=lambda node: (node.seen_commit, node.name))]
        if target == "most_ahead":
            return [max(running, key=lambda node: (node.seen_commit, node.name))]
        return [running[self._rng.randrange(len(running))]]

    def _one(self, step: Step, event: Event) -> Member:
        node = self.resolve(step.target)[0]
        event.node = node.name
        return node

    def _machine(self, name: str) -> Machine:
        ground = self._ground
        found: Machine
        for machines in (ground.brokers, ground.name_servers, ground.clients):
            if name in machines:
                found = machines[name]
        return found

    # -- nodes -----------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            await self._ground.sleep(SUPERVISOR_S)
            for node in (*self._ground.name_servers.values(), *self._ground.brokers.values()):
                if node.is_down and not self._held_down[node.name]:
                    self.done["restarted_by_supervisor"] += 1
                    await node.start()

    async def _down(self, nodes: Iterable[Machine], for_ms: int) -> None:
        held = [node.name for node in nodes]
        self._held_down.update(held)
        await self._ground.sleep(for_ms / 1000)
        self._held_down.subtract(held)
        for name in held:
            node = self._machine(name)
            if not self._held_down[name] and node.is_down:
                await node.start()

    async def _kill(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        await node.kill()
        await self._down([node], step.for_ms)

    async def _clean_restart(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if not node.is_up:
            event.detail = "skipped: it is not up"
            return
        self._held_down[node.name] += 1
        await node.stop()
        self._held_down[node.name] -= 1
        await self._down([node], step.for_ms)

    async def _rolling_restart(self, step: Step, event: Event) -> None:
        for node in self.resolve("all"):
            if not node.is_up:
                continue
            self._held_down[node.name] += 1
            await node.stop()
            self._held_down[node.name] -= 1
            await self._down([node], step.for_ms)
            with trio.move_on_after(CATCH_UP_S):
                while not self._ground.soundness(node.name).is_caught_up:
                    await self._ground.sleep(0.5)

    async def _pause(self, step: Step, event: Event) -> None:
        for node in self.resolve(step.target):
            event.node = node.name
            node.pause()
            await self._ground.sleep(step.for_ms / 1000)
            node.resume()

    async def _power_cut(self, step: Step, event: Event) -> None:
        nodes = self.resolve("all")
        if step.kind is not Kind.POWER_CUT_ALL:
            nodes = [self._one(step, event)]
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(self._cut_power, node)
        async with trio.open_nursery() as nursery:
            for node in nodes:  # they do not all come back at the same moment
                share = 1.0 if len(nodes) == 1 else self._rng.random()
                nursery.start_soon(self._down, [node], int(step.for_ms * share))

    async def _wipe(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if not self._may_hurt(Kind.WIPE, node, event):
            return
        await self._lose_folder(node)
        await self._down([node], step.for_ms)

    async def _lose_folder(self, node: Member) -> None:
        self._budget.note_hurt(Kind.WIPE, node.name)
        with self._budget.destroying(node.name):
            await node.wipe()

    async def _kill_at_point(self, step: Step, event: Event) -> None:
        """Kill inside the product's own disk call: the next one, or one of the next few."""
        node = self._one(step, event)
        power = step.arg % 2 == 0 and self._may_cut_power(node)
        where = await node.kill_at_point(step.arg % STEP_POINTS, power=power)
        if not where:
            event.detail = "skipped: the disk did nothing"
            return
        event.detail = f"{'power cut' if power else 'kill'} at {where}"
        self._ground.sometimes[f"ended_at_{where.partition(' ')[0]}"] += 1
        await self._down([node], step.for_ms)

    async def _skew_version(self, step: Step, event: Event) -> None:
        """Nothing else starts it meanwhile, so it cannot come back as itself too early."""
        node = self._one(step, event)
        if not node.is_up:
            event.detail = "skipped: it is not up"
            return
        self._held_down[node.name] += 1
        try:
            await node.restart_newer()
            await self._ground.sleep(step.for_ms / 1000)
            await node.stop()
        finally:
            self._held_down[node.name] -= 1
        await self._down([node], 0)

    async def _kill_name_server(self, step: Step, event: Event) -> None:
        servers = list(self._ground.name_servers.values())
        if step.target.isdecimal():
            servers = [servers[int(step.target) % len(servers)]]
        event.node = ",".join(node.name for node in servers)
        for node in servers:
            await node.kill()
        await self._down(servers, step.for_ms)

    async def _kill_client(self, step: Step, event: Event) -> None:
        machines = list(self._ground.clients.values())
        node = machines[int(step.target) % len(machines)]
        event.node = node.name
        await node.kill()
        await self._down([node], step.for_ms)

    async def _kill_client_at(self, step: Step, event: Event) -> None:
        """Kill the clients that send and consume when one of them reaches the named point."""
        sending = step.kind is Kind.MID_SEND_KILL
        workload = self._ground.workload
        node = next(iter(self._ground.clients.values()))
        event.node = node.name
        with trio.move_on_after(MOMENT_S) as waiting:
            await workload.reach(Moment.SENDING if sending else Moment.HALF_A_BATCH)
        if waiting.cancelled_caught:
            event.detail = "skipped: no client came to that place"
            return
        if not sending:
            workload.begin_where_committed()
        await node.kill()
        await self._down([node], step.for_ms)

    async def _double_consumers(self, step: Step, event: Event) -> None:
        ground, half_s = self._ground, step.for_ms / 2000
        ground.workload.hold_consumers()
        try:
            await ground.start_doubles()
            await ground.sleep(half_s)
            woken = ground.workload.release_consumers()
            event.detail = f"{woken} old offsets committed"
            await ground.sleep(half_s)
        finally:
            ground.workload.release_consumers()
        await ground.end_doubles()

    async def _attack_peers(self, step: Step, event: Event) -> None:
        event.detail = await self._ground.attack_peers(step.for_ms / 1000)

    async def _steal_name(self, step: Step, event: Event) -> None:
        identity = f"{step.arg:032x}" if step.arg % 2 else ""
        event.detail = await self._ground.steal_name(step.for_ms / 1000, identity)

    # -- links -----------------------------------------------------------------------------

    def _pairs(self, step: Step, event: Event) -> list[tuple[str, str]]:
        """Return the directed links that a step cuts."""
        names = list(self._ground.brokers)
        node = self._one(step, event).name if step.target != "all" else names[0]
        others = [name for name in names if name != node]
        outside = [*self._ground.clients, *self._ground.name_servers]
        at = names.index(node)
        match step.kind:
            case Kind.ISOLATE:
                return _both_ways([node], others)
            case Kind.MUTE:
                return [(node, other) for other in others]
            case Kind.DEAF:
                return [(other, node) for other in others]
            case Kind.PARTIAL:
                other = names[(at + 1 + step.arg % max(1, len(others))) % len(names)]
                return _both_ways([node], [other]) if other != node else []
            case Kind.RING:
                size = len(names)
                far = [
                    (a, b)
                    for i, a in enumerate(names)
                    for j, b in enumerate(names)
                    if (i - j) % size not in (0, 1, size - 1)
                ]
                return far or _both_ways([names[0]], [names[1 % size]])
            case Kind.BRIDGE:
                half = len(others) // 2
                return _both_ways(others[:half], others[half:])
            case Kind.CLIENT_CUT:
                return _both_ways([node], outside)
            case _:  # SPLIT
                every = [*names, *outside]
                left = [name for bit, name in enumerate(every) if step.arg >> bit % 10 & 1]
                event.detail = "|".join(left)
                return _both_ways(left, [name for name in every if name not in left])

    async def _cut_links(self, step: Step, event: Event) -> None:
        pairs = self._pairs(step, event)
        if step.kind is Kind.ISOLATE and step.arg % 2:
            with suppress(CannotBeDone):
                for pair in pairs:
                    self._ground.network.reset_between(*pair)
        self._cut(pairs)
        await self._ground.sleep(step.for_ms / 1000)
        self._mend(pairs)

    def _cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        for pair in pairs:
            if not self._cuts[pair]:
                self._ground.network.cut(*pair)
            self._cuts[pair] += 1

    def _mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        for pair in pairs:
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                self._ground.network.mend(*pair, reset=RESET_ON_MEND)

    async def _swizzle(self, step: Step, event: Event) -> None:
        names = list(self._ground.brokers)
        pairs = [(a, b) for a in names for b in names if a != b]
        if not pairs:
            event.detail = "skipped: one broker"
            return
        pause_s = step.for_ms / 1000 / (2 * len(pairs))
        self._rng.shuffle(pairs)
        for pair in pairs:
            self._cut([pair])
            await self._ground.sleep(pause_s)
        self._rng.shuffle(pairs)
        for pair in pairs:
            self._mend([pair])
            await self._ground.sleep(pause_s)

    async def _reset(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        ground = self._ground
        for other in (*ground.name_servers, *ground.brokers, *ground.clients):
            if other != node.name:
                ground.network.reset_between(node.name, other)

    async def _spoil_links(self, step: Step, event: Event) -> None:
        share = step.arg / 1000
        change: dict[str, Any] = {
            Kind.LOSS: {"loss": share, "silent": step.arg % 2 == 0},
            Kind.DELAY: {"delay_s": share, "jitter_s": share},
            Kind.DUPLICATE: {"duplicate": share},
            Kind.REORDER: {"reorder": share},
            Kind.HOLD: {"hold": share},
            Kind.CORRUPT: {"corrupt": share},
            Kind.SLOW_LINK: {"bytes_per_s": float(step.arg)},
        }[step.kind]
        nodes = [node.name for node in self.resolve(step.target)]
        event.node = ",".join(nodes)
        pairs = sorted(
            {
                pair
                for name in nodes
                for other in self._ground.brokers
                if other != name
                for pair in ((name, other), (other, name))
            }
        )
        await self._change_links(pairs, change, step)

    async def _lose_at_name_servers(self, step: Step, event: Event) -> None:
        ground = self._ground
        event.node = ",".join(ground.name_servers)
        pairs = _both_ways(ground.name_servers, [*ground.brokers, *ground.clients])
        await self._change_links(pairs, {"loss": step.arg / 1000}, step)

    async def _change_links(
        self, pairs: list[tuple[str, str]], change: dict[str, Any], step: Step
    ) -> None:
        for pair in pairs:
            self._qualities.setdefault(pair, []).append(change)
            self._set_quality(pair)
        await self._ground.sleep(step.for_ms / 1000)
        for pair in pairs:
            active = self._qualities[pair]
            del active[next(at for at, item in enumerate(active) if item is change)]
            self._set_quality(pair)

    def _set_quality(self, pair: tuple[str, str]) -> None:
        active = self._qualities[pair]
        fault: LinkFault = HEALTHY
        for change in active:
            fault = replace(fault, **change)
        self._ground.network.set_fault(*pair, fault)

    # -- disks -----------------------------------------------------------------------------

    async def _fill_disk(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        await node.fill_disk(0)
        await self._ground.sleep(step.for_ms / 1000)
        await node.fill_disk(None)

    async def _slow_disk(self, step: Step, event: Event) -> None:
        nodes = self.resolve(step.target)
        event.node = ",".join(node.name for node in nodes)
        for node in nodes:
            await node.slow_disk(step.arg / 1000)
        await self._ground.sleep(step.for_ms / 1000)
        for node in nodes:
            await node.slow_disk(0.0)

    async def _fail_flush(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if not node.is_up or not self._may_hurt(step.kind, node, event):
            event.detail = event.detail or "skipped: it is not up"
            return
        await node.fail_flushes(1)
        await self._ground.sleep(step.for_ms / 1000)
        await node.fail_flushes(0)

    async def _rot(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if not self._may_hurt(step.kind, node, event):
            return
        with self._budget.destroying(node.name):
            await node.kill()
            event.detail = await node.rot(max(1, step.arg))
        if event.detail:
            self._budget.note_hurt(step.kind, node.name)
        await self._down([node], step.for_ms)

    async def _spoil_sectors(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if not self._may_hurt(step.kind, node, event):
            return
        ends = step.arg % 2 == 1
        self._held_down[node.name] += ends
        try:
            with self._budget.destroying(node.name):
                if ends:
                    await node.kill()
                event.detail = await node.spoil_sectors(1 + step.arg // 2)
            if event.detail:
                self._budget.note_hurt(step.kind, node.name)
        finally:
            self._held_down[node.name] -= ends
        if ends:
            await self._down([node], step.for_ms)

    async def _rot_file(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if not self._may_hurt(step.kind, node, event):
            return
        self._held_down[node.name] += 1
        try:
            with self._budget.destroying(node.name):
                await node.kill()
                event.detail = await node.rot_file(step.arg)
            if event.detail:
                self._budget.note_hurt(step.kind, node.name)
        finally:
            self._held_down[node.name] -= 1
        await self._down([node], step.for_ms)

    async def _tear_tail(self, step: Step, event: Event) -> None:
        """Tear what no start can prove was acknowledged, once others hold all of it."""
        node = self._one(step, event)
        if not self._may_hurt(step.kind, node, event):
            return
        self._budget.note_hurt(step.kind, node.name)  # what follows takes time
        self._held_down[node.name] += 1
        try:
            with self._budget.destroying(node.name):
                await node.kill()
                if await self._is_spare(node):
                    where = await node.tear_tail(max(1, step.arg))
                    event.detail = where or "skipped: nothing stands above the commit mark"
                else:
                    event.detail = "skipped: others do not hold all it may have acknowledged"
        finally:
            self._held_down[node.name] -= 1
        await self._down([node], step.for_ms)

    async def _lie_about_flushes(self, step: Step, event: Event) -> None:
        """Record what flushes do not make durable; lose it once it is safe without it."""
        node = self._one(step, event)
        if not node.is_up or not self._may_hurt(step.kind, node, event):
            event.detail = event.detail or "skipped: it is not up"
            return
        self._budget.note_hurt(step.kind, node.name)
        await node.lie_about_flushes(lies=True)
        self._held_down[node.name] += 1
        try:
            with self._budget.destroying(node.name):
                await self._ground.sleep(step.for_ms / 1000)
                await node.kill()
                if await self._is_spare(node):
                    await node.power_cut()
                    event.detail = await node.undo_lied_flushes()
                else:
                    event.detail = "skipped: others do not hold all it may have acknowledged"
        finally:
            self._held_down[node.name] -= 1
            await node.lie_about_flushes(lies=False)
        await self._down([node], 0)

    async def _stall(self, step: Step, event: Event) -> None:
        """Let work take time: the loop stands still, or blocking work begins late."""
        node, most_s = self._one(step, event), step.arg / 1000
        if step.arg % 2:
            await node.begin_work_late(most_s)
            await self._ground.sleep(step.for_ms / 1000)
            await node.begin_work_late(0.0)
            return
        end_s = self._ground.elapsed_s + step.for_ms / 1000
        while self._ground.elapsed_s < end_s:
            was_up = node.is_up
            if was_up:
                node.pause()
            await self._ground.sleep(max(LEAST_STALL_S, most_s * self._rng.random()))
            if was_up:
                node.resume()
            await self._ground.sleep(max(LEAST_STALL_S, most_s * self._rng.random()))

    async def _is_spare(self, node: Member) -> bool:
        """Wait until the others hold all that *node*, which has ended, may have acknowledged."""
        ground = self._ground
        others = others_of(node.name, ground.voters(), ground.brokers)
        await ground.look()
        newest = newest_of([ground.log_end(name) for name in others])
        for _ in range(CATCH_UP_TRIES if newest is not None else 0):
            if newest is not None and tail_is_spare(newest, [ground.log_end(n) for n in others]):
                return node.is_down
            await ground.sleep(CATCH_UP_LOOK_S)
        return False

    # -- limits ----------------------------------------------------------------------------

    async def _limit_files(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if not node.is_up:
            event.detail = "skipped: it is not up"
            return
        event.detail = await node.limit_files(step.arg)
        await self._ground.sleep(step.for_ms / 1000)
        event.detail = await node.limit_files(None) or event.detail

    async def _flood(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        event.detail = await node.flood(step.arg or CONNECTIONS)
        await self._ground.sleep(step.for_ms / 1000)
        event.detail = await node.flood(0) or event.detail

    def _may_hurt(self, kind: Kind, node: Member, event: Event) -> bool:
        if self._allows(kind, node):
            return True
        event.detail = "skipped: a majority must keep its disks"
        return False

    def _allows(self, kind: Kind, node: Member) -> bool:
        ground = self._ground
        nodes = {name: ground.soundness(name) for name in ground.brokers}
        return self._budget.allows(kind, node.name, nodes, ground.voters())

    def _may_cut_power(self, node: Member) -> bool:
        return self._budget.allows(Kind.POWER_CUT, node.name, {}, self._ground.voters())

    async def _cut_power(self, node: Member) -> None:
        if self._may_cut_power(node):
            await node.power_cut()
        else:
            await node.kill()

    # -- clocks, orders --------------------------------------------------------------------

    async def _jump_clock(self, step: Step, event: Event) -> None:
        self._one(step, event).jump_clock(step.arg)

    async def _drift_clock(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        node.drift_clock(float(step.arg))
        await self._ground.sleep(step.for_ms / 1000)
        node.drift_clock(0.0)

    async def _lose_date(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if self._wrong_dates:
            event.detail = "skipped: another date is wrong"
            return
        by_ms = (step.arg or YEARS_OFF) * YEAR_MS
        event.detail = f"by {by_ms} ms"
        self._wrong_dates.add(node.name)
        node.jump_clock(by_ms)
        try:
            await self._ground.sleep(step.for_ms / 1000)
        finally:
            node.jump_clock(-by_ms)
            self._wrong_dates.remove(node.name)

    async def _transfer(self, step: Step, event: Event) -> None:
        node = self._one(step, event)
        if node.name == self._ground.leading():
            event.detail = "skipped: no other member can move it"
            return
        await self._order(event, step.kind, node.name)

    async def _add_members(self, step: Step, event: Event) -> None:
        await self.add_missing(event)

    async def add_missing(self, event: Event | None = None) -> bool:
        """Add every broker that is no member; tell whether all are members now."""
        missing = self._ground.missing_members()
        if missing is None:
            return False
        event = event or Event(self._now_ns, self._now_ns, "add_missing")
        for name in missing:
            await self._order(event, Kind.MEMBER_ADD, name)
        return not missing

    async def remove(self, name: str) -> None:
        """Ask the leader to remove *name*; a refusal or an unknown end is no failure."""
        await self._order(Event(self._now_ns, self._now_ns, "remove"), Kind.MEMBER_REMOVE, name)

    async def _remove_member(self, step: Step, event: Event) -> None:
        """Remove one, and add it again later; sometimes with another disk."""
        node = self._one(step, event)
        if not self._may_hurt(Kind.WIPE, node, event):
            return
        await self._order(event, step.kind, node.name)
        await self._ground.sleep(step.for_ms / 1000)
        # Much may have happened to others meanwhile.
        if step.arg % 2 and not event.detail and self._allows(Kind.WIPE, node):
            await self._lose_folder(node)
            await node.start()
        await self.add_missing(event)

    async def _change_without_minority(self, step: Step, event: Event) -> None:
        """Ask for a change while a minority is away and others may be down; no fault is healed."""
        leader, change = self._ground.leading(), Change(step.arg // 2 % len(Change))
        voters = next((v for v in self._ground.voters() if leader in v), ())
        order = self._rng.shuffle
        chosen = choose(change, leader or "", voters, order)
        if chosen is None:  # three are enough for the simplest one
            change = Change.REMOVE_ABSENT
            chosen = choose(change, leader or "", voters, order)
        if chosen is None:
            event.detail = f"skipped: {len(voters)} voters are too few"
            return
        event.node = ",".join(chosen.away)
        event.detail = f"{change.name.lower()} {chosen.removed}".strip()
        cut_off = step.arg % 2 == 1
        gone = list(chosen.away)
        await self._go_away(gone, cut_off=cut_off)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask, chosen)
            if chosen.leader_goes and leader is not None:
                await self._ground.sleep(LEADER_GOES_S[self._rng.randrange(len(LEADER_GOES_S))])
                await self._go_away([leader], cut_off=cut_off)
                gone.append(leader)
            await self._ground.sleep(step.for_ms / 1000)
            nursery.cancel_scope.cancel()
        await self._come_back(gone, cut_off=cut_off)
        await self._add_again()

    async def _ask(self, chosen: Chosen) -> None:
        event = Event(self._now_ns, self._now_ns, "minority")
        with suppress(CannotBeDone):
            if chosen.removed:
                await self._order(event, Kind.MEMBER_REMOVE, chosen.removed)
            else:
                await self.add_missing(event)
            if not event.detail:
                self._ground.sometimes["change_without_minority"] += 1

    async def _add_again(self) -> None:
        """Add the removed member as soon as a member leads: else too few are left."""
        for _ in range(ADD_TRIES):
            with suppress(CannotBeDone):
                if await self.add_missing():
                    return
            await self._ground.sleep(ADD_LOOK_S)

    async def _go_away(self, names: list[str], *, cut_off: bool) -> None:
        self.away.update(names)
        for name in names:
            if cut_off:
                self._cut(self._around(name))
            else:
                self._held_down[name] += 1
                await self._machine(name).kill()

    async def _come_back(self, names: list[str], *, cut_off: bool) -> None:
        self.away -= Counter(names)
        for name in names:
            if cut_off:
                self._mend(self._around(name))
        if not cut_off:
            self._held_down.subtract(names)
            await self._down([self._machine(name) for name in names], 0)

    def _around(self, name: str) -> list[tuple[str, str]]:
        return _both_ways([name], [other for other in self._ground.brokers if other != name])

    async def _replace_member(self, step: Step, event: Event) -> None:
        """A wiped node under an old name: it takes its own former place."""
        await self._wipe(step, event)
        if not event.detail:
            await self._order(event, step.kind, event.node)

    async def _order(self, event: Event, kind: Kind, name: str) -> None:
        """Give an order to the leader; that it is refused, or its end unknown, is no failure."""
        if not self._ground.leads_now():
            event.detail = "skipped: no member leads"
            return
        with trio.move_on_after(ORDER_S):
            self._budget.orders += 1
            try:
                await self._ground.order(kind, name)
            except MQError as error:
                event.detail = f"refused: {type(error).__name__}: {error}"
            finally:
                self._budget.orders -= 1


def _both_ways(left: Iterable[str], right: Iterable[str]) -> list[tuple[str, str]]:
    theirs = list(right)
    return [pair for one in left for other in theirs for pair in ((one, other), (other, one))]
