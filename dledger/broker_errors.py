"""Errors of a broker group, a branch of the tree in :mod:`dledger.commitlog.errors`.

::

    ReplicationError
    ├── NotLeaderError        this node may not append; the hint names the leader
    ├── PendingFullError      too much is waiting for a majority already
    ├── ShuttingDownError     the node drains and takes nothing new
    ├── ChangeRefusedError    a change of the members that no rule allows
    ├── ChangePendingError    a change of the members that must wait for another one
    ├── StampError            an idempotent send whose stamp does not fit
    │   ├── ProducerUnknownError    its producer has no session, or a newer epoch
    │   ├── SequenceTooOldError     it is older than what is remembered
    │   ├── SequenceUndecidedError  its first attempt is on its way, without a waiting caller
    │   ├── SequenceGapError        it came before another one that it has to follow
    │   └── SequenceReusedError     marked as a repetition, and is another message
    ├── UnprocessableMessageError   a stored message that names nothing a service could do with it
    ├── PropertyUnreadableError     a system property of a message that names no number, or such
    ├── TableFullError        one more topic, group, offset or client than a setting allows
    ├── CommitNotExpectedError  a step begins at another offset than its consumer group has
    ├── SettingRefusedError   a setting that cannot be changed like this while the broker runs
    ├── ConfirmationNeededError  it would give up messages that are kept now
    └── UnknownOutcomeError   leadership ended, or the wait was over, before the answer was known

``condition`` is the row of :mod:`dledger.remoting.protocol.outcome` that a client gets.
"""

from __future__ import annotations

from dledger.commitlog.errors import MQError
from dledger.remoting.protocol.outcome import (
    LEADER_FIELD,
    REASON_FIELD,
    TERM_FIELD,
    Condition,
)
from dledger.remoting.protocol.own_fields import COMMITTED_FIELD, GIVES_UP_FIELD, GivenUp

MAX_QUOTED_BYTES = 64
"""Of a value in a refusal: it may be as long as all properties."""


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
        where = leader_address or "not known yet"
        super().__init__(
            f"not the leader in term {term}; the newest is {where}; nothing was stored"
        )
        self.leader_address = leader_address
        self.term = term

    @property
    def answer_fields(self) -> dict[str, object]:
        """What an answer gives the client beside the code: where to go."""
        return {LEADER_FIELD: self.leader_address, TERM_FIELD: self.term}


class PendingFullError(ReplicationError):
    """Too many bytes wait for a majority. Nothing was stored; retry after a moment."""

    retriable = True
    condition = Condition.PENDING_FULL


class PropertyUnreadableError(ReplicationError):
    """A system property of a message has a value of another kind. Nothing was stored."""

    condition = Condition.MESSAGE_ILLEGAL

    def __init__(self, name: str, kind: str, value: bytes) -> None:
        """Name the property, what it has to be, and what it is."""
        shown = value[:MAX_QUOTED_BYTES].decode(errors="replace")
        super().__init__(f"{name} is not {kind}: {shown!r}; nothing was stored")


class TableFullError(ReplicationError):
    """A limit of topics, groups, offsets or clients is met. Nothing was stored."""

    condition = Condition.TABLE_FULL


class CommitNotExpectedError(ReplicationError):
    """A step begins at another offset than its consumer group has committed. Nothing was stored.

    ``committed`` is that offset in the leader's log, commits on their way included; -1: none.
    """

    condition = Condition.COMMIT_NOT_EXPECTED

    def __init__(self, topic: str, queue_id: int, expected: int, committed: int) -> None:
        super().__init__(
            f"the committed offset of queue {queue_id} of {topic} is {committed}, not {expected};"
            " nothing was stored"
        )
        self.topic = topic
        self.queue_id = queue_id
        self.committed = committed

    @property
    def answer_fields(self) -> dict[str, object]:
        """What an answer gives the client beside the code: the offset of the group."""
        return {
            COMMITTED_FIELD: self.committed,
            "topic": self.topic,
            "queueId": self.queue_id,
        }


class ShuttingDownError(ReplicationError):
    """The node is stopping and takes nothing new. Nothing was stored; another node will lead."""

    retriable = True
    refresh_route = True
    condition = Condition.SHUTTING_DOWN


class UnknownOutcomeError(ReplicationError):
    """The proposal may or may not have been stored; this cannot be known here."""

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


class StampError(ReplicationError):
    """What is wrong with the stamp of an idempotent send."""

    condition: Condition

    @property
    def answer_fields(self) -> dict[str, object]:
        """Which condition it is: some of them share a code."""
        return {REASON_FIELD: self.condition.value}


class ProducerUnknownError(StampError):
    """The producer has no session here any more, or a newer one.

    This request stored nothing. Whether an earlier attempt did cannot be found out any more; a
    producer that knows there was none opens a session and sends again.
    """

    outcome = "unknown"
    condition = Condition.PRODUCER_UNKNOWN


class SequenceTooOldError(StampError):
    """The send is older than what is remembered of its producer, or its place is not kept.

    This request stored nothing. Whether an earlier attempt did cannot be found out any more.
    """

    outcome = "unknown"
    condition = Condition.SEQUENCE_TOO_OLD


class SequenceUndecidedError(StampError):
    """An earlier attempt is in the log and waits for a majority. Ask again, with the same stamp."""

    retriable = True
    outcome = "unknown"
    condition = Condition.SEQUENCE_UNDECIDED


class SequenceGapError(StampError):
    """A send that this one has to follow is missing. Nothing was stored; send that one first."""

    retriable = True
    condition = Condition.SEQUENCE_GAP


class SequenceReusedError(StampError):
    """Another message was stored under this stamp. This one was not stored."""

    condition = Condition.SEQUENCE_REUSED


class SettingRefusedError(ReplicationError):
    """A setting cannot be changed like this while the broker runs. Nothing was changed."""

    condition = Condition.BAD_REQUEST


class ConfirmationNeededError(ReplicationError):
    """The change gives up messages that are kept now, and is not confirmed. Nothing was changed."""

    condition = Condition.BAD_REQUEST

    def __init__(self, lost: GivenUp, next_step: str) -> None:
        super().__init__(f"{lost}; nothing was changed; {next_step}")
        self.lost = lost
        self.answer_fields = {GIVES_UP_FIELD: lost.encode()}


class UnprocessableMessageError(ReplicationError):
    """A stored message that a service can do nothing with; it is kept as it is, and set aside."""

    outcome = "stored"
