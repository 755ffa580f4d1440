"""Locks of queues for orderly consumption: grants in the log, leases in the leader's memory.

Decisions are pure: time comes in as seconds of the leader's monotonic clock. One entry of this
service is in flight at a time; what arrives meanwhile shares the next one. A renewal takes no
entry, but the read barrier: a leader that was deposed long ago can renew nothing.

Spec: docs/internals/protocol/remoting.md, section 8.5; docs/internals/protocol/semantics.md,
section 5.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import structlog

from dledger.broker_errors import NotLeaderError
from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup, Proposed
from dledger.remoting.seams import Clock
from dledger.services.entry_under_way import EntryUnderWay, OneEntryAtATime
from dledger.services.pending_configs import TopicView
from dledger.state.queue_lock import (
    NO_TOKEN,
    LockGrant,
    LockKey,
    LockRelease,
    QueueLock,
    QueueLocksChange,
)
from dledger.state.state_record import state_batch

# ---------------------------------------------------------------------------------- decided


MAX_QUEUES_PER_CHANGE: Final = 4_096
"""Queues asked for in one decision, but for a single larger request: 10 ms, and 0.5 MB of entry."""

MAX_LOCKS: Final = 500_000
"""Grants that may stand at a time: each is part of every snapshot, with about 100 bytes."""

FORGOTTEN_LEASES: Final = 10
"""A grant that was not renewed for this number of leases is given back by the leader."""

MAX_FORGOTTEN: Final = 128
"""Grants looked at for it in one decision, a microsecond each."""


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

    def with_those_of(self, locks: Iterable[LockKey]) -> Iterator[LockKey]:
        """Return what `forgotten` is to look at: *locks*, and grants that leases are of."""
        return chain([*locks], [*self._renewed])

    def ended_since_s(self, key: LockKey, now_s: float) -> float:
        """Return for how long the lease of *key* has been over; negative while it runs."""
        since_s = max(self._renewed.get(key, self._begin_s), self._begin_s)
        return now_s - since_s - self.lease_s

    def is_over(self, key: LockKey, now_s: float) -> bool:
        """Return whether another client may have *key*."""
        return self.ended_since_s(key, now_s) >= 0

    def forgotten(
        self, keys: Collection[LockKey], locks: Container[LockKey], now_s: float
    ) -> list[LockKey]:
        """Return those of *keys* that are among *locks* and were not renewed for very long.

        Leases of the others end: their grants went with their topics.
        """
        late_s = (FORGOTTEN_LEASES - 1) * self.lease_s
        self.end(key for key in keys if key not in locks)
        return [key for key in keys if key in locks and self.ended_since_s(key, now_s) >= late_s]


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
    def changing(self) -> Collection[LockKey]:
        """The queues that change hands."""
        return ChainMap[LockKey, Any](self.releases, self.grants)

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
        may_lock: Whether that queue exists and is not just being removed.
        forgotten: Grants to give back beside, unless they are asked for.
    """
    decision, size = Decision(), 0
    for ask in asks:
        size += len(ask.keys)
        if decision.taken and size > MAX_QUEUES_PER_CHANGE:
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


# ------------------------------------------------------------------------------- granted and leased


LEASE_S: Final = 60.0
"""RocketMQ's: its clients renew every 20 s and stop by themselves after 30 s."""

