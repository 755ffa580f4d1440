"""Nothing that is due waits while a leader serves.

===================  =======================================================================
delay levels         the head of each level is delivered soon after it is due
timers               so is each message with a time of its own
transactions         so are the producers of an open half message asked
===================  =======================================================================

Due is what the date of the leader of now calls due, so that dates that differ raise no alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dledger.state.names import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.state.tables import StateTables
from jepsen_like.simulation.checked_world import CheckedWorld
from jepsen_like.simulation.node import BrokerNode
from jepsen_like.simulation.reference_replica import ReferenceReplica
from jepsen_like.simulation.steadiness import Steadiness

DUE_WITHIN_S: Final = 20.0
"""Longer than a delivery that is tried again after a refusal, several times over."""

DATE_NOTICED_S: Final = 80.0
"""A service reads the date again after 60 s: a date that was moved is not noticed before."""


class DueHeads:
    """What waits in one broker group.

    Attributes:
        check_after_ms: How long an open half message waits for its decision and between two
            questions; None: nothing is demanded.
    """

    def __init__(
        self, world: CheckedWorld, reference: ReferenceReplica, steadiness: Steadiness
    ) -> None:
        self._world = world
        self._reference = reference
        self._steadiness = steadiness
        self.check_after_ms: tuple[int, int] | None = None
        self._due_since_s: dict[tuple[Any, ...], float] = {}

    def look(self, node: BrokerNode | None) -> None:
        """Look at what waits at a leader that serves steadily; None: there is none."""
        world = self._world
        if node is None or node.group is None or node.process is None:
            self._due_since_s.clear()
            return
        now_s, steady = world.elapsed_s, self._steadiness
        due = self._due_at(node, node.group.state)
        before, self._due_since_s = self._due_since_s, {}
        for key, within_s in due:
            since_s = self._due_since_s[key] = before.get(key, now_s)
            since_s = max(since_s, steady.date_since_s + DATE_NOTICED_S - within_s)
            if now_s - since_s > within_s:
                what = " ".join(map(str, key))
                world.violate(
                    "overdue", f"{node.name} serves, and for {now_s - since_s:.0f} s waits {what}"
                )
                return

    def _due_at(self, node: BrokerNode, state: StateTables) -> Iterator[tuple[Any, float]]:
        assert node.process is not None
        date_ms, units = node.process.clock.wall_ms(), self._reference.units
        for topic, queue_id in state.queues:
            if topic == SCHEDULE_TOPIC:
                offset = state.delay_progress.get(queue_id + 1, 0)
                waiting = units(topic, queue_id)[offset:]
                if len(waiting) and int(waiting[0]["tags_code"]) <= date_ms:
                    yield ("delay level", queue_id + 1, offset), DUE_WITHIN_S
        lowest = state.timers.lowest
        if lowest is not None:
            waiting = units(TIMER_TOPIC, 0)[lowest:]
            mask = state.timers.mask(lowest, len(waiting)) & (waiting["tags_code"] <= date_ms)
            for place in mask.nonzero()[0].tolist():
                yield ("timer", lowest + place), DUE_WITHIN_S
        if self.check_after_ms is None:
            return
        first_ms, again_ms = self.check_after_ms
        for half_offset, half in state.transactions.open.items():
            due_ms = half.checked_ms + again_ms if half.checks else half.store_time_ms + first_ms
            if due_ms <= date_ms:
                # A leader that has just begun, or knows no producer yet, asks a whole pause later.
                within_s = DUE_WITHIN_S + 2 * again_ms / 1000
                yield ("half message", half_offset, half.checks), within_s
