"""Retention: old segments are given up, by a record in the log, so that all replicas agree.

The leader moves the floor past whole segments that are too old, or too much, but never past a
delayed message that was not delivered, a half message without a decision, or what it has not saved
in a checkpoint. Each replica removes its files once it has saved the moved floor itself. A topic
may keep its messages for a shorter time (``retention.ms``): then its queues begin later, and the
bytes leave with their segment.

What has not expired stays, however full the disk is: sends are refused then (`disk_space`). Only
where the operator has set `cleanFileForciblyEnable` the oldest segment goes by force, one at a
time. Delayed messages are delivered, and half messages given up, within `TransactionCheckService`'s
patience: neither stands in the way for good.

Spec: docs/internals/protocol/store.md, section 12.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Protocol

import msgspec
import structlog
import trio

from dledger.commitlog.errors import CorruptEntryError, OffsetOutOfRangeError
from dledger.commitlog.mark import Anchor
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.commitlog.record import STORED_MS_BYTES, stored_ms_of
from dledger.commitlog.seams import UtcOffset, utc
from dledger.group_api import BrokerGroup
from dledger.remoting.protocol.own_fields import GivenUp, given_up
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.remoting.seams import Clock
from dledger.services.leader_loop import Fate, LeaderLoop
from dledger.settings.tables import StoreTable
from dledger.state.state_record import (
    AGE,
    CAUSES,
    FORCED,
    REQUEST,
    SIZE,
    FloorChange,
    FloorReason,
    QueueFloorsChange,
    state_batch,
)
from dledger.state.table import StateChange
from dledger.state.tables import QueueBounds, QueueKey, StateTables

HOUR_MS: Final = 3_600_000
DAY_HOURS: Final = 24


def is_in_hours(wall_ms: int, hours: Collection[int], offset_ms: UtcOffset) -> bool:
    """Tell whether it is one of *hours* of the local day. Pure, but for *offset_ms*.

    An hour that a change to summer time leaves out counts as the hour after it, so that no day
    is without it. One that comes twice when summer time ends counts both times.
    """
    hour = _hour(wall_ms, offset_ms)
    if hour in hours:
        return True
    left_out = (_hour(wall_ms - HOUR_MS, offset_ms) + 1) % DAY_HOURS
    while left_out != hour and (hour - left_out) % DAY_HOURS < DAY_HOURS // 2:
        if left_out in hours:
            return True
        left_out = (left_out + 1) % DAY_HOURS
    return False


def _hour(wall_ms: int, offset_ms: UtcOffset) -> int:
    return (wall_ms + offset_ms(wall_ms)) // HOUR_MS % DAY_HOURS


log = structlog.get_logger(__name__)

NAME: Final = "retention"
"""In logs and metrics."""

SEGMENTS_PER_PASS: Final = 10
"""As in RocketMQ: removing files is not free."""


NEVER_RATIO: Final = 2.0
"""A disk use that no disk reaches."""

QUEUES_PER_STEP: Final = 512
"""Queues that one entry lets begin later, or that one turn reads: each is searched for its first
message, so about ten milliseconds between two heartbeats."""


class SegmentedLog(Protocol):
    """What retention asks of the log."""

    first_index: int
    first_position: int
    last_index: int
    end_position: int

    def position_at(self, index: int) -> int:
        """Return where an entry starts."""

    def anchor_at(self, index: int) -> Anchor:
        """Return the anchor of a log that would begin with entry *index*.

        Raises CorruptEntryError: the entry before it is damaged.
        """

    def index_of(self, position: int) -> int:
        """Return the entry that holds the byte at *position*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is so at the moment the settings are applied.

    Attributes:
        disk_ratio: Used part of the disk, 0 to 1.
        is_freed: Whether all that was given up before has left the disk, so that the ratio counts
            it.
        limit_position: The floor stays at or before this byte.
    """

    now_ms: int
    disk_ratio: float
    limit_position: int
    is_hour: bool = False
    is_asked: bool = False
    is_freed: bool = True


def force_ratio(settings: StoreTable) -> float:
    """Return the disk use from which segments go by force: one no disk has, when none may."""
    if not settings.clean_file_forcibly_enable:
        return NEVER_RATIO
    return settings.disk_space_clean_forcibly_ratio / 100


def segment_starts(entry_log: SegmentedLog, segment_bytes: int) -> Iterator[int]:
    """Yield the index of the first entry of each segment after the first, oldest first."""
    base = entry_log.first_position - entry_log.first_position % segment_bytes + segment_bytes
    low = entry_log.first_index
    while base < entry_log.end_position:
        high = entry_log.last_index
        while low < high:
            middle = (low + high) // 2
            if entry_log.position_at(middle) < base:
                low = middle + 1
            else:
                high = middle
        if entry_log.position_at(low) < base:
            return
        yield low
        base += segment_bytes


def choose_floor(
    entry_log: SegmentedLog,
    settings: StoreTable,
    look: Look,
    *,
    segments_max: int | None = SEGMENTS_PER_PASS,
) -> tuple[Anchor, str] | None:
    """Return the furthest floor that the settings ask for, and its cause; None: nothing goes.

    By force one segment goes at most, and only when nothing else does. Where the last entry of a
    segment waits for its repair, that segment goes together with the next one.
    """
    chosen: tuple[Anchor, str] | None = None
    for count, index in enumerate(segment_starts(entry_log, settings.mapped_file_size_commit_log)):
        if count == segments_max or entry_log.position_at(index) > look.limit_position:
            break
        try:
            anchor = entry_log.anchor_at(index)
        except CorruptEntryError:
            continue
        cause = _cause(anchor, entry_log.end_position, settings, look)
        if cause is None:
            if chosen is None and look.is_freed and look.disk_ratio >= force_ratio(settings):
                return anchor, FORCED
            break
        chosen = anchor, cause
    return chosen


def next_step(entry_log: SegmentedLog, state: StateTables, floor: Anchor) -> Anchor:
    """Return the first step on the way to *floor* that moves no more than `QUEUES_PER_STEP` queues.

    Queues whose first messages stand in one entry are moved together.
    """
    position = state.first_position_of(QUEUES_PER_STEP)
    if position is None or position >= floor.position:
        return floor
    index = max(entry_log.index_of(position), state.floor.first_index + 1)
    if index >= floor.first_index:
        return floor
    try:
        return entry_log.anchor_at(index)
    except CorruptEntryError:
        return floor  # the entry before it waits for its repair


def _cause(anchor: Anchor, end_position: int, settings: StoreTable, look: Look) -> str | None:
    """Return why all before *anchor* may go, or None when it has to stay."""
    if anchor.prev_store_time_ms < look.now_ms - settings.file_reserved_time * HOUR_MS:
        if look.is_hour or look.disk_ratio >= settings.disk_max_used_space_ratio / 100:
            return AGE
        if look.is_asked:
            return REQUEST
    if 0 < settings.keep_bytes <= end_position - anchor.position:
        return SIZE
    return None


@dataclass(eq=False, repr=False)
class RetentionService:
    """Moves the floor, leader only.

    Args:
        saved_index: Newest entry that this replica's checkpoint covers.
        utc_offset: Local time, for the hours of `deleteWhen`.

    Attributes:
        settings: In force; changed while it runs.
        asked_by: Account or address that changed a setting while the broker ran, by the cause that
            it leads to.
    """

    _group: BrokerGroup
    entry_log: Callable[[], SegmentedLog]
    settings: StoreTable
    clock: Clock
    saved_index: Callable[[], int]
    disk_ratio: Callable[[], float]
    utc_offset: UtcOffset = utc

    def __post_init__(self) -> None:
        self.is_deleting: Callable[[str], bool] = lambda _topic: False
        """Topics whose removal is in flight; their queues are left alone."""
        self.asked_by: dict[str, str] = {}
        self.given_up_bytes: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        self.wanted_position = 0
        """Where the floor would be if no half message stood in the way."""
        self._asked_now: str | None = None
        self.name = NAME
        self._loop = LeaderLoop(self._group, self.clock, NAME)

    def expire_soon(self, asked_by: str) -> None:
        """Let segments that have expired go at the next check, whatever the hour."""
        self._asked_now = asked_by

    async def run(self) -> None:
        """Check every interval until cancelled. Run it inside the leadership's nursery."""
        while True:
            await self.clock.sleep(self.settings.retention_interval_ms / 1000)
            await self.check()
            await self.check_topics()

    async def check(self) -> Anchor | None:
        """Move the floor once, if something should go; return the new floor."""
        look = self.look(self._limit_position())
        chosen = choose_floor(self.entry_log(), self.settings, look)
        oldest_half = self._group.state.transactions.oldest_position
        self.wanted_position = 0
        if chosen is not None and oldest_half is not None and oldest_half < chosen[0].position:
            self.wanted_position = chosen[0].position
            look = replace(look, limit_position=oldest_half)
            chosen = choose_floor(self.entry_log(), self.settings, look)
        asked_by, self._asked_now = self._asked_now, None
        if chosen is None or chosen[0].first_index <= self._group.state.floor.first_index:
            return None
        floor, cause = chosen
        who = asked_by if cause == REQUEST else self.asked_by.get(cause)
        return await self._move(floor, self._reason(look, cause, who or ""))

    async def _move(self, floor: Anchor, reason: FloorReason) -> Anchor | None:
        """Move the floor, in steps that each touch a limited number of queues."""
        state = self._group.state
        size = floor.position - max(state.floor.position, 0)
        while state.floor.first_index < floor.first_index:
            step = next_step(self.entry_log(), state, floor)
            if not await self._store(FloorChange(step, reason)):
                return None
        self.given_up_bytes[reason.cause] += size
        write = log.warning if reason.cause == FORCED else log.info
        write(
            "floor_moved",
            first_index=floor.first_index,
            position=floor.position,
            bytes=size,
            newest_ms=floor.prev_store_time_ms,
            **msgspec.structs.asdict(reason),
        )
        return floor

    async def check_topics(self) -> None:
        """Let the queues of topics with a retention of their own begin later, where they should."""
        queues = expiring_queues(self._group)
        while some := list(islice(queues, QUEUES_PER_STEP)):
            await self._begin_later(some)
            await trio.lowlevel.checkpoint()

    async def _begin_later(self, queues: Sequence[QueueKey]) -> None:
        now_ms = self.clock.wall_ms()
        change = queue_floors(self._group, queues, now_ms, is_deleting=self.is_deleting)
        if change is not None and await self._store(change):
            log.info(
                "queue_floors_moved",
                queues=len(change.floors),
                retention_ms=dict(change.retention_ms),
            )

    async def _store(self, change: StateChange) -> bool:
        """Store a change; false when it is not stored, or another member leads by now."""
        leadership = self._group.leadership
        if leadership is None:
            return False
        fate = await self._loop.store(state_batch(change), term=leadership.term)
        return fate is Fate.APPLIED

    def look(self, limit_position: int) -> Look:
        """Return what is so now."""
        now_ms = self.clock.wall_ms()
        return Look(
            now_ms=now_ms,
            disk_ratio=self.disk_ratio(),
            limit_position=limit_position,
            is_hour=is_in_hours(now_ms, self.settings.delete_when, self.utc_offset),
            is_asked=self._asked_now is not None,
            is_freed=self.entry_log().first_index >= self._group.state.floor.first_index,
        )

    def _reason(self, look: Look, cause: str, asked_by: str) -> FloorReason:
        settings = self.settings
        is_forcible = force_ratio(settings) < NEVER_RATIO
        return FloorReason(
            cause=cause,
            decided_ms=look.now_ms,
            end_position=self.entry_log().end_position,
            reserved_hours=settings.file_reserved_time,
            keep_bytes=settings.keep_bytes,
            disk_used_permille=round(look.disk_ratio * 1000),
            force_permille=round(force_ratio(settings) * 1000) if is_forcible else 0,
            asked_by=asked_by,
        )

    def _limit_position(self) -> int:
        entry_log, state = self.entry_log(), self._group.state
        saved = self.saved_index()
        if saved < entry_log.first_index:
            return 0
        limit = entry_log.position_at(saved)
        for queue_id, bounds in state.queues_of.get(SCHEDULE_TOPIC, {}).items():
            offset = state.delay_progress.get(queue_id + 1, 0)
            if offset < bounds.max_offset:
                unit = self._group.queues.queue(SCHEDULE_TOPIC, queue_id).read(offset, 1)[0]
                limit = min(limit, int(unit["phy_offset"]))
        waits = state.timers.lowest
        if waits is not None:
            unit = self._group.queues.queue(TIMER_TOPIC, 0).read(waits, 1)[0]
            limit = min(limit, int(unit["phy_offset"]))
        return limit


