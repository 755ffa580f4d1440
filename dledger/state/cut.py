"""The rows of the tables that changed, copied at one applied index.

A cut shares nothing with the tables that apply could change, so it may go to a worker thread.
Cuts that follow each other without a gap make up the whole state: see `dledger.state.image`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dledger.state.configs import SubscriptionGroupConfig, TopicConfig
from dledger.state.queue_lock import LockKey, QueueLock
from dledger.state.state_record import floor_to_state
from dledger.state.tables import Marks, StateTables
from dledger.state.transactions import OpenHalf, TransactionDecision


@dataclass(frozen=True, slots=True)
class Cut:
    """Changed rows by key; None, or no queues, for a row that was removed."""

    applied_index: int
    scalars: dict[str, Any]
    topics: list[tuple[str, TopicConfig | None]]
    groups: list[tuple[str, SubscriptionGroupConfig | None]]
    offsets: list[tuple[tuple[str, str], dict[int, int] | None]]
    queues: list[tuple[str, dict[int, list[int]], dict[int, int]]]
    """Topic, bounds and first positions by queue."""
    locks: list[tuple[LockKey, QueueLock | None]]
    halves: list[tuple[int, OpenHalf | None]]
    decided: list[tuple[int, TransactionDecision | None]]
    timer_pieces: list[tuple[int, bytes | None]]
    recalled: list[int]
    producers: list[tuple[bytes, list[Any] | None]]

    def __len__(self) -> int:
        """Return how many rows there are, all queues of a topic being one."""
        return (
            len(self.topics)
            + len(self.groups)
            + len(self.offsets)
            + len(self.queues)
            + len(self.locks)
            + len(self.halves)
            + len(self.decided)
            + len(self.timer_pieces)
            + len(self.recalled)
            + len(self.producers)
        )


def scalars(tables: StateTables) -> dict[str, Any]:
    """Return the parts of a snapshot that are small whatever there is, by their names in it."""
    return {
        "members_index": tables.members_index,
        "members": tables.members_body,
        "applied_index": tables.applied_index,
        "applied_term": tables.applied_term,
        "applied_chain": tables.applied_chain,
        "applied_end_position": tables.applied_end_position,
        "last_store_time_ms": tables.last_store_time_ms,
        "topics_counter": tables.topics_counter,
        "topics_changed_ms": tables.topics_changed_ms,
        "delay_progress": dict(tables.delay_progress),
        "floor": floor_to_state(tables.floor),
        "queue_locks_index": tables.queue_locks_index,
    }


def take_cut(tables: StateTables) -> Cut:
    """Copy what changed since the cut before, and begin to mark again."""
    marks, tables.marks = tables.marks, Marks()
    return _cut(tables, marks, tables.producers.take_touched())


def cut_everything(tables: StateTables) -> Cut:
    """Copy all rows, and begin to mark again."""
    tables.marks = Marks()
    tables.producers.take_touched()
    everything = Marks(
        topics=set(tables.topics),
        groups=set(tables.subscription_groups),
        offsets=set(tables.consumer_offsets),
        queues=set(tables.queues_of),
        locks=set(tables.queue_locks),
        halves=dict.fromkeys(tables.transactions.open),
        decided=list(tables.transactions.decided),
        timer_pieces=set(tables.timers.pieces()),
        recalled=tables.timers.recalled(),
    )
    return _cut(tables, everything, tables.producers.ids())


def _cut(tables: StateTables, marks: Marks, producers: Iterable[bytes]) -> Cut:
    offsets, queues = tables.consumer_offsets, tables.queues_of
    transactions = tables.transactions
    return Cut(
        applied_index=tables.applied_index,
        scalars=scalars(tables),
        topics=[(name, tables.topics.get(name)) for name in marks.topics],
        groups=[(name, tables.subscription_groups.get(name)) for name in marks.groups],
        offsets=[
            (pair, dict(offsets[pair]) if pair in offsets else None) for pair in marks.offsets
        ],
        queues=[
            (
                topic,
                {
                    queue_id: [bounds.min_offset, bounds.max_offset]
                    for queue_id, bounds in queues.get(topic, {}).items()
                },
                {
                    queue_id: bounds.first_position
                    for queue_id, bounds in queues.get(topic, {}).items()
                },
            )
            for topic in marks.queues
        ],
        locks=[(key, tables.queue_locks.get(key)) for key in marks.locks],
        halves=[(half, transactions.open.get(half)) for half in marks.halves],
        decided=[(half, transactions.decided.get(half)) for half in marks.decided],
        timer_pieces=[(number, tables.timers.piece(number)) for number in marks.timer_pieces],
        recalled=marks.recalled,
        producers=[(name, tables.producers.row(name)) for name in producers],
    )
