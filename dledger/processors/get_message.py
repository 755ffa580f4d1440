"""Which pulls are admitted, and which messages they get.

The SQL92 expression of a pull is the request's own, the group's, or those of its retries. It is
compiled when a pull first uses it: what a client can make a broker do with one request stays small.

A worker thread may touch old pages: `find_messages` reads the consume queue and decides,
`MessageRange.join` touches the log. With a filter over properties, which has to touch the log to
decide, `read_units` and `judge` are the two halves of `find_messages`.

Spec: docs/internals/protocol/semantics.md, section 7; docs/internals/protocol/remoting.md, sections
8.1 and 8.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from dledger.commitlog.queue_unit import Units
from dledger.filters.errors import ExpressionIllegalError
from dledger.filters.expiry import LivingFilter, expires
from dledger.filters.property_filter import (
    Expression,
    ExpressionCache,
    PropertyFilter,
    RetryFilter,
    scan,
)
from dledger.group_api import BrokerGroup
from dledger.processors.answers import RefusedError, bad_request, check_group_name, not_leader
from dledger.processors.client_table import (
    SETTLE_S,
    TAG_EXPRESSION,
    ClientTable,
    ConsumerGroup,
    Subscription,
    TagCodes,
    is_tag_type,
    parse_tags,
)
from dledger.processors.locks import check_lock_token
from dledger.remoting.access.gate import limited_account
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import PullMessageHeader
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.own_fields import WITH_EXPIRED_FIELD
from dledger.remoting.protocol.topic_names import RETRY_PREFIX, is_of_copies
from dledger.remoting.seams import Clock
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import KnownGroups, TopicView
from dledger.services.queue_locks import QueueLocks
from dledger.settings.parts import BrokerSettings, ReadLimits
from dledger.state.topics import PERM_READ, SubscriptionGroupConfig, is_secret

# ---------------------------------------------------------------------------------- the expression


SQL92: Final = "SQL92"

MAX_RETRY_EXPRESSIONS: Final = 32
"""Topics of one group whose retries are matched again; those of further ones pass as they did."""


class PropertyFilters:
    """Finds and compiles expressions."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._cache = ExpressionCache()

    def expression(self, kind: str | None, text: str | None) -> Expression:
        """Return the expression that a client names.

        Raises RefusedError: another language than SQL92, or filtering by properties is switched
        off; or, with code 23, *text* is no expression.
        """
        if kind != SQL92 or not self._settings.broker.enable_property_filter:
            raise bad_request(f"The broker does not support consumer to filter message by {kind}")
        try:
            return self._cache.get(text or "")
        except ExpressionIllegalError as error:
            raise RefusedError(
                Condition.SUBSCRIPTION_ILLEGAL, f"parse the consumer's subscription failed: {error}"
            ) from error

    def of_subscription(self, subscription: Subscription) -> Expression:
        """Return the expression of a heartbeat's subscription; raises as `expression`."""
        return self.expression(subscription.data.expression_type, subscription.data.sub_string)

    def of_retries(self, group: ConsumerGroup[Connection], topic: str) -> PropertyFilter | None:
        """Return what judges messages of *topic* if that is the group's retry topic.

        Returns:
            None where retries are not judged: no retry topic, or no topic is subscribed by SQL92.
        """
        settings = self._settings
        if not topic.startswith(RETRY_PREFIX):
            return None
        if not (settings.broker.enable_property_filter and settings.broker.filter_support_retry):
            return None
        expressions: dict[str, Expression] = {}
        for name, subscription in group.subscriptions.items():
            if subscription.is_tag_type or len(expressions) == MAX_RETRY_EXPRESSIONS:
                continue
            try:
                expressions[name] = self.of_subscription(subscription)
            except RefusedError:
                continue  # no pull of that topic can use it, so nothing of it was judged before
        return RetryFilter(expressions) if expressions else None


# ---------------------------------------------------------------------------------- the messages


MIN_SCAN_UNITS = 800
"""Units read in one pull when a filter matches nothing: 16,000 bytes of consume queue."""

