"""What can go wrong on the client's side, and what it means for the message.

::

    ClientError (MQError)
    ├── MessageIllegalError       (also LocalProtocolError) the message breaks a rule   not_stored
    ├── SubscriptionIllegalError  (also LocalProtocolError) no subscription can look so not_stored
    ├── ClientClosedError         the instance or producer is closed; nothing was sent  not_stored
    ├── BackpressureError         too many bytes wait already; nothing was queued       not_stored
    ├── NoNameServerError         no NameServer answers and there is no cached route    not_stored
    ├── NoRouteError              the NameServers do not know the topic                 not_stored
    ├── BrokerUnreachableError    no connection could be made in time                   not_stored
    ├── BrokerRefusedError        a broker refuses, and will again                      not_stored
    │   ├── BrokerBusyError       a broker refuses for now (busy, not leader)           not_stored
    │   ├── TransactionDecidedError  the transaction has another decision, for good     not_stored
    │   ├── StepOvertakenError    another consumer of the group was quicker            not_stored
    │   ├── AlreadyDeliveredError a message to be recalled was delivered                not_stored
    │   └── RequesterAwayError    a reply for a client that is not connected            not_stored
    ├── ReplyTimedOutError        the request is stored, its reply did not come in time stored
    ├── UnknownOutcomeError       sent, but no answer shows whether it is stored        unknown
    ├── OffsetIllegalError        a pull outside the queue; carries where to go on      not_stored
    └── RequestFailedError        an answer to a read or admin request that is no success not_stored
        ├── ConfirmationNeededError  a change would give up messages; carries which     not_stored
        ├── ReceiptStaleError     a received message is not this consumer's any more    not_stored
        ├── LockLostError         the token is old: another client may have it          not_stored
        └── RequestTimedOutError  no answer to a read or admin request in time          unknown

``retriable`` is whether calling again can help; a send has by then used up its own budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.commitlog.errors import LocalProtocolError, MQError
from dledger.remoting.protocol.outcome import outcome_of

if TYPE_CHECKING:
    from dledger.client.core.message_ext import SendResult
    from dledger.remoting.protocol.command import RemotingCommand
    from dledger.remoting.protocol.own_fields import GivenUp


class ClientError(MQError):
    """Root of the client's errors."""


class MessageIllegalError(ClientError, LocalProtocolError):
    """The message breaks a rule (topic, size, properties, batch, delay). It is not stored.

    Attributes:
        remark: Of the broker that refused it; empty: nothing was sent.
    """

    def __init__(self, message: str, *, remark: str = "") -> None:
        super().__init__(message)
        self.remark = remark


class SubscriptionIllegalError(ClientError, LocalProtocolError):
    """What a consumer asked for is no expression. Nothing was subscribed or pulled."""


class ClientClosedError(ClientError):
    """The client instance or producer is closed or closing. Nothing was sent."""


class BackpressureError(ClientError):
    """More bytes wait to be sent than the limit allows. Nothing was queued; wait and try again."""

    retriable = True


class NoNameServerError(ClientError):
    """None of the NameServers answers, and nothing is cached to go on with. Nothing was sent."""

    retriable = True


class NoRouteError(ClientError):
    """The NameServers know no writable (or readable) queue of the topic. Nothing was sent.

    While its group elects a leader, a send waits for one within its own time.
    """

    retriable = True
    refresh_route = True


class BrokerUnreachableError(ClientError):
    """No connection to the broker could be made within the budget. Nothing was sent."""

    retriable = True
    refresh_route = True


