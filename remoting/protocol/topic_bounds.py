"""The numbers a topic may have: one table for the broker that creates it and the NameServer that
lists it.

A broker refuses to make a topic outside of it. A NameServer leaves such a topic out of the route,
and a client that reads a route need not be afraid of it.
"""

from __future__ import annotations

from typing import Final, Protocol

MAX_QUEUE_NUMS: Final = 65_536
"""Queues of one topic on one broker: each costs a folder and a table row on every replica, and an
object in every client."""

MAX_PERM: Final = 15
"""Inherit, read, write and priority."""

MAX_SYS_FLAG: Final = 2**31 - 1
"""Clients read 32 bits, with a sign."""

MAX_TOPIC_NAME_CHARS: Final = 255
"""Of retry and dead letter topics; others are shorter."""


class TopicNumbers(Protocol):
    """What is looked at of a topic, wherever it stands."""

    @property
    def read_queue_nums(self) -> int:
        """Queues that may be pulled from."""

    @property
    def write_queue_nums(self) -> int:
        """Queues that may be sent to."""

    @property
    def perm(self) -> int:
        """What may be done."""

    @property
    def topic_sys_flag(self) -> int:
        """RocketMQ's unit flags."""


_BOUNDS: Final = (
    ("read_queue_nums", "readQueueNums", MAX_QUEUE_NUMS),
    ("write_queue_nums", "writeQueueNums", MAX_QUEUE_NUMS),
    ("perm", "perm", MAX_PERM),
    ("topic_sys_flag", "topicSysFlag", MAX_SYS_FLAG),
)


def out_of_bounds(topic: TopicNumbers) -> str:
    """Return which number of *topic* is none that a topic may have; empty: all are."""
    for name, shown, most in _BOUNDS:
        number = getattr(topic, name)
        if not 0 <= number <= most:
            return f"{shown} {number} is not between 0 and {most}"
    return ""


def bad_topic_name(name: str) -> str:
    """Return why *name* cannot stand in a route; empty: it can."""
    if not name or len(name) > MAX_TOPIC_NAME_CHARS:
        return f"a name of {len(name)} characters is not between 1 and {MAX_TOPIC_NAME_CHARS}"
    if not name.isprintable():
        return "its name cannot be printed"
    return ""
