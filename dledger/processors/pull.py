"""PULL_MESSAGE (11), LITE_PULL_MESSAGE (361) and our BULK_PULL (51103), with long polling.

Answers come from applied entries of the node asked, followers included. A pull that finds nothing
may be held: it is tried again when its queue grows, every five seconds, and answered at the latest
when the client's own time is over. A follower never says that there is nothing: what it has not
got may be at the leader, and there it sends who asks.

Spec: remoting fact sheet, sections 8.1 and 8.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio
from typing_extensions import Buffer

from commitlog.errors import CorruptRecordError, MQError
from commitlog.record import check_bodies
from dledger.broker_id import LEADER_ID
from dledger.filters.errors import DamagedMessageError
from dledger.filters.property_filter import MAX_SCANNED_UNITS, PropertyFilter
from dledger.group_api import BrokerGroup, QueueTouched
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.client_table import ClientTable, ConsumerGroup
from dledger.processors.current_read import when_current
from dledger.processors.get_message import (
    GetStatus,
    MessageRange,
    ReadLimits,
    UnitRange,
    find_messages,
    judge,
    read_units,
)
from dledger.processors.held_pulls import Held, HeldPulls
from dledger.processors.lock_token import check_lock_token
from dledger.processors.names_check import check_group_name
from dledger.processors.property_filters import PropertyFilters
from dledger.processors.read_suggestion import ReadSuggestion
from dledger.processors.refusal import RefusedError, not_leader, refusal
from dledger.processors.subscription import TagCodes, is_tag_type, parse_tags
from dledger.services.known_groups import KnownGroups
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.queue_locks import QueueLocks
from dledger.services.throughput import Throughput
from dledger.services.waiting import wait_for
from dledger.state.subscription_group_config import SubscriptionGroupConfig
from dledger.state.topic_config import PERM_READ
from remoting.access.gate import limited_account
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, SerializeType, response_to
from remoting.protocol.headers import PullMessageHeader
from remoting.protocol.outcome import Condition, answer
from remoting.seams import Clock, Executor

FLAG_COMMIT_OFFSET = 1
FLAG_SUSPEND = 2
FLAG_SUBSCRIPTION = 4
FLAG_CLASS_FILTER = 8

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
"""What depends on where the queue ends: said only by a leader that is known to lead still."""

_CODES = {
    GetStatus.FOUND: ResponseCode.SUCCESS,
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.NO_MESSAGE_IN_QUEUE: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}


@dataclass(slots=True)
class _Pull:
    """A pull that passed its checks."""

    connection: Connection
    command: RemotingCommand
    group: SubscriptionGroupConfig
    topic: str
    queue_id: int
    offset: int
    hot: ReadLimits
    cold: ReadLimits
    codes: TagCodes | None
    wants: PropertyFilter | None
    # While it is held: where the next look begins, behind messages that did not match.
    scan_from: int


class PullProcessor:
    """Answers pulls, and keeps those that wait."""

    def __init__(
        self,
        group: BrokerGroup,
        topics: TopicView,
        clients: ClientTable[Connection],
        offsets: OffsetCommits,
        filters: PropertyFilters,
        settings: BrokerSettings,
        locks: QueueLocks,
        *,
        clock: Clock,
        executor: Executor,
        throughput: Throughput | None = None,
    ) -> None:
        self._group = group
        self._topics = topics
        self._clients = clients
        self._offsets = offsets
        self._filters = filters
        self._settings = settings
        self._locks = locks
        self._known_groups = KnownGroups(group, topics)
        self._clock = clock
        self._executor = executor
        self._throughput = throughput
        self._suggestion = ReadSuggestion(
            group,
            own_id=settings.follower_id,
            recent_bytes=settings.recent_bytes,
            slave_read_enable=settings.slave_read_enable,
            clock=clock,
        )
        self._held: HeldPulls[_Pull] = HeldPulls(settings.max_held_pulls)
        self._deadline_moved = trio.Event()
        self._watched: set[Connection] = set()

    @property
    def held_count(self) -> int:
        """How many pulls wait."""
        return len(self._held)

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 11, 361 and 51103."""
        try:
            return self._pull(connection, command)
        except MQError as error:
            return refusal(command, error)

    def on_applied(self, touched: Sequence[QueueTouched]) -> None:
        """Try held pulls of these queues again; to be put into the group's `on_applied`."""
        if not len(self._held):
            return
        for topic, queue_id, _ in touched:
            if self._held.waits_for((topic, queue_id)):
                for held in self._held.waiting((topic, queue_id)):
                    self._try_again(held)

    async def run(self) -> None:
        """Answer held pulls whose time is over, and sweep.

        Cancellation: Held pulls are left to the closing of their connections.
        """
        next_sweep = self._clock.monotonic() + SWEEP_S
        while True:
            self._deadline_moved = trio.Event()
            deadline = self._held.next_deadline
            until = next_sweep if deadline is None else min(next_sweep, deadline)
            await wait_for(
                self._deadline_moved, self._clock, max(0.0, until - self._clock.monotonic())
            )
            now = self._clock.monotonic()
            for held in self._held.expired(now):
                self._answer_held(held)
            if now >= next_sweep:
                next_sweep = now + SWEEP_S
                self.sweep()

    def sweep(self) -> None:
        """Try every held pull again whose queue is not where it was."""
        for key in self._held.queues:
            bounds = self._group.state.queues.get(key)
            for held in self._held.waiting(key):
                if bounds is None or bounds.max_offset != held.pull.scan_from:
                    self._try_again(held)

    # ------------------------------------------------------------------------------ checks

    def _pull(self, connection: Connection, command: RemotingCommand) -> Handled:
        header = PullMessageHeader.decode(command.ext)
        settings = self._settings
        leading = self._group.leadership is not None
        if not leading and not settings.slave_read_enable:
            raise not_leader(self._group)
        if not settings.broker_permission & PERM_READ:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"the broker[{settings.address}] pulling message is forbidden",
            )
        group_name, topic = header.consumer_group, header.topic
        consumers = self._check_group(group_name, leading)
        self._check_queue(topic, header.queue_id, leading)
        codes, wants = self._wanted(header)
        if leading and self._topics.subscription_group(group_name) is None:
            self._known_groups.make_known(group_name, limited_account(connection))
        shows_token = check_lock_token(self._locks, command, (group_name, topic, header.queue_id))
        if header.sys_flag & FLAG_COMMIT_OFFSET and header.commit_offset >= 0 and leading:
            self._offsets.check_room(group_name, topic, limited_account(connection))
            commit = (group_name, topic, header.queue_id, header.commit_offset)
            if shows_token:
                self._offsets.commit_now(*commit, lambda _: None)
            else:
                self._offsets.commit(*commit)
        hot, cold = self._limits(command.code, header)
        pull = _Pull(
            connection,
            command,
            consumers,
            topic,
            header.queue_id,
            header.queue_offset,
            hot,
            cold,
            codes,
            wants,
            header.queue_offset,
        )
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

    def _check_group(self, group_name: str, leading: bool) -> SubscriptionGroupConfig:
        known = self._topics.subscription_group(group_name)
        if known is None:
            check_group_name(group_name)
        config = known or self._topics.subscription_group_or_default(group_name)
        if config is None:
            raise RefusedError(
                Condition.GROUP_NOT_EXIST, f"subscription group [{group_name}] does not exist"
            )
        if not config.consume_enable:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"subscription group no permission, {group_name} is not allowed to consume",
            )
        return config

    def _check_queue(self, topic: str, queue_id: int, leading: bool) -> None:
        """See that there is such a queue; a follower may not have come to its topic yet."""
        config = self._topics.config(topic)
        if config is None:
            if not leading:
                return
            raise RefusedError(
                Condition.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!"
            )
        if not config.readable:
            raise RefusedError(
                Condition.NO_PERMISSION, f"the topic[{topic}] pulling message is forbidden"
            )
        if not 0 <= queue_id < config.read_queue_nums and leading:
            raise RefusedError(
                Condition.INVALID_QUEUE,
                f"queueId[{queue_id}] is illegal, topic:[{topic}] has "
                f"{config.read_queue_nums} read queues",
            )

    def _wanted(self, header: PullMessageHeader) -> tuple[TagCodes | None, PropertyFilter | None]:
        """Return what filters: hashes of tags, or what looks at properties, or neither."""
        group_name, topic = header.consumer_group, header.topic
        if header.sys_flag & FLAG_SUBSCRIPTION:
            if header.sys_flag & FLAG_CLASS_FILTER:
                return None, None
            if not is_tag_type(header.expression_type):
                return None, self._filters.expression(header.expression_type, header.subscription)
            try:
                codes = parse_tags(header.subscription)
            except ValueError as error:
                raise RefusedError(
                    Condition.SUBSCRIPTION_ILLEGAL,
                    f"parse the consumer's subscription failed: {error}",
                ) from error
            return self._with_retries(codes, self._clients.consumer_group(group_name), topic)
        group = self._clients.consumer_group(group_name)
        if group is None:
            raise RefusedError(
                Condition.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist, group: {group_name}",
            )
        config = self._topics.subscription_group_or_default(group_name)
        if group.is_broadcasting and config is not None and not config.consume_broadcast_enable:
            raise RefusedError(
                Condition.NO_PERMISSION, f"the consumer group[{group_name}] may not broadcast"
            )
        subscription = group.subscriptions.get(topic)
        if subscription is None:
            raise RefusedError(
                Condition.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist, group: {group_name}, topic: {topic}",
            )
        if subscription.data.sub_version < header.sub_version:
            raise RefusedError(
                Condition.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription not latest, group: {group_name}, topic: {topic}",
            )
        if not subscription.is_tag_type:
            return None, self._filters.of_subscription(subscription)
        return self._with_retries(subscription.codes, group, topic)

    def _with_retries(
        self, codes: TagCodes | None, group: ConsumerGroup[Connection] | None, topic: str
    ) -> tuple[TagCodes | None, PropertyFilter | None]:
        if codes is not None or group is None:
            return codes, None
        return None, self._filters.of_retries(group, topic)

    def _limits(self, code: int, header: PullMessageHeader) -> tuple[ReadLimits, ReadLimits]:
        settings = self._settings
        if code == RequestCode.BULK_PULL:
            hot = cold = settings.bulk_pull_limits
        else:
            hot, cold = settings.pull_limits, settings.cold_pull_limits
        return _lowered(hot, header), _lowered(cold, header)

    # ------------------------------------------------------------------------------ reading

    def _find(self, pull: _Pull, offset: int) -> tuple[MessageRange, bool]:
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
            return judge(self._group, units, limits, wants)
        except DamagedMessageError as error:
            self._group.report_damage(error.position, error.size)
            raise

    def _cold_units(self, pull: _Pull) -> UnitRange | None:
        """Return the units to be judged in a worker thread: of messages probably not in memory."""
        key = (pull.topic, pull.queue_id, pull.offset)
        units = read_units(self._group, *key, MAX_SCANNED_UNITS)
        if isinstance(units, MessageRange) or not self._is_cold(int(units.units["phy_offset"][0])):
            return None
        return units

    def _is_cold(self, position: int) -> bool:
        return position < self._group.log.end_position - self._settings.recent_bytes

    def _is_waiting(self, pull: _Pull, found: MessageRange) -> bool:
        """Tell whether the pull stands at the end of its queue, as far as this node knows."""
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

    def _answer_unless_stale(self, pull: _Pull, found: MessageRange) -> Handled:
        """Answer what was found; that there is nothing, only behind the read barrier."""
        if found.status not in _NOTHING:
            return self._answer(pull, found, self._joined(found))
        if self._group.leadership is None and _goes_where_it_is_sent(pull.command):
            return self._answer_at_the_end_of_a_follower(pull, found)
        return when_current(
            self._group, pull.connection, pull.command, lambda: self._look_again(pull)
        )

    def _look_again(self, pull: _Pull) -> RemotingCommand:
        found, _ = self._find(pull, pull.scan_from)
        if pull.scan_from > pull.offset and found.status is GetStatus.OFFSET_OVERFLOW_ONE:
            found.status = GetStatus.NO_MATCHED_MESSAGE
        return self._answer(pull, found, self._joined(found))

    def _answer_at_the_end_of_a_follower(self, pull: _Pull, found: MessageRange) -> RemotingCommand:
        """Say "nothing for you here": go on at the same offset, and at the leader.

        Not that there is nothing: this node may be behind. Not "no": RocketMQ's clients then come
        back to this same node three seconds later, for ever if they were sent here.
        """
        found.status = GetStatus.NO_MATCHED_MESSAGE
        found.next_begin_offset = max(pull.offset, pull.scan_from)
        return self._answer(pull, found)

    def _joined(self, found: MessageRange) -> Buffer:
        return found.join(self._group) if found.status is GetStatus.FOUND else b""

    def _answer(self, pull: _Pull, found: MessageRange, body: Buffer = b"") -> RemotingCommand:
        status = found.status
        code = _CODES[status]
        if self._throughput is not None:
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

    def _suggested(self, pull: _Pull, found: MessageRange) -> int:
        if not found.slices:
            return LEADER_ID
        position, _ = found.slices[-1]
        return self._suggestion.broker_id(pull.group, self._group.log.end_position - position)

    async def _answer_cold(self, pull: _Pull, found: MessageRange) -> RemotingCommand:
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
        except MQError as error:
            return refusal(pull.command, error)
        return self._answer(pull, found, body)

    async def _judge_cold(
        self, pull: _Pull, units: UnitRange, wants: PropertyFilter
    ) -> RemotingCommand:
        def read() -> MessageRange:
            return judge(self._group, units, pull.cold, wants)

        try:
            found = await self._executor.run(read, kind=COLD_READ_KIND)
        except MQError as error:
            if isinstance(error, DamagedMessageError):
                self._group.report_damage(error.position, error.size)
            return refusal(pull.command, error)
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
        if not settings.long_polling_enable:
            hold_ms = min(hold_ms, settings.short_polling_time_ms)
        if not leading and _goes_where_it_is_sent(command):
            # Without a pause one that takes this node for the leader would ask without end.
            hold_ms = max(hold_ms, settings.short_polling_time_ms)
        return hold_ms

    def _hold(self, pull: _Pull, hold_ms: int) -> bool:
        connection = pull.connection
        deadline = self._clock.monotonic() + hold_ms / 1000
        before = self._held.next_deadline
        if not self._held.hold((pull.topic, pull.queue_id), connection, deadline, pull):
            return False
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_close.append(self._closed)
        if before is None or deadline < before:
            self._deadline_moved.set()
        return True

    def _closed(self, connection: Connection) -> None:
        self._watched.discard(connection)
        self._held.drop_owner(connection)

    def _try_again(self, held: Held[_Pull]) -> None:
        pull = held.pull
        try:
            found, _ = self._find(pull, pull.scan_from)
        except MQError as error:
            self._held.release(held)
            pull.connection.reply(pull.command, refusal(pull.command, error))
            return
        if found.status is GetStatus.NO_MATCHED_MESSAGE:
            # Nothing for this one among the new messages: it goes on waiting behind them, or is
            # told to ask again where there are more of them than are looked at in one go.
            pull.scan_from = found.next_begin_offset
            if found.next_begin_offset >= found.max_offset:
                return
        if self._is_waiting(pull, found):
            return
        self._held.release(held)
        self._reply(pull, found)

    def _answer_held(self, held: Held[_Pull]) -> None:
        pull = held.pull
        try:
            found, _ = self._find(pull, pull.scan_from)
        except MQError as error:
            pull.connection.reply(pull.command, refusal(pull.command, error))
            return
        self._reply(pull, found)

    def _reply(self, pull: _Pull, found: MessageRange) -> None:
        try:
            response = self._answer_unless_stale(pull, found)
        except MQError as error:
            response = refusal(pull.command, error)
        if isinstance(response, RemotingCommand):
            pull.connection.reply(pull.command, response)


def _goes_where_it_is_sent(command: RemotingCommand) -> bool:
    """Tell a client of RocketMQ, which follows `suggestWhichBrokerId`, from our own SDK.

    The SDK takes "no matching message" for the end of a backlog, and a refusal for what it is: it
    asks whoever leads. It speaks CBOR to us, and nobody else does.
    """
    return command.serialize is not SerializeType.CBOR


def _lowered(limits: ReadLimits, header: PullMessageHeader) -> ReadLimits:
    messages = max(1, min(limits.max_messages, header.max_msg_nums))
    size = limits.max_bytes
    if header.max_msg_bytes is not None and header.max_msg_bytes > 0:
        size = min(size, header.max_msg_bytes)
    return ReadLimits(messages, size)
