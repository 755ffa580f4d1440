"""Errors of a broker group, a branch of the tree in :mod:`commitlog.errors`.

::

    ReplicationError
    ├── NotLeaderError        this node may not append; the hint says who may
    ├── PendingFullError      too much is waiting for a majority already
    ├── ShuttingDownError     the node drains and takes nothing new
    ├── ChangeRefusedError    a change of the members that no rule allows
    ├── ChangePendingError    a change of the members that must wait for another one
    └── UnknownOutcomeError   leadership ended, or the wait was over, before the answer was known

``condition`` is the row of :mod:`remoting.protocol.outcome` that tells a client.
"""

from __future__ import annotations

from commitlog.errors import MQError
from remoting.protocol.outcome import LEADER_FIELD, TERM_FIELD, Condition


class ReplicationError(MQError):
    """The group could not do what was asked."""


class NotLeaderError(ReplicationError):
    """This node does not lead, or does not yet. Nothing was stored.

    ``leader_address`` is the advertised ``ip:port`` of the leader as far as this node knows,
    ``term`` the newest term it has seen.
    """

    retriable = True
    refresh_route = True
    condition = Condition.NOT_LEADER

    def __init__(self, leader_address: str | None, term: int) -> None:
        where = leader_address or "nobody yet"
        super().__init__(
            f"not the leader in term {term}; the leader is {where}; nothing was stored"
        )
        self.leader_address = leader_address
        self.term = term

    @property
    def answer_fields(self) -> dict[str, object]:
        """What an answer tells the client beside the code: where to go."""
        return {LEADER_FIELD: self.leader_address, TERM_FIELD: self.term}


class PendingFullError(ReplicationError):
    """Too many bytes wait for a majority. Nothing was stored; retry after a moment."""

    retriable = True
    condition = Condition.PENDING_FULL


class ShuttingDownError(ReplicationError):
    """The node is stopping and takes nothing new. Nothing was stored; another node will lead."""

    retriable = True
    refresh_route = True
    condition = Condition.SHUTTING_DOWN


class UnknownOutcomeError(ReplicationError):
    """The proposal may or may not have been stored: nobody was left to say."""

    retriable = True
    refresh_route = True
    outcome = "unknown"
    condition = Condition.LEADERSHIP_LOST


class ChangeRefusedError(ReplicationError):
    """The list of members may not be changed like this. Nothing was changed."""

    condition = Condition.BAD_REQUEST


class ChangePendingError(ReplicationError):
    """The members cannot be changed now: another change comes first. Nothing was changed."""

    retriable = True
    condition = Condition.NOT_READY
