"""Messages of repeated schedules: which are due, and their entries, on the leader.

One entry holds the messages of instants that came *and* the instants, so each instant yields one
message at most, whatever happens to the leader and to clocks. Of several that passed only the
newest yields one. No message is sent before its instant by the leader's date.

The leader fires no schedule that has a change in flight, or whose topic is being deleted: what it
decides on is the applied table.

Spec: docs/internals/state.md, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import structlog
import trio

from dledger.broker_settings import BrokerSettings
from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.errors import LocalProtocolError
from dledger.commitlog.message_id import UniqKeyFactory
from dledger.commitlog.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_SHARDING_KEY,
    PROPERTY_UNIQ_KEY,
    SCHEDULE_DUE_MS,
    SCHEDULE_MISSED,
    SCHEDULE_NAME,
    encode_properties,
)
from dledger.commitlog.queue_unit import java_hash
from dledger.commitlog.record import encode_record
from dledger.group_api import BrokerGroup, QueueTouched
from dledger.remoting.seams import Clock
from dledger.services.leader_loop import Fate, LeaderLoop
from dledger.services.pending_configs import PendingConfigs, TopicView
from dledger.services.schedule_times import (
    MISSED_COUNTED_MAX,
    DueInstant,
    Times,
    newest_due,
    next_instant,
    times_of,
)
from dledger.state.schedules import ANY_QUEUE, Fired, Schedule, ScheduleConfig, SchedulesChange
from dledger.state.state_record import batch_with_messages
from dledger.state.topics import SCHEDULES_QUEUE, STATE_TOPIC, TOPICS_QUEUE, TopicConfig
from dledger.waiting import wait_for

NAME: Final = "schedules"
"""In logs and metrics."""

SCHEDULES_MAX: Final = 1024
"""Of a group: the leader checks each once a second, and all may be due in the same one."""

SCHEDULE_BYTES_MAX: Final = 16 * 1024
"""Of one, encoded: each is in memory and in every snapshot. A larger message goes somewhere else,
and the schedule's names it."""

FIRED_PER_ENTRY: Final = 64
"""Messages of one entry: some 20 ms of the event loop, well below a heartbeat."""

WALKED_PER_ENTRY: Final = 200
"""Missed instants that are counted for one entry, but for its last message: what is left goes with
the next one, so that the begin of a leadership takes no heartbeat's time."""

FIRED_BYTES: Final = 1 << 20
"""Bytes of one entry: it must stay far below a segment."""

READ_TOGETHER: Final = 16
"""Rows whose next instants are computed before others get the event loop: some 5 ms."""

LOOK_S: Final = 1.0
"""The date is looked at again after this long, in case it was set; so is what is held."""

IDLE_S: Final = 60.0
"""Without a schedule."""

log = structlog.get_logger(__name__)


# ---------------------------------------------------------------------------------- what is known


@dataclass(frozen=True, slots=True)
class _Known:
    row: Schedule
    times: Times | None
    next_ms: int | None
    problem: str = ""


class ScheduleView:
    """The schedules as the leader sees them: applied, with what is in flight and when each is due.

    Attributes:
        pending: Changes in flight.
    """

    def __init__(self, group: BrokerGroup, topics: TopicView) -> None:
        self._group = group
        self._topics = topics
        self._known: dict[str, _Known] = {}
        self.pending: PendingConfigs[ScheduleConfig] = PendingConfigs(group, self._applied)

    def _applied(self, name: str) -> ScheduleConfig | None:
        row = self._group.state.schedules.get(name)
        return None if row is None else row.config

    def next_ms(self, row: Schedule) -> int | None:
        """Return the first instant of *row* that is not decided; None: paused, or no more."""
        return None if row.config.paused else self._of(row).next_ms

    def times(self, row: Schedule) -> Times | None:
        """Return the instants of *row*; None: they cannot be read here."""
        return self._of(row).times

    def is_known(self, row: Schedule) -> bool:
        """Whether nothing is left to compute about *row*."""
        known = self._known.get(row.config.name)
        return known is not None and known.row is row

    def keep(self, rows: Iterable[str]) -> None:
        """Forget all but these."""
        if len(self._known) > len(self._group.state.schedules):
            kept = set(rows)
            self._known = {name: known for name, known in self._known.items() if name in kept}

    def refuse(self, row: Schedule, problem: str) -> None:
        """Hold *row*, as it is now, for as long as it stays so."""
        self._known[row.config.name] = _Known(row, None, None, problem)

    def problem(self, row: Schedule) -> str:
        """Return why *row* is held although it may be due; empty: it is not."""
        known = self._of(row)
        return known.problem or self._problem_of_topic(row.config)

    def _of(self, row: Schedule) -> _Known:
        known = self._known.get(row.config.name)
        if known is None or known.row is not row:
            try:
                times = times_of(row.config, row.counts_from_ms)
            except ValueError as error:
                known = _Known(row, None, None, str(error))
            else:
                known = _Known(row, times, next_instant(row, times))
            self._known[row.config.name] = known
        return known

    def _problem_of_topic(self, config: ScheduleConfig) -> str:
        topic = self._topics.config(config.topic)
        if topic is None or self._topics.pending.removes(config.topic):
            return f"topic {config.topic} is being deleted"
        if not topic.writeable:
            return f"topic {config.topic} may not be written"
        if config.queue_id >= topic.write_queue_nums:
            return f"topic {config.topic} has no queue {config.queue_id} for writing"
        return ""


