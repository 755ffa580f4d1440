"""Where clients may send: permission, topic and queue, checked alike for every kind of send.

A topic that is missing is made by the entry that holds its first message.

Spec: docs/internals/protocol/semantics.md, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.properties import MAX_CLIENT_PROPERTIES_BYTES, leaves_space
from dledger.filters.expiry import marked
from dledger.group_api import BrokerGroup, OnDone
from dledger.processors.answers import RefusedError, check_sendable
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.seams import Rng
from dledger.services.limits import DiskSpace
from dledger.services.pending_configs import TopicView, noting
from dledger.settings.parts import BrokerSettings
from dledger.state.state_record import StateRecord, TopicsChange, behind_heads, state_record
from dledger.state.topics import (
    PERM_READ,
    PERM_WRITE,
    SubscriptionGroupConfig,
    TopicConfig,
    dlq_topic,
    retry_topic,
)

MAX_RECONSUME_TIMES_VERSION = 121
"""3.4.9: from here on a client's own maxReconsumeTimes is honoured."""


@dataclass(eq=False, repr=False)
class Destinations:
    """Checks where a message may go, and proposes it there."""

    _group: BrokerGroup
    _topics: TopicView
    _settings: BrokerSettings
    space: DiskSpace
    _rng: Rng

    # ------------------------------------------------------------------------------ checks

    def check(
        self,
        topic: str,
        queue_id: int,
        default_topic: str | None = None,
        default_queue_nums: int = 0,
        account: str = "",
        planned: TopicConfig | None = None,
    ) -> tuple[TopicConfig, TopicConfig | None]:
        """Check that a client may send to this broker, and to a queue of *topic*.

        Args:
            queue_id: Negative: any queue.
            default_topic: What a missing topic inherits from; None: it is not made.
            account: A topic that is made counts as this one's.
            planned: The topic as this same request makes it already.
        Returns:
            The topic, and again if this message makes it, else None.
        Raises:
            RefusedError: The broker accepts no messages, the name is bad, or the topic is missing,
                not writeable, or has no such queue; nothing was stored.
            TableFullError: As `TopicView.to_create`.
        """
        if not self._settings.broker.broker_permission & PERM_WRITE:
            check_accepts(self._settings)
        check_sendable(topic)
        config = planned or self._topics.config(topic)
        create: TopicConfig | None = None
        if config is None and default_topic is not None:
            config = create = self._topics.to_create(
                topic, default_topic, default_queue_nums, account
            )
        if config is None:
            raise RefusedError(
                Condition.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!"
            )
        if not config.writeable:
            raise RefusedError(
                Condition.NO_PERMISSION, f"the topic[{topic}] sending message is forbidden"
            )
        if queue_id >= config.queue_nums:
            raise RefusedError(
                Condition.INVALID_QUEUE,
                f"request queueId[{queue_id}] is illegal, {topic} has {config.queue_nums} queues",
            )
        return config, create

    def any_queue(self, config: TopicConfig) -> int:
        """Return a queue of a topic, by chance."""
        return self._rng.randrange(max(1, config.write_queue_nums))

    def expiring(self, topic: str, create: TopicConfig | None) -> TopicConfig | None:
        """Return how a topic has to be put so that its reads look for messages that expired.

        *create*: the topic as this message makes it already; returned where nothing is to be added
        to it.
        """
        config = create or self._topics.config(topic)
        return create if config is None else marked(config) or create

    # ------------------------------------------------------------------------------ retries

    def consumer_group(self, group: str) -> SubscriptionGroupConfig:
        """Return the configuration of a consumer group, as it would be made where it is unknown.

        Raises RefusedError: it is unknown and may not be made.
        """
        config = self._topics.subscription_group_or_default(group)
        if config is None:
            raise RefusedError(Condition.GROUP_NOT_EXIST, f"subscription group not exist, {group}")
        return config

    def retry_topic(self, group: str) -> tuple[str, TopicConfig | None]:
        """Return a group's retry topic, and its configuration if it has to be made.

        Raises:
            RefusedError: It is being deleted.
            TableFullError: As `TopicView.retry_topic_to_create`.
        """
        topic = retry_topic(group)
        if self._topics.is_deleting(topic):
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{topic}] is being deleted")
        change = self._topics.retry_topic_to_create(group)
        return topic, None if change is None else change.put[0]

    def retry_queue(self, topic: str, queue_id: int) -> int:
        """Return the queue of a retry topic that a client means; negative: any."""
        config = self._topics.config(topic)
        return -1 if config is None or queue_id >= config.queue_nums else queue_id

    def dead_letter_topic(self, group: str) -> tuple[str, TopicConfig | None]:
        """Return a group's dead letter topic, and its configuration if it has to be made.

        Raises:
            RefusedError: It is being deleted.
            TableFullError: There are as many topics as may be, and the group is not known either.
        """
        topic = dlq_topic(group)
        if self._topics.config(topic) is not None:
            return topic, None
        if self._topics.is_deleting(topic):
            raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{topic}] is being deleted")
        if self._topics.subscription_group(group) is None:
            self._topics.check_room()
        return topic, TopicConfig(topic, 1, 1, PERM_READ | PERM_WRITE)

    # ------------------------------------------------------------------------------ proposals

    def propose(
        self,
        create: TopicConfig | None,
        records: Sequence[bytes],
        target: Run,
        on_done: OnDone,
        *,
        heads: Sequence[StateRecord] = (),
        is_applied: bool = True,
        settled: Sequence[OnDone] = (),
    ) -> None:
        """Propose *records*, all for *target*, behind the topic *create* if there is one to make.

        Args:
            heads: Stand right before *records*.
            is_applied, settled: As `BrokerGroup.propose`; a topic that is made is always applied.
        Raises:
            MQError: What `BrokerGroup.propose` raises; nothing was stored, *on_done* is not called.
        """
        change = None if create is None else TopicsChange(put=(create,))
        if change is not None:
            heads = [state_record(change), *heads]
        batch = behind_heads(heads, RecordBatch.joined(records, (target,)))
        if change is None:
            self._group.propose(batch, on_done, is_applied=is_applied, settled=settled)
        else:
            with noting((self._topics.pending, change)) as noted:
                noted += settled
                self._group.propose(batch, on_done, settled=noted)


