"""The nodes of a cluster as the steps of a plan mean them: which one, held down, ended and started.

`Disks` are the faults of their disks: full, slow, without flushes, and with bytes that go bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

import trio

from dledger.jepsen_like.history.operation import Event
from dledger.jepsen_like.nemesis.ground import CannotBeDone, Ground, Machine, Member
from dledger.jepsen_like.plans.budget import Budget, newest_of, others_of, tail_is_spare
from dledger.jepsen_like.plans.plan import PROXY_KINDS, Kind, Step
from dledger.jepsen_like.seeded_rng import SimRng

SUPERVISOR_S: Final = 2.0
"""Seconds between two searches of a supervisor for processes that ended by themselves."""

CATCH_UP_S: Final = 60.0
"""How long a rolling restart waits for a node before it goes on."""

STEP_POINTS: Final = 40
"""Operations of the disk that a kill at a named point waits for, at most."""


class Nodes:
    """The nodes of one run, and the faults that end them.

    Args:
        keeps_unflushed: What members acknowledge before they flush it stays on a majority: power
            fails at no member whose memory is needed. Off, the checkers have to name the losses.

    Attributes:
        held_down: How many steps want a node down, by name.
    """

    def __init__(self, ground: Ground, rng: SimRng, *, keeps_unflushed: bool = False) -> None:
        self._ground = ground
        self.keeps_unflushed = keeps_unflushed
        self.rng = rng
        self.budget = Budget()
        self.held_down: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

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
        return [running[self.rng.randrange(len(running))]]

    def one(self, step: Step, event: Event) -> Member:
        """Return the one broker that a step means, and note it in *event*."""
        node = self.resolve(step.target)[0]
        event.node = node.name
        return node

    def one_up(self, step: Step, event: Event) -> Member:
        """Likewise. Raises CannotBeDone: it is not up."""
        node = self.one(step, event)
        if not node.is_up:
            raise CannotBeDone("it is not up")
        return node

    def machine(self, name: str) -> Machine:
        """Return the node of that name: a broker, a NameServer or a client."""
        ground = self._ground
        found: Machine
        for machines in (ground.brokers, ground.name_servers, ground.proxies, ground.clients):
            if name in machines:
                found = machines[name]
        return found

    @property
    def now_ns(self) -> int:
        """The history's clock."""
        return round(self._ground.elapsed_s * 1e9)

    async def down(self, nodes: Iterable[Machine], for_ms: int) -> None:
        """Keep *nodes* down for *for_ms*, then start those that no other step keeps down."""
        held = [node.name for node in nodes]
        self.held_down.update(held)
        await self._ground.sleep(for_ms / 1000)
        self.held_down.subtract(held)
        for name in held:
            node = self.machine(name)
            if not self.held_down[name] and node.is_down:
                await node.start()

    @contextmanager
    def held(self, node: Machine) -> Iterator[None]:
        """Let no other step start *node* while the block runs."""
        self.held_down[node.name] += 1
        try:
            yield
        finally:
            self.held_down[node.name] -= 1

    def check_disks(self, kind: Kind, node: Member) -> None:
        """Raises CannotBeDone: a fault may not destroy data of *node* now."""
        if not self.allows(kind, node):
            raise CannotBeDone("a majority must keep its disks")

    def allows(self, kind: Kind, node: Member) -> bool:
        """Whether the budget allows such a fault on *node* now."""
        ground = self._ground
        nodes = {name: ground.soundness(name) for name in ground.brokers}
        return self.budget.allows(kind, node.name, nodes, ground.voters())

    def may_cut_power(self, node: Member) -> bool:
        """Whether power may fail at *node* now; the budget notes what it may lose."""
        if self.keeps_unflushed:
            # It loses what it has acknowledged, as with another disk.
            if not self.allows(Kind.WIPE, node):
                return False
            self.budget.note_hurt(Kind.WIPE, node.name)
            return True
        return self.budget.allows(Kind.POWER_CUT, node.name, {}, self._ground.voters())

    async def _cut_power(self, node: Member) -> None:
        if self.may_cut_power(node):
            await node.power_cut()
        else:
            await node.kill()

    async def lose_folder(self, node: Member) -> None:
        """Wipe a node, and note it in the budget."""
        self.budget.note_hurt(Kind.WIPE, node.name)
        with self.budget.destroying(node.name):
            await node.wipe()

    async def supervise(self) -> None:
        """Start nodes that ended by themselves, until cancelled."""
        while True:
            await self._ground.sleep(SUPERVISOR_S)
            ground = self._ground
            for node in (
                *ground.name_servers.values(),
                *ground.brokers.values(),
                *ground.proxies.values(),
            ):
                if node.is_down and not self.held_down[node.name]:
                    self.done["restarted_by_supervisor"] += 1
                    await node.start()

    async def kill(self, step: Step, event: Event) -> None:
        """Kill a node."""
        node = self.one(step, event)
        await node.kill()
        await self.down([node], step.for_ms)

    async def clean_restart(self, step: Step, event: Event) -> None:
        """Stop a node in order, and start it later."""
        node = self.one_up(step, event)
        with self.held(node):
            await node.stop()
        await self.down([node], step.for_ms)

    async def rolling_restart(self, step: Step, event: Event) -> None:
        """Restart all nodes one after the other; each has caught up before the next."""
        for node in self.resolve("all"):
            if not node.is_up:
                continue
            with self.held(node):
                await node.stop()
            await self.down([node], step.for_ms)
            with trio.move_on_after(CATCH_UP_S):
                while not self._ground.soundness(node.name).is_caught_up:
                    await self._ground.sleep(0.5)

    async def pause(self, step: Step, event: Event) -> None:
        """Let nodes stand still."""
        for node in self.resolve(step.target):
            event.node = node.name
            node.pause()
            await self._ground.sleep(step.for_ms / 1000)
            node.resume()

    async def power_cut(self, step: Step, event: Event) -> None:
        """Cut the power of one node, or of all."""
        nodes = self.resolve("all")
        if step.kind is not Kind.POWER_CUT_ALL:
            nodes = [self.one(step, event)]
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(self._cut_power, node)
        async with trio.open_nursery() as nursery:
            for node in nodes:  # they do not all come back at the same moment
                share = 1.0 if len(nodes) == 1 else self.rng.random()
                nursery.start_soon(self.down, [node], int(step.for_ms * share))

    async def wipe(self, step: Step, event: Event) -> None:
        """Remove the folder of a node."""
        node = self.one(step, event)
        self.check_disks(Kind.WIPE, node)
        await self.lose_folder(node)
        await self.down([node], step.for_ms)

    async def kill_at_point(self, step: Step, event: Event) -> None:
        """Kill inside the product's own disk call: the next one, or one of the next few."""
        node = self.one(step, event)
        power = step.arg % 2 == 0 and self.may_cut_power(node)
        where = await node.kill_at_point(step.arg % STEP_POINTS, power=power)
        if not where:
            raise CannotBeDone("the disk did nothing")
        event.detail = f"{'power cut' if power else 'kill'} at {where}"
        self._ground.sometimes[f"ended_at_{where.partition(' ')[0]}"] += 1
        await self.down([node], step.for_ms)

    async def skew_version(self, step: Step, event: Event) -> None:
        """Nothing else starts it meanwhile, so it cannot come back as itself too early."""
        node = self.one_up(step, event)
        with self.held(node):
            await node.restart_newer()
            await self._ground.sleep(step.for_ms / 1000)
            await node.stop()
        await self.down([node], 0)

    def _servers(self, step: Step, event: Event) -> list[Machine]:
        """Return the NameServer or proxy that a step means, or all of its kind."""
        of_proxies = step.kind in PROXY_KINDS
        servers = list((self._ground.proxies if of_proxies else self._ground.name_servers).values())
        if not servers:
            raise CannotBeDone("no client of this workload goes through a proxy")
        if step.target.isdecimal():
            servers = [servers[int(step.target) % len(servers)]]
        event.node = ",".join(node.name for node in servers)
        return servers

    async def kill_servers(self, step: Step, event: Event) -> None:
        """Kill a NameServer or a proxy, or all of its kind."""
        servers = self._servers(step, event)
        for node in servers:
            await node.kill()
        await self.down(servers, step.for_ms)

    async def pause_proxy(self, step: Step, event: Event) -> None:
        """Let a proxy stand still, or all of them."""
        proxies = self._servers(step, event)
        for node in proxies:
            node.pause()
        await self._ground.sleep(step.for_ms / 1000)
        for node in proxies:
            node.resume()


