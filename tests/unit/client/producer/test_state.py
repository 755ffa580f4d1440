"""What follows a request that failed, and what its senders get when nothing does."""

from __future__ import annotations

import pytest

from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    MessageIllegalError,
    RequesterAwayError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.retry import Failure, FailureKind
from dledger.client.core.route import MessageQueue
from dledger.client.producer.state import (
    Next,
    SendSlot,
    Standing,
    error_of,
    next_of,
)

FORGOTTEN = Failure(FailureKind.UNKNOWN, 1, is_forgotten=True)


@pytest.mark.parametrize("kind", FailureKind)
def test_next_releases_what_has_no_sequence(kind: FailureKind) -> None:
    for failure in (Failure(kind), Failure(kind, is_forgotten=True)):
        assert next_of(Standing.UNNUMBERED, failure, is_alone=False) is Next.RELEASE


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("is_alone", [False, True])
def test_next_repeats_what_may_be_stored(kind: FailureKind, is_alone: bool) -> None:
    assert next_of(Standing.UNCERTAIN, Failure(kind), is_alone=is_alone) is Next.REPEAT


@pytest.mark.parametrize("is_alone", [False, True])
def test_next_of_a_forgotten_request(is_alone: bool) -> None:
    assert next_of(Standing.NUMBERED, FORGOTTEN, is_alone=is_alone) is Next.RENEW
    assert next_of(Standing.UNCERTAIN, FORGOTTEN, is_alone=is_alone) is Next.END


@pytest.mark.parametrize(
    ("failure", "error", "outcome"),
    [
        (Failure(FailureKind.UNKNOWN, 1), UnknownOutcomeError, "unknown"),
        (Failure(FailureKind.UNREACHABLE), BrokerUnreachableError, "not_stored"),
        (Failure(FailureKind.NOT_LEADER), BrokerUnreachableError, "not_stored"),
        (Failure(FailureKind.FINAL), MessageIllegalError, "not_stored"),
        (Failure(FailureKind.FINAL, 13), MessageIllegalError, "not_stored"),
        (Failure(FailureKind.FINAL, 16), BrokerRefusedError, "not_stored"),
        (Failure(FailureKind.BUSY, 2), BrokerBusyError, "not_stored"),
        (Failure(FailureKind.REDIRECTED, 14), BrokerBusyError, "not_stored"),
        (Failure(FailureKind.REQUESTER_AWAY, 1), RequesterAwayError, "not_stored"),
    ],
)
def test_error_of_a_failure_by_kind_and_code(
    failure: Failure, error: type[ClientError], outcome: str
) -> None:
    slot = SendSlot(Message("T", b"x"), MessageQueue("T", "g", 0), "id", b"", b"", 1, 1.0, False)
    found = error_of(slot, failure, "g")
    assert type(found) is error
    assert found.outcome == outcome
    slot.sent = True
    assert error_of(slot, failure, "g").outcome == "unknown"
