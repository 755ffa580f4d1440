"""Check-back, on the leader: half messages without a decision are asked for, and at last given up.

How often one was asked for is in the log before it is asked, so that no fail-over makes it more;
the message itself is not stored again. A question that finds no live producer is none: it is not
counted, and the half message waits for the next round, until it is older than messages are kept.

Spec: docs/internals/protocol/semantics.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import structlog
import trio

from dledger.broker_errors import NotLeaderError, PendingFullError, ShuttingDownError
from dledger.commitlog.entry import Run
from dledger.commitlog.errors import LocalProtocolError
from dledger.group_api import BrokerGroup, Proposed, QueueTouched
from dledger.remoting.protocol.topic_names import HALF_TOPIC
from dledger.remoting.seams import Clock
from dledger.services.delayed_message import Delivery
from dledger.services.half_message import (
    HALF_RUN,
    HalfMessage,
    TransactionDecisions,
    half_message_at,
)
from dledger.services.leader_loop import RETRY_S, Fate, LeaderLoop
from dledger.services.pending_configs import TopicView
from dledger.services.retention import HOUR_MS
from dledger.services.stored_record import StoredRecords
from dledger.settings.tables import BrokerTable, StoreTable
from dledger.state.state_record import TransactionsChange, state_batch
from dledger.state.topics import PERM_READ, PERM_WRITE, TopicConfig
from dledger.state.transactions import OpenHalf, TransactionDecision
from dledger.waiting import ROWS_PER_TURN, Wakeup, call_in_turns

CHECKS_PER_ENTRY = 128
"""Half messages looked at in one turn, 10 ms or so: a leader sends heartbeats between two turns."""

NAME = "transactions"
"""In dead letters, logs and metrics."""

LONGEST_SLEEP_S = 60.0
"""The tables are looked at again after this long, whatever was planned."""

STALE_PLANS = 1024
"""Plans for half messages that were decided since, beyond as many again as are open."""

logger = structlog.get_logger(__name__)


def patience_ms(settings: BrokerTable) -> int:
    """Return how long check-back takes when no producer decides."""
    checks_ms = settings.transaction_check_max * settings.transaction_check_interval_ms
    return settings.transaction_timeout_ms + checks_ms


class _Plan(NamedTuple):
    """When to look at a half message next."""

    due_s: float
    half_offset: int
    immune_to_s: float | None = None
    """Monotonic time up to which its producers are not to be asked; None: not known yet."""


class Producers(Protocol):
    """Producers that can be asked."""

    def is_there(self, group: str) -> bool:
        """Tell whether a live producer of *group* is connected."""

    def ask(self, half: HalfMessage, checks: int) -> bool:
        """Ask one of them; tell whether the question is on its way."""


@dataclass(eq=False, repr=False)
class TransactionCheckService:
    """Asks for decisions.

    Args:
        store: How long messages are kept: an older half message is given up, asked for or not.
        floor_wanted: Position up to which retention would cut the log if no half message stood in
            the way. What stands before it is given up once producers had their time.
    """

    _group: BrokerGroup
    _topics: TopicView
    _decisions: TransactionDecisions
    _producers: Producers
    settings: BrokerTable
    store: StoreTable
    clock: Clock
    floor_wanted: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self.name = NAME
        self._plans: list[_Plan] = []
        self._planned_to = 0
        self._sleeps_until_s = 0.0
        self._wake = Wakeup()
        self._loop = LeaderLoop(self._group, self.clock, NAME, is_deleting=self._topics.is_deleting)

    async def run(self) -> None:
        """Ask until cancelled. Run it inside the leadership's nursery, once per leadership.

        Cancellation: What was counted and not asked yet is not asked with that count any more.
        """
        await self._loop.run(self._on_applied, self._check)

    # -- when ------------------------------------------------------------------------------

    async def _plan_all(self) -> None:
        state = self._group.state
        still_open = state.transactions.open
        self._planned_to = state.max_offset(HALF_TOPIC, HALF_RUN.queue_id)
        self._plans = []
        await call_in_turns(self._plan, list(still_open), ROWS_PER_TURN)

    def _plan(self, half_offset: int) -> None:
        half = self._group.state.transactions.open.get(half_offset)
        if half is not None:
            due_s = self._due_s(half)
            heappush(self._plans, _Plan(due_s, half_offset))
            if due_s < self._sleeps_until_s:
                self._wake.set()

    def _due_s(self, half: OpenHalf) -> float:
        """Return the monotonic time at which a half message is to be asked for."""
        if half.checks:
            since_ms, wait_ms = half.checked_ms, self.settings.transaction_check_interval_ms
        else:
            since_ms, wait_ms = half.store_time_ms, self.settings.transaction_timeout_ms
        left_ms = min(since_ms + wait_ms - self.clock.wall_ms(), wait_ms)
        return self.clock.monotonic() + max(left_ms, 0) / 1000

    def _on_applied(self, touched: Sequence[QueueTouched]) -> None:
        for topic, _, max_offset in touched:
            if topic != HALF_TOPIC:
                continue
            for half_offset in range(self._planned_to, max_offset):
                self._plan(half_offset)
            self._planned_to = max_offset
            if len(self._plans) > 2 * len(self._group.state.transactions.open) + STALE_PLANS:
                self._forget_decided()

    def _forget_decided(self) -> None:
        still_open = self._group.state.transactions.open
        self._plans = [plan for plan in self._plans if plan.half_offset in still_open]
        heapify(self._plans)

    def _take_due(self) -> list[_Plan]:
        now = self.clock.monotonic()
        due: list[_Plan] = []
        while self._plans and self._plans[0].due_s <= now and len(due) < CHECKS_PER_ENTRY:
            due.append(heappop(self._plans))
        return due

    def _again_in(self, seconds: float, half_offset: int, immune_to_s: float | None = None) -> None:
        heappush(self._plans, _Plan(self.clock.monotonic() + seconds, half_offset, immune_to_s))

    def _immune_to_s(self, plan: _Plan, message: HalfMessage, age_ms: int) -> float:
        """Return the monotonic time up to which producers are not to be asked."""
        until_s = self.clock.monotonic() + message.immunity_s - age_ms / 1000
        return until_s if plan.immune_to_s is None else min(until_s, plan.immune_to_s)

    # -- what ------------------------------------------------------------------------------

    async def _check(self, term: int) -> None:
        await self._plan_all()
        while True:
            due = self._take_due()
            if due:
                await self._look_at(due, term)
                continue
            now = self.clock.monotonic()
            self._sleeps_until_s = now + LONGEST_SLEEP_S
            if self._plans:
                self._sleeps_until_s = min(self._sleeps_until_s, self._plans[0].due_s)
            await self._wake.wait_or(self.clock, self._sleeps_until_s - now)

    async def _look_at(self, due: Sequence[_Plan], term: int) -> None:
        to_ask: list[tuple[int, HalfMessage, int]] = []
        records = StoredRecords(self._group)
        interval_s = self.settings.transaction_check_interval_ms / 1000
        for plan in due:
            half_offset, immune_to_s = plan.half_offset, plan.immune_to_s
            half = self._group.state.transactions.open.get(half_offset)
            if half is None:
                continue
            if records.is_tired or not self._decisions.is_open(half_offset):
                self._again_in(RETRY_S, half_offset, immune_to_s)
                continue
            message = self._read(records, half_offset, half)
            if message is None:
                self._again_in(RETRY_S, half_offset, immune_to_s)
                continue
            age_ms = max(0, self.clock.wall_ms() - half.store_time_ms)
            immune_to_s = self._immune_to_s(plan, message, age_ms)
            immune_s = immune_to_s - self.clock.monotonic()
            if self._is_over(half, age_ms):
                record, run = message.given_up()
                copy = Delivery(run.topic, run.queue_id, record, half.phy_offset)
                self._decide_given_up(half_offset, copy, "")
                self._again_in(RETRY_S, half_offset)  # in case it is not stored
            elif immune_s > 0 and not half.checks:
                # In between retention may come to want its place.
                self._again_in(min(immune_s, interval_s), half_offset, immune_to_s)
            elif not self._producers.is_there(message.group):
                self._again_in(interval_s, half_offset, immune_to_s)
            else:
                to_ask.append((half_offset, message, half.checks + 1))
        if to_ask:
            await self._count_and_ask(to_ask, term)
        else:
            self._group.kick()
            await trio.lowlevel.checkpoint()

    def _is_over(self, half: OpenHalf, age_ms: int) -> bool:
        settings = self.settings
        return (
            half.checks >= settings.transaction_check_max
            or age_ms >= self.store.file_reserved_time * HOUR_MS
            or (age_ms >= patience_ms(settings) and half.phy_offset < self.floor_wanted())
        )

    def _read(self, records: StoredRecords, half_offset: int, half: OpenHalf) -> HalfMessage | None:
        """Return the message; None when it is being repaired, or is set aside now."""
        found: list[HalfMessage] = []

        def given_up(records: StoredRecords) -> Delivery:
            message = half_message_at(records, half.phy_offset, half_offset)
            found.append(message)
            # Built now although it is needed at the end only: what cannot be is seen early.
            record, run = message.given_up()
            return Delivery(run.topic, run.queue_id, record, half.phy_offset)

        copy = self._loop.build(records, half.phy_offset, given_up)
        if copy is None:
            return None
        if copy.reason:
            self._decide_given_up(half_offset, copy, copy.reason)
            return None
        return found[0]

    def _decide_given_up(self, half_offset: int, copy: Delivery, reason: str) -> None:
        create = None
        if self._topics.config(copy.topic) is None:
            if self._topics.is_deleting(copy.topic):
                return
            create = TopicConfig(copy.topic, 1, 1, PERM_READ | PERM_WRITE)

        def done(proposed: Proposed) -> None:
            if proposed.outcome != "stored":
                return
            logger.info("transaction_given_up", half_offset=half_offset, position=copy.position)
            if reason:
                self._loop.was_set_aside(copy.position, reason)

        run = Run(copy.topic, copy.queue_id, 1)
        try:
            self._decisions.decide(
                half_offset, TransactionDecision.GIVEN_UP, done, (copy.record, run), create
            )
        except (PendingFullError, NotLeaderError, ShuttingDownError, LocalProtocolError) as error:
            logger.warning("transaction_waits", half_offset=half_offset, reason=str(error))

    async def _count_and_ask(
        self, to_ask: Sequence[tuple[int, HalfMessage, int]], term: int
    ) -> None:
        counts = tuple((half_offset, checks) for half_offset, _, checks in to_ask)
        fate = await self._loop.store(
            state_batch(TransactionsChange(checked=counts)),
            term=term,
        )
        if fate is Fate.NOT_STORED:
            for half_offset, _, _ in to_ask:
                self._again_in(RETRY_S, half_offset)
            return
        for half_offset, message, checks in to_ask:
            if not self._loop.leads(term):
                return
            if half_offset in self._group.state.transactions.open:
                self._again_in(self.settings.transaction_check_interval_ms / 1000, half_offset)
                if self._decisions.is_open(half_offset):
                    self._producers.ask(message, checks)
