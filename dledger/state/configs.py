"""The configuration of a topic, and of a consumer group, as the replicated state keeps it.

Apart from the wire's TopicConfig on purpose: what is in the log must not change when a JSON
dialect does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PERM_READ = 4
PERM_WRITE = 2
PERM_INHERIT = 1


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """Queues and permission of one topic."""

    topic: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = PERM_READ | PERM_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)

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

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record."""
        return {
            "topic": self.topic,
            "read_queue_nums": self.read_queue_nums,
            "write_queue_nums": self.write_queue_nums,
            "perm": self.perm,
            "topic_filter_type": self.topic_filter_type,
            "topic_sys_flag": self.topic_sys_flag,
            "order": self.order,
            "attributes": dict(self.attributes),
        }

    @classmethod
    def from_state(cls, value: dict[str, Any]) -> TopicConfig:
        """Read what `to_state` made."""
        return cls(**value)


@dataclass(frozen=True, slots=True)
class SubscriptionGroupConfig:
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
    attributes: Mapping[str, str] = field(default_factory=dict)
    retry_policy: Mapping[str, Any] | None = None
    """Kept for queries; RocketMQ's brokers follow it for POP consumers alone."""

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record."""
        state: dict[str, Any] = {
            "group_name": self.group_name,
            "consume_enable": self.consume_enable,
            "consume_from_min_enable": self.consume_from_min_enable,
            "consume_broadcast_enable": self.consume_broadcast_enable,
            "consume_message_orderly": self.consume_message_orderly,
            "retry_queue_nums": self.retry_queue_nums,
            "retry_max_times": self.retry_max_times,
            "broker_id": self.broker_id,
            "which_broker_when_consume_slowly": self.which_broker_when_consume_slowly,
            "notify_consumer_ids_changed_enable": self.notify_consumer_ids_changed_enable,
            "group_sys_flag": self.group_sys_flag,
            "consume_timeout_minute": self.consume_timeout_minute,
            "attributes": dict(self.attributes),
        }
        if self.retry_policy is not None:
            state["retry_policy"] = dict(self.retry_policy)
        return state

    @classmethod
    def from_state(cls, value: dict[str, Any]) -> SubscriptionGroupConfig:
        """Read what `to_state` made."""
        return cls(**value)