RETENTION_ATTRIBUTE: Final = "retention.ms"

DIGITS_MAX: Final = 15
"""Of that number: some ten thousand years."""


def retention_ms(attributes: Mapping[str, str]) -> int | None:
    """Return what a topic's attributes say, or None where they say nothing.

    Raises ValueError: what they say is no number of milliseconds.
    """
    value = attributes.get(RETENTION_ATTRIBUTE)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > DIGITS_MAX or not int(value):
        raise ValueError(f"{RETENTION_ATTRIBUTE} is a number of milliseconds, not {value!r}")
    return int(value)


def expiring_queues(group: BrokerGroup) -> Iterator[QueueKey]:
    """Yield the queues of topics with a retention of their own; topics may change meanwhile."""
    for topic in list(group.state.topics_with.get(RETENTION_ATTRIBUTE, ())):
        config = group.state.topics.get(topic)
        for queue_id in range(config.queue_nums if config is not None else 0):
            yield topic, queue_id


def queue_floors(
    group: BrokerGroup,
    queues: Iterable[QueueKey],
    now_ms: int,
    *,
    is_deleting: Callable[[str], bool],
) -> QueueFloorsChange | None:
    """Return which of *queues* are to begin later, with their first offset kept; None: no queue."""
    found: list[tuple[str, int, int]] = []
    keeps: dict[str, int] = {}
    for topic, queue_id in queues:
        config = group.state.topics.get(topic)
        keeps_ms = None if config is None else retention_ms(config.attributes)
        if keeps_ms is None or is_deleting(topic):
            continue
        first = first_since(group, topic, queue_id, now_ms - keeps_ms)
        if first > group.state.min_offset(topic, queue_id):
            keeps[topic] = keeps_ms
            found.append((topic, queue_id, first))
    return QueueFloorsChange(tuple(found), now_ms, tuple(keeps.items())) if found else None


