"""Answers that must not be stale: computed behind the group's read barrier."""

from __future__ import annotations

from collections.abc import Callable

import trio

from commitlog.errors import MQError
from dledger.broker_errors import NotLeaderError
from dledger.group_api import BrokerGroup
from dledger.processors.refusal import refusal
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand


def when_current(
    group: BrokerGroup,
    connection: Connection,
    command: RemotingCommand,
    read: Callable[[], RemotingCommand],
) -> Handled:
    """Answer *command* with what *read* returns once this node is known to lead still.

    Args:
        read: Called once at most, when the applied state holds all that was stored before now.
    Returns:
        The answer, or DEFERRED when it comes later: *read*'s, or a refusal that names the leader.
    """
    answered: list[RemotingCommand] = []
    is_deferred = False

    def done(error: NotLeaderError | None) -> None:
        response = _answer(command, read, error)
        if is_deferred:
            connection.reply(command, response)
        else:
            answered.append(response)

    try:
        group.read_barrier(done)
    except NotLeaderError as error:
        return refusal(command, error)
    if answered:
        return answered[0]
    is_deferred = True
    return DEFERRED


async def until_current(group: BrokerGroup) -> None:
    """Wait until what is applied holds all that was stored before this call.

    Raises:
        NotLeaderError: This node does not lead, or stopped leading before it could tell.
    Cancellation: Nothing is left behind.
    """
    told: list[NotLeaderError | None] = []
    passed = trio.Event()

    def done(error: NotLeaderError | None) -> None:
        told.append(error)
        passed.set()

    group.read_barrier(done)
    await passed.wait()
    if told[0] is not None:
        raise told[0]


def _answer(
    command: RemotingCommand, read: Callable[[], RemotingCommand], error: NotLeaderError | None
) -> RemotingCommand:
    if error is not None:
        return refusal(command, error)
    try:
        return read()
    except MQError as failure:
        return refusal(command, failure)
