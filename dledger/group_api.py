"""A broker group as processors and services see it: the only way to the replicated log.

An unexpected error in one service leaves the others, the log and the leadership as they are. It is
logged with its trace and counted; the service runs again in the same leadership after a pause that
doubles. Only what proves that this node's own durable state is wrong goes on to stop the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import structlog

from dledger.broker_errors import NotLeaderError
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.entry import RecordBatch
from dledger.commitlog.errors import (
    CorruptStoreError,
    FlushFailedError,
    InvariantBroken,
    MQError,
    Outcome,
)
from dledger.commitlog.key_index import KeyIndex
from dledger.commitlog.log_reader import LogReader
from dledger.commitlog.record import STORED_MS_BYTES, stored_ms_of
from dledger.remoting.seams import Clock
from dledger.state.tables import StateTables
from dledger.waiting import Turns

# ------------------------------------------------------------------------------- services that fail


SET_ASIDE_BY: Final = ("delay_levels", "timer", "transactions", "retries")
SERVICES: Final = (
    "delay_levels",
    "timer",
    "transactions",
    "consumer_offsets",
    "retention",
)
"""Their counters are there from the start, at 0: an alert can watch them."""


def _from_zero(names: tuple[str, ...]) -> Callable[[], Counter[str]]:
    return lambda: Counter(dict.fromkeys(names, 0))


@dataclass(slots=True, eq=False)
class ServiceCounts:
    """Counters since the start, by the name of the service."""

    set_aside: Counter[str] = field(default_factory=_from_zero(SET_ASIDE_BY))
    """Messages put into the dead letters of services."""
    restarts: Counter[str] = field(default_factory=_from_zero(SERVICES))
    """Unexpected failures; the service begins again after each."""
    forwarded: Counter[str] = field(default_factory=_from_zero(("taken", "repeated", "refused")))
    """Requests carried to the leader, sent to it once more, and over a limit."""
    listener_failures: int = 0
    """Failures of those that are called after each applied entry."""


FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""A service that fails at once each time costs one try a minute."""

CALM_S: Final = 120.0
"""After so long without an error the next pause is the first one again."""

