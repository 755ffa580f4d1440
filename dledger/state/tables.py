"""The tables that applied entries build up: everything a broker knows besides the messages.

A new replicated table is its form beside its rows, and one field of `StateTables`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Annotated, Any, Final

import msgspec

from dledger.commitlog.mark import Anchor
from dledger.remoting.protocol.topic_names import RETRY_PREFIX
from dledger.state.accounts import ACCOUNTS, AccountConfig
from dledger.state.pending_timers import PendingTimers
from dledger.state.pop import POPS, REQUEST_MODES, PopKey, PopRow, RequestMode
from dledger.state.producer_sessions import ProducerSessions
from dledger.state.queue_lock import QUEUE_LOCKS, LockKey, QueueLock
from dledger.state.table import Form, Table
from dledger.state.topics import (
    GROUP_BEGINS,
    SUBSCRIPTION_GROUPS,
    TOPIC_BEGINS,
    TOPICS,
    SubscriptionGroupConfig,
    TopicConfig,
)
from dledger.state.transactions import TransactionTable

QueueKey = tuple[str, int]
"""Topic and queue id."""

OffsetKey = tuple[str, str]
"""Consumer group and topic."""

TOPIC_CHANGES_KEPT: Final = 4_096
"""Newest changes of topics that are known one by one: a NameServer that knows an older table is
sent all topics."""


class QueueBounds(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Offsets of one consume queue: messages ``min_offset`` … ``max_offset - 1`` are there."""

    min_offset: int = 0
    max_offset: int = 0


CONSUMER_OFFSETS: Final = Form[OffsetKey, dict[int, int]](
    "consumer_offsets", OffsetKey, dict[int, int], copied=dict, names=(0, 1)
)
"""Committed offsets by queue id."""
DELAY_PROGRESS: Final = Form[int, int]("delay_progress", int, int)
QUEUES: Final = Form[QueueKey, QueueBounds]("queues", QueueKey, QueueBounds, copied=copy)
FIRST_POSITIONS: Final = Form[QueueKey, int](
    "first_positions", QueueKey, Annotated[int, msgspec.Meta(ge=0)], is_hint=True
)


@dataclass(slots=True)
class Counters:
    """What is no table, and small whatever there is."""

    floor: Anchor = field(default_factory=Anchor)
    """Where the kept log begins: what stands before it may be removed on any replica."""
    white_addresses: str = ""
    """From there no request needs a signature; patterns with ``,`` between them."""
    access_counter: int = 0
    """Changes of accounts and white addresses so far; 0: there never was one."""
    access_changed_ms: int = 0
    """Store time of the newest of them."""

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


