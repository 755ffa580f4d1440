"""Which rows of the tables have changed since they were last copied.

Apply marks, `dledger.state.cut` takes the marks and copies the rows: so a copy costs what changed,
not what there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dledger.state.queue_lock import LockKey


@dataclass(slots=True)
class Marks:
    """Keys of changed rows, deleted ones included. A topic stands for all its queues."""

    topics: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    offsets: set[tuple[str, str]] = field(default_factory=set)
    queues: set[str] = field(default_factory=set)
    locks: set[LockKey] = field(default_factory=set)
    halves: dict[int, None] = field(default_factory=dict)
    """Half messages begun, checked or decided, in the order of the log."""
    decided: list[int] = field(default_factory=list)
    timer_pieces: set[int] = field(default_factory=set)
    recalled: list[int] = field(default_factory=list)

    def __len__(self) -> int:
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
        )