def check_accepts(settings: BrokerSettings) -> None:
    """Check that the broker accepts messages.

    Raises RefusedError: it does not; nothing was stored.
    """
    if not settings.broker.broker_permission & PERM_WRITE:
        raise RefusedError(
            Condition.NO_PERMISSION, f"the broker[{settings.address}] sending message is forbidden"
        )


def retries_allowed(config: SubscriptionGroupConfig, version: int, asked: int | None) -> int:
    """Return how often a message is consumed again; a client's own number needs its *version*."""
    if version >= MAX_RECONSUME_TIMES_VERSION and asked is not None:
        return asked
    return config.retry_max_times


def body_refused(size_bytes: int, max_bytes: int) -> RefusedError:
    """Return the refusal of a body that is empty or larger than *max_bytes*."""
    if not size_bytes:
        return RefusedError(Condition.MESSAGE_ILLEGAL, "the message body is empty")
    return RefusedError(
        Condition.MESSAGE_ILLEGAL, f"the message has {size_bytes} bytes, at most {max_bytes}"
    )


def check_room(properties: bytes) -> None:
    """Check that a message's properties leave the space that the broker needs later.

    Raises RefusedError: they are too long; nothing was stored.
    """
    if len(properties) > MAX_CLIENT_PROPERTIES_BYTES and not leaves_space(properties):
        raise properties_too_long(len(properties))


def properties_too_long(size_bytes: int) -> RefusedError:
    """Return the refusal of properties of that size."""
    return RefusedError(
        Condition.MESSAGE_ILLEGAL,
        f"the properties have {size_bytes} bytes, at most {MAX_CLIENT_PROPERTIES_BYTES}: the rest "
        "of a record's space for them is the broker's; nothing was stored",
    )
