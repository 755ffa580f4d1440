"""Which names a topic or a group may have."""

from __future__ import annotations

from dledger.processors.refusal import RefusedError
from dledger.state.names import (
    MAX_GROUP_CHARS,
    NOT_ALLOWED_SEND_TOPICS,
    RETRY_PREFIX,
    name_problem,
    topic_problem,
)
from remoting.protocol.outcome import Condition


def check_topic_name(topic: str) -> None:
    """Let a topic name pass, or say what is wrong with it.

    Raises:
        RefusedError: Empty, too long, or with characters a folder name could choke on.
    """
    problem = topic_problem(topic)
    if problem is not None:
        raise RefusedError(Condition.BAD_REQUEST, problem)


def check_group_name(group: str) -> None:
    """Let a consumer group's name pass, or say what is wrong with it.

    Raises:
        RefusedError: As for topics: the group names its retry topic.
    """
    problem = name_problem(group, "group", MAX_GROUP_CHARS - len(RETRY_PREFIX))
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
