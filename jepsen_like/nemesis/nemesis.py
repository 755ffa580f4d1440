"""Injects the faults of a plan into a world and heals them: one task per step.

Faults overlap, so what they touch is counted: a link is cut while any step wants it cut, a node is
down while any step wants it down. A node that ended by itself is started again by a supervisor, as
an operator's would.

Some faults wait for a rare moment (`Moments`): a change of role, a leader that was deposed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import trio

from dledger.commitlog.errors import MQError
from dledger.jepsen_like.history.operation import Event
from dledger.jepsen_like.nemesis.ground import CannotBeDone, Ground, Moment
from dledger.jepsen_like.nemesis.links import Links
from dledger.jepsen_like.nemesis.members import MemberChanges
from dledger.jepsen_like.nemesis.nodes import Disks, Nodes
from dledger.jepsen_like.plans.plan import CUTS, LINK_QUALITIES, Kind, Plan, Step
from dledger.jepsen_like.seeded_rng import rng_stream

ORDERS: Final = (Kind.MEMBER_REMOVE, Kind.TRANSFER, Kind.MEMBER_ADD, Kind.MEMBER_REMOVE)
"""What is asked at a change of role, by `Step.arg` % 4."""

ORDER_WITHIN_MS: Final = 50
"""After the change of role, by the rest of `Step.arg`: half of the orders come within 6 ms, when
little of the new term is committed."""

ADD_AGAIN_S: Final = 5.0
"""A member that was removed so is added again after this."""

NEW_SENDS_S: Final = 5.0
"""A new leader has acknowledged something after this."""

DEAF_READS: Final = 4
DEAF_READ_S: Final = 0.45
"""Reads at a leader that has handed over, and the pause before each: it believes that it leads
until nothing has come from another member for an election timeout."""

ORDERED_S: Final = 0.001
"""An order has been given after this, and no answer to it has come from another host."""

ARRIVED_S: Final = 0.5
"""A client has found its broker, and its requests have arrived there."""

MOMENT_LOOK_S: Final = 0.05


class Moments:
    """The acts of one run that wait for a moment."""

    def __init__(self, ground: Ground, nodes: Nodes, links: Links, members: MemberChanges) -> None:
        self._ground = ground
        self._nodes = nodes
        self._links = links
        self._members = members

    async def order_at_role_change(self, step: Step, event: Event) -> None:
        """Ask the member that leads next for a change, within 50 ms of the change of role."""
        ground, kind, leader = self._ground, ORDERS[step.arg % len(ORDERS)], ""
        with trio.move_on_after(step.for_ms / 1000):
            leader = await ground.role_change()
        if not leader:
            raise CannotBeDone("no role changed")
        share = step.arg // len(ORDERS) / ORDER_WITHIN_MS
        await ground.sleep(share**3 * ORDER_WITHIN_MS / 1000)
        others = [node for name, node in ground.brokers.items() if name != leader]
        if not others:
            raise CannotBeDone("one broker")
        node = others[self._nodes.rng.randrange(len(others))]
        event.node = node.name
        removes = kind is Kind.MEMBER_REMOVE
        if removes:
            self._nodes.check_disks(Kind.WIPE, node)
        ground.sometimes["order_at_role_change"] += 1
        await self._members.order(event, kind, node.name, asked=leader)
        if removes:
            await ground.sleep(ADD_AGAIN_S)
            await self._members.add_missing()

    async def read_at_old_leader(self, step: Step, event: Event) -> None:
        """Read at a leader that is cut off from the others, once these have another one.

        With an odd `arg` it stands still as well until the reads have arrived: it takes itself for
        the leader then. With every second even `arg` it hands over its leadership, and does not
        hear that another one has it. It is read once more as soon as it receives from the others
        again.
        """
        ground, node = self._ground, self._nodes.one(step, event)
        if not ground.leads_now() or ground.leading() != node.name:
            raise CannotBeDone("it does not lead")
        if step.arg % 4 == 2:
            await self._read_after_transfer(node.name, step, event)
            return
        pairs, stands_still = self._links.around(node.name), step.arg % 2 == 1
        if stands_still:
            node.pause()
        self._links.cut(pairs)
        with trio.move_on_after(step.for_ms / 1000) as waiting:
            while ground.leading() == node.name:
                await ground.sleep(MOMENT_LOOK_S)
            await ground.sleep(NEW_SENDS_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, node.name, step.arg)
            if stands_still:
                await ground.sleep(ARRIVED_S)
                node.resume()
        self._links.mend(pairs)
        await self._read(node.name, step.arg)
        if waiting.cancelled_caught:
            event.detail = "no other member led for long enough"
        else:
            ground.sometimes["read_at_old_leader"] += 1

    async def _read_after_transfer(self, name: str, step: Step, event: Event) -> None:
        ground = self._ground
        others = [other for other in ground.brokers if other != name]
        if not others:
            raise CannotBeDone("one broker")
        target = others[self._nodes.rng.randrange(len(others))]
        pairs = [(other, name) for other in others]
        async with trio.open_nursery() as nursery:
            order = partial(self._members.order, event, Kind.TRANSFER, target, asked=name)
            nursery.start_soon(order)
            await ground.sleep(ORDERED_S)
            self._links.cut(pairs)
            with trio.move_on_after(step.for_ms / 1000):
                while (leader := ground.leading()) in (None, name):
                    await ground.sleep(MOMENT_LOOK_S)
                ground.tell_leader(leader)
            for _ in range(DEAF_READS):
                await ground.sleep(DEAF_READ_S)
                await self._read(name, step.arg)
            self._links.mend(pairs)
        ground.sometimes["read_at_old_leader"] += ground.leading() != name

    async def _read(self, name: str, reads: int) -> None:
        with suppress(CannotBeDone):  # another burst is under way
            await self._ground.read_at(name, reads)


MOMENT_S: Final = 10.0
"""How long a kill waits for clients to be where it is to hit them."""

CONNECTIONS: Final = 10_000
"""Connections of a flood unless the step has a number."""

YEARS_OFF: Final = 2
"""Years that a date is off unless the step has a number."""

YEAR_MS: Final = 365 * 86_400_000

LEAST_STALL_S: Final = 0.01
"""Of a stall, and of the time between two."""


class Nemesis:
    """Carries out the steps of one plan.

    Args:
        record: Given a row for every act when it begins, and again, completed, with true, when it
            has ended.

    Attributes:
        done: How often each kind was done, and ``skipped``.
    """

    def __init__(self, ground: Ground, plan: Plan, record: Callable[[Event, bool], None]) -> None:
        self._ground = ground
        self._plan = plan
        self._record = record
        self._nodes = nodes = Nodes(
            ground, rng_stream(plan.seed, "nemesis"), keeps_unflushed="async_flush" in plan.modes
        )
        self._links = links = Links(ground, nodes)
        disks = Disks(ground, nodes)
        self.members = members = MemberChanges(ground, nodes, links)
        moments = Moments(ground, nodes, links, members)
        self.done = nodes.done
        self._begin_s = ground.elapsed_s
        self._wrong_dates: set[str] = set()
        self._acts: dict[Kind, Callable[[Step, Event], Awaitable[None]]] = {
            Kind.KILL: nodes.kill,
            Kind.CLEAN_RESTART: nodes.clean_restart,
            Kind.ROLLING_RESTART: nodes.rolling_restart,
            Kind.PAUSE: nodes.pause,
            Kind.POWER_CUT: nodes.power_cut,
            Kind.POWER_CUT_ALL: nodes.power_cut,
            Kind.WIPE: nodes.wipe,
            Kind.BUGGIFY_KILL: nodes.kill_at_point,
            Kind.VERSION_SKEW: nodes.skew_version,
            Kind.FD_LIMIT: self._limit_files,
            Kind.CONNECTIONS: self._flood,
            **dict.fromkeys(CUTS, links.cut_links),
            Kind.SWIZZLE: links.swizzle,
            Kind.RESET: links.reset,
            **dict.fromkeys(LINK_QUALITIES, links.spoil_links),
            Kind.DISK_FULL: disks.fill_disk,
            Kind.DISK_SLOW: disks.slow_disk,
            Kind.FSYNC_ERROR: disks.fail_flush,
            Kind.BIT_ROT: disks.rot,
            Kind.TORN_TAIL: disks.tear_tail,
            Kind.BAD_SECTOR: disks.spoil_sectors,
            Kind.FILE_ROT: disks.rot_file,
            Kind.LYING_FLUSH: disks.lie_about_flushes,
            Kind.STALL: self._stall,
            Kind.NAMESRV_LOSS: links.lose_at_name_servers,
            Kind.CLOCK_JUMP: self._jump_clock,
            Kind.CLOCK_DRIFT: self._drift_clock,
            Kind.CLOCK_YEARS: self._lose_date,
            Kind.TRANSFER: members.transfer,
            Kind.MEMBER_ADD: members.add_members,
            Kind.MEMBER_REMOVE: members.remove_member,
            Kind.MEMBER_REPLACE: members.replace_member,
            Kind.CHANGE_WITHOUT_MINORITY: members.change_without_minority,
            Kind.ROLE_ORDER: moments.order_at_role_change,
            Kind.READ_BURST: moments.read_at_old_leader,
            Kind.NAMESRV_KILL: nodes.kill_servers,
            Kind.PROXY_KILL: nodes.kill_servers,
            Kind.PROXY_PAUSE: nodes.pause_proxy,
            Kind.CLIENT_KILL: self._kill_client,
            Kind.MID_SEND_KILL: self._kill_client_at,
            Kind.MID_BATCH_KILL: self._kill_client_at,
            Kind.ZOMBIE_CLIENT: self._double_consumers,
            Kind.NAME_THIEF: self._steal_name,
            Kind.PEER_STRANGER: self._attack_peers,
        }

    async def run(self) -> None:
        """Do every step at its time; return at the end of the plan with everything undone.

        Of a step there is nothing before its time, not even a task that waits: a plan without its
        later steps plays the same up to the first of them. Nodes that are down are left to
        `World.heal`.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._nodes.supervise)
            for step in sorted(self._plan.steps, key=lambda step: step.at_ms):
                if step.at_ms >= self._plan.duration_ms:
                    break
                await self._until(step.at_ms)
                nursery.start_soon(self._do, step)
            await self._until(self._plan.duration_ms)
            nursery.cancel_scope.cancel()
        self._links.forget()

    async def _until(self, at_ms: int) -> None:
        await self._ground.sleep_until(self._begin_s + at_ms / 1000)

    async def _do(self, step: Step) -> None:
        event = Event(self._nodes.now_ns, self._nodes.now_ns, step.kind.value, step.target)
        self._record(event, False)
        try:
            await self._acts[step.kind](step, event)
        except (CannotBeDone, MQError) as reason:
            event.detail = f"skipped: {reason}"
        finally:  # also what the end of the plan cuts short was done, until then
            event.end_ns = self._nodes.now_ns
            self._record(event, True)
            word = "skipped" if event.detail.startswith("skipped") else step.kind.value
            self.done[word] += 1

    async def _kill_client(self, step: Step, event: Event) -> None:
        machines = list(self._ground.clients.values())
        node = machines[int(step.target) % len(machines)]
        event.node = node.name
        await node.kill()
        await self._nodes.down([node], step.for_ms)

    async def _kill_client_at(self, step: Step, event: Event) -> None:
        """Kill the clients that send and consume when one of them reaches the named point."""
        sending = step.kind is Kind.MID_SEND_KILL
        workload = self._ground.workload
        node = next(iter(self._ground.clients.values()))
        event.node = node.name
        with trio.move_on_after(MOMENT_S) as waiting:
            await workload.reach(Moment.SENDING if sending else Moment.HALF_A_BATCH)
        if waiting.cancelled_caught:
            raise CannotBeDone("no client came to that place")
        if not sending:
            workload.begin_where_committed()
        await node.kill()
        await self._nodes.down([node], step.for_ms)

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

    async def _stall(self, step: Step, event: Event) -> None:
        """Let work take time: the loop stands still, or blocking work begins late."""
        node, most_s = self._nodes.one(step, event), step.arg / 1000
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
            await self._ground.sleep(max(LEAST_STALL_S, most_s * self._nodes.rng.random()))
            if was_up:
                node.resume()
            await self._ground.sleep(max(LEAST_STALL_S, most_s * self._nodes.rng.random()))

    async def _limit_files(self, step: Step, event: Event) -> None:
        node = self._nodes.one_up(step, event)
        event.detail = await node.limit_files(step.arg)
        await self._ground.sleep(step.for_ms / 1000)
        event.detail = await node.limit_files(None) or event.detail

    async def _flood(self, step: Step, event: Event) -> None:
        node = self._nodes.one(step, event)
        event.detail = await node.flood(step.arg or CONNECTIONS)
        await self._ground.sleep(step.for_ms / 1000)
        event.detail = await node.flood(0) or event.detail

    async def _jump_clock(self, step: Step, event: Event) -> None:
        self._nodes.one(step, event).jump_clock(step.arg)

    async def _drift_clock(self, step: Step, event: Event) -> None:
        node = self._nodes.one(step, event)
        node.drift_clock(float(step.arg))
        await self._ground.sleep(step.for_ms / 1000)
        node.drift_clock(0.0)

    async def _lose_date(self, step: Step, event: Event) -> None:
        node = self._nodes.one(step, event)
        if self._wrong_dates:
            raise CannotBeDone("another date is wrong")
        by_ms = (step.arg or YEARS_OFF) * YEAR_MS
        event.detail = f"by {by_ms} ms"
        self._wrong_dates.add(node.name)
        node.jump_clock(by_ms)
        try:
            await self._ground.sleep(step.for_ms / 1000)
        finally:
            node.jump_clock(-by_ms)
            self._wrong_dates.remove(node.name)
