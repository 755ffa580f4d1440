"""Queue offsets a leader hands out before the messages are applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commitlog.entry import Run
from dledger.state.tables import QueueKey, StateTables


class PendingQueueOffsets:
    """Next offset of every queue: applied state plus what this leader has appended since.

    Made again when leadership begins, thrown away when it ends. One exists per leadership, used
    when an entry is sealed.
    """

    def __init__(self, tables: StateTables) -> None:
        self._tables = tables
        self._next: dict[QueueKey, int] = {}

    def assign(self, runs: Iterable[Run]) -> list[int]:
        """Return the first offset of each run, and count the runs as appended."""
        first_offsets = []
        known = self._next
        for run in runs:
            key = (run.topic, run.queue_id)
            first = known.get(key)
            if first is None:
                first = self._tables.max_offset(run.topic, run.queue_id)
            first_offsets.append(first)
            known[key] = first + run.count
        return first_offsets

    def forget_topics(self, topics: Sequence[str]) -> None:
        """Drop what is known of deleted topics: a topic of that name begins at 0 again.

        Call it when the deletion is applied (`Applied.deleted_topics`). Nothing of these topics
        is in flight then: processors refuse sends between proposal and apply of a deletion.
        """
        if topics:
            gone = set(topics)
            for key in [key for key in self._next if key[0] in gone]:
                del self._next[key]
