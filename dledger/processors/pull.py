"""PULL_MESSAGE (11), LITE_PULL_MESSAGE (361) and our BULK_PULL (51103), with long polling.

Answers come from applied entries of the node asked, followers included. A pull that finds nothing
may be held: it is tried again when its queue grows, every five seconds, and answered at the latest
when the client's own time is over. A follower never answers that there is nothing: the leader may
have what it has not got, and the answer sends the client there.

Spec: docs/internals/protocol/remoting.md, sections 8.1 and 8.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from dledger.commitlog.errors import CorruptRecordError, MQError
from dledger.commitlog.record import check_bodies
from dledger.filters.errors import DamagedMessageError
from dledger.filters.expiry import LivingFilter
from dledger.filters.property_filter import MAX_SCANNED_UNITS, PropertyFilter
from dledger.group_api import BrokerGroup, QueueTouched
from dledger.processors.answers import refusal, when_current
from dledger.processors.get_message import (
    FLAG_SUSPEND,
    GetStatus,
    MessageRange,
    Pull,
    PullChecks,
    UnitRange,
    find_messages,
    judge,
    read_units,
)
from dledger.processors.handles import CONSUMES, Limit, handles
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, response_to
from dledger.remoting.protocol.headers import PullMessageHeader
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.seams import Clock, Executor
from dledger.services.read_suggestion import ReadSuggestion
from dledger.services.throughput import Throughput
from dledger.settings.parts import BrokerSettings, ReadLimits
from dledger.settings.text import LEADER_ID
from dledger.state.tables import QueueKey
from dledger.waiting import ROWS_PER_TURN, HeldRequest, HeldRequests, Wakeup, call_in_turns


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPull(HeldRequest):
    """One waiting pull, in the line of its queue."""

    pull: Pull
    is_woken: bool = False
    """It waits for its turn to be tried again."""

    @property
    def line(self) -> QueueKey:
        return self.pull.topic, self.pull.queue_id


SWEEP_S = 5.0
"""Held pulls are compared with their queues this often, whatever woke or did not wake them."""

MAX_SUSPEND_MS = 600_000
"""Longest hold: a client that asks for more is answered "nothing there" after ten minutes."""

COLD_READ_KIND = "cold_read"
"""Name under which the executor measures reads of old data."""

_NOTHING = frozenset(
    {
        GetStatus.NO_MESSAGE_IN_QUEUE,
        GetStatus.OFFSET_FOUND_NULL,
        GetStatus.OFFSET_OVERFLOW_ONE,
        GetStatus.OFFSET_OVERFLOW_BADLY,
    }
)
"""What depends on where the queue ends: answered only by a leader that is known to lead still."""

_CODES = {
    GetStatus.FOUND: ResponseCode.SUCCESS,
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.NO_MESSAGE_IN_QUEUE: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}


@dataclass(eq=False, repr=False)
class PullProcessor:
    """Answers pulls, and keeps those that wait."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _checks: PullChecks
    _throughput: Throughput
    _clock: Clock
    _executor: Executor

    def __post_init__(self) -> None:
        self._suggestion = ReadSuggestion(
            self._group,
            own_id=self._settings.follower_id,
            follower_ids=self._settings.follower_ids,
            recent_bytes=self._settings.recent_bytes,
            slave_read_enable=self._settings.broker.slave_read_enable,
            clock=self._clock,
        )
        self._held: HeldRequests[QueueKey, HeldPull] = HeldRequests()
        self._deadline_moved = Wakeup()
        self._watched: set[Connection] = set()

    @property
    def held_count(self) -> int:
        """How many pulls wait."""
        return self._held.count

    def holds(self, group: str, topic: str, queue_id: int) -> bool:
        """Return whether a pull of that group waits for that queue."""
        key = (topic, queue_id)
        return any(held.pull.group.group_name == group for held in self._held.waiting(key))

    def on_applied(self, touched: Sequence[QueueTouched]) -> None:
        """Try held pulls of these queues again; to be put into the group's `on_applied`."""
        if not self._held.count:
            return
        for topic, queue_id, _ in touched:
            self._wake(self._held.waiting((topic, queue_id)))

    async def run(self) -> None:
        """Answer held pulls whose time is over, and sweep.

        Cancellation: Held pulls are left to the closing of their connections.
        """
        next_sweep = self._clock.monotonic() + SWEEP_S
        while True:
            deadline = self._held.next_deadline
            until = next_sweep if deadline is None else min(next_sweep, deadline)
            await self._deadline_moved.wait_or(
                self._clock, max(0.0, until - self._clock.monotonic())
            )
            now = self._clock.monotonic()
            self._group.turns.call_each(self._answer_held, self._held.take_expired(now))
            if now >= next_sweep:
                next_sweep = now + SWEEP_S
                await self.sweep()

    def answer_all(self) -> None:
        """Answer every held pull: this node stops, and its clients are to pull elsewhere."""
        self._group.turns.call_each(self._answer_held, self._held.take_expired(math.inf))

    async def sweep(self) -> None:
        """Try every held pull again whose queue is not where it was."""
        await call_in_turns(self._sweep, self._held.all(), ROWS_PER_TURN)

    def _sweep(self, held: HeldPull) -> None:
        bounds = self._group.state.queues.get(held.line)
        if bounds is None or bounds.max_offset != held.pull.scan_from:
            self._wake([held])

    def _wake(self, crowd: Iterable[HeldPull]) -> None:
        """Let pulls be tried again in their turn: once, however often they are woken before it."""
        woken = [held for held in crowd if not held.is_woken]
        for held in woken:
            held.is_woken = True
        self._group.turns.call_each(self._try_again, woken)

    @handles(
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.BULK_PULL,
        limit=Limit.PULL,
        rule=CONSUMES,
        reads=True,
    )
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 11, 361 and 51103."""
        header = PullMessageHeader.decode(command.ext)
        leading = self._group.leadership is not None
        pull = self._checks.admit(connection, command, header, leading)
        wants = pull.wants
        if wants is not None and (units := self._cold_units(pull)) is not None:
            return self._judge_cold(pull, units, wants)
        found, is_cold = self._find(pull, pull.offset)
        if found.status is GetStatus.FOUND:
            if is_cold:
                return self._answer_cold(pull, found)
            return self._answer(pull, found, found.join(self._group))
        hold_ms = self._hold_ms(header, leading, command)
        if hold_ms and self._is_waiting(pull, found) and self._hold(pull, hold_ms):
            return DEFERRED
        return self._answer_unless_stale(pull, found)

    # ------------------------------------------------------------------------------ reading

    def _find(self, pull: Pull, offset: int) -> tuple[MessageRange, bool]:
        key = (pull.topic, pull.queue_id, offset)
        if pull.wants is not None:
            units = read_units(self._group, *key, MAX_SCANNED_UNITS)
            if isinstance(units, MessageRange):
                return units, False
            return self._judged(units, pull.hot, pull.wants), False
        found = find_messages(self._group, *key, pull.hot, pull.codes)
        if found.status is not GetStatus.FOUND:
            return found, False
        if not self._is_cold(found.slices[0][0]):
            return found, False
        if pull.cold != pull.hot:
            found = find_messages(self._group, *key, pull.cold, pull.codes)
        return found, True

    def _judged(self, units: UnitRange, limits: ReadLimits, wants: PropertyFilter) -> MessageRange:
        try:
            found = judge(self._group, units, limits, wants)
        except DamagedMessageError as error:
            self._group.report_damage(error.position, error.size)
            raise
        self._count_expired(wants)
        return found

    def _count_expired(self, wants: PropertyFilter) -> None:
        if isinstance(wants, LivingFilter):
            self._throughput.expired += wants.take_passed_over()

    def _cold_units(self, pull: Pull) -> UnitRange | None:
        """Return the units to be judged in a worker thread: of messages probably not in memory."""
        key = (pull.topic, pull.queue_id, pull.offset)
        units = read_units(self._group, *key, MAX_SCANNED_UNITS)
        if isinstance(units, MessageRange) or not self._is_cold(int(units.units["phy_offset"][0])):
            return None
        return units

    def _is_cold(self, position: int) -> bool:
        return position < self._group.log.end_position - self._settings.recent_bytes

    def _is_waiting(self, pull: Pull, found: MessageRange) -> bool:
        """Return whether the pull stands at the end of its queue, as far as this node knows."""
        status = found.status
        if status is GetStatus.OFFSET_OVERFLOW_ONE:
            return True
        if status is GetStatus.NO_MESSAGE_IN_QUEUE and pull.offset == 0:
            return True
        # A follower may be behind what the consumer has read from the leader.
        return self._group.leadership is None and status in (
            GetStatus.NO_MESSAGE_IN_QUEUE,
            GetStatus.OFFSET_OVERFLOW_BADLY,
        )

    def _answer_unless_stale(self, pull: Pull, found: MessageRange) -> Handled:
        """Answer what was found; that there is nothing, only behind the read barrier."""
        if found.status not in _NOTHING:
            return self._answer(pull, found, self._joined(found))
        if self._group.leadership is None and _goes_where_it_is_sent(pull.command):
            return self._answer_at_the_end_of_a_follower(pull, found)
        return when_current(
            self._group, pull.connection, pull.command, lambda: self._look_again(pull)
        )

    def _look_again(self, pull: Pull) -> RemotingCommand:
        self._checks.look_for_expired(pull)
        found, _ = self._find(pull, pull.scan_from)
        if pull.scan_from > pull.offset and found.status is GetStatus.OFFSET_OVERFLOW_ONE:
            found.status = GetStatus.NO_MATCHED_MESSAGE
        return self._answer(pull, found, self._joined(found))

    def _answer_at_the_end_of_a_follower(self, pull: Pull, found: MessageRange) -> RemotingCommand:
        """Answer "no matching message": the client goes on at the same offset, at the leader.

        Not that there is nothing: this node may be behind. Not a refusal: RocketMQ's clients would
        come back to this same node three seconds later, without end if they were sent here.
        """
        found.status = GetStatus.NO_MATCHED_MESSAGE
        found.next_begin_offset = max(pull.offset, pull.scan_from)
        return self._answer(pull, found)

    def _joined(self, found: MessageRange) -> Buffer:
        return found.join(self._group) if found.status is GetStatus.FOUND else b""

    def _answer(self, pull: Pull, found: MessageRange, body: Buffer = b"") -> RemotingCommand:
        status = found.status
        code = _CODES[status]
        size_bytes = memoryview(body).nbytes
        self._throughput.count_pull(found.count, size_bytes, pull.topic, pull.group.group_name)
        if status is GetStatus.NO_MESSAGE_IN_QUEUE and pull.offset == 0:
            code = ResponseCode.PULL_NOT_FOUND
        return response_to(
            pull.command,
            int(code),
            status.value,
            {
                "suggestWhichBrokerId": str(self._suggested(pull, found)),
                "nextBeginOffset": str(found.next_begin_offset),
                "minOffset": str(found.min_offset),
                "maxOffset": str(found.max_offset),
            },
            body,
        )

    def _suggested(self, pull: Pull, found: MessageRange) -> int:
        if not found.slices:
            return LEADER_ID
        position, _ = found.slices[-1]
        return self._suggestion.broker_id(pull.group, self._group.log.end_position - position)

    async def _answer_cold(self, pull: Pull, found: MessageRange) -> RemotingCommand:
        def read() -> bytes:
            body = found.join_copied(self._group)
            check_bodies(body)
            return body

        try:
            body = await self._executor.run(read, kind=COLD_READ_KIND)
        except CorruptRecordError:
            for position, size in found.slices:
                self._group.report_damage(position, size)
            return answer(
                pull.command,
                Condition.NOT_READY,
                "these messages are damaged on this broker's disk and are being repaired",
            )
        return self._answer(pull, found, body)

    async def _judge_cold(
        self, pull: Pull, units: UnitRange, wants: PropertyFilter
    ) -> RemotingCommand:
        def read() -> MessageRange:
            return judge(self._group, units, pull.cold, wants)

        try:
            found = await self._executor.run(read, kind=COLD_READ_KIND)
        except DamagedMessageError as error:
            self._group.report_damage(error.position, error.size)
            raise
        self._count_expired(wants)
        if found.status is GetStatus.FOUND:
            return await self._answer_cold(pull, found)
        return self._answer(pull, found)

    # ------------------------------------------------------------------------------ waiting

    def _hold_ms(self, header: PullMessageHeader, leading: bool, command: RemotingCommand) -> int:
        """Return how long this pull may wait, 0 when it may not."""
        settings = self._settings
        hold_ms = 0
        if header.sys_flag & FLAG_SUSPEND:
            hold_ms = max(0, min(header.suspend_timeout_millis, MAX_SUSPEND_MS))
        if not settings.broker.long_polling_enable:
            hold_ms = min(hold_ms, settings.broker.short_polling_time_ms)
        if not leading and _goes_where_it_is_sent(command):
            # Without a pause a client that takes this node for the leader would pull without end.
            hold_ms = max(hold_ms, settings.broker.short_polling_time_ms)
        return hold_ms

    def _hold(self, pull: Pull, hold_ms: int) -> bool:
        connection = pull.connection
        deadline = self._clock.monotonic() + hold_ms / 1000
        before = self._held.next_deadline
        if self._held.count >= self._settings.max_held_pulls:
            return False
        self._held.hold(HeldPull(owner=connection, deadline=deadline, pull=pull))
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_close.append(self._closed)
        if before is None or deadline < before:
            self._deadline_moved.set()
        return True

    def _closed(self, connection: Connection) -> None:
        self._watched.discard(connection)
        self._held.release_owner(connection)

    def _try_again(self, held: HeldPull) -> None:
        held.is_woken = False
        if not held.is_held:
            return
        pull = held.pull
        self._checks.look_for_expired(pull)
        try:
            # The group may have been paused since.
            self._checks.check_group(pull.group.group_name)
            found, _ = self._find(pull, pull.scan_from)
        except MQError as error:
            self._held.release(held)
            pull.connection.reply(pull.command, refusal(pull.command, error))
            return
        if found.status is GetStatus.NO_MATCHED_MESSAGE:
            # Nothing for this pull among the new messages: it waits on behind them, or the client
            # pulls again where there are more of them than one scan reads.
            pull.scan_from = found.next_begin_offset
            if found.next_begin_offset >= found.max_offset:
                return
        if self._is_waiting(pull, found):
            return
        self._held.release(held)
        self._reply(pull, found)

    def _answer_held(self, held: HeldPull) -> None:
        pull = held.pull
        self._checks.look_for_expired(pull)
        try:
            found, _ = self._find(pull, pull.scan_from)
        except MQError as error:
            pull.connection.reply(pull.command, refusal(pull.command, error))
            return
        self._reply(pull, found)

    def _reply(self, pull: Pull, found: MessageRange) -> None:
        try:
            response = self._answer_unless_stale(pull, found)
        except MQError as error:
            response = refusal(pull.command, error)
        if isinstance(response, RemotingCommand):
            pull.connection.reply(pull.command, response)


def _goes_where_it_is_sent(command: RemotingCommand) -> bool:
    """Return whether this is a client of RocketMQ, which follows `suggestWhichBrokerId`."""
    return command.serialize is not SerializeType.CBOR