CATCH_UP_TRIES: Final = 40
"""Times other members are asked whether they hold all that a torn log may have acknowledged."""

CATCH_UP_LOOK_S: Final = 0.5
"""Pause between two of these questions."""


class Disks:
    """The disks of one run."""

    def __init__(self, ground: Ground, nodes: Nodes) -> None:
        self._ground = ground
        self._nodes = nodes

    async def fill_disk(self, step: Step, event: Event) -> None:
        """Leave no space on a disk for a while."""
        node = self._nodes.one(step, event)
        await node.fill_disk(0)
        await self._ground.sleep(step.for_ms / 1000)
        await node.fill_disk(None)

    async def slow_disk(self, step: Step, event: Event) -> None:
        """Let disks take longer for a while."""
        nodes = self._nodes.resolve(step.target)
        event.node = ",".join(node.name for node in nodes)
        for node in nodes:
            await node.slow_disk(step.arg / 1000)
        await self._ground.sleep(step.for_ms / 1000)
        for node in nodes:
            await node.slow_disk(0.0)

    async def fail_flush(self, step: Step, event: Event) -> None:
        """Let the next flush of a node fail."""
        node = self._nodes.one_up(step, event)
        self._nodes.check_disks(step.kind, node)
        if self._nodes.keeps_unflushed and not self._nodes.may_cut_power(node):
            raise CannotBeDone("a majority must keep its disks")
        await node.fail_flushes(1)
        await self._ground.sleep(step.for_ms / 1000)
        await node.fail_flushes(0)

    async def _damage(
        self,
        step: Step,
        event: Event,
        act: Callable[[Member], Awaitable[str]],
        *,
        ends: bool = True,
    ) -> None:
        """Destroy data of a node, which is down meanwhile if it *ends*; *act* returns where."""
        nodes, node = self._nodes, self._nodes.one(step, event)
        nodes.check_disks(step.kind, node)
        with nodes.held(node) if ends else nullcontext(), nodes.budget.destroying(node.name):
            if ends:
                await node.kill()
            event.detail = await act(node)
        if event.detail:
            nodes.budget.note_hurt(step.kind, node.name)
        if ends:
            await nodes.down([node], step.for_ms)

    async def rot(self, step: Step, event: Event) -> None:
        """Change bits in the log of a node that is down."""
        await self._damage(step, event, lambda node: node.rot(max(1, step.arg)))

    async def spoil_sectors(self, step: Step, event: Event) -> None:
        """Let sectors of a disk be unreadable, with its node down or not."""
        count, ends = 1 + step.arg // 2, step.arg % 2 == 1
        await self._damage(step, event, lambda node: node.spoil_sectors(count), ends=ends)

    async def rot_file(self, step: Step, event: Event) -> None:
        """Let a file that is no segment go bad on a node that is down."""
        await self._damage(step, event, lambda node: node.rot_file(step.arg))

    async def tear_tail(self, step: Step, event: Event) -> None:
        """Tear what no start can prove was acknowledged, once others hold all of it."""
        nodes, node = self._nodes, self._nodes.one(step, event)
        nodes.check_disks(step.kind, node)
        nodes.budget.note_hurt(step.kind, node.name)  # what follows takes time
        with nodes.held(node), nodes.budget.destroying(node.name):
            await node.kill()
            if await self._is_spare(node, event):
                where = await node.tear_tail(max(1, step.arg))
                event.detail = where or "skipped: nothing stands above the commit mark"
        await nodes.down([node], step.for_ms)

    async def lie_about_flushes(self, step: Step, event: Event) -> None:
        """Record what flushes do not make durable; lose it once it is safe without it."""
        nodes, node = self._nodes, self._nodes.one_up(step, event)
        nodes.check_disks(step.kind, node)
        nodes.budget.note_hurt(step.kind, node.name)
        await node.lie_about_flushes(lies=True)
        try:
            with nodes.held(node), nodes.budget.destroying(node.name):
                await self._ground.sleep(step.for_ms / 1000)
                await node.kill()
                if await self._is_spare(node, event):
                    await node.power_cut()
                    event.detail = await node.undo_lied_flushes()
        finally:
            await node.lie_about_flushes(lies=False)
        await nodes.down([node], 0)

    async def _is_spare(self, node: Member, event: Event) -> bool:
        """Wait until the others hold all that *node*, which has ended, may have acknowledged.

        False, with *event* skipped: they do not in time.
        """
        ground = self._ground
        others = others_of(node.name, ground.voters(), ground.brokers)
        await ground.look()
        newest = newest_of([ground.log_end(name) for name in others])
        for _ in range(CATCH_UP_TRIES if newest is not None else 0):
            if newest is not None and tail_is_spare(newest, [ground.log_end(n) for n in others]):
                if node.is_down:
                    return True
                break
            await ground.sleep(CATCH_UP_LOOK_S)
        event.detail = "skipped: others do not hold all it may have acknowledged"
        return False
