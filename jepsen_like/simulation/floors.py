"""What a broker group gives up: every move of the floor against the model of retention.

The model is `jepsen_like.checkers.retention`, with the settings of the world; it is applied to what
the log itself holds when a replica applies the move. The rows are kept for the history.
"""

from __future__ import annotations

from typing import Any, Final

from commitlog.errors import MQError
from dledger.group import Group
from dledger.services.retention import retention_ms
from dledger.state.apply import Applied
from dledger.state.state_record import FloorChange, QueueFloorsChange
from jepsen_like.checkers.retention import Keeps, mistake_in
from jepsen_like.history.operation import FloorMove
from jepsen_like.simulation.checked_world import CheckedWorld
from jepsen_like.simulation.node import BrokerNode
from jepsen_like.simulation.world_settings import WorldSettings
from jepsen_like.workloads.floor_rows import HOUR_MS, Queue, kept_offsets, move_of, rows_of

KEEP_HOURS: Final = 72
"""`fileReservedTime` where no option sets it."""


def keeps_of(settings: WorldSettings) -> Keeps:
    """Return what the brokers of a world keep. By the log alone, dates may be wrong."""
    options = settings.options
    return Keeps(
        keep_bytes=int(str(options.get("store.keep_bytes", 0))),
        keep_ms=int(str(options.get("store.file_reserved_time", KEEP_HOURS))) * HOUR_MS,
        segment_bytes=settings.segment_bytes,
        date_error_ns=None,
    )


class Floors:
    """What one broker group has given up.

    Attributes:
        floors: First index kept, of every record that moved the floor.
        queues: Topics whose queues begin elsewhere for another reason: a retention of their own, or
            they were deleted.
        rows: Of the history, every move once, from the first replica whose log could be read.
    """

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._keeps = keeps_of(world.settings)
        self.floors: set[int] = set()
        self.queues: set[str] = set()
        self.rows: list[FloorMove] = []
        self._moves: set[int] = set()
        self._begins: dict[int, dict[Queue, int]] = {1: {}}
        """By first index kept: where queues may begin at most."""

    def watch(self, group: Group) -> None:
        """Take what a process applied when it started."""
        # The others have the same record before them.
        self.floors.add(group.state.floor.first_index)

    def applied(self, node: BrokerNode, group: Group, result: Applied) -> None:
        """Look at the changes of one entry, and at where the log begins after it."""
        tables: Any = group.state
        self.queues.update(result.deleted_topics)
        for change in result.changes:
            if isinstance(change, FloorChange):
                self.floors.add(change.floor.first_index)
                self._world.sometimes["floor_moved"] += 1
                if result.index not in self._moves:
                    self._judge(node, group, result.index, change)
            elif isinstance(change, QueueFloorsChange):
                self._check_queues(node, tables, result.index, change)
        first = tables.floor.first_index
        if first not in self.floors:
            self._violate(node, result.index, f"the log begins with entry {first} without a record")

    def _judge(self, node: BrokerNode, group: Group, index: int, change: FloorChange) -> None:
        at_ns = round(self._world.elapsed_s * 1e9)
        first, log = change.floor.first_index, group.store.log
        try:
            move = move_of(log, index, change, node=node.name, at_ns=at_ns)
            kept = kept_offsets(log, group.state, first, index)
        except (MQError, OSError):
            return  # damaged here: another replica has it
        self._moves.add(index)
        before = self._begins[max(known for known in self._begins if known <= first)]
        self.rows += rows_of(move, kept, before=before)
        self._begins[first] = kept
        if mistake := mistake_in(move, self._keeps):
            self._violate(node, index, f"all before byte {move.position} goes {mistake}")
        if change.floor.position != log.position_at(first):
            self._violate(node, index, f"entry {first} is at {log.position_at(first)}")
        if (move.keep_bytes, move.keep_ms) != (self._keeps.keep_bytes, self._keeps.keep_ms):
            text = f"{move.keep_bytes} bytes and {move.keep_ms} ms; the plan has {self._keeps}"
            self._violate(node, index, f"the settings of the record are {text}")

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
        """Compare where queues begin with where the floor lets them."""
        begins = self._begins.get(tables.floor.first_index)
        if begins is None:
            return  # no log that could be read showed that move
        for (topic, queue_id), bounds in tables.queues.items():
            if bounds.min_offset > begins.get((topic, queue_id), 0) and topic not in self.queues:
                text = f"{topic} {queue_id} begins at {bounds.min_offset}, it may at "
                self._violate(node, index, text + str(begins.get((topic, queue_id), 0)))

    def _violate(self, node: BrokerNode, index: int, text: str) -> None:
        self._world.violate("given_up", f"{node.name}, entry {index}: {text}")
