"""The outcome table knows every error a caller of the SDK can meet, and agrees with it."""

from __future__ import annotations

import inspect

import pytest

from client.core import errors
from client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    ClientError,
    OffsetIllegalError,
    ReplyTimedOutError,
    RequestFailedError,
    RequestTimedOutError,
)
from commitlog.errors import LocalProtocolError, MQError
from jepsen_like.history.operation import Outcome
from jepsen_like.history.outcome import OUTCOMES, classify

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, ClientError) and value is not ClientError
]


def make(kind: type[MQError]) -> MQError:
    if issubclass(kind, ReplyTimedOutError):
        return kind("x", send_result=None)  # type: ignore[arg-type]  # nobody looks at it
    if issubclass(kind, OffsetIllegalError):
        return kind("x", next_begin_offset=0, min_offset=0, max_offset=0)
    if issubclass(kind, BrokerRefusedError | BrokerBusyError):
        return kind("x", code=1)
    if issubclass(kind, RequestFailedError):
        return kind("x", code=1)
    return kind("x")


@pytest.mark.parametrize("kind", [*CLASSES, LocalProtocolError])
def test_every_error_of_the_sdk_has_a_row_that_agrees_with_the_error(kind: type[MQError]) -> None:
    classified = classify(make(kind))
    assert classified.is_known
    assert (classified.outcome is Outcome.INFO) == (make(kind).outcome == "unknown")
    assert OUTCOMES[kind] is classified.outcome


def test_an_error_nobody_thought_about_is_info_and_says_so() -> None:
    class NewError(RequestTimedOutError):
        pass

    assert classify(NewError("x")) == (Outcome.INFO, False)
    assert classify(KeyError("x")) == (Outcome.INFO, False)


def test_an_error_that_says_unknown_is_never_a_failure() -> None:
    error = RequestFailedError("x", code=1)
    error.outcome = "unknown"  # type: ignore[misc]  # as an instance may
    assert classify(error) == (Outcome.INFO, True)
