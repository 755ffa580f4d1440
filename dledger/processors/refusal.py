"""How a processor says no: a condition of the outcome table and a sentence."""

from __future__ import annotations

from commitlog.errors import InvariantBroken, MQError
from dledger.broker_errors import NotLeaderError
from dledger.group_api import BrokerGroup, Proposed
from remoting.protocol.command import RemotingCommand
from remoting.protocol.outcome import Condition, answer, answer_error


class RefusedError(MQError):
    """A request was looked at and refused; nothing was stored."""

    def __init__(self, condition: Condition, remark: str) -> None:
        super().__init__(remark)
        self.condition = condition


def refusal(command: RemotingCommand, error: MQError) -> RemotingCommand:
    """Return the answer that tells *error*.

    Raises:
        InvariantBroken: That is no answer; the node stops.
    """
    if isinstance(error, InvariantBroken):
        raise error
    return answer_error(command, error)


def not_leader(group: BrokerGroup) -> NotLeaderError:
    """Return the error that sends a client to the leader."""
    return NotLeaderError(group.leader_address, group.term)


def failed_proposal(
    command: RemotingCommand, proposed: Proposed, group: BrokerGroup
) -> RemotingCommand:
    """Return the answer for a proposal that was not stored, or whose fate is unknown."""
    if proposed.outcome == "not_stored":
        return answer_error(command, proposed.error or not_leader(group))
    return answer(
        command,
        Condition.LEADERSHIP_LOST,
        "leadership ended before a majority answered; the message may or may not be stored",
        leaderAddr=group.leader_address,
        term=group.term,
    )
