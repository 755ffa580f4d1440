"""Topics and consumer groups: configurations, names with a meaning, those a broker is born with.

Configurations are apart from the wire's TopicConfig on purpose: what is in the log must not change
when a JSON dialect does.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC, reply_topic
from dledger.remoting.protocol.topic_names import (
    AUTO_CREATE_TOPIC_KEY_TOPIC,
    BENCHMARK_TOPIC,
    DLQ_PREFIX,
    HALF_TOPIC,
    OFFSET_MOVED_EVENT,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    SELF_TEST_TOPIC,
    STATE_TOPIC,
    SYSTEM_GROUPS,
    is_of_copies,
)
from dledger.state.table import Form

# ---------------------------------------------------------------------------------- configurations


PERM_READ = 4
PERM_WRITE = 2
PERM_INHERIT = 1


class TopicConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Queues and permission of one topic."""

    topic: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = PERM_READ | PERM_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def queue_nums(self) -> int:
        """How many queue ids a request may name."""
        return max(self.read_queue_nums, self.write_queue_nums)

    @property
    def readable(self) -> bool:
        """Whether consumers may pull."""
        return bool(self.perm & PERM_READ)

    @property
    def writeable(self) -> bool:
        """Whether producers may send."""
        return bool(self.perm & PERM_WRITE)

    @property
    def inherited(self) -> bool:
        """Whether missing topics may be created after this one."""
        return bool(self.perm & PERM_INHERIT)


class SubscriptionGroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the broker knows about a consumer group before it meets one of its members."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)
    retry_policy: Mapping[str, Any] | None = None
    """Kept for queries, and for proxies: their push consumers change invisible times by it."""


TOPICS: Final = Form[str, TopicConfig]("topics", str, TopicConfig)
SUBSCRIPTION_GROUPS: Final = Form[str, SubscriptionGroupConfig](
    "subscription_groups", str, SubscriptionGroupConfig
)
TOPIC_BEGINS: Final = Form[str, int]("topic_begins", str, int)
GROUP_BEGINS: Final = Form[str, int]("group_begins", str, int)
"""Where in the log the present topic, or group, of a name was made."""

# ---------------------------------------------------------------------------------- names


DELAY_LEVELS = 18

# Queues of the state topic.
TOPICS_QUEUE = 0
SUBSCRIPTION_GROUPS_QUEUE = 1
CONSUMER_OFFSETS_QUEUE = 2
DELAY_PROGRESS_QUEUE = 3
FLOOR_QUEUE = 4
TRANSACTIONS_QUEUE = 5
POP_QUEUE = 6
QUEUE_LOCKS_QUEUE = 8
PRODUCERS_OPENED_QUEUE = 10
PRODUCER_SENDS_QUEUE = 11
TIMERS_QUEUE = 12
QUEUE_FLOORS_QUEUE = 13
ACCESS_QUEUE = 14
STATE_QUEUE_NUMS = 15


def is_secret(topic: str, queue_id: int) -> bool:
    """Return whether no client may read a queue: the one with the secrets of accounts."""
    return queue_id == ACCESS_QUEUE and topic == STATE_TOPIC


MAX_TOPIC_CHARS = 127
MAX_SPECIAL_TOPIC_CHARS = 255
MAX_GROUP_CHARS = 255

CHECKED_NAMES_MAX = 65_536
"""Names remembered as checked, so that the hot path checks each once."""

_VALID = re.compile(r"[%|a-zA-Z0-9_-]+").fullmatch


@lru_cache(CHECKED_NAMES_MAX)
def topic_problem(topic: str) -> str | None:
    """Return what is wrong with a topic's name, None if nothing is: it becomes a folder's name."""
    most = MAX_SPECIAL_TOPIC_CHARS if is_of_copies(topic) else MAX_TOPIC_CHARS
    return name_problem(topic, "topic", most)


def name_problem(name: str, what: str, limit: int) -> str | None:
    """Return what is wrong with the name of *what* that may have *limit* characters."""
    if not name:
        return f"the specified {what} is blank"
    if len(name) > limit:
        return f"the specified {what} is longer than {limit} characters"
    if _VALID(name) is None:
        return (
            f"the specified {what}[{name}] contains illegal characters, allowing only "
            "^[%|a-zA-Z0-9_-]+$"
        )
    return None


def retry_topic(group: str) -> str:
    """Return the topic that holds messages *group* has to consume again."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """Return the topic that holds messages *group* gave up."""
    return DLQ_PREFIX + group


def builtin_topics(
    cluster_name: str,
    broker_name: str,
    *,
    default_topic_queue_nums: int = 8,
    delay_levels: int = DELAY_LEVELS,
    auto_create_topic_enable: bool = True,
    trace_topic: str = "",
) -> dict[str, TopicConfig]:
    """Return the topics that exist without an entry in the log.

    Args:
        trace_topic: Where message trace goes to; empty: there is no such topic from the start.

    Names depend on the group's own configuration only, so every replica has the same.
    """
    read_write = PERM_READ | PERM_WRITE
    inherit = read_write | PERM_INHERIT

    def config(topic: str, queues: int, perm: int = read_write) -> TopicConfig:
        return TopicConfig(topic, queues, queues, perm)

    topics = [
        config(SELF_TEST_TOPIC, 1),
        config(BENCHMARK_TOPIC, 1024),
        config(cluster_name, 16, inherit),
        config(broker_name, 1, inherit),
        config(OFFSET_MOVED_EVENT, 1),
        config(SCHEDULE_TOPIC, delay_levels),
        config(TIMER_TOPIC, 1),
        config(reply_topic(cluster_name), 1),
        config(HALF_TOPIC, 1),
        config(OP_HALF_TOPIC, 1),
        # Readable, so that the state can be inspected with any client; never writable.
        config(STATE_TOPIC, STATE_QUEUE_NUMS, PERM_READ),
    ]
    if auto_create_topic_enable:
        topics.append(config(AUTO_CREATE_TOPIC_KEY_TOPIC, default_topic_queue_nums, inherit))
    if trace_topic:
        topics.append(config(trace_topic, 1))
    return {topic.topic: topic for topic in topics}


def builtin_groups() -> dict[str, SubscriptionGroupConfig]:
    """Return the subscription groups that exist without an entry in the log."""
    return {name: SubscriptionGroupConfig(name) for name in SYSTEM_GROUPS}
