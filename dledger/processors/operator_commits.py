"""Offset commits of operators, which are administrative acts; those of consumers are none.

Where no consumer of a group is connected, a reset stores offsets by the request that consumers
commit with. Our tools mark it with `BY_OPERATOR_FIELD`. Those of RocketMQ ask for the reset first,
are refused with 206, and commit on the same connection what they would have got.
"""

from __future__ import annotations

from typing import Final

from remoting.access.audit import Subject
from remoting.connection import Connection
from remoting.protocol.command import RemotingCommand
from remoting.protocol.headers import UpdateConsumerOffsetHeader
from remoting.protocol.own_fields import BY_OPERATOR_FIELD

RESETS_NOTED_MAX: Final = 64
"""Resets that were refused on one connection, newest kept: a tool asks for one after the other."""

_REFUSED: Final = "resets refused with 206"
"""Attribute of a connection: group and topic of each."""


def note_refused_reset(connection: Connection, group: str, topic: str) -> None:
    """Let later commits of *group* in *topic* on this connection count as those of an operator."""
    noted: dict[tuple[str, str], None] = connection.attributes.setdefault(_REFUSED, {})
    noted.pop((group, topic), None)
    noted[group, topic] = None
    while len(noted) > RESETS_NOTED_MAX:
        del noted[next(iter(noted))]


def is_of_operator(connection: Connection, command: RemotingCommand) -> bool:
    """Return whether an offset commit is that of an operator, and not of a consumer."""
    if command.ext.get(BY_OPERATOR_FIELD) in (True, "true"):
        return True
    noted: dict[tuple[str, str], None] = connection.attributes.get(_REFUSED, {})
    return bool(noted) and (command.ext.get("consumerGroup"), command.ext.get("topic")) in noted


def subject_of_commit(command: RemotingCommand) -> Subject:
    """Return what a commit is about, for the audit line. Pure.

    Raises:
        BadRequestError: It cannot be read.
    """
    header = UpdateConsumerOffsetHeader.decode(command.ext)
    return {
        "topic": header.topic,
        "consumerGroup": header.consumer_group,
        "queueId": str(header.queue_id),
        "commitOffset": str(header.commit_offset),
    }
