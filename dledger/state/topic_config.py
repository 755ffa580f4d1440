"""A topic's configuration as the replicated state keeps it.

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