OnLocked = Callable[[dict[LockKey, int] | MQError], None]
"""Called with the queues asked for that are held, and their tokens; or with why it is not known."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    ask: LockAsk
    on_done: OnLocked

    def fail(self, error: MQError) -> None:
        self.on_done(error)


class QueueLocks(OneEntryAtATime[_Waiting, Decision]):
    """Grants and renews locks while this node leads; distinguishes old tokens from good ones
    always.
    """

    def __init__(
        self, group: BrokerGroup, topics: TopicView, clock: Clock, *, lease_s: float = LEASE_S
    ) -> None:
        super().__init__(group)
        self._topics = topics
        self._clock = clock
        self._leases = Leases(lease_s)
        self._next_sweep_s = 0.0
        self._unswept: Iterator[LockKey] = iter(())

    def lock(self, client_id: str, keys: Sequence[LockKey], on_done: OnLocked) -> None:
        """Lock *keys* for a client, or renew what it holds; the others stay with their holders.

        *on_done* is called exactly once, perhaps from inside this call, when every grant in it is
        applied on a majority.

        Raises NotLeaderError, PendingFullError: nothing was granted; *on_done* is not called.
        """
        self._take(_Waiting(LockAsk(client_id, tuple(keys), self._clock.monotonic()), on_done))

    def unlock(
        self, client_id: str, keys: Sequence[LockKey], tokens: Sequence[int], on_done: OnLocked
    ) -> None:
        """Give back what *client_id* holds of *keys*; what it does not hold is passed over.

        Args:
            tokens: Those of the grants that are meant, one for each key; empty: whichever.
        Raises:
            NotLeaderError, PendingFullError: Nothing was given back; *on_done* is not called.
        """
        ask = LockAsk(
            client_id, tuple(keys), self._clock.monotonic(), is_unlock=True, tokens=tuple(tokens)
        )
        self._take(_Waiting(ask, on_done))

    def refuses(self, key: LockKey, token: int) -> bool:
        """Tell whether *token* is no longer, or not yet, what *key* is held with.

        The leader is exact: also while the next grant is on its way. Any other node refuses what it
        knows to be old.
        """
        lock = self._group.state.queue_locks.get(key)
        if self._group.leadership is None:
            return lock is not None and lock.token > token
        if key in self._changing:
            return True
        return lock is None or lock.token != token

    def is_held(self, key: LockKey) -> bool:
        """Return whether a client has *key*, or is being given it; not when its lease is over."""
        self._leads()
        if key in self._changing:
            return True
        now_s = self._clock.monotonic()
        return key in self._group.state.queue_locks and not self._leases.is_over(key, now_s)

    def holds_any(self, group: str) -> bool:
        """Return whether a client of *group* has a queue, or is being given one."""
        self._leads()
        locks = self._group.state.queue_locks
        return any(self.is_held(key) for key in locks.keys_with(0, group)) or any(
            self.is_held(key) for key in self._changing if key[0] == group
        )

    @property
    def _changing(self) -> Collection[LockKey]:
        """The queues that the entry under way changes."""
        return () if self._entry is None else self._entry.decision.changing

    def _end(self) -> None:
        super()._end()
        self._leases.begin(self._clock.monotonic())

    # ------------------------------------------------------------------------------ work

    def _work(self) -> None:
        if self._waiting and self._entry is None:
            now_s = self._clock.monotonic()
            locks = self._group.state.queue_locks
            decision = decide(
                (item.ask for item in self._waiting),
                locks,
                self._leases,
                now_s,
                may_lock=self._may_lock,
                forgotten=self._forgotten(now_s),
            )
            taken = [self._waiting.popleft() for _ in range(decision.taken)]
            self._leases.renew(decision.renewed)
            if decision.change is None:
                self._confirm(taken)
            else:
                self._propose(taken, decision)
            if self._waiting and self._entry is None:
                self._group.turns.next_turn(self._work)

    def _may_lock(self, key: LockKey) -> bool:
        """Whether the queue and the group are there, and stay: what goes cannot change."""
        config = self._topics.config(key[1])
        return (
            config is not None
            and 0 <= key[2] < config.queue_nums
            and not self._topics.pending_groups.removes(key[0])
        )

    def _forgotten(self, now_s: float) -> list[LockKey]:
        locks = self._group.state.queue_locks
        keys = list(islice(self._unswept, MAX_FORGOTTEN))
        if not keys and now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + self._leases.lease_s
            self._unswept = self._leases.with_those_of(locks)
            keys = list(islice(self._unswept, MAX_FORGOTTEN))
        return self._leases.forgotten(keys, locks, now_s)

    def _propose(self, waiting: list[_Waiting], decision: Decision) -> None:
        change = decision.change
        assert change is not None
        entry = EntryUnderWay(waiting, decision)
        settled = [partial(self._settled, entry)]
        try:
            answered = partial(self._answered, entry)
            self._group.propose(state_batch(change), answered, settled=settled)
        except MQError as error:
            self._fail(waiting, error)
            return
        self._entry = entry

    def _arrived(self, entry: EntryUnderWay[_Waiting, Decision]) -> None:
        self._leases.end(entry.decision.releases)
        self._leases.renew(entry.decision.granted)

    def _confirm(self, waiting: list[_Waiting]) -> None:
        """Answer what changes nothing; a renewal only as long as this node certainly leads."""
        if not any(self._held(item.ask) for item in waiting):
            self._tell_held(waiting)
            return

        def done(error: NotLeaderError | None) -> None:
            if error is None:
                self._tell_held(waiting)
            else:
                self._fail(waiting, error)

        try:
            self._group.read_barrier(done)
        except NotLeaderError as error:
            self._fail(waiting, error)

    def _held(self, ask: LockAsk) -> dict[LockKey, int]:
        if ask.is_unlock:
            return {}
        locks = self._group.state.queue_locks
        found = {}
        for key in ask.keys:
            lock = locks.get(key)
            if lock is not None and lock.client_id == ask.client_id:
                found[key] = lock.token
        return found

    def _answer(self, asked: list[_Waiting], proposed: Proposed) -> None:
        del proposed
        self._tell_held(asked)

    def _tell_held(self, waiting: list[_Waiting]) -> None:
        self._group.turns.call_each(lambda item: item.on_done(self._held(item.ask)), waiting)