def first_since(group: BrokerGroup, topic: str, queue_id: int, since_ms: int) -> int:
    """Return the first offset of a queue that was stored at *since_ms* or later."""
    low, high = group.state.min_offset(topic, queue_id), group.state.max_offset(topic, queue_id)
    kept = low
    while low < high:
        middle = (low + high) // 2
        stored_ms = _store_time(group, topic, queue_id, middle)
        if stored_ms is None:
            return kept  # it is being repaired: later
        if stored_ms < since_ms:
            low = middle + 1
        else:
            high = middle
    return low


def _store_time(group: BrokerGroup, topic: str, queue_id: int, offset: int) -> int | None:
    position = int(group.queues.queue(topic, queue_id).read(offset, 1)[0]["phy_offset"])
    try:
        return stored_ms_of(group.log.read(position, STORED_MS_BYTES))
    except (CorruptEntryError, OffsetOutOfRangeError):
        return None


# --------------------------------------------------------------------------- what a change gives up


def keeps_less(before: StoreTable, after: StoreTable) -> bool:
    """Tell whether messages may go under *after* that *before* keeps. Pure."""
    no_limit = float("inf")
    return (
        (after.keep_bytes or no_limit) < (before.keep_bytes or no_limit)
        or after.file_reserved_time < before.file_reserved_time
        or force_ratio(after) < force_ratio(before)
    )


