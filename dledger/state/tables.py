"""The tables that applied entries build up: everything a broker knows besides the messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from commitlog.mark import Anchor
from dledger.state.pending_timers import PendingTimers
from dledger.state.producer_sessions import ProducerSessions
from dledger.state.queue_lock import LockKey, QueueLock
from dledger.state.subscription_group_config import SubscriptionGroupConfig
from dledger.state.topic_config import TopicConfig
from dledger.state.transactions import TransactionTable

QueueKey = tuple[str, int]
"""Topic and queue id."""

OffsetKey = tuple[str, str]
"""Consumer group and topic."""


@dataclass(slots=True)
class QueueBounds:
    """Offsets of one consume queue: messages ``min_offset`` … ``max_offset - 1`` are there."""

    min_offset: int = 0
    max_offset: int = 0


@dataclass(slots=True)
class StateTables:
    """Applied state of one replica. Equal on all replicas that applied the same entries.

    Changed by `apply_entry` and `load` alone; everybody else reads. Built-in topics and groups
    come from the group's own settings and are overlaid by what the log says.
    """

    builtin_topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    builtin_groups: Mapping[str, SubscriptionGroupConfig] = field(default_factory=dict)

    topics: dict[str, TopicConfig] = field(default_factory=dict)
    subscription_groups: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
    consumer_offsets: dict[OffsetKey, dict[int, int]] = field(default_factory=dict)
    delay_progress: dict[int, int] = field(default_factory=dict)
    timers: PendingTimers = field(default_factory=PendingTimers)
    queues: dict[QueueKey, QueueBounds] = field(default_factory=dict)
    producers: ProducerSessions = field(default_factory=ProducerSessions)
    transactions: TransactionTable = field(default_factory=TransactionTable)

    floor: Anchor = field(default_factory=Anchor)
    """Where the kept log begins: what stands before it may be gone on any replica."""

    queue_locks: dict[LockKey, QueueLock] = field(default_factory=dict)
    """Grants that stand: queue by queue, who holds it and with which token."""
    queue_locks_index: int = 0
    """Index of the newest applied change of them."""

    topics_counter: int = 0
    """Changes of the topic table so far: the counter of its DataVersion."""
    topics_changed_ms: int = 0
    """Store time of the newest of them."""

    members_index: int = 0
    """Index of the newest applied list of members; 0 when there was none."""
    members_body: bytes = b""
    """That list, encoded."""

    applied_index: int = 0
    applied_term: int = 0
    applied_chain: int = 0
    applied_end_position: int = 0
    last_store_time_ms: int = 0

    def become(self, other: StateTables) -> None:
        """Take over everything from *other*; whoever holds these tables sees the new state."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def topic_config(self, topic: str) -> TopicConfig | None:
        """Return a topic's configuration, or None when it does not exist."""
        return self.topics.get(topic) or self.builtin_topics.get(topic)

    def all_topics(self) -> Iterator[TopicConfig]:
        """Yield every topic once, built-in ones first."""
        for name, config in self.builtin_topics.items():
            if name not in self.topics:
                yield config
        yield from self.topics.values()

    def subscription_group(self, group: str) -> SubscriptionGroupConfig | None:
        """Return a consumer group's configuration, or None when it is unknown."""
        return self.subscription_groups.get(group) or self.builtin_groups.get(group)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset the next message of that queue will get."""
        bounds = self.queues.get((topic, queue_id))
        return bounds.max_offset if bounds is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first message still kept."""
        bounds = self.queues.get((topic, queue_id))
        return bounds.min_offset if bounds is not None else 0

    def consumer_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the committed offset, or None when there is none."""
        offsets = self.consumer_offsets.get((group, topic))
        return None if offsets is None else offsets.get(queue_id)