@dataclass(slots=True)
class StateTables(Counters):
    """Applied state of one replica. Equal on all replicas that applied the same entries.

    Changed by `apply_entry` and `load` alone; everybody else reads. Built-in topics and groups
    come from the group's own settings and are overlaid by what the log has.
    """

    builtin_topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    builtin_groups: Mapping[str, SubscriptionGroupConfig] = field(default_factory=dict)

    topics: Table[str, TopicConfig] = field(default_factory=TOPICS.table)
    subscription_groups: Table[str, SubscriptionGroupConfig] = field(
        default_factory=SUBSCRIPTION_GROUPS.table
    )
    topic_begins: Table[str, int] = field(default_factory=TOPIC_BEGINS.table)
    group_begins: Table[str, int] = field(default_factory=GROUP_BEGINS.table)
    consumer_offsets: Table[OffsetKey, dict[int, int]] = field(
        default_factory=CONSUMER_OFFSETS.table
    )
    delay_progress: Table[int, int] = field(default_factory=DELAY_PROGRESS.table)
    timers: PendingTimers = field(default_factory=PendingTimers)
    queues: Table[QueueKey, QueueBounds] = field(default_factory=QUEUES.table)
    first_positions: Table[QueueKey, int] = field(
        default_factory=FIRST_POSITIONS.table, compare=False, repr=False
    )
    """No message of the queue that is kept stands before it in the log; 0: not known."""
    producers: ProducerSessions = field(default_factory=ProducerSessions)
    transactions: TransactionTable = field(default_factory=TransactionTable)
    queue_locks: Table[LockKey, QueueLock] = field(default_factory=QUEUE_LOCKS.table)
    """Grants that stand: queue by queue, its holder and the token."""
    pops: Table[PopKey, PopRow] = field(default_factory=POPS.table)
    """Messages that are out by POP."""
    request_modes: Table[tuple[str, str], RequestMode] = field(default_factory=REQUEST_MODES.table)
    """By topic and consumer group."""
    accounts: Table[str, AccountConfig] = field(default_factory=ACCOUNTS.table)
    """Accounts by access key; those of a member's file are not among them."""

    tables: tuple[Table[Any, Any], ...] = field(init=False, compare=False, repr=False)
    """All tables, those in the fields of fields too."""

    queues_of: dict[str, dict[int, QueueBounds]] = field(init=False, compare=False, repr=False)
    """The same bounds by topic; no topic without a queue."""

    topics_with: dict[str, dict[str, None]] = field(init=False, compare=False, repr=False)
    """Attribute → topics that have it, in the order they got it."""

    topic_changes: dict[str, int] = field(init=False, compare=False, repr=False)
    """Topic → `topics_counter` at its newest change, in the order of these changes."""
    topic_changes_from: int = field(init=False, compare=False, repr=False)
    """`topics_counter` behind which every change is in `topic_changes`."""

    by_position: list[tuple[int, str, int]] = field(init=False, compare=False, repr=False)
    """A heap of first positions, topics and queue ids; an entry whose queue has another first
    position by now means nothing."""

    def __post_init__(self) -> None:
        self.tables = tuple(_tables_in(self))
        self.index()

    @property
    def changed_count(self) -> int:
        """How many rows changed since the tables were last copied."""
        return sum(len(table.changed) for table in self.tables)

    def index(self) -> None:
        """Make what is found from the rows, after they were loaded."""
        self.timers.count()
        self.queues_of = {}
        self.topic_changes, self.topic_changes_from = {}, self.topics_counter
        self.topics_with = {}
        for name, config in self.topics.items():
            self._note_attributes(name, None, config)
        self.by_position = [
            (self.first_positions.get(key, 0), *key)
            for key, bounds in self.queues.items()
            if bounds.max_offset > bounds.min_offset
        ]
        heapify(self.by_position)
        for (topic, queue_id), bounds in self.queues.items():
            self.queues_of.setdefault(topic, {})[queue_id] = bounds

    def set_topic(self, name: str, config: TopicConfig | None, position: int) -> None:
        """Enter a topic; None removes it; for apply.

        *position*: where the log goes on behind the change.
        """
        old = self.topics.get(name)
        if config is None:
            self.topics.pop(name, None)
            self.topic_begins.pop(name, None)
        else:
            self.topics[name] = config
            if old is None:
                self.topic_begins[name] = position
        self._note_attributes(name, old, config)

    def _note_attributes(
        self, name: str, old: TopicConfig | None, config: TopicConfig | None
    ) -> None:
        before = old.attributes if old is not None else {}
        now = config.attributes if config is not None else {}
        for attribute in before.keys() - now.keys():
            self.topics_with[attribute].pop(name, None)
        for attribute in now:
            self.topics_with.setdefault(attribute, {})[name] = None

    def note_topics(self, names: Iterable[str]) -> None:
        """Note that these topics are as `topics_counter` counts now; for apply."""
        changes = self.topic_changes
        for name in names:
            changes.pop(name, None)
            changes[name] = self.topics_counter
        while len(changes) > TOPIC_CHANGES_KEPT:
            self.topic_changes_from = changes.pop(next(iter(changes)))

    def topics_since(self, counter: int) -> list[str] | None:
        """Return the topics that changed after *counter*, in no special order.

        None: that is too long ago, or a counter of another history.
        """
        if not self.topic_changes_from <= counter <= self.topics_counter:
            return None
        newest_first = reversed(self.topic_changes.items())
        return [name for name, _ in takewhile(lambda item: item[1] > counter, newest_first)]

    def add_queue(self, topic: str, queue_id: int) -> QueueBounds:
        """Enter an empty queue and return its bounds; for apply."""
        bounds = self.queues[topic, queue_id] = QueueBounds()
        self.queues_of.setdefault(topic, {})[queue_id] = bounds
        return bounds

    def set_first(self, topic: str, queue_id: int, position: int) -> None:
        """Note where the first kept message of a queue stands; for apply."""
        self.first_positions[topic, queue_id] = position
        heappush(self.by_position, (position, topic, queue_id))

    def first_position_of(self, count: int) -> int | None:
        """Return where the queue begins that comes after *count* others; None: there is none."""
        heap = self.by_position
        if len(heap) <= count:
            return None
        # The smallest entries of a heap hang together: only their children are looked at.
        border = [(heap[0], 0)]
        for _ in range(count):
            _, place = heappop(border)
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(border, (heap[child], child))
        return border[0][0][0]

    def take_before(self, position: int) -> Iterator[tuple[str, int, QueueBounds]]:
        """Yield the queues that may keep a message before *position*; for apply.

        Each is forgotten here until `set_first` enters it again.
        """
        heap = self.by_position
        while heap and heap[0][0] < position:
            first, topic, queue_id = heappop(heap)
            bounds = self.queues.get((topic, queue_id))
            if (
                bounds is not None
                and self.first_positions.get((topic, queue_id), 0) == first
                and bounds.min_offset < bounds.max_offset
            ):
                yield topic, queue_id, bounds

    def drop_queues(self, topic: str) -> None:
        """Remove all queues of *topic*; for apply."""
        for queue_id in self.queues_of.pop(topic, ()):
            del self.queues[topic, queue_id]
            self.first_positions.pop((topic, queue_id))

    def set_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Enter committed offsets by queue id; for apply."""
        pair = (group, topic)
        if pair not in self.consumer_offsets:
            self.consumer_offsets[pair] = {}
        self.consumer_offsets[pair].update(offsets)
        self.consumer_offsets.mark(pair)

    def become(self, other: StateTables) -> None:
        """Take over everything from *other*; every holder of these tables sees the new state."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def was_deleted_since(self, position: int, topic: str) -> bool:
        """Return whether the topic, or the group that it retries for, of that place is removed.

        There may be another of that name.
        """
        if topic not in self.builtin_topics and (
            topic not in self.topics or self.topic_begins.get(topic, 0) > position
        ):
            return True
        group = topic.removeprefix(RETRY_PREFIX)
        if group == topic or group in self.builtin_groups:
            return False
        return group not in self.subscription_groups or self.group_begins.get(group, 0) > position

    def topic_config(self, topic: str) -> TopicConfig | None:
        """Return a topic's configuration, or None when it does not exist."""
        return self.topics.get(topic) or self.builtin_topics.get(topic)

    def all_topics(self) -> Iterator[TopicConfig]:
        """Yield every topic once, built-in ones first."""
        for name, config in self.builtin_topics.items():
            if name not in self.topics:
                yield config
        yield from self.topics.values()

    @property
    def topics_count(self) -> int:
        """How many topics there are, built-in ones included."""
        return len(self.topics) + sum(name not in self.topics for name in self.builtin_topics)

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.tables))

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


def _tables_in(value: Any) -> Iterator[Table[Any, Any]]:
    for each in fields(value):
        part = getattr(value, each.name, None)
        if isinstance(part, Table):
            yield part
        elif is_dataclass(part):
            yield from _tables_in(part)