# ---------------------------------------------------------------------------------- what is sent


def queue_of(row: Schedule, topic: TopicConfig) -> int:
    """Return the queue of the next message: the given one, that of its group, or the next one."""
    queues = max(1, topic.write_queue_nums)
    if row.config.queue_id != ANY_QUEUE:
        return row.config.queue_id
    group = row.config.properties.get(PROPERTY_SHARDING_KEY)
    return row.fired % queues if group is None else abs(java_hash(group)) % queues


def uniq_key(group_identity: str, name: str, due_ms: int) -> str:
    """Return the UNIQ_KEY of an instant's message: the same whichever leader makes it.

    It has the form of other keys, so that tools read its time out of it.
    """
    drawn = blake2b(f"{group_identity}\0{name}".encode(), digest_size=10).digest()
    process, salt = int.from_bytes(drawn[4:6], "big"), int.from_bytes(drawn[6:], "big")
    return UniqKeyFactory(drawn[:4], process, salt).create(due_ms)


@dataclass(frozen=True, slots=True)
class _Firing:
    row: Schedule
    fired: Fired
    run: Run
    record: bytes


def firing_batch(firings: Sequence[_Firing]) -> RecordBatch:
    """Return the messages and the instants they stand for: all of it happens, or nothing."""
    messages = (((item.run.topic, item.run.queue_id), item.record) for item in firings)
    fired = SchedulesChange(fired=tuple(item.fired for item in firings))
    return batch_with_messages(messages, fired)