class BrokerRefusedError(ClientError):
    """A broker refused before storing anything.

    Attributes:
        code: The response code.
        remark: The broker's own words.
    """

    def __init__(self, message: str, *, code: int, remark: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.remark = remark


class BrokerBusyError(BrokerRefusedError):
    """A broker refused for now: busy, shutting down or not the leader. Nothing was stored."""

    retriable = True
    refresh_route = True


class TransactionDecidedError(BrokerRefusedError):
    """The transaction was decided otherwise before, and stays so. This decision counts for nothing.

    Attributes:
        decision: ``commit``, ``rollback``, or ``given_up``: not decided in time, and a copy of
            the message is in ``TRANS_CHECK_MAX_TIME_TOPIC``.
    """

    def __init__(self, message: str, *, code: int, remark: str = "", decision: str = "") -> None:
        super().__init__(message, code=code, remark=remark)
        self.decision = decision


class StepOvertakenError(BrokerRefusedError):
    """The group has committed another offset than the one the step begins at. Nothing was stored.

    Another consumer was quicker: continue from `PullConsumer.committed_offset`.

    Attributes:
        committed_offset: What the group has committed in that queue, commits on their way
            included; -1: nothing.
    """

    def __init__(self, message: str, *, code: int, remark: str = "", committed_offset: int) -> None:
        super().__init__(message, code=code, remark=remark)
        self.committed_offset = committed_offset


class AlreadyDeliveredError(BrokerRefusedError):
    """The message that was to be recalled has been delivered. It cannot be taken back."""


class RequesterAwayError(BrokerRefusedError):
    """The requester is not connected to the brokers, or refused the reply. It did not arrive."""

    retriable = True


class ReplyTimedOutError(ClientError):
    """The request is stored, but no reply came in time. A consumer may get it, or have got it.

    Attributes:
        send_result: Where the request is.
    """

    outcome = "stored"

    def __init__(self, message: str, *, send_result: SendResult) -> None:
        super().__init__(message)
        self.send_result = send_result


class UnknownOutcomeError(ClientError):
    """The message was sent and may or may not be stored: there was no answer, or it was this.

    Sending it again may store it twice.
    """

    retriable = True
    refresh_route = True
    outcome = "unknown"


class OffsetIllegalError(ClientError):
    """The offset asked for lies outside the queue.

    Attributes:
        next_begin_offset: Where reading can go on, by the broker's answer.
        min_offset: First offset the queue holds.
        max_offset: One past the last offset the queue holds.
    """

    def __init__(
        self, message: str, *, next_begin_offset: int, min_offset: int, max_offset: int
    ) -> None:
        super().__init__(message)
        self.next_begin_offset = next_begin_offset
        self.min_offset = min_offset
        self.max_offset = max_offset


class RequestFailedError(ClientError):
    """A read or admin request was answered with something that is no success.

    Attributes:
        code: The response code, or -1 when no answer came.
        remark: The peer's own words.
    """

    def __init__(self, message: str, *, code: int = -1, remark: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.remark = remark


class ConfirmationNeededError(RequestFailedError):
    """A change would give up messages, and was not confirmed. Nothing was changed.

    Attributes:
        given_up: What would go.
    """

    def __init__(self, message: str, *, code: int, remark: str, given_up: GivenUp) -> None:
        super().__init__(message, code=code, remark=remark)
        self.given_up = given_up


class DamagedAnswerError(RequestFailedError):
    """What was read cannot be what was stored, and is kept back; later it may be repaired."""

    retriable = True


class ReceiptStaleError(RequestFailedError):
    """A message that was received is not this consumer's any more. Nothing was done.

    Its time was over and another consumer got it, or it was acknowledged.
    """


class LockLostError(RequestFailedError):
    """The queue is not held with the token shown any more. Nothing was done; lock it again."""


class RequestTimedOutError(RequestFailedError):
    """A read or admin request got no answer in time; what it asked for may have been done."""

    retriable = True
    refresh_route = True
    outcome = "unknown"


def refusal(
    what: str,
    answer: RemotingCommand,
    kind: type[RequestFailedError | BrokerRefusedError] = RequestFailedError,
) -> RequestFailedError | BrokerRefusedError:
    """Return the error of an *answer* that is no success: *kind*, unless it may be done."""
    code, remark, suffix = answer.code, answer.remark or "", ""
    if outcome_of(answer) == "unknown":
        kind, suffix = RequestTimedOutError, "; it may be done, the broker does not know"
    return kind(f"{what}: code {code} {remark}{suffix}", code=code, remark=remark)


def same_again(error: MQError) -> MQError:
    """Return an equal error, for another task to raise: one that two raise has mixed traces."""
    other = type(error).__new__(type(error), *error.args)
    other.__dict__.update(error.__dict__)
    return other
