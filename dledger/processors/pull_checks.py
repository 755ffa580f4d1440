"""Which pulls are admitted: may the group consume, is there such a queue, and what filters it.

Spec: docs/internals/protocol/remoting.md, section 8.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from dledger.broker_settings import BrokerSettings, ReadLimits
from dledger.filters.property_filter import PropertyFilter
from dledger.group_api import BrokerGroup
from dledger.processors.answers import RefusedError, not_leader
from dledger.processors.client_table import (
    ClientTable,
    ConsumerGroup,
    TagCodes,
    is_tag_type,
    parse_tags,
)
from dledger.processors.locks import check_lock_token
from dledger.processors.property_filters import PropertyFilters
from dledger.processors.request_checks import check_group_name
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import KnownGroups, TopicView
from dledger.services.queue_locks import QueueLocks
from dledger.state.configs import PERM_READ, SubscriptionGroupConfig
from remoting.access.gate import limited_account
from remoting.connection import Connection
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from remoting.protocol.headers import PullMessageHeader
from remoting.protocol.outcome import Condition

FLAG_COMMIT_OFFSET = 1
FLAG_SUSPEND = 2
FLAG_SUBSCRIPTION = 4
FLAG_CLASS_FILTER = 8


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


class PullChecks:
    """Admits pulls, and commits the offsets that they carry."""

    def __init__(
        self,
        group: BrokerGroup,
        settings: BrokerSettings,
        topics: TopicView,
        clients: ClientTable[Connection],
        filters: PropertyFilters,
        offsets: OffsetCommits,
        locks: QueueLocks,
    ) -> None:
        self._group = group
        self._settings = settings
        self._topics = topics
        self._clients = clients
        self._filters = filters
        self._offsets = offsets
        self._locks = locks
        self._known_groups = KnownGroups(group, topics)

    def admit(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageHeader,
        leading: bool,
    ) -> Pull:
        """Return the pull that a request asks for.

        Args:
            leading: Whether this node leads.
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
        consumers = self._check_group(group_name)
        self._check_queue(topic, queue_id, leading)
        codes, wants = self._wanted(header)
        if leading and self._topics.subscription_group(group_name) is None:
            self._known_groups.make_known(group_name, limited_account(connection))
        shows_token = check_lock_token(self._locks, command, (group_name, topic, queue_id))
        if header.sys_flag & FLAG_COMMIT_OFFSET and header.commit_offset >= 0 and leading:
            self._offsets.check_room(group_name, topic, limited_account(connection))
            commit = (group_name, topic, queue_id, header.commit_offset)
            if shows_token:
                self._offsets.commit_now(*commit, lambda _: None)
            else:
                self._offsets.commit(*commit)
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

    def _check_group(self, group_name: str) -> SubscriptionGroupConfig:
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
        """Check that there is such a queue; a follower may not have applied its topic yet."""
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
        """Return the filter: hashes of tags, or an expression over properties, or neither."""
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
