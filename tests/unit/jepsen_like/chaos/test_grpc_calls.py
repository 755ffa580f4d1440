"""Clients of proxies: what answers mean for a history, and which proxy is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import trio

from dledger.client.core.errors import BrokerUnreachableError
from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.chaos.grpc_calls import (
    CALL_TIMEOUT_S,
    GrpcCalls,
    Link,
    error_of,
    error_of_all,
    message_group_of,
)
from dledger.jepsen_like.history.operation import Outcome
from dledger.jepsen_like.workloads.recorder import classify
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.sends import queue_of_group
from tests.harness.present import present


class FakeLink:
    """A link that connects at the second attempt, or never."""

    def __init__(self, *, is_connected: bool, comes_back: bool = False) -> None:
        self.is_connected = is_connected
        self._comes_back = comes_back
        self.attempts = 0

    def connect(self) -> None:
        self.attempts += 1
        self.is_connected = self._comes_back and self.attempts == 2


def calls_of(links: Sequence[FakeLink]) -> GrpcCalls:
    return GrpcCalls(cast("Sequence[Link]", links), 4)


def status(code: Any) -> pb.Status:
    return pb.Status(code=code, message="why")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (pb.PROXY_TIMEOUT, Outcome.INFO),
        (pb.MASTER_PERSISTENCE_TIMEOUT, Outcome.INFO),
        (pb.HA_NOT_AVAILABLE, Outcome.INFO),
        (pb.INVALID_RECEIPT_HANDLE, Outcome.FAIL),
        (pb.TOO_MANY_REQUESTS, Outcome.FAIL),
        (pb.TOPIC_NOT_FOUND, Outcome.FAIL),
        (pb.INTERNAL_SERVER_ERROR, Outcome.FAIL),
        (pb.BAD_REQUEST, Outcome.FAIL),
    ],
)
def test_codes_have_the_outcome_they_state(code: Any, outcome: Outcome) -> None:
    error = present(error_of(status(code)))
    assert classify(error) == (outcome, True)
    assert pb.Code.Name(code) in str(error)


def test_a_code_without_a_reason_fails_the_run() -> None:
    assert error_of(status(pb.OK)) is None
    for code in (pb.INTERNAL_ERROR, pb.FORBIDDEN, pb.UNSUPPORTED):
        error = present(error_of(status(code)))
        assert classify(error) == (Outcome.INFO, False)


def test_different_results_of_one_request_are_unknown() -> None:
    assert error_of_all([status(pb.OK), status(pb.OK)]) is None
    error = present(error_of_all([status(pb.OK), status(pb.INVALID_RECEIPT_HANDLE)]))
    assert classify(error) == (Outcome.INFO, True)
    assert "INVALID_RECEIPT_HANDLE, OK" in str(error)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_message_groups_reach_their_queues(count: int) -> None:
    queues = [MessageQueue("Orders", "chaos", number) for number in range(count)]
    found = [queue_of_group(queues, message_group_of(number, count)) for number in range(count)]
    assert found == queues


async def test_a_client_calls_the_next_connected_proxy() -> None:
    calls = calls_of([FakeLink(is_connected=False), FakeLink(is_connected=True)])
    assert await calls.connected(0, CALL_TIMEOUT_S) == 1
    assert await calls.connected(1, CALL_TIMEOUT_S) == 1
    assert await calls.connected(2, CALL_TIMEOUT_S) == 3


async def test_nothing_is_called_without_a_proxy() -> None:
    links = [FakeLink(is_connected=False), FakeLink(is_connected=False)]
    begin_s = trio.current_time()
    with pytest.raises(BrokerUnreachableError, match="no proxy is connected within 8 s") as caught:
        await calls_of(links).connected(0, CALL_TIMEOUT_S)
    assert trio.current_time() - begin_s == pytest.approx(CALL_TIMEOUT_S)
    assert classify(caught.value) == (Outcome.FAIL, True)
    assert all(link.attempts > 10 for link in links)


async def test_a_client_waits_for_a_proxy_to_return() -> None:
    links = [FakeLink(is_connected=False), FakeLink(is_connected=False, comes_back=True)]
    assert await calls_of(links).connected(0, CALL_TIMEOUT_S) == 1
    assert links[1].attempts == 2
