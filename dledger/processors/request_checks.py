"""What handlers read of a request alike: names, the account and host, confirmation, born host."""

from __future__ import annotations

from commitlog.errors import LocalProtocolError
from commitlog.record import NO_HOST, pack_host
from dledger.processors.answers import RefusedError
from dledger.state.names import (
    MAX_GROUP_CHARS,
    NOT_ALLOWED_SEND_TOPICS,
    RETRY_PREFIX,
    name_problem,
    topic_problem,
)
from remoting.access.gate import admitted_account
from remoting.connection import Connection
from remoting.protocol.command import RemotingCommand
from remoting.protocol.confirmation import CONFIRMED_FIELD
from remoting.protocol.outcome import Condition

_BORN_HOST = "born_host"
_MAPPED_IPV4 = "::ffff:"


def check_topic_name(topic: str) -> None:
    """Check the name of a topic.

    Raises:
        RefusedError: Empty, too long, or with characters that no folder name may have.
    """
    problem = topic_problem(topic)
    if problem is not None:
        raise RefusedError(Condition.BAD_REQUEST, problem)


def check_group_name(group: str) -> None:
    """Check the name of a consumer group.

    Raises:
        RefusedError: As for topics: the group names its retry topic.
    """
    problem = name_problem(group, "group", MAX_GROUP_CHARS - len(RETRY_PREFIX))
    if problem is not None:
        raise RefusedError(Condition.BAD_REQUEST, problem)


def check_sendable(topic: str) -> None:
    """Check that clients may send to a topic of that name.

    Raises:
        RefusedError: Bad name, or a topic that the broker alone writes.
    """
    check_topic_name(topic)
    if topic in NOT_ALLOWED_SEND_TOPICS:
        raise RefusedError(
            Condition.NO_PERMISSION, f"sending to the system topic {topic} is forbidden"
        )


def asked_by(connection: Connection) -> str:
    """Return the account, where there is access control, and the host that a request came from.

    A name that was not checked is not shown: it would let one person act under another's name. Call
    it before the handler returns or waits.
    """
    host = connection.peer_address[0]
    account = admitted_account(connection)
    return f"{account} at {host}" if account else host


def is_confirmed(command: RemotingCommand) -> bool:
    """Return whether the request confirms that messages are given up."""
    return command.ext.get(CONFIRMED_FIELD) == "true"


def born_host_of(connection: Connection) -> bytes:
    """Return the packed address of the other end; computed once for each connection."""
    known = connection.attributes.get(_BORN_HOST)
    if known is None:
        known = connection.attributes[_BORN_HOST] = _pack(*connection.peer_address)
    return bytes(known)


def _pack(host: str, port: int) -> bytes:
    # A dual-stack listener sees IPv4 clients as mapped addresses.
    if host.lower().startswith(_MAPPED_IPV4) and "." in host:
        host = host[len(_MAPPED_IPV4) :]
    try:
        return pack_host(host.partition("%")[0], port)
    except LocalProtocolError:
        return NO_HOST