def lost_to_settings(
    group: BrokerGroup, entry_log: SegmentedLog, after: StoreTable, look: Look, change: str
) -> GivenUp:
    """Return what goes under the settings *after*, all passes of retention together."""
    look = replace(look, is_hour=True, limit_position=entry_log.end_position)
    chosen = choose_floor(entry_log, after, look, segments_max=None)
    if chosen is None:
        return GivenUp(change=change)
    floor, _ = chosen
    counts, uncounted = _messages_before(group, floor.position)
    starts = segment_starts(entry_log, after.mapped_file_size_commit_log)
    gone = (index for index in starts if index <= floor.first_index)
    return given_up(
        change,
        counts,
        uncounted_queues=uncounted,
        segments=sum(1 for _ in gone),
        size_bytes=floor.position - entry_log.first_position,
        newest_ms=floor.prev_store_time_ms,
    )


def lost_to_topic(
    group: BrokerGroup, topic: str, keeps_ms: int, now_ms: int, change: str
) -> GivenUp:
    """Return what goes when *topic* keeps its messages for *keeps_ms* only."""
    queues = [(topic, queue_id) for queue_id in group.state.queues_of.get(topic, ())]
    gone = 0
    for name, queue_id in queues[:QUEUES_PER_STEP]:
        first = first_since(group, name, queue_id, now_ms - keeps_ms)
        gone += first - group.state.min_offset(name, queue_id)
    return given_up(
        change,
        {topic: gone} if gone else {},
        uncounted_queues=max(0, len(queues) - QUEUES_PER_STEP),
        newest_ms=now_ms - keeps_ms if gone else 0,
    )


