"""What becomes of requests to lock and unlock queues: leases, and one change for many requests.

Pure: time comes in as a number of seconds of the leader's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dledger.state.queue_lock import (
    NO_TOKEN,
    LockGrant,
    LockKey,
    LockRelease,
    QueueLock,
    QueueLocksChange,
)

MAX_QUEUES_PER_CHANGE: Final = 4_096
"""Queues that one entry locks or unlocks, but for a single larger request: about 0.5 MB."""

MAX_LOCKS: Final = 500_000
"""Grants that may stand at a time: each is part of every snapshot, with about 100 bytes."""

FORGOTTEN_LEASES: Final = 10
"""A grant that was not renewed for this number of leases is given back by the leader."""

MAX_FORGOTTEN: Final = 1_000
"""Grants given back like that in one entry."""


class Leases:
    """How long the leader lets each grant last. In its memory only.

    What it has not seen renewed counts from the moment its term began: an earlier leader may have
    renewed it up to then.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._begin_s = 0.0
        self._renewed: dict[LockKey, float] = {}

    def begin(self, now_s: float) -> None:
        """Start again: a term begins."""
        self._begin_s = now_s
        self._renewed.clear()

    def renew(self, renewed: Mapping[LockKey, float]) -> None:
        """Let leases count from these moments on; never from an earlier one than before."""
        for key, since_s in renewed.items():
            self._renewed[key] = max(since_s, self._renewed.get(key, since_s))

    def end(self, keys: Iterable[LockKey]) -> None:
        """Forget leases whose grants were removed."""
        for key in keys:
            self._renewed.pop(key, None)

    def keep(self, locks: Container[LockKey]) -> None:
        """Forget leases of all but these grants: others went with their topics."""
        self.end([key for key in self._renewed if key not in locks])

    def ended_since_s(self, key: LockKey, now_s: float) -> float:
        """Return for how long the lease of *key* has been over; negative while it runs."""
        since_s = max(self._renewed.get(key, self._begin_s), self._begin_s)
        return now_s - since_s - self.lease_s

    def is_over(self, key: LockKey, now_s: float) -> bool:
        """Return whether another client may have *key*."""
        return self.ended_since_s(key, now_s) >= 0

    def forgotten(self, locks: Iterable[LockKey], now_s: float) -> list[LockKey]:
        """Return grants that were not renewed for very long."""
        late_s = (FORGOTTEN_LEASES - 1) * self.lease_s
        found = (key for key in locks if self.ended_since_s(key, now_s) >= late_s)
        return [key for key, _ in zip(found, range(MAX_FORGOTTEN), strict=False)]


@dataclass(frozen=True, slots=True)
class LockAsk:
    """A request to lock or unlock.

    ``tokens`` belongs to an unlock: what is given back must have been granted with it.
    """

    client_id: str
    keys: tuple[LockKey, ...]
    arrived_s: float
    is_unlock: bool = False
    tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class Decision:
    """What to do with the first *taken* requests.

    ``renewed`` holds from now on, ``granted`` once the change is applied.
    """

    taken: int = 0
    renewed: dict[LockKey, float] = field(default_factory=dict)
    granted: dict[LockKey, float] = field(default_factory=dict)
    releases: dict[LockKey, LockRelease] = field(default_factory=dict)
    grants: dict[LockKey, LockGrant] = field(default_factory=dict)

    @property
    def change(self) -> QueueLocksChange | None:
        """The entry this takes; None when it takes none."""
        if not self.releases and not self.grants:
            return None
        return QueueLocksChange(tuple(self.releases.values()), tuple(self.grants.values()))


def decide(
    asks: Iterable[LockAsk],
    locks: Mapping[LockKey, QueueLock],
    leases: Leases,
    now_s: float,
    *,
    may_lock: Callable[[LockKey], bool],
    forgotten: Iterable[LockKey] = (),
) -> Decision:
    """Return what to do with *asks*, in their order, given that nothing else is in flight.

    One entry grants a queue once at most, or two holders would have one token: a request that asks
    for more ends the decision before it and waits for the next.

    Args:
        locks: Grants that stand, applied.
        may_lock: Whether that queue exists and is not just being removed.
        forgotten: Grants to give back beside, unless they are asked for.
    """
    decision = Decision()
    for ask in asks:
        size = len(decision.releases) + len(decision.grants)
        if size and size + len(ask.keys) > MAX_QUEUES_PER_CHANGE:
            break
        if ask.is_unlock:
            if any(_is_granted_to(decision, key, ask.client_id) for key in ask.keys):
                break
            _unlock(decision, ask, locks, may_lock)
        else:
            _lock(decision, ask, locks, leases, now_s, may_lock)
        decision.taken += 1
    for key in forgotten:
        untouched = not (key in decision.renewed or key in decision.grants)
        if untouched and key not in decision.releases and may_lock(key):
            decision.releases[key] = LockRelease(key, locks[key].token)
    return decision


def _is_granted_to(decision: Decision, key: LockKey, client_id: str) -> bool:
    grant = decision.grants.get(key)
    return grant is not None and grant.client_id == client_id


def _unlock(
    decision: Decision,
    ask: LockAsk,
    locks: Mapping[LockKey, QueueLock],
    may_lock: Callable[[LockKey], bool],
) -> None:
    tokens = ask.tokens or (NO_TOKEN,) * len(ask.keys)
    for key, token in zip(ask.keys, tokens, strict=True):
        lock = locks.get(key)
        if lock is None or lock.client_id != ask.client_id or token not in (NO_TOKEN, lock.token):
            continue
        # Taken over in this entry already, or removed with its topic.
        if key not in decision.grants and may_lock(key):
            decision.releases[key] = LockRelease(key, lock.token)
            decision.renewed.pop(key, None)


def _lock(
    decision: Decision,
    ask: LockAsk,
    locks: Mapping[LockKey, QueueLock],
    leases: Leases,
    now_s: float,
    may_lock: Callable[[LockKey], bool],
) -> None:
    for key in ask.keys:
        if key in decision.grants or not may_lock(key):
            continue
        lock = None if key in decision.releases else locks.get(key)
        if lock is None:
            if len(locks) + len(decision.grants) < MAX_LOCKS:
                decision.grants[key] = LockGrant(key, ask.client_id)
                decision.granted[key] = ask.arrived_s
        elif lock.client_id == ask.client_id:
            decision.renewed[key] = ask.arrived_s
        elif key not in decision.renewed and leases.is_over(key, now_s):
            decision.grants[key] = LockGrant(key, ask.client_id, lock.token)
            decision.granted[key] = ask.arrived_s