STOPS_NODE: Final = (InvariantBroken, FlushFailedError, CorruptStoreError)
"""What is proved from this node's own durable state."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeaderService:
    """What runs while this node leads: *run*, under its *name* in logs and metrics."""

    name: str
    run: Callable[[], Awaitable[None]]

    async def __call__(self, _leadership: object) -> None:
        """Run in one leadership."""
        await self.run()


async def fenced(
    name: str, run: Callable[[], Awaitable[None]], clock: Clock, counts: ServiceCounts
) -> None:
    """Run a service until it ends or is cancelled; begin again after an unexpected error.

    Args:
        run: May be called again after an error.
    Raises:
        InvariantBroken, FlushFailedError, CorruptStoreError: Out of *run*: the node must stop.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = clock.monotonic()
        try:
            await run()
        except BaseException as error:
            unexpected, rest = split(error)
            if unexpected is None:
                raise
            if clock.monotonic() - began_s >= CALM_S:
                pause_s = FIRST_PAUSE_S
            counts.restarts[name] += 1
            logger.error("service_failed", service=name, again_in_s=pause_s, exc_info=unexpected)
            if rest is not None:
                raise rest from None
        else:
            return
        await clock.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def split(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Return the part of *error* that a fence keeps in, and the part that goes on."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(_is_unexpected)
    return (error, None) if _is_unexpected(error) else (None, error)


def _is_unexpected(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, (*STOPS_NODE, ExceptionGroup))


# ---------------------------------------------------------------------------------- the group


QueueTouched = tuple[str, int, int]
"""Topic, queue id and the queue's new max offset."""

AppliedListener = Callable[[Sequence[QueueTouched]], None]


class Proposed(msgspec.Struct, frozen=True):
    """What became of a proposal.

    ``stored``: committed (with ``ASYNC_MASTER``, where it need not be applied: flushed by the
    leader alone); ``not_stored``: it never will be; ``unknown``: this node stopped leading before
    it was decided. The other fields count for ``stored`` only.
    """

    outcome: Outcome
    first_offsets: tuple[int, ...] = ()
    """First queue offset of each run of the batch behind its heads."""
    phy_offset: int = -1
    """Position of the first record behind them; the others follow it without a gap."""
    store_time_ms: int = 0
    index: int = 0
    term: int = 0
    error: MQError | None = None
    """With ``not_stored``: why, when it is not the end of the leadership."""


OnDone = Callable[[Proposed], None]


class OffsetCommit(NamedTuple):
    """An offset that a proposal commits for a consumer group.

    *expected*: the offset that it takes the place of, -1 for none; None: whatever stands there.
    """

    group: str
    topic: str
    queue_id: int
    offset: int
    expected: int | None = None


OnBarrier = Callable[[NotLeaderError | None], None]
"""Called with None when a read may be answered from what is applied now, else with the reason."""


class Leadership(Protocol):
    """The right to append, in one term."""

    @property
    def term(self) -> int:
        """The term it was won in."""


class BrokerGroup(Protocol):
    """One replica of a broker group."""

    @property
    def state(self) -> StateTables:
        """The applied state. Read it, never write it."""

    @property
    def leadership(self) -> Leadership | None:
        """Set while this node leads *and* has applied an entry of its own term."""

    @property
    def leader_address(self) -> str | None:
        """Advertised ``ip:port`` of the leader, as far as known."""

    @property
    def group_identity(self) -> str:
        """Identity of the whole group, the same on every member; empty before bootstrap."""

    @property
    def membership_proof(self) -> str:
        """What members alone can send to NameServers, the same for each; empty without a secret."""

    @property
    def readable(self) -> bool:
        """Whether queues and log hold what the state has; not while a snapshot is refilled."""

    @property
    def service_counts(self) -> ServiceCounts:
        """What services of this node count for the metrics."""

    @property
    def has_other_members(self) -> bool:
        """Whether another member may have a copy of what is damaged here."""

    @property
    def term(self) -> int:
        """The newest term this node has seen."""

    @property
    def store_time_ms(self) -> int:
        """The store time that an entry gets which is sealed now, if this node leads."""

    @property
    def log(self) -> LogReader:
        """The log. Read applied records only."""

    @property
    def queues(self) -> ConsumeQueueStore:
        """The consume queues."""

    @property
    def key_index(self) -> KeyIndex:
        """The key index: positions of records by their keys."""

    @property
    def on_applied(self) -> list[AppliedListener]:
        """Called after each applied entry with the queues it touched; must not block or raise."""

    @property
    def turns(self) -> Turns:
        """What makes the calls that an event asks for, a part of them in each turn."""

    def report_damage(self, position: int, size: int) -> None:
        """Report bytes read from the log that were bad: what is damaged is repaired from now on."""

    def read_barrier(self, on_done: OnBarrier) -> None:
        """Call *on_done* when a read from `state` reflects all that was stored before this call.

        It is called exactly once, perhaps from inside this call: with None, or with the error
        when leadership ended or no majority confirmed it in time.

        Raises NotLeaderError: not leading; *on_done* is not called.
        """

    @property
    def waiting_reads(self) -> list[Callable[[], int]]:
        """Each returns how many reads wait for an entry: then entries are applied without delay."""

    def catch_up(self) -> None:
        """Apply all that is committed here: a read sees every message that was answered."""

    def propose(
        self,
        batch: RecordBatch,
        on_done: OnDone,
        *,
        is_applied: bool = True,
        settled: Sequence[OnDone] = (),
        commits: Sequence[OffsetCommit] = (),
    ) -> None:
        """Append *batch* under the current leadership, all of it in one entry.

        It is sealed when the connection's whole received chunk has been handled; outside of a
        handler call `kick`. *on_done* is called exactly once, later, never from inside this call.

        Args:
            is_applied: A stored batch is applied when *on_done* is called. Off: it is committed
                then, or with ``ASYNC_MASTER`` flushed by the leader alone, and applied later.
            settled: For what is kept beside the applied state while a proposal is in flight.
                Each is called once, before *on_done* where both are due, when the applied state
                shows what became of it: it is applied here, or never will be. *on_done* may have
                been called long before, with ``unknown`` when a majority took it too late.
            commits: The consumer offsets in it. Where one expects another offset than the group
                has, all that was appended before counted, it is not stored, with a
                `CommitNotExpectedError`.
        Raises:
            NotLeaderError: Not leading; nothing was stored.
            PendingFullError: Too much in flight; nothing was stored.
            ShuttingDownError: The node drains; nothing was stored.
            LocalProtocolError: Larger than an entry may be; nothing was stored.
        """

    def kick(self) -> None:
        """Seal what was proposed, unless a flush is on its way: then its end does."""

    async def submit(self, batch: RecordBatch, settled: Sequence[OnDone] = ()) -> Proposed:
        """`propose`, awaited: returns a stored proposal only.

        Raises:
            UnknownOutcomeError: Leadership ended first; also everything `propose` raises.
            DiskFullError: No space; nothing was stored.
        Cancellation: The entry may still be stored.
        """

    def status(self) -> Mapping[str, Any]:
        """Return what `raft status` shows: role, term, indexes, peers; JSON-able values."""


# ------------------------------------------------------------ store times of messages in a queue


def starts_in_memory(group: BrokerGroup, topic: str, queue_id: int, recent_bytes: int) -> bool:
    """Return whether a queue still has its first message, and that in memory."""
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or bounds.max_offset == 0:
        return True
    if bounds.min_offset > 0:
        return False
    unit = group.queues.queue(topic, queue_id).read(0, 1)
    behind = group.log.end_position - int(unit["phy_offset"][0])
    return behind <= recent_bytes


def store_time_at(group: BrokerGroup, topic: str, queue_id: int, offset: int) -> int:
    """Return when the message at *offset* was stored, ms since the epoch.

    Raises OffsetOutOfRangeError: it is not kept any more.
    """
    unit = group.queues.queue(topic, queue_id).read(offset, 1)
    return stored_ms_of(group.log.read(int(unit["phy_offset"][0]), STORED_MS_BYTES))


def search_offset(
    group: BrokerGroup, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool
) -> int:
    """Return the offset at a store time.

    *upper*: the last message stored at or before *timestamp_ms* (the first one when all are later),
    instead of the first stored at or after it (the end when all are earlier).
    """
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or bounds.max_offset <= bounds.min_offset:
        return 0
    # Store times never go back along a queue, across leaders too.
    low, high = bounds.min_offset, bounds.max_offset
    while low < high:
        middle = (low + high) // 2
        stored = store_time_at(group, topic, queue_id, middle)
        if stored < timestamp_ms or (upper and stored == timestamp_ms):
            low = middle + 1
        else:
            high = middle
    return max(bounds.min_offset, low - 1) if upper else low