def has_messages(group: BrokerGroup, topic: str, queue_nums: int) -> bool:
    """Tell whether *topic* holds any message now."""
    state = group.state
    return any(
        state.max_offset(topic, queue_id) > state.min_offset(topic, queue_id)
        for queue_id in range(queue_nums)
    )


def _messages_before(group: BrokerGroup, position: int) -> tuple[dict[str, int], int]:
    """Return how many messages of each topic stand before *position*, and queues not counted."""
    counts: dict[str, int] = {}
    queues = [
        (key, bounds)
        for key, bounds in group.state.queues.items()
        if key[0] != STATE_TOPIC and bounds.max_offset > bounds.min_offset
    ]
    uncounted = max(0, len(queues) - QUEUES_PER_STEP)
    for (topic, queue_id), bounds in queues[:QUEUES_PER_STEP]:
        try:
            first = _first_at(group, topic, queue_id, bounds, position)
        except OffsetOutOfRangeError:
            uncounted += 1  # a snapshot is being refilled here
            continue
        if first > bounds.min_offset:
            counts[topic] = counts.get(topic, 0) + first - bounds.min_offset
    return counts, uncounted


def _first_at(
    group: BrokerGroup, topic: str, queue_id: int, bounds: QueueBounds, position: int
) -> int:
    """Return the first offset of a queue whose message stands at or after *position*."""
    queue = group.queues.queue(topic, queue_id)
    low, high = bounds.min_offset, bounds.max_offset
    while low < high:
        middle = (low + high) // 2
        if int(queue.read(middle, 1)[0]["phy_offset"]) < position:
            low = middle + 1
        else:
            high = middle
    return low
