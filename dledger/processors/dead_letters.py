"""When a consumer group gives a message up, and where it goes then.

Spec: semantics fact sheet, section 4.
"""

from __future__ import annotations

from dledger.processors.refusal import RefusedError
from dledger.services.pending_configs import TopicView
from dledger.state.names import dlq_topic
from dledger.state.subscription_group_config import SubscriptionGroupConfig
from dledger.state.topic_config import PERM_READ, PERM_WRITE, TopicConfig
from remoting.protocol.outcome import Condition

MAX_RECONSUME_TIMES_VERSION = 121
"""3.4.9: from here on a client's own maxReconsumeTimes is honoured."""


def consumer_group_of(topics: TopicView, group: str) -> SubscriptionGroupConfig:
    """Return the configuration of a consumer group, as it would be made where it is unknown.

    Raises:
        RefusedError: It is unknown and may not be made.
    """
    config = topics.subscription_group_or_default(group)
    if config is None:
        raise RefusedError(Condition.GROUP_NOT_EXIST, f"subscription group not exist, {group}")
    return config


def retries_allowed(config: SubscriptionGroupConfig, version: int, asked: int | None) -> int:
    """Return how often a message is consumed again; a client's own number needs its *version*."""
    if version >= MAX_RECONSUME_TIMES_VERSION and asked is not None:
        return asked
    return config.retry_max_times


def dead_letter_topic(topics: TopicView, group: str) -> tuple[str, TopicConfig | None]:
    """Return a group's dead letter topic, and its configuration if it has to be made.

    Raises:
        RefusedError: It is being deleted.
        TableFullError: There are as many topics as may be, and the group is not known either.
    """
    topic = dlq_topic(group)
    if topics.config(topic) is not None:
        return topic, None
    if topics.is_deleting(topic):
        raise RefusedError(Condition.TOPIC_NOT_EXIST, f"topic[{topic}] is being deleted")
    if topics.subscription_group(group) is None:
        topics.check_room()
    return topic, TopicConfig(topic, 1, 1, PERM_READ | PERM_WRITE)
