"""Topics and consumer groups of the broker's own: the one list of them; pure.

Access checks, sends, creation of topics, listings and metrics ask here.

Spec: docs/operate/access.md, docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from dledger.commitlog.properties import REPLY_TOPIC_SUFFIX, SCHEDULE_TOPIC, TIMER_TOPIC

STATE_TOPIC: Final = "RMQ_SYS_DLEDGER_STATE"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
AUTO_CREATE_TOPIC_KEY_TOPIC: Final = "TBW102"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
OFFSET_MOVED_EVENT: Final = "OFFSET_MOVED_EVENT"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
RESERVED_PREFIX: Final = "rmq_sys_"
"""Of names that no client makes a topic of, in upper and lower case."""

SET_ASIDE_GROUP: Final = "DLEDGER_SET_ASIDE"
"""No consumer group has this name: its dead letters are those of the leader's services."""

SET_ASIDE_TOPIC: Final = DLQ_PREFIX + SET_ASIDE_GROUP
"""Messages that a service of the leader could not process, each with the reason."""

INNER_TOPICS: Final = frozenset(
    {STATE_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_HALF_TOPIC}
    | {TRANS_CHECK_MAX_TIME_TOPIC}
)
"""The broker's state, and messages of all topics that are not delivered."""

CLOSED_TOPICS: Final = INNER_TOPICS | {SELF_TEST_TOPIC, OFFSET_MOVED_EVENT, SET_ASIDE_TOPIC}
"""Topics that the broker alone writes."""

SYSTEM_TOPICS: Final = CLOSED_TOPICS | {AUTO_CREATE_TOPIC_KEY_TOPIC, BENCHMARK_TOPIC}
"""Topics that are there without anybody having made them, beside those with a name of a cluster."""

SYSTEM_GROUPS: Final = (
    *("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY"),
    *("CID_ONSAPI_OWNER", "CID_ONSAPI_PERMISSION", "CID_ONSAPI_PULL", "CID_RMQ_SYS_TRANS"),
)


def is_reserved(topic: str) -> bool:
    """Return whether no client makes a topic of that name."""
    return topic in CLOSED_TOPICS or topic[: len(RESERVED_PREFIX)].lower() == RESERVED_PREFIX


def is_of_copies(topic: str) -> bool:
    """Return whether a topic holds messages that a group consumes again, or gave up."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


def holds_of_others(topic: str) -> bool:
    """Return whether a topic holds what was sent in others, or about them, of no one group."""
    return is_reserved(topic) or topic.endswith(REPLY_TOPIC_SUFFIX)


def is_system(topic: str, own: Container[str] = ()) -> bool:
    """Return whether brokers made a topic; *own*: names of their clusters and groups."""
    named = topic in SYSTEM_TOPICS or topic.removesuffix(REPLY_TOPIC_SUFFIX) in own
    return named or is_reserved(topic) or is_of_copies(topic)
