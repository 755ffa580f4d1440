"""Errors of the SDK as codes of apache.rocketmq.v2. Pure.

What happened to a message stays true: an outcome that is unknown is `PROXY_TIMEOUT` and nothing
else, so no client takes it for a message that is not stored. (What is no error of ours has no
code here; the server answers it `INTERNAL_ERROR`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dledger.client.core.errors import (
    AlreadyDeliveredError,
    BackpressureError,
    MessageIllegalError,
    NoRouteError,
    OffsetIllegalError,
    ReceiptStaleError,
    SubscriptionIllegalError,
    TransactionDecidedError,
)
from dledger.client.core.message_ext import SendStatus
from dledger.commitlog.errors import CorruptRecordError, MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.remoting.protocol.codes import ResponseCode

UNKNOWN: Final = pb.PROXY_TIMEOUT

_BY_TYPE: Final[tuple[tuple[type[MQError], pb.Code], ...]] = (
    (ReceiptStaleError, pb.INVALID_RECEIPT_HANDLE),
    (NoRouteError, pb.TOPIC_NOT_FOUND),
    (MessageIllegalError, pb.BAD_REQUEST),
    (SubscriptionIllegalError, pb.ILLEGAL_FILTER_EXPRESSION),
    (OffsetIllegalError, pb.ILLEGAL_OFFSET),
    (BackpressureError, pb.TOO_MANY_REQUESTS),
    (TransactionDecidedError, pb.PRECONDITION_FAILED),
    (AlreadyDeliveredError, pb.PRECONDITION_FAILED),
    (CorruptRecordError, pb.MESSAGE_CORRUPTED),
)

_BY_RESPONSE_CODE: Final[Mapping[int, pb.Code]] = {
    ResponseCode.SYSTEM_BUSY: pb.TOO_MANY_REQUESTS,
    ResponseCode.FLOW_CONTROL: pb.TOO_MANY_REQUESTS,
    ResponseCode.MESSAGE_ILLEGAL: pb.BAD_REQUEST,
    ResponseCode.INVALID_PARAMETER: pb.BAD_REQUEST,
    ResponseCode.NO_PERMISSION: pb.FORBIDDEN,
    ResponseCode.TOPIC_NOT_EXIST: pb.TOPIC_NOT_FOUND,
    ResponseCode.QUERY_NOT_FOUND: pb.OFFSET_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: pb.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: pb.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.NO_MESSAGE: pb.INVALID_RECEIPT_HANDLE,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: pb.UNSUPPORTED,
}

_BY_SEND_STATUS: Final[Mapping[SendStatus, pb.Code]] = {
    SendStatus.SEND_OK: pb.OK,
    SendStatus.FLUSH_DISK_TIMEOUT: pb.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: pb.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: pb.HA_NOT_AVAILABLE,
}

OK: Final = pb.Status(code=pb.OK, message="OK")

_OF_SEND: Final = {
    status: pb.Status(code=code, message=status.name) for status, code in _BY_SEND_STATUS.items()
}


class RefusedError(MQError):
    """The proxy refuses a request by itself; nothing was sent to a broker."""

    def __init__(self, code: pb.Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: MQError) -> pb.Code:
    """Return the code that states what *error* means for the message."""
    if error.outcome == "unknown":
        return UNKNOWN
    if isinstance(error, RefusedError):
        return error.code
    for kind, code in _BY_TYPE:
        if isinstance(error, kind):
            return code
    response_code = getattr(error, "code", None)
    return _BY_RESPONSE_CODE.get(response_code or -1, pb.INTERNAL_SERVER_ERROR)


def status_of(error: MQError) -> pb.Status:
    """Return the status for *error*, with its words."""
    return pb.Status(code=code_of(error), message=str(error))


def status_of_send(status: SendStatus) -> pb.Status:
    """Return the status for a message that is stored; one that is not as safe as asked has it."""
    return _OF_SEND[status]


def overall(statuses: list[pb.Status]) -> pb.Status:
    """Return the status of an answer that has one for each of its entries."""
    if len(statuses) == 1 or len({status.code for status in statuses}) == 1:
        return statuses[0]
    return pb.Status(code=pb.MULTIPLE_RESULTS, message="the entries have different results")
