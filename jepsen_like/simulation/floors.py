"""Messages are given up only with a right to it, read off the records that give them up.

===================  =======================================================================
floor                the log begins later only by a record whose cause covers all that goes,
                     with the settings of the plan: `keep_bytes` and no less, no force unless
                     the plan asks for it
queue floor          a queue begins later by itself only where its topic has a retention
nothing else         where no record gave anything up every queue begins with its first message
===================  =======================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dledger.group import Group
from dledger.services.topic_retention import retention_ms
from dledger.state.apply import Applied
from dledger.state.floor_reason import FORCED, entitlement_error
from dledger.state.state_record import FloorChange, QueueFloorsChange

if TYPE_CHECKING:
    from jepsen_like.simulation.node import BrokerNode
    from jepsen_like.simulation.world import World


class Floors:
    """What one broker group has given up.

    Attributes:
        floors: First index kept, of every record that moved the floor.
        queues: Topics whose queues begin later by themselves.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.floors: set[int] = set()
        self.queues: set[str] = set()

    def watch(self, node: BrokerNode, group: Group) -> None:
        """Look at everything that a replica applies from now on."""
        # What it applied when it was opened: the others have the same record before them.
        self.floors.add(group.state.floor.first_index)
        apply = group.store.apply

        def applied(index: int) -> Applied:
            result = apply(index)
            if node.group is group:
                self.applied(node, group, result)
            return result

        group.store.apply = applied  # type: ignore[method-assign]

    def applied(self, node: BrokerNode, group: Group, result: Applied) -> None:
        """Look at the changes of one entry, and at where the log begins after it."""
        tables: Any = group.state
        for change in result.changes:
            if isinstance(change, FloorChange):
                self._check_floor(node, result.index, change)
            elif isinstance(change, QueueFloorsChange):
                self._check_queues(node, tables, result.index, change)
        first = tables.floor.first_index
        if first not in self.floors:
            self._violate(node, result.index, f"the log begins with entry {first} without a record")

    def _check_floor(self, node: BrokerNode, index: int, change: FloorChange) -> None:
        self.floors.add(change.floor.first_index)
        reason, store = change.reason, node.config.store
        error = entitlement_error(change.floor, reason)
        if error is None and reason is not None:
            if reason.cause == FORCED and not store.clean_file_forcibly_enable:
                error = "by force, which nobody asked for"
            elif reason.keep_bytes != store.keep_bytes:
                error = f"keep_bytes is {store.keep_bytes}, the record has {reason.keep_bytes}"
            elif reason.reserved_hours != store.file_reserved_time:
                error = f"{reason.reserved_hours} hours, the plan has {store.file_reserved_time}"
        if error is not None:
            self._violate(node, index, error)
        self._world.sometimes["floor_moved"] += 1

    def _check_queues(
        self, node: BrokerNode, tables: Any, index: int, change: QueueFloorsChange
    ) -> None:
        keeps = dict(change.retention_ms)
        for topic, _, _ in change.floors:
            self.queues.add(topic)
            config = tables.topics.get(topic)
            if config is not None and retention_ms(config.attributes) != keeps.get(topic):
                self._violate(node, index, f"{topic} has another retention than {keeps.get(topic)}")

    def check_tables(self, node: BrokerNode, index: int, tables: Any) -> None:
        """Compare where queues begin with what was given up; only where nothing was."""
        if any(first > 1 for first in self.floors):
            return
        for (topic, queue_id), bounds in tables.queues.items():
            if bounds.min_offset and topic not in self.queues:
                self._violate(node, index, f"{topic} {queue_id} begins at {bounds.min_offset}")

    def _violate(self, node: BrokerNode, index: int, text: str) -> None:
        self._world.violate("given_up", f"{node.name}, entry {index}: {text}")