SCAN_FACTOR = 20
"""Units read for each requested message, when that is more."""


class GetStatus(StrEnum):
    """RocketMQ's GetMessageStatus: the remark of a pull answer."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"


@dataclass(slots=True)
class MessageRange:
    """What a pull found. ``slices`` are (position, bytes), neighbours in the log merged."""

    status: GetStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    slices: Sequence[tuple[int, int]] = ()
    count: int = 0

    def join(self, group: BrokerGroup) -> Buffer:
        """Return the records back to back: a view of the segment when they are one piece."""
        read = group.log.read
        if len(self.slices) == 1:
            return read(*self.slices[0])
        return b"".join([read(position, size) for position, size in self.slices])

    def join_copied(self, group: BrokerGroup) -> bytes:
        """Return the records back to back, every page touched."""
        read = group.log.read
        return b"".join([read(position, size) for position, size in self.slices])


def find_messages(
    group: BrokerGroup,
    topic: str,
    queue_id: int,
    offset: int,
    limits: ReadLimits,
    codes: npt.NDArray[np.int64] | None,
) -> MessageRange:
    """Return what a pull from *offset* gets, without touching the log."""
    wanted = max(1, limits.max_messages)
    most = wanted if codes is None else max(MIN_SCAN_UNITS, SCAN_FACTOR * wanted)
    found = read_units(group, topic, queue_id, offset, most)
    if isinstance(found, MessageRange):
        return found
    units, next_offset = found.units, offset + len(found.units)
    if codes is None:
        return _chosen(found, None, next_offset, limits)
    if len(codes) == 1:
        matching = np.flatnonzero(units["tags_code"] == codes[0])
    else:
        matching = np.flatnonzero(np.isin(units["tags_code"], codes))
    if len(matching) > wanted:
        matching = matching[:wanted]
        next_offset = offset + int(matching[-1]) + 1
    return _chosen(found, matching, next_offset, limits)


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units of a queue from one offset on, at least one, and the bounds of the queue."""

    units: Units
    offset: int
    min_offset: int
    max_offset: int