class RepeatedMessageService:
    """Sends the messages of schedules when they are due.

    Args:
        view: Shared with the handlers that change schedules.
        entry_bytes_max: Largest entry of the group; what is sent together takes half of it at most.
    """

    def __init__(
        self,
        group: BrokerGroup,
        clock: Clock,
        view: ScheduleView,
        topics: TopicView,
        settings: BrokerSettings,
        *,
        entry_bytes_max: int = 2 * FIRED_BYTES,
    ) -> None:
        self.name = NAME
        self._group = group
        self._clock = clock
        self._view = view
        self._topics = topics
        self._settings = settings
        self._bytes_max = min(FIRED_BYTES, entry_bytes_max // 2)
        self._wake = trio.Event()
        self._held: dict[str, str] = {}
        self._loop = LeaderLoop(group, clock, NAME)

    async def run(self) -> None:
        """Send until cancelled. Run it inside the leadership's nursery, once per leadership.

        It may be run again in the same leadership after an error.

        Cancellation: An entry in flight may still be stored; the next leader sees what it did.
        """
        leadership = self._group.leadership
        if leadership is None:
            return
        with self._loop.listening(self._on_applied):
            await self._loop.settle(leadership.term)
            while self._loop.leads(leadership.term):
                self._wake = trio.Event()
                await self._read()
                if not await self._fire(leadership.term):
                    await self._rest()

    def _on_applied(self, touched: Sequence[QueueTouched]) -> None:
        for topic, queue_id, _ in touched:
            if topic == STATE_TOPIC and queue_id in (SCHEDULES_QUEUE, TOPICS_QUEUE):
                self._wake.set()

    async def _read(self) -> None:
        """Compute the next instant of each row that is new or has changed."""
        computed = 0
        rows = self._group.state.schedules
        self._view.keep(rows)
        for row in list(rows.values()):
            if not self._view.is_known(row):
                if self._view.times(row) is None:
                    self._is_held(row.config.name, row)
                computed += 1
                if computed % READ_TOGETHER == 0:
                    await trio.lowlevel.checkpoint()

    async def _rest(self) -> None:
        """Wait for the next instant, or for a change."""
        rows, now_ms = self._group.state.schedules, self._clock.wall_ms()
        wait_s = LOOK_S if rows else IDLE_S
        for row in rows.values():
            next_ms = self._view.next_ms(row)
            # What is due and held is looked at again after a while.
            if next_ms is not None and next_ms > now_ms:
                wait_s = min(wait_s, (next_ms - now_ms) / 1000)
        await wait_for(self._wake, self._clock, wait_s)

    # -- what is due ------------------------------------------------------------------------

    async def _fire(self, term: int) -> bool:
        """Propose one entry of what is due; tell whether something was."""
        firings = self._due(self._clock.wall_ms())
        if not firings:
            return False
        rows = self._group.state.schedules

        def is_applied() -> bool:
            return all(
                item.fired.name not in rows or rows[item.fired.name].after_ms >= item.fired.due_ms
                for item in firings
            )

        try:
            fate = await self._loop.store(firing_batch(firings), is_applied=is_applied, term=term)
        except LocalProtocolError as error:
            # Together they take half an entry at most: it is one, larger than an entry may be.
            for item in firings:
                log.error("schedule_held", schedule=item.fired.name, reason=str(error))
                self._view.refuse(item.row, str(error))
            return True
        if fate is Fate.NOT_STORED:
            await self._loop.pause()
        elif fate is Fate.APPLIED:
            self._count([item.fired for item in firings])
        return True

    def _due(self, now_ms: int) -> list[_Firing]:
        """Return what goes into the next entry: what has waited longest comes first."""
        waiting = [
            (next_ms, name, row)
            for name, row in self._group.state.schedules.items()
            if (next_ms := self._view.next_ms(row)) is not None and next_ms <= now_ms
        ]
        firings: list[_Firing] = []
        size = walked = 0
        for _, name, row in sorted(waiting, key=lambda item: item[:2]):
            if len(firings) >= FIRED_PER_ENTRY or walked >= WALKED_PER_ENTRY:
                break
            if self._is_held(name, row):
                continue
            try:
                firing = self._newest(row, now_ms)
            except Exception as error:  # noqa: BLE001  # whatever a row holds, it ends no service
                self._view.refuse(row, str(error) or type(error).__name__)
                self._is_held(name, row)
                continue
            if firing is None:
                continue
            if firings and size + len(firing.record) > self._bytes_max:
                break
            firings.append(firing)
            size += len(firing.record)
            walked += min(firing.fired.missed, MISSED_COUNTED_MAX)
        return firings

    def _newest(self, row: Schedule, now_ms: int) -> _Firing | None:
        times = self._view.times(row)
        instant = None if times is None else newest_due(row, times, now_ms)
        return None if instant is None else self._firing(row, instant, now_ms)

    def _is_held(self, name: str, row: Schedule) -> bool:
        """Whether *row* has to wait; the reason is logged when it is a new one."""
        if self._view.pending.is_changing(name):
            return True
        problem = self._view.problem(row)
        if not problem:
            self._held.pop(name, None)
            return False
        if self._held.get(name) != problem:
            if len(self._held) >= SCHEDULES_MAX:
                self._held.clear()
            self._held[name] = problem
            log.warning("schedule_held", schedule=name, reason=problem)
        return True

    def _firing(self, row: Schedule, instant: DueInstant, now_ms: int) -> _Firing:
        config = row.config
        topic = self._topics.config(config.topic) or TopicConfig(config.topic)
        run = Run(config.topic, queue_of(row, topic), 1)
        key = uniq_key(self._group.group_identity, config.name, instant.due_ms)
        properties = {
            PROPERTY_UNIQ_KEY: key,
            **config.properties,
            PROPERTY_CLUSTER: self._settings.broker.cluster_name,
            SCHEDULE_NAME: config.name,
            SCHEDULE_DUE_MS: str(instant.due_ms),
        }
        if instant.missed:
            properties[SCHEDULE_MISSED] = str(instant.missed)
        record = encode_record(
            topic=run.topic,
            queue_id=run.queue_id,
            body=config.body,
            properties=encode_properties(properties),
            born_timestamp_ms=now_ms,
            born_host=self._settings.store_host,
        )
        fired = Fired(config.name, row.after_ms, instant.due_ms, instant.missed)
        return _Firing(row, fired, run, record)

    def _count(self, fired: Sequence[Fired]) -> None:
        counts = self._group.service_counts
        counts.fired += len(fired)
        for item in fired:
            if item.missed:
                counts.missed += item.missed
                log.info(
                    "schedule_instants_missed",
                    schedule=item.name,
                    missed=item.missed,
                    due_ms=item.due_ms,
                )
