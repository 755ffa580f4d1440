"""Pulls that found nothing and wait: for which queue, until when. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dledger.state.tables import QueueKey

PullT = TypeVar("PullT")
KeyT = TypeVar("KeyT")


@dataclass(slots=True, eq=False)
class Held(Generic[PullT]):
    """One waiting pull."""

    key: QueueKey
    owner: object
    deadline: float
    pull: PullT
    released: bool = field(default=False)


class HeldPulls(Generic[PullT]):
    """Waiting pulls by queue, by connection and by deadline. Each leaves exactly once."""

    def __init__(self, max_held: int) -> None:
        self._max_held = max_held
        # Dicts without values: in order of arrival, so that the oldest pull is answered first.
        self._by_queue: dict[QueueKey, dict[Held[PullT], None]] = {}
        self._by_owner: dict[object, dict[Held[PullT], None]] = {}
        self._deadlines: list[tuple[float, int, Held[PullT]]] = []
        self._serial = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def next_deadline(self) -> float | None:
        """When the first of them times out, or None when no pull waits."""
        while self._deadlines and self._deadlines[0][2].released:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def queues(self) -> list[QueueKey]:
        """Queues that pulls wait for."""
        return list(self._by_queue)

    def hold(self, key: QueueKey, owner: object, deadline: float, pull: PullT) -> bool:
        """Keep *pull* waiting; False when too many wait already."""
        if self._count >= self._max_held:
            return False
        held = Held(key, owner, deadline, pull)
        self._by_queue.setdefault(key, {})[held] = None
        self._by_owner.setdefault(owner, {})[held] = None
        self._serial += 1
        heapq.heappush(self._deadlines, (deadline, self._serial, held))
        self._count += 1
        return True

    def waits_for(self, key: QueueKey) -> bool:
        """Return whether a pull waits for that queue."""
        return key in self._by_queue

    def waiting(self, key: QueueKey) -> list[Held[PullT]]:
        """Return the pulls that wait for that queue; they go on waiting."""
        return list(self._by_queue.get(key, ()))

    def expired(self, now: float) -> list[Held[PullT]]:
        """Release and return all whose time is over."""
        result = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            held = heapq.heappop(self._deadlines)[2]
            self._forget(held)
            result.append(held)
        return result

    def release(self, held: Held[PullT]) -> None:
        """Let one go, to be answered now."""
        self._forget(held)

    def drop_owner(self, owner: object) -> int:
        """Forget all of a closed connection; return how many."""
        dropped = list(self._by_owner.get(owner, ()))
        for held in dropped:
            self._forget(held)
        return len(dropped)

    def _forget(self, held: Held[PullT]) -> None:
        if held.released:
            return
        held.released = True
        self._count -= 1
        _discard(self._by_queue, held.key, held)
        _discard(self._by_owner, held.owner, held)
        # The heap keeps released ones until they reach its top; their number is bounded by the
        # pulls answered within the longest suspension.
        if len(self._deadlines) > 2 * self._count + 64:
            self._deadlines = [item for item in self._deadlines if not item[2].released]
            heapq.heapify(self._deadlines)


def _discard(table: dict[KeyT, dict[Held[PullT], None]], key: KeyT, held: Held[PullT]) -> None:
    members = table[key]
    members.pop(held, None)
    if not members:
        del table[key]
