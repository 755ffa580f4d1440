"""How a processor answers: refusals, outcomes of proposals, and reads behind the read barrier."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from commitlog.errors import InvariantBroken, MQError
from dledger.broker_errors import NotLeaderError
from dledger.group_api import BrokerGroup, OnDone, Proposed
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.outcome import Condition, answer, answer_error


class RefusedError(MQError):
    """A request was checked and refused; nothing was stored."""

    def __init__(self, condition: Condition, remark: str) -> None:
        super().__init__(remark)
        self.condition = condition


def refusal(command: RemotingCommand, error: MQError) -> RemotingCommand:
    """Return the answer for *error*: of a request that is answered after its handler returned.

    A handler raises the error instead, and the connection answers the same.

    Raises:
        InvariantBroken: That is no answer; the node stops.
    """
    if isinstance(error, InvariantBroken):
        raise error
    return answer_error(command, error)


def not_leader(group: BrokerGroup) -> NotLeaderError:
    """Return the error that sends a client to the leader."""
    return NotLeaderError(group.leader_address, group.term)


def require_leader(group: BrokerGroup) -> None:
    """Return if this node leads.

    Raises:
        NotLeaderError: It does not; nothing was done.
    """
    if group.leadership is None:
        raise not_leader(group)


def failed_proposal(
    command: RemotingCommand, proposed: Proposed, group: BrokerGroup
) -> RemotingCommand:
    """Return the answer for a proposal that was not stored, or whose outcome is unknown."""
    if proposed.outcome == "not_stored":
        return answer_error(command, proposed.error or not_leader(group))
    return answer(
        command,
        Condition.LEADERSHIP_LOST,
        "leadership ended before a majority answered; the message may or may not be stored",
        leaderAddr=group.leader_address,
        term=group.term,
    )


def proposal_answer(
    command: RemotingCommand, proposed: Proposed, group: BrokerGroup
) -> RemotingCommand:
    """Return the answer for a proposal that needs no more than success where it is stored."""
    if proposed.outcome == "stored":
        return response_to(command)
    return failed_proposal(command, proposed, group)


def answer_when_done(
    connection: Connection,
    command: RemotingCommand,
    group: BrokerGroup,
    stored: Callable[[Proposed], RemotingCommand] | None = None,
    failed_fields: Mapping[str, str] | None = None,
) -> OnDone:
    """Return what answers *command* once the outcome of its proposal is known.

    Args:
        stored: Makes the answer of a proposal that is stored; None: success without fields.
        failed_fields: Further fields of the answer where it is not stored, or may not be.
    """

    def done(proposed: Proposed) -> None:
        if proposed.outcome != "stored":
            response = failed_proposal(command, proposed, group)
            if failed_fields is not None:
                response.ext.update(failed_fields)
        elif stored is None:
            response = response_to(command)
        else:
            response = stored(proposed)
        connection.reply(command, response)

    return done


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
    Raises:
        NotLeaderError: This node does not lead.
    """
    answered: list[RemotingCommand] = []
    is_deferred = False

    def done(error: NotLeaderError | None) -> None:
        response = _read_answer(command, read, error)
        if is_deferred:
            connection.reply(command, response)
        else:
            answered.append(response)

    group.read_barrier(done)
    if answered:
        return answered[0]
    is_deferred = True
    return DEFERRED


async def until_current(group: BrokerGroup) -> None:
    """Wait until the applied state holds all that was stored before this call.

    Raises:
        NotLeaderError: This node does not lead, or stopped leading while it waited.
    Cancellation: Nothing is left behind.
    """
    outcomes: list[NotLeaderError | None] = []
    passed = trio.Event()

    def done(error: NotLeaderError | None) -> None:
        outcomes.append(error)
        passed.set()

    group.read_barrier(done)
    await passed.wait()
    if outcomes[0] is not None:
        raise outcomes[0]


def _read_answer(
    command: RemotingCommand, read: Callable[[], RemotingCommand], error: NotLeaderError | None
) -> RemotingCommand:
    if error is not None:
        return refusal(command, error)
    try:
        return read()
    except MQError as failure:
        return refusal(command, failure)
