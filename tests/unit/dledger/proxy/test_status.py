"""Errors of the SDK as codes of the gRPC protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dledger.client.core import errors
from dledger.client.core.errors import (
    AlreadyDeliveredError,
    BackpressureError,
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    ReceiptStaleError,
    RequestFailedError,
    RequestTimedOutError,
    SubscriptionIllegalError,
    TransactionDecidedError,
    UnknownOutcomeError,
)
from dledger.client.core.message_ext import SendStatus
from dledger.commitlog.errors import MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.status import RefusedError, code_of, overall, status_of, status_of_send
from dledger.remoting.protocol.codes import ResponseCode


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownOutcomeError("sent"), pb.PROXY_TIMEOUT),
        (RequestTimedOutError("asked", code=ResponseCode.NO_PERMISSION), pb.PROXY_TIMEOUT),
        (NoRouteError("no route"), pb.TOPIC_NOT_FOUND),
        (MessageIllegalError("too large"), pb.BAD_REQUEST),
        (SubscriptionIllegalError("blank"), pb.ILLEGAL_FILTER_EXPRESSION),
        (BackpressureError("full"), pb.TOO_MANY_REQUESTS),
        (BrokerBusyError("busy", code=ResponseCode.SYSTEM_BUSY), pb.TOO_MANY_REQUESTS),
        (
            BrokerBusyError("no leader", code=ResponseCode.SERVICE_NOT_AVAILABLE),
            pb.INTERNAL_SERVER_ERROR,
        ),
        (BrokerUnreachableError("no leader"), pb.INTERNAL_SERVER_ERROR),
        (NoNameServerError("none"), pb.INTERNAL_SERVER_ERROR),
        (BrokerRefusedError("no", code=ResponseCode.NO_PERMISSION), pb.FORBIDDEN),
        (BrokerRefusedError("no", code=ResponseCode.TOPIC_NOT_EXIST), pb.TOPIC_NOT_FOUND),
        (BrokerRefusedError("no", code=ResponseCode.MESSAGE_ILLEGAL), pb.BAD_REQUEST),
        (ReceiptStaleError("old", code=ResponseCode.NO_MESSAGE), pb.INVALID_RECEIPT_HANDLE),
        (
            RequestFailedError("no", code=ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
            pb.CONSUMER_GROUP_NOT_FOUND,
        ),
        (
            RequestFailedError("no", code=ResponseCode.SUBSCRIPTION_PARSE_FAILED),
            pb.ILLEGAL_FILTER_EXPRESSION,
        ),
        (TransactionDecidedError("late", code=1), pb.PRECONDITION_FAILED),
        (AlreadyDeliveredError("late", code=1), pb.PRECONDITION_FAILED),
        (RefusedError(pb.ILLEGAL_TOPIC, "blank"), pb.ILLEGAL_TOPIC),
    ],
)
def test_error_has_its_code(error: MQError, code: pb.Code) -> None:
    assert code_of(error) == code
    assert status_of(error) == pb.Status(code=code, message=str(error))


def unknown_errors() -> Iterator[type[MQError]]:
    found = [errors.ClientError]
    for kind in found:
        found.extend(kind.__subclasses__())
        if kind.outcome == "unknown":
            yield kind


def test_unknown_outcome_is_no_failure() -> None:
    kinds = list(unknown_errors())
    assert {UnknownOutcomeError, RequestTimedOutError} <= set(kinds)
    for kind in kinds:
        for code in ResponseCode:
            error = kind.__new__(kind)
            error.code = code  # type: ignore[attr-defined]  # a refusal that came after a time-out
            assert code_of(error) == pb.PROXY_TIMEOUT


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (SendStatus.SEND_OK, pb.OK),
        (SendStatus.FLUSH_DISK_TIMEOUT, pb.MASTER_PERSISTENCE_TIMEOUT),
        (SendStatus.FLUSH_SLAVE_TIMEOUT, pb.SLAVE_PERSISTENCE_TIMEOUT),
        (SendStatus.SLAVE_NOT_AVAILABLE, pb.HA_NOT_AVAILABLE),
    ],
)
def test_stored_message_has_its_code(status: SendStatus, code: pb.Code) -> None:
    assert status_of_send(status).code == code


def test_overall_is_that_of_all_entries() -> None:
    good, bad = pb.Status(code=pb.OK), pb.Status(code=pb.INVALID_RECEIPT_HANDLE, message="old")
    assert overall([good, good]) == good
    assert overall([bad]) == bad
    assert overall([good, bad]).code == pb.MULTIPLE_RESULTS
