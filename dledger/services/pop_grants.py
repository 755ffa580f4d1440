"""POP: requests wait here, are decided together, and are answered when their entry is applied.

One entry of this service is in flight at a time, so every decision is made on applied state alone;
what arrives meanwhile waits and shares the next entry. A request that finds nothing may be held:
it is tried again when a message arrives, when one is acknowledged, when the time of one is over,
and answered at the latest when its own time is over.

Spec: docs/internals/decisions/0016-pop.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import structlog

from dledger.broker_errors import (
    ChangeRefusedError,
    ReplicationError,
)
from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup, Proposed, QueueTouched
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.seams import Clock
from dledger.services.entry_under_way import EntryUnderWay, OneEntryAtATime
from dledger.services.pending_configs import TopicView, noting
from dledger.services.pop_decision import PopDecision, PopReader, Receive, SpentKey
from dledger.services.pop_lines import DueTimes, HandedOut, LineKey, PopAsk, PopLines, RecentPairs
from dledger.state.pop import PopKey
from dledger.state.state_record import TopicsChange, batch_of, state_record
from dledger.waiting import Wakeup

MAX_HELD: Final = 100_000
"""Requests that wait for messages: one for each consumer; more are answered 209 at once."""

PASSED_OVER_MS: Final = 200
"""After so long a queue is looked at again that could not be received from, because a pull or a
commit of the group was at work there, because too many messages were out, or because what was
decided could not be stored."""

SET_ASIDE_S: Final = 10.0
"""After so long a copy for a dead letter topic is tried again that could not be made."""

logger = structlog.get_logger(__name__)


class PopAtWorkError(ReplicationError):
    """A pull, or an offset, of a group that has messages of this queue out by POP."""

    outcome = "not_stored"
    retriable = True
    condition = Condition.POP_AT_WORK


class PopGrants(OneEntryAtATime[PopAsk, PopDecision]):
    """Decides requests of POP consumers while this node leads.

    *drop_offset*: forgets the committed offset that is not proposed yet: the grant has it.
    """

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        clock: Clock,
        reader: PopReader,
        drop_offset: Callable[[PopKey], None],
    ) -> None:
        super().__init__(group)
        self._topics = topics
        self._clock = clock
        self._reader = reader
        self._drop_offset = drop_offset
        self._lines = PopLines()
        self._woken: dict[LineKey, None] = {}
        self._due = DueTimes()
        self._recent = RecentPairs()
        self._set_aside: set[SpentKey] = set()
        self._set_aside_until = 0.0
        self._moved = Wakeup()

    @property
    def held_count(self) -> int:
        """How many requests wait for messages."""
        return self._lines.count

    def polling_count(self, group: str, topic: str, queue_id: int) -> int:
        """Return how many requests of a group wait for messages of a queue."""
        return len(self._lines.waiting((group, topic, queue_id, False)))

    def receives(self, group: str, topic: str) -> bool:
        """Return whether a group receives messages of a topic by POP, now or a short time ago."""
        pair = (group, topic)
        return bool(self._lines.of_pair(pair)) or self._recent.has(pair, self._clock.monotonic())

    def offsets_set(self, group: str, topic: str) -> None:
        """Try held requests again after offsets of a group in a topic were set."""
        self._look_again([(group, topic)], self._group.store_time_ms)

    def ask(self, ask: PopAsk) -> None:
        """Take a request.

        Raises:
            NotLeaderError, PendingFullError: Nothing was changed; `PopAsk.on_done` is not called.
        """
        now = self._clock.monotonic()
        ask.deadline = now + ask.hold_s
        self._take(ask)
        if ask.receive is not None:
            self._recent.note((ask.receive.group, ask.receive.topic), now)

    def check_classic(self, key: PopKey) -> None:
        """Let a pull, or a commit of an offset, go on.

        Raises PopAtWorkError: messages of the queue are out for the group; nothing was stored.
        """
        entry, row = self._entry, self._group.state.pops.get(key)
        is_out = row is not None and not row.is_idle(self._group.store_time_ms)
        if is_out or (entry is not None and key in entry.decision.planned):
            group, topic, queue_id = key
            raise PopAtWorkError(
                f"messages of queue {queue_id} of {topic} are out for the group {group} by POP: "
                "it pulls, and commits offsets, when they are acknowledged or given up"
            )

    def on_applied(self, touched: Sequence[QueueTouched]) -> None:
        """Try held requests again; to be put into the group's `on_applied`."""
        if not self._lines.count:
            return
        for topic, queue_id, _ in touched:
            for line in self._lines.of_topic(topic):
                if line[2] in (-1, queue_id):
                    self._woken[line] = None
        if self._woken:
            self._work()

    def closed(self, owner: object) -> None:
        """Forget the messages that a closed connection waits for; its receipts count."""
        self._waiting = deque(
            ask for ask in self._waiting if ask.receive is None or ask.owner is not owner
        )
        self._lines.release_owner(owner)

    async def run(self) -> None:
        """Answer held requests whose time is over, and try others when a message's time is.

        Cancellation: Held requests are left to the closing of their connections.
        """
        while True:
            await self._moved.wait_or(self._clock, self._next_wait_s())
            self._leads()
            now = self._clock.monotonic()
            now_ms = self._group.store_time_ms
            fired = self._due.take(now_ms)
            for pair in fired:
                self._wake(pair)
            expired = self._lines.take_expired(now)
            self._group.turns.call_each(lambda ask: ask.on_done(ask, None), expired)
            self._work()
            for pair in fired:
                self._note_due(pair)
            self._group.kick()

    def _next_wait_s(self) -> float:
        if self._entry is None and (self._waiting or self._woken):
            return 0.0  # the decision before was full
        waits = [60.0]
        deadline = self._lines.next_deadline
        if deadline is not None:
            waits.append(deadline - self._clock.monotonic())
        due_ms = self._due.next_ms
        if due_ms is not None:
            waits.append((due_ms - self._group.store_time_ms) / 1000)
        return max(0.0, min(waits))

    def _end(self) -> None:
        self._waiting.extend(self._lines.all())
        self._lines = PopLines()
        self._woken.clear()
        self._due.clear()
        self._set_aside.clear()
        super()._end()

    # ------------------------------------------------------------------------------ work

    def _work(self) -> None:
        while (self._waiting or self._woken) and self._entry is None and self._leads():
            now_ms = self._group.store_time_ms
            decision = PopDecision(
                self._group.state.pops,
                self._reader,
                now_ms,
                self._group.state.pops.total,
                self._spent_without_copy(),
            )
            taken, refused = list[PopAsk](), list[PopAsk]()
            while self._waiting and not decision.is_full:
                decision.requests += 1
                self._decide(self._waiting.popleft(), decision, taken, refused)
            while self._woken and not decision.is_full:
                decision.requests += 1
                line = next(iter(self._woken))
                if not self._try_line(line, decision, taken):
                    self._woken.pop(line, None)
            self._look_again(decision.passed_over, now_ms)
            self._propose(taken, decision)
            # Not before: a read barrier applies what is committed, which wakes held requests, and
            # they would be decided beside this decision, on a state that it has not seen.
            for ask in refused:
                self._confirm(ask)
            if decision.is_full and self._entry is None:
                # Nothing was to be stored, or could be: `run` goes on when others had their turn.
                self._moved.set()
                return

    def _look_again(self, pairs: Iterable[tuple[str, str]], now_ms: int) -> None:
        """Let what waits for messages of a group in a topic be tried again a little later."""
        for pair in pairs:
            if self._lines.of_pair(pair) and self._due.note(pair, now_ms + PASSED_OVER_MS):
                self._moved.set()

    def _spent_without_copy(self) -> set[SpentKey]:
        now = self._clock.monotonic()
        if now >= self._set_aside_until:
            self._set_aside.clear()
            self._set_aside_until = now + SET_ASIDE_S
        return self._set_aside

    def _decide(
        self, ask: PopAsk, decision: PopDecision, taken: list[PopAsk], refused: list[PopAsk]
    ) -> None:
        if ask.modes:
            self._set_modes(ask, decision, taken)
        elif ask.receive is None:
            if ask.invisible_ms is None:
                ask.accepted = decision.acknowledge(ask.receipts)
            else:
                ask.accepted = [
                    decision.change_time(each, ask.invisible_ms, ask.is_unseen)
                    for each in ask.receipts
                ]
            if any(ask.accepted):
                taken.append(ask)
            elif ask.is_current:
                ask.on_done(ask, None)
            else:
                refused.append(ask)
        elif not self._try(ask, decision, taken):
            self._hold(ask)

    def _set_modes(self, ask: PopAsk, decision: PopDecision, taken: list[PopAsk]) -> None:
        """Plan modes, unless a topic is being removed since the request came."""
        gone = [mode.topic for mode in ask.modes if self._topics.config(mode.topic) is None]
        if gone:
            ask.on_done(ask, ChangeRefusedError(f"{gone[0]} was deleted; nothing was changed"))
            return
        decision.modes.extend(ask.modes)
        taken.append(ask)

    def _confirm(self, ask: PopAsk) -> None:
        """Decide again behind the read barrier: a deposed leader knows no newer grants."""
        is_later = False

        def passed(error: MQError | None) -> None:
            if error is not None:
                ask.on_done(ask, error)
                return
            ask.is_current = True
            self._waiting.append(ask)
            if is_later:
                self._work()

        try:
            self._group.read_barrier(passed)
        except MQError as error:
            ask.on_done(ask, error)
        is_later = True

    def _try(self, ask: PopAsk, decision: PopDecision, taken: list[PopAsk]) -> bool:
        assert ask.receive is not None
        if ask.queue_id < 0:
            self._add_new_queues(ask.receive)
        try:
            if ask.is_notice:
                ask.has_messages = decision.has_messages(ask.receive)
            else:
                ask.grants = decision.receive(ask.receive)
        except MQError as error:
            ask.on_done(ask, error)
            return True
        if ask.has_messages:
            ask.on_done(ask, None)
            return True
        if ask.grants:
            taken.append(ask)
        return bool(ask.grants)

    def _add_new_queues(self, receive: Receive) -> None:
        """Look at queues, too, that the topic has been given since the request came."""
        config, count = self._topics.config(receive.topic), len(receive.queue_ids)
        if config is not None and config.read_queue_nums > count:
            receive.queue_ids += tuple(range(count, config.read_queue_nums))

    def _hold(self, ask: PopAsk) -> None:
        if ask.deadline <= self._clock.monotonic():
            ask.on_done(ask, None)
        elif self._lines.count >= MAX_HELD:
            ask.is_full = True
            ask.on_done(ask, None)
        else:
            self._lines.hold(ask)
            self._note_due((ask.line[0], ask.line[1]))
            self._moved.set()

    def _note_due(self, pair: tuple[str, str]) -> None:
        """Note when the next message of a group in a topic may be handed out again."""
        group, topic = pair
        config = self._topics.config(topic)
        ends = [
            end
            for queue_id in range(config.queue_nums if config and self._lines.of_pair(pair) else 0)
            if (row := self._group.state.pops.get((group, topic, queue_id))) is not None
            and (end := row.next_expiry_ms()) is not None
        ]
        if not ends:
            return
        now_ms = self._group.store_time_ms
        # One that is over already was passed over for a reason: not at once again.
        at_ms = max(min(ends), now_ms + 1_000 * (min(ends) <= now_ms))
        if self._due.note(pair, at_ms):
            self._moved.set()

    def _try_line(self, line: LineKey, decision: PopDecision, taken: list[PopAsk]) -> bool:
        ask = self._lines.first(line)
        if ask is None or not self._try(ask, decision, taken):
            return False
        self._lines.release(ask)
        return True

    def _wake(self, pair: tuple[str, str]) -> None:
        for line in self._lines.of_pair(pair):
            self._woken[line] = None

    def _propose(self, asks: list[PopAsk], decision: PopDecision) -> None:
        change = decision.change
        if change is None:
            return
        entry = EntryUnderWay(asks, decision)
        creates = {letter.run.topic: letter.create for letter in decision.letters if letter.create}
        topics = [TopicsChange(put=(create,)) for create in creates.values()]
        batch = batch_of(
            [
                *map(state_record, topics),
                *((letter.record, letter.run) for letter in decision.letters),
                state_record(change),
            ]
        )
        noted = ((self._topics.pending, topic) for topic in topics)
        try:
            with noting(*noted) as settled:
                settled.append(partial(self._settled, entry))
                self._group.propose(batch, partial(self._answered, entry), settled=settled)
        except MQError as error:
            self._fail(asks, error)
            self._not_stored(entry)
            return
        self._entry = entry
        for grant in decision.grants:
            if grant.key not in self._group.state.pops:
                self._drop_offset(grant.key)

    def _not_stored(self, entry: EntryUnderWay[PopAsk, PopDecision]) -> None:
        # Requests held behind what it passed over go on.
        pairs = {(group, topic) for group, topic, _ in entry.decision.planned}
        self._look_again(pairs, self._group.store_time_ms)

    def _arrived(self, entry: EntryUnderWay[PopAsk, PopDecision]) -> None:
        for pair in {(group, topic) for group, topic, _ in entry.decision.planned}:
            self._wake(pair)
            self._note_due(pair)

    def _answer(self, asked: list[PopAsk], proposed: Proposed) -> None:
        self._group.turns.call_each(partial(self._finish, proposed), asked)

    def _finish(self, proposed: Proposed, ask: PopAsk) -> None:
        rows = self._group.state.pops
        ask.index, ask.store_time_ms = proposed.index, proposed.store_time_ms
        for grant in ask.grants:
            row = rows.get(grant.key)
            for offset in (*(at for at, _ in grant.again), *grant.fresh):
                out = None if row is None else row.out.get(offset)
                if out is not None and out.token == proposed.index:
                    ask.messages.append(HandedOut(grant.key, offset, out))
        ask.on_done(ask, None)
