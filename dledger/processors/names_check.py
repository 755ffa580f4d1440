"""Which names a topic or a group may have."""

from __future__ import annotations

import re
from functools import lru_cache

from dledger.processors.refusal import RefusedError
from dledger.state.names import (
    DLQ_PREFIX,
    MAX_GROUP_CHARS,
    MAX_SPECIAL_TOPIC_CHARS,
    MAX_TOPIC_CHARS,
    NOT_ALLOWED_SEND_TOPICS,
    RETRY_PREFIX,
)
from remoting.protocol.outcome import Condition

_VALID = re.compile(r"[%|a-zA-Z0-9_-]+").fullmatch

CHECKED_NAMES_MAX = 65_536
"""Names remembered as checked, so that the hot path looks each up once."""


def check_topic_name(topic: str) -> None:
    """Let a topic name pass, or say what is wrong with it.

    Raises:
        RefusedError: Empty, too long, or with characters a folder name could choke on.
    """
    problem = _topic_problem(topic)
    if problem is not None:
        raise RefusedError(Condition.BAD_REQUEST, problem)


def check_group_name(group: str) -> None:
    """Let a consumer group's name pass, or say what is wrong with it.

    Raises:
        RefusedError: As for topics: the group names its retry topic.
    """
    problem = _problem(group, "group", MAX_GROUP_CHARS - len(RETRY_PREFIX))
    if problem is not None:
        raise RefusedError(Condition.BAD_REQUEST, problem)


def check_sendable(topic: str) -> None:
    """Let clients send to a topic, or not.

    Raises:
        RefusedError: Bad name, or a topic that the broker alone writes.
    """
    check_topic_name(topic)
    if topic in NOT_ALLOWED_SEND_TOPICS:
        raise RefusedError(
            Condition.NO_PERMISSION, f"sending to the system topic {topic} is forbidden"
        )


@lru_cache(CHECKED_NAMES_MAX)
def _topic_problem(topic: str) -> str | None:
    special = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    return _problem(topic, "topic", MAX_SPECIAL_TOPIC_CHARS if special else MAX_TOPIC_CHARS)


def _problem(name: str, what: str, limit: int) -> str | None:
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
