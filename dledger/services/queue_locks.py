"""Locks of queues for orderly consumption: grants in the log, leases in the leader's memory.

Decisions are pure: time comes in as seconds of the leader's monotonic clock. One entry of this
service is in flight at a time; what arrives meanwhile shares the next one. A renewal takes no
entry, but the read barrier: a leader that was deposed long ago can renew nothing.

Spec: docs/internals/protocol/remoting.md, section 8.5; docs/internals/protocol/semantics.md,
section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from dledger.broker_errors import NotLeaderError, PendingFullError, UnknownOutcomeError
from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup, Proposed, QueueTouched
from dledger.remoting.seams import Clock
from dledger.services.entry_under_way import EntryUnderWay, Fate
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


# ------------------------------------------------------------------------------- granted and leased


LEASE_S: Final = 60.0
"""RocketMQ's: its clients renew every 20 s and stop by themselves after 30 s."""

MAX_WAITING: Final = 10_000
"""Requests that wait for the entry before theirs; more are refused as busy."""

OnLocked = Callable[[dict[LockKey, int] | MQError], None]
"""Called with the queues asked for that are held, and their tokens; or with why it is not known."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    ask: LockAsk
    on_done: OnLocked


class _Work(NamedTuple):
    """What the entry under way answers, what was decided with it, and the queues it changes."""

    waiting: list[_Waiting]
    decision: Decision
    changing: frozenset[LockKey]


class QueueLocks:
    """Grants and renews locks while this node leads; distinguishes old tokens from good ones
    always.
    """

    def __init__(
        self, group: BrokerGroup, topics: TopicView, clock: Clock, *, lease_s: float = LEASE_S
    ) -> None:
        self._group = group
        self._topics = topics
        self._clock = clock
        self._leases = Leases(lease_s)
        self._waiting: deque[_Waiting] = deque()
        self._entry: EntryUnderWay[_Work] | None = None
        self._term = 0
        self._next_sweep_s = 0.0
        self._keys: dict[str, list[LockKey]] = {}
        self._keys_index = 0
        """The change of locks that `_keys` has them of."""

    def lock(self, client_id: str, keys: Sequence[LockKey], on_done: OnLocked) -> None:
        """Lock *keys* for a client, or renew what it holds; the others stay with their holders.

        *on_done* is called exactly once, perhaps from inside this call, when every grant in it is
        applied on a majority.

        Raises NotLeaderError, PendingFullError: nothing was granted; *on_done* is not called.
        """
        self._take(LockAsk(client_id, tuple(keys), self._clock.monotonic()), on_done)

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
        self._take(ask, on_done)

    def refuses(self, key: LockKey, token: int) -> bool:
        """Tell whether *token* is no longer, or not yet, what *key* is held with.

        The leader is exact: also while the next grant is on its way. Any other node refuses what it
        knows to be old.
        """
        lock = self._group.state.queue_locks.get(key)
        if self._group.leadership is None:
            return lock is not None and lock.token > token
        if self._entry is not None and key in self._entry.work.changing:
            return True
        return lock is None or lock.token != token

    def is_held(self, key: LockKey) -> bool:
        """Return whether a client has *key*, or is being given it; not when its lease is over."""
        self._leads()
        if self._entry is not None and key in self._entry.work.changing:
            return True
        now_s = self._clock.monotonic()
        return key in self._group.state.queue_locks and not self._leases.is_over(key, now_s)

    def holds_any(self, group: str) -> bool:
        """Return whether a client of *group* has a queue, or is being given one."""
        self._leads()
        changing = frozenset() if self._entry is None else self._entry.work.changing
        return any(self.is_held(key) for key in self._keys_of(group)) or any(
            self.is_held(key) for key in changing if key[0] == group
        )

    def _keys_of(self, group: str) -> list[LockKey]:
        """Return the queues of a group that have a lock; those that went with a topic are there."""
        state = self._group.state
        if self._keys_index != state.queue_locks_index:
            self._keys = {}
            for key in state.queue_locks:
                self._keys.setdefault(key[0], []).append(key)
            self._keys_index = state.queue_locks_index
        return self._keys.get(group, [])

    def on_applied(self, _touched: Sequence[QueueTouched]) -> None:
        """See whether what is in flight has arrived; to be put into the group's `on_applied`."""
        entry, state = self._entry, self._group.state
        if entry is not None and entry.has_arrived(state.applied_index, state.queue_locks_index):
            self._arrived(entry)

    def role_changed(self) -> None:
        """Begin or end a term at once; to be put into the group's `on_role_change`."""
        self._leads()

    # ------------------------------------------------------------------------------ terms

    def _leads(self) -> bool:
        leadership = self._group.leadership
        term = 0 if leadership is None else leadership.term
        if term != self._term:
            self._term = term
            self._end()
            self._leases.begin(self._clock.monotonic())
        return leadership is not None

    def _end(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None and entry.waits_for_apply:
            _tell(entry.work.waiting, UnknownOutcomeError("leadership ended before it was applied"))
        waiting, self._waiting = list(self._waiting), deque()
        _tell(waiting, self._not_leader())

    def _not_leader(self) -> NotLeaderError:
        return NotLeaderError(self._group.leader_address, self._group.term)

    # ------------------------------------------------------------------------------ work

    def _take(self, ask: LockAsk, on_done: OnLocked) -> None:
        if not self._leads():
            raise self._not_leader()
        if self._entry is not None and self._entry.is_uncertain:
            raise PendingFullError("it is not known yet what became of an earlier change of locks")
        if len(self._waiting) >= MAX_WAITING:
            raise PendingFullError(f"{MAX_WAITING} requests for locks wait already")
        self._waiting.append(_Waiting(ask, on_done))
        self._work()

    def _work(self) -> None:
        while self._waiting and self._entry is None:
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

    def _may_lock(self, key: LockKey) -> bool:
        """Whether the queue and the group are there, and stay: what goes cannot change."""
        config = self._topics.config(key[1])
        return (
            config is not None
            and 0 <= key[2] < config.queue_nums
            and not self._topics.pending_groups.removes(key[0])
        )

    def _forgotten(self, now_s: float) -> list[LockKey]:
        if now_s < self._next_sweep_s:
            return []
        self._next_sweep_s = now_s + self._leases.lease_s
        locks = self._group.state.queue_locks
        self._leases.keep(locks)
        return self._leases.forgotten(locks, now_s)

    def _propose(self, waiting: list[_Waiting], decision: Decision) -> None:
        change = decision.change
        assert change is not None
        changing = frozenset((*decision.releases, *decision.grants))
        work = _Work(waiting, decision, changing)
        entry = EntryUnderWay(work, self._group.state.queue_locks_index)

        def done(proposed: Proposed) -> None:
            self._answered(entry, proposed)

        try:
            self._group.propose(state_batch(change), done)
        except MQError as error:
            _tell(waiting, error)
            return
        self._entry = entry

    def _answered(self, entry: EntryUnderWay[_Work], proposed: Proposed) -> None:
        is_mine = self._entry is entry and self._leads() and self._entry is entry
        asked = entry.work.waiting
        match entry.answered(proposed, self._group.state.applied_index, is_current=is_mine):
            case Fate.APPLIED if is_mine:
                self._arrived(entry)
            case Fate.APPLIED:
                self._tell_held(asked)
            case Fate.STORED:
                pass  # `on_applied` goes on
            case Fate.OUT_OF_SIGHT:
                _tell(asked, UnknownOutcomeError("leadership ended before it was applied"))
            case Fate.UNKNOWN:
                _tell(asked, UnknownOutcomeError("the change of locks may still be stored"))
                if is_mine:
                    waiting, self._waiting = list(self._waiting), deque()
                    _tell(waiting, PendingFullError("an earlier change of locks got no majority"))
            case Fate.NOT_STORED:
                _tell(asked, proposed.error or self._not_leader())
                if is_mine:
                    self._entry = None
                    self._work()

    def _arrived(self, entry: EntryUnderWay[_Work]) -> None:
        """What was under way is applied."""
        self._entry = None
        waiting, decision, _ = entry.work
        self._leases.end(decision.releases)
        self._leases.renew(decision.granted)
        # An entry of unknown outcome was answered when that was known.
        if entry.waits_for_apply:
            self._tell_held(waiting)
        self._work()

    def _confirm(self, waiting: list[_Waiting]) -> None:
        """Answer what changes nothing; a renewal only as long as this node certainly leads."""
        if not any(self._held(item.ask) for item in waiting):
            self._tell_held(waiting)
            return

        def done(error: NotLeaderError | None) -> None:
            if error is None:
                self._tell_held(waiting)
            else:
                _tell(waiting, error)

        try:
            self._group.read_barrier(done)
        except NotLeaderError as error:
            _tell(waiting, error)

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

    def _tell_held(self, waiting: list[_Waiting]) -> None:
        for item in waiting:
            item.on_done(self._held(item.ask))


def _tell(waiting: list[_Waiting], error: MQError) -> None:
    for item in waiting:
        item.on_done(error)
