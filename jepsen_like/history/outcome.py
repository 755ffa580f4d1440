"""What an error of the SDK lets a history say: one table, ok / fail / info.

A wrong `fail` invents aborted reads, a wrong `info` hides lost writes. What is not in the table is
`info`, and `is_known` is false: the run that met it fails, so the table stays complete.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from client.core import errors as client_errors
from commitlog import errors as log_errors
from jepsen_like.history.operation import Outcome

OUTCOMES: Final[dict[type[Exception], Outcome]] = {
    # Refused before anything was handed to the network.
    client_errors.MessageIllegalError: Outcome.FAIL,
    client_errors.SubscriptionIllegalError: Outcome.FAIL,
    client_errors.ClientClosedError: Outcome.FAIL,
    client_errors.BackpressureError: Outcome.FAIL,
    client_errors.NoNameServerError: Outcome.FAIL,
    client_errors.NoRouteError: Outcome.FAIL,
    client_errors.BrokerUnreachableError: Outcome.FAIL,
    log_errors.LocalProtocolError: Outcome.FAIL,
    # A broker refused before it appended.
    client_errors.BrokerRefusedError: Outcome.FAIL,
    client_errors.BrokerBusyError: Outcome.FAIL,
    client_errors.TransactionDecidedError: Outcome.FAIL,
    client_errors.AlreadyDeliveredError: Outcome.FAIL,
    client_errors.OffsetIllegalError: Outcome.FAIL,
    client_errors.RequestFailedError: Outcome.FAIL,
    client_errors.DamagedAnswerError: Outcome.FAIL,
    client_errors.LockLostError: Outcome.FAIL,
    client_errors.RequesterAwayError: Outcome.FAIL,
    # Stored: only the reply is missing.
    client_errors.ReplyTimedOutError: Outcome.OK,
    # Unknown.
    client_errors.UnknownOutcomeError: Outcome.INFO,
    client_errors.RequestTimedOutError: Outcome.INFO,
}
"""By exact class: a new subclass must be thought about, not inherit an answer."""


class Classified(NamedTuple):
    """The outcome of an error, and whether the table knows the error."""

    outcome: Outcome
    is_known: bool


def classify(error: Exception) -> Classified:
    """Return what the history may say about an operation that ended in *error*.

    An error that reports of itself that its outcome is unknown is never called a failure, whatever
    its class.
    """
    outcome = OUTCOMES.get(type(error))
    if outcome is None:
        return Classified(Outcome.INFO, is_known=False)
    if getattr(error, "outcome", "unknown") == "unknown":
        return Classified(Outcome.INFO, is_known=True)
    return Classified(outcome, is_known=True)
