"""The errors that a program which uses the client can get. Tables: docs/reference/errors.md.

Each has ``outcome`` (what happened to the message), ``retriable`` (the same call may succeed later)
and ``refresh_route`` as attributes. `MQError` is the root of all, `ClientError` of those that are
raised while client and cluster talk.
"""

from dledger.client.core.errors import (
    AlreadyDeliveredError,
    BackpressureError,
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    ConfirmationNeededError,
    DamagedAnswerError,
    LockLostError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    OffsetIllegalError,
    ReceiptStaleError,
    ReplyTimedOutError,
    RequesterAwayError,
    RequestFailedError,
    RequestTimedOutError,
    StepOvertakenError,
    SubscriptionIllegalError,
    TransactionDecidedError,
    UnknownOutcomeError,
)
from dledger.commitlog.errors import (
    ConfigError,
    CorruptRecordError,
    LocalProtocolError,
    MQError,
    Outcome,
    ProtocolError,
    RemoteProtocolError,
)

__all__ = [
    "MQError",
    "Outcome",
    "ConfigError",
    "CorruptRecordError",
    "ProtocolError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "ClientError",
    "ConfirmationNeededError",
    "AlreadyDeliveredError",
    "BackpressureError",
    "BrokerBusyError",
    "BrokerRefusedError",
    "BrokerUnreachableError",
    "ClientClosedError",
    "DamagedAnswerError",
    "LockLostError",
    "MessageIllegalError",
    "NoNameServerError",
    "NoRouteError",
    "OffsetIllegalError",
    "ReceiptStaleError",
    "ReplyTimedOutError",
    "RequestFailedError",
    "RequestTimedOutError",
    "RequesterAwayError",
    "StepOvertakenError",
    "SubscriptionIllegalError",
    "TransactionDecidedError",
    "UnknownOutcomeError",
]
