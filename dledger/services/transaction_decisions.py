"""Decisions over half messages as the leader sees them: applied, plus what it has in flight.

The decision and the message it brings into the world go into one entry. A half message has one
decision in flight at most, so there is never a second one in the log: `apply` has nothing to
refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from commitlog.entry import RecordBatch, Run
from dledger.group_api import BrokerGroup, OnDone, Proposed, QueueTouched
from dledger.services.pending_configs import TopicView
from dledger.state.configs import TopicConfig
from dledger.state.names import STATE_TOPIC
from dledger.state.state_record import TopicsChange, TransactionsChange, state_record
from dledger.state.transactions import TransactionDecision


@dataclass(slots=True, eq=False)
class _InFlight:
    decision: TransactionDecision
    waiting: list[OnDone] = field(default_factory=list)
    answered: Proposed | None = None


class TransactionDecisions:
    """What is decided, or is being decided; the only way to propose a decision."""

    def __init__(self, group: BrokerGroup, topics: TopicView) -> None:
        self._group = group
        self._topics = topics
        self._in_flight: dict[int, _InFlight] = {}
        self._answered: set[int] = set()
        """Answered and perhaps not applied: with ``ASYNC_MASTER``, or of unknown outcome."""
        self._term = 0
        group.on_applied.append(self._on_applied)

    def __len__(self) -> int:
        return len(self._in_flight)

    def is_open(self, half_offset: int) -> bool:
        """Tell whether a half message may be decided now: open, and nothing in flight."""
        return (
            half_offset in self._group.state.transactions.open
            and self._pending(half_offset) is None
        )

    def decision(self, half_offset: int) -> TransactionDecision | None:
        """Return what was decided, or is being; None while it is open, or if it is forgotten."""
        pending = self._pending(half_offset)
        if pending is not None:
            return pending.decision
        return self._group.state.transactions.decided.get(half_offset)

    def wait(self, half_offset: int, on_done: OnDone) -> None:
        """Call *on_done* with what becomes of the decision in flight, or became of it.

        At once, from inside this call, when that is known: it is applied, the wait for a majority
        is over, or there was none.
        """
        pending = self._pending(half_offset)
        if pending is None:
            on_done(Proposed("stored"))
        elif pending.answered is not None:
            on_done(pending.answered)
        else:
            pending.waiting.append(on_done)

    def decide(
        self,
        half_offset: int,
        decision: TransactionDecision,
        on_done: OnDone,
        message: tuple[bytes, Run] | None = None,
        create: TopicConfig | None = None,
    ) -> None:
        """Propose the *decision* over an open half message, and with it the *message*.

        Args:
            on_done: As for `BrokerGroup.propose`.
            message: What the decision brings into the world, and where.
            create: The topic that *message* needs to be made first.
        Raises:
            MQError: What `BrokerGroup.propose` raises; nothing was stored and *on_done* is not
                called.
        """
        assert self.is_open(half_offset)
        mine = _InFlight(decision, [on_done])
        records: list[tuple[bytes, Run]] = []
        made: list[OnDone] = []
        if create is not None:
            topics = state_record(TopicsChange(put=(create,)))
            records.append((topics.record, topics.run))
        if message is not None:
            records.append(message)
        state = state_record(TransactionsChange(decided=((half_offset, decision),)))
        records.append((state.record, state.run))

        def done(proposed: Proposed) -> None:
            for tell in made:
                tell(proposed)
            self._done(half_offset, mine, proposed)

        self._group.propose(_batch(records), done)
        self._in_flight[half_offset] = mine
        if create is not None:
            made.append(self._topics.pending.put(create.topic, create))

    def _done(self, half_offset: int, mine: _InFlight, proposed: Proposed) -> None:
        if self._in_flight.get(half_offset) is mine:
            is_late = proposed.index > self._group.state.applied_index
            if proposed.outcome == "unknown" or (proposed.outcome == "stored" and is_late):
                mine.answered = proposed
                self._answered.add(half_offset)
            else:
                del self._in_flight[half_offset]
        waiting, mine.waiting = mine.waiting, []
        for on_done in waiting:
            on_done(proposed)

    def _pending(self, half_offset: int) -> _InFlight | None:
        leadership = self._group.leadership
        if leadership is None or leadership.term != self._term:
            # All that an earlier leadership has left is applied by now, or lost.
            self._term = 0 if leadership is None else leadership.term
            self._in_flight.clear()
            self._answered.clear()
        return self._in_flight.get(half_offset)

    def _on_applied(self, touched: Sequence[QueueTouched]) -> None:
        if self._answered and any(topic == STATE_TOPIC for topic, _, _ in touched):
            still_open = self._group.state.transactions.open
            for half_offset in [each for each in self._answered if each not in still_open]:
                self._answered.discard(half_offset)
                self._in_flight.pop(half_offset, None)


def _batch(records: Sequence[tuple[bytes, Run]]) -> RecordBatch:
    return RecordBatch(
        records=b"".join(record for record, _ in records),
        sizes=np.array([len(record) for record, _ in records], dtype=np.uint32),
        runs=tuple(run for _, run in records),
        born_host=None,
    )
