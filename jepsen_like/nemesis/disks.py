"""The faults of disks: full, slow, without flushes, and with bytes that go bad."""

from __future__ import annotations

from typing import Final

from jepsen_like.history.operation import Event
from jepsen_like.nemesis.ground import Ground, Member
from jepsen_like.nemesis.nodes import Nodes
from jepsen_like.plans.budget import newest_of, others_of, tail_is_spare
from jepsen_like.plans.plan import Step

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
        node = self._nodes.one(step, event)
        if not node.is_up or not self._nodes.may_hurt(step.kind, node, event):
            event.detail = event.detail or "skipped: it is not up"
            return
        if self._nodes.keeps_unflushed and not self._nodes.may_cut_power(node):
            event.detail = "skipped: a majority must keep its disks"
            return
        await node.fail_flushes(1)
        await self._ground.sleep(step.for_ms / 1000)
        await node.fail_flushes(0)

    async def rot(self, step: Step, event: Event) -> None:
        """Change bits in the log of a node that is down."""
        node = self._nodes.one(step, event)
        if not self._nodes.may_hurt(step.kind, node, event):
            return
        with self._nodes.budget.destroying(node.name):
            await node.kill()
            event.detail = await node.rot(max(1, step.arg))
        if event.detail:
            self._nodes.budget.note_hurt(step.kind, node.name)
        await self._nodes.down([node], step.for_ms)

    async def spoil_sectors(self, step: Step, event: Event) -> None:
        """Let sectors of a disk be unreadable, with its node down or not."""
        node = self._nodes.one(step, event)
        if not self._nodes.may_hurt(step.kind, node, event):
            return
        ends = step.arg % 2 == 1
        self._nodes.held_down[node.name] += ends
        try:
            with self._nodes.budget.destroying(node.name):
                if ends:
                    await node.kill()
                event.detail = await node.spoil_sectors(1 + step.arg // 2)
            if event.detail:
                self._nodes.budget.note_hurt(step.kind, node.name)
        finally:
            self._nodes.held_down[node.name] -= ends
        if ends:
            await self._nodes.down([node], step.for_ms)

    async def rot_file(self, step: Step, event: Event) -> None:
        """Let a file that is no segment go bad on a node that is down."""
        node = self._nodes.one(step, event)
        if not self._nodes.may_hurt(step.kind, node, event):
            return
        self._nodes.held_down[node.name] += 1
        try:
            with self._nodes.budget.destroying(node.name):
                await node.kill()
                event.detail = await node.rot_file(step.arg)
            if event.detail:
                self._nodes.budget.note_hurt(step.kind, node.name)
        finally:
            self._nodes.held_down[node.name] -= 1
        await self._nodes.down([node], step.for_ms)

    async def tear_tail(self, step: Step, event: Event) -> None:
        """Tear what no start can prove was acknowledged, once others hold all of it."""
        node = self._nodes.one(step, event)
        if not self._nodes.may_hurt(step.kind, node, event):
            return
        self._nodes.budget.note_hurt(step.kind, node.name)  # what follows takes time
        self._nodes.held_down[node.name] += 1
        try:
            with self._nodes.budget.destroying(node.name):
                await node.kill()
                if await self._is_spare(node):
                    where = await node.tear_tail(max(1, step.arg))
                    event.detail = where or "skipped: nothing stands above the commit mark"
                else:
                    event.detail = "skipped: others do not hold all it may have acknowledged"
        finally:
            self._nodes.held_down[node.name] -= 1
        await self._nodes.down([node], step.for_ms)

    async def lie_about_flushes(self, step: Step, event: Event) -> None:
        """Record what flushes do not make durable; lose it once it is safe without it."""
        node = self._nodes.one(step, event)
        if not node.is_up or not self._nodes.may_hurt(step.kind, node, event):
            event.detail = event.detail or "skipped: it is not up"
            return
        self._nodes.budget.note_hurt(step.kind, node.name)
        await node.lie_about_flushes(lies=True)
        self._nodes.held_down[node.name] += 1
        try:
            with self._nodes.budget.destroying(node.name):
                await self._ground.sleep(step.for_ms / 1000)
                await node.kill()
                if await self._is_spare(node):
                    await node.power_cut()
                    event.detail = await node.undo_lied_flushes()
                else:
                    event.detail = "skipped: others do not hold all it may have acknowledged"
        finally:
            self._nodes.held_down[node.name] -= 1
            await node.lie_about_flushes(lies=False)
        await self._nodes.down([node], 0)

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
