"""Clients of proxies: what answers mean for a history, and which proxy is called.

A broker's clock does what the runner orders, and nothing jumps that must not.
A flood states what became of its connections.
What a network of the run's own is configured with.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from dledger.client.core.errors import BrokerUnreachableError
from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.chaos.broker_child import ClockFile, SteeredClock
from dledger.jepsen_like.chaos.grpc_calls import (
    CALL_TIMEOUT_S,
    GrpcCalls,
    Link,
    error_of,
    error_of_all,
    message_group_of,
)
from dledger.jepsen_like.chaos.limits import Flood, kept_of, source_for
from dledger.jepsen_like.chaos.namespaces import HOSTS_MAX, RunNetwork, rule_lines, run_network
from dledger.jepsen_like.history.operation import Outcome
from dledger.jepsen_like.nemesis.ground import FaultError
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


class Hand:
    """A clock that stands still."""

    now_s = 100.0
    slept: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return 1_000_000 + int(self.now_s * 1000)

    async def sleep(self, seconds: float) -> None:
        self.slept = seconds

    def time_out(self, seconds: float) -> trio.CancelScope:
        self.slept = seconds
        return trio.CancelScope()


def test_a_jump_moves_the_date_and_no_duration(tmp_path: Path) -> None:
    hand, file = Hand(), ClockFile(tmp_path / "clock")
    clock = SteeredClock(hand, file.path)
    before = (clock.monotonic(), clock.wall_ms())
    file.jump(-3_600_000)
    file.jump(1_000)
    assert (clock.monotonic() - before[0], clock.wall_ms() - before[1]) == (0.0, -3_599_000)


def test_drift_gathers_and_stays(tmp_path: Path) -> None:
    hand, file = Hand(), ClockFile(tmp_path / "clock")
    clock = SteeredClock(hand, file.path)
    begin, date = clock.monotonic(), clock.wall_ms()
    file.drift(20_000.0)
    clock.monotonic()
    hand.now_s += 10.0
    assert clock.monotonic() - begin == pytest.approx(10.2)
    file.drift(0.0)
    clock.monotonic()
    hand.now_s += 10.0
    assert clock.monotonic() - begin == pytest.approx(20.2)
    assert clock.wall_ms() - date == 20_200


async def test_fast_clock_wakes_early(tmp_path: Path) -> None:
    hand, file = Hand(), ClockFile(tmp_path / "clock")
    clock = SteeredClock(hand, file.path)
    file.drift(250_000.0)
    await clock.sleep(5.0)
    assert hand.slept == pytest.approx(4.0)
    with clock.time_out(10.0):
        assert hand.slept == pytest.approx(8.0)


def test_a_holder_has_a_loopback_address_of_its_own() -> None:
    assert source_for("127.0.0.1").startswith("127.7.")
    assert source_for("10.9.0.2") == ""


def test_flood_reports_when_it_was_made_smaller() -> None:
    assert str(Flood(10, 10, 10, 4)) == "10 of 10 connections, 6 closed by the broker"
    assert str(Flood(10_000, 960, 900, 900)) == (
        "900 of 960 connections instead of 10000, 0 closed by the broker"
    )


def test_a_connection_that_the_other_side_closed_is_not_kept() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        ours = [pair[0] for pair in pairs]
        assert kept_of(ours) == 3
        pairs[1][1].close()
        assert kept_of(ours) == 2
    finally:
        for one, other in pairs:
            one.close()
            other.close()


def test_flood_states_when_its_holder_ended() -> None:
    assert str(Flood(10, 10, 10)) == "10 of 10 connections, their process ended"


A, B, C = "10.77.1.2", "10.77.2.2", "10.77.3.2"


def test_router_gets_changes_only() -> None:
    assert rule_lines((), [(A, B)]) == [f"rule add priority 10 from {A} to {B} blackhole"]
    assert rule_lines([(A, B), (B, C)], [(B, C), (B, A)]) == [
        f"rule del priority 10 from {A} to {B} blackhole",
        f"rule add priority 10 from {B} to {A} blackhole",
    ]
    assert rule_lines([(A, B)], [(A, B)]) == []
    assert rule_lines([(A, B)], ()) == [f"rule del priority 10 from {A} to {B} blackhole"]


def test_every_host_has_two_addresses_and_a_namespace_of_its_own() -> None:
    files = {name: Path(name) for name in ("n0", "ns0", "clients")}
    hosts = RunNetwork(Path("router"), files).hosts
    reported = [at for host in hosts.values() for at in (host.address, host.watch_address)]
    assert len(set(reported)) == 6
    assert {name: host.namespace for name, host in hosts.items()} == files


def test_too_many_hosts_are_refused_first() -> None:
    with (
        pytest.raises(FaultError, match=f"{HOSTS_MAX} at most"),
        run_network([f"n{n}" for n in range(HOSTS_MAX + 1)]),
    ):
        pass