def read_units(
    group: BrokerGroup, topic: str, queue_id: int, offset: int, most: int
) -> UnitRange | MessageRange:
    """Return up to *most* units from *offset* on, or what a pull gets where there are none."""
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or not bounds.max_offset:
        return MessageRange(GetStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
    low, high = bounds.min_offset, bounds.max_offset
    if offset < low:
        return MessageRange(GetStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return MessageRange(GetStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
    if offset > high:
        return MessageRange(GetStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    units = group.queues.queue(topic, queue_id).read(offset, min(high - offset, most))
    if not len(units):
        return MessageRange(GetStatus.OFFSET_FOUND_NULL, offset, low, high)
    return UnitRange(units, offset, low, high)


def judge(
    group: BrokerGroup, found: UnitRange, limits: ReadLimits, wants: PropertyFilter
) -> MessageRange:
    """Return what of *found* a pull gets; touches the log.

    Raises DamagedMessageError, OffsetOutOfRangeError, CorruptEntryError: as `scan`.
    """
    matching = scan(group.log.read, found.units, max(1, limits.max_messages), wants)
    places = np.array(matching.places, np.int64)
    return _chosen(found, places, found.offset + matching.scanned, limits)


def _chosen(
    found: UnitRange, matching: npt.NDArray[np.int64] | None, next_offset: int, limits: ReadLimits
) -> MessageRange:
    """Return as many of the units at *matching*, or of all, as the limits allow."""
    offset, low, high = found.offset, found.min_offset, found.max_offset
    if matching is not None and not len(matching):
        return MessageRange(GetStatus.NO_MATCHED_MESSAGE, next_offset, low, high)
    units = found.units if matching is None else found.units[matching]
    sizes = units["size"].astype(np.int64)
    ends = sizes.cumsum()
    count = len(units)
    if int(ends[-1]) > limits.max_bytes:
        count = max(1, int(ends.searchsorted(limits.max_bytes, side="right")))
        last = count - 1 if matching is None else int(matching[count - 1])
        next_offset = offset + last + 1
    positions = units["phy_offset"].astype(np.int64)
    # In one piece as long as a record begins where the one before ended.
    gaps = np.flatnonzero(positions[1:count] != positions[: count - 1] + sizes[: count - 1])
    slices: list[tuple[int, int]] = []
    start = 0
    for gap in (*gaps.tolist(), count - 1):
        before = int(ends[start - 1]) if start else 0
        slices.append((int(positions[start]), int(ends[gap]) - before))
        start = gap + 1
    return MessageRange(GetStatus.FOUND, next_offset, low, high, slices, count)


FLAG_COMMIT_OFFSET = 1
FLAG_SUSPEND = 2
FLAG_SUBSCRIPTION = 4
FLAG_CLASS_FILTER = 8


def _asks_for_expired(command: RemotingCommand) -> bool:
    return command.ext.get(WITH_EXPIRED_FIELD) in (True, "true")


@dataclass(slots=True)
class Pull:
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
    # While it is held: where the next read begins, behind messages that did not match.
    scan_from: int


@dataclass(eq=False, repr=False)
class PullChecks:
    """Admits pulls, and commits the offsets that they carry."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _topics: TopicView
    _clients: ClientTable[Connection]
    _filters: PropertyFilters
    _offsets: OffsetCommits
    _locks: QueueLocks
    _clock: Clock

    def __post_init__(self) -> None:
        self._known_groups = KnownGroups(self._group, self._topics)
        self._heartbeats_came_s = self._clock.monotonic() + SETTLE_S

    def admit(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageHeader,
        leading: bool,
    ) -> Pull:
        """Return the pull that a request asks for.

        Raises:
            NotLeaderError: Followers serve no pulls here.
            RefusedError: The group may not read this queue, its lock token is stale, or the filter
                is unknown or wrong; no offset was committed.
            TableFullError: The offset that the pull carries is of one topic too many.
        """
        settings = self._settings
        if not leading and not settings.broker.slave_read_enable:
            raise not_leader(self._group)
        if not settings.broker.broker_permission & PERM_READ:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"the broker[{settings.address}] pulling message is forbidden",
            )
        group_name, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        consumers = self.check_group(group_name)
        self.check_queue(topic, queue_id, leading)
        self._offsets.check_slot((group_name, topic, queue_id))
        codes, wants = self.wanted(header)
        if not _asks_for_expired(command):
            codes, wants = self.living(topic, codes, wants)
        if leading:
            self.make_known(connection, group_name)
        shows_token = check_lock_token(self._locks, command, (group_name, topic, queue_id))
        if header.sys_flag & FLAG_COMMIT_OFFSET and header.commit_offset >= 0 and leading:
            self._offsets.check_room(group_name, topic, limited_account(connection))
            slot = (group_name, topic, queue_id)
            if shows_token:
                self._offsets.commit_now([(slot, header.commit_offset)], lambda _: None)
            else:
                self._offsets.commit(*slot, header.commit_offset)
        hot, cold = self._limits(command.code, header)
        return Pull(
            connection,
            command,
            consumers,
            topic,
            queue_id,
            header.queue_offset,
            hot,
            cold,
            codes,
            wants,
            header.queue_offset,
        )

    def make_known(self, connection: Connection, group_name: str) -> None:
        """Make a consumer group that is not known; for the leader."""
        if self._topics.subscription_group(group_name) is None:
            self._known_groups.make_known(group_name, limited_account(connection))

    def check_group(self, group_name: str) -> SubscriptionGroupConfig:
        """Return a group's configuration, as it would be made where it is unknown.

        Raises RefusedError: it may not consume.
        """
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

    def check_queue(self, topic: str, queue_id: int, leading: bool) -> None:
        """Check that there is such a queue; a follower may not have applied its topic yet.

        Raises RefusedError: there is none, or it may not be read.
        """
        config = self._topics.config(topic)
        if config is None:
            if not leading:
                return
            raise RefusedError(
                Condition.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!"
            )
        if not config.readable or is_secret(topic, queue_id):
            raise RefusedError(
                Condition.NO_PERMISSION, f"the topic[{topic}] pulling message is forbidden"
            )
        if not 0 <= queue_id < config.read_queue_nums and leading:
            raise RefusedError(
                Condition.INVALID_QUEUE,
                f"queueId[{queue_id}] is illegal, topic:[{topic}] has "
                f"{config.read_queue_nums} read queues",
            )

    def wanted(self, header: PullMessageHeader) -> tuple[TagCodes | None, PropertyFilter | None]:
        """Return the filter: hashes of tags, or an expression over properties, or neither.

        Raises RefusedError: it is unknown, or wrong.
        """
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
        config = self._topics.subscription_group_or_default(group_name)
        if (
            group is not None
            and group.is_broadcasting
            and not (config is None or config.consume_broadcast_enable)
        ):
            raise RefusedError(
                Condition.NO_PERMISSION, f"the consumer group[{group_name}] may not broadcast"
            )
        subscription = None if group is None else group.subscriptions.get(topic)
        if group is None or subscription is None:
            if header.expression_type == TAG_EXPRESSION and (
                group is None or self._clock.monotonic() < self._heartbeats_came_s
            ):
                # Until the next heartbeat; clients look for their tags themselves, as two may share
                # a hash.
                return None, None
            unknown = "group info" if group is None else "subscription"
            of_topic = "" if group is None else f", topic: {topic}"
            raise RefusedError(
                Condition.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's {unknown} not exist, group: {group_name}{of_topic}",
            )
        if subscription.data.sub_version < header.sub_version:
            raise RefusedError(
                Condition.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription not latest, group: {group_name}, topic: {topic}",
            )
        if not subscription.is_tag_type:
            return None, self._filters.of_subscription(subscription)
        return self._with_retries(subscription.codes, group, topic)

    def look_for_expired(self, pull: Pull) -> None:
        """Let a held pull pass over what has expired: its topic may have such messages since."""
        if not isinstance(pull.wants, LivingFilter) and not _asks_for_expired(pull.command):
            pull.codes, pull.wants = self.living(pull.topic, pull.codes, pull.wants)

    def living(
        self, topic: str, codes: TagCodes | None, wants: PropertyFilter | None
    ) -> tuple[TagCodes | None, PropertyFilter | None]:
        """Return the filter, and that messages have not expired where *topic* may have such."""
        config = self._topics.config(topic)
        if config is None or not config.attributes or not expires(config.attributes):
            return codes, wants
        if is_of_copies(topic):
            return codes, wants
        return None, LivingFilter(self._now_ms, None if codes is None else codes.tolist(), wants)

    def _now_ms(self) -> int:
        # Never before the newest message: a clock that is behind lets messages expire late only.
        return max(self._clock.wall_ms(), self._group.state.last_store_time_ms)

    def _with_retries(
        self, codes: TagCodes | None, group: ConsumerGroup[Connection] | None, topic: str
    ) -> tuple[TagCodes | None, PropertyFilter | None]:
        if codes is not None or group is None:
            return codes, None
        return None, self._filters.of_retries(group, topic)

    def _limits(self, code: int, header: PullMessageHeader) -> tuple[ReadLimits, ReadLimits]:
        settings = self._settings
        if code == RequestCode.BULK_PULL:
            bulk = settings.bulk_pull_limits
            limits = _lowered(bulk.max_messages, bulk.max_bytes, header)
            return limits, limits
        store = settings.store
        return (
            _lowered(
                store.max_transfer_count_in_memory, store.max_transfer_bytes_in_memory, header
            ),
            _lowered(store.max_transfer_count_in_disk, store.max_transfer_bytes_in_disk, header),
        )


def _lowered(max_messages: int, max_bytes: int, header: PullMessageHeader) -> ReadLimits:
    """Return the broker's limits, or the request's where these are lower."""
    messages = max(1, min(max_messages, header.max_msg_nums))
    if header.max_msg_bytes is not None and header.max_msg_bytes > 0:
        max_bytes = min(max_bytes, header.max_msg_bytes)
    return ReadLimits(messages, max_bytes)
