"""What a proxy counts, and its page where the port is taken."""

from __future__ import annotations

import re

from structlog.testing import capture_logs

from dledger.client.connect import connect
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.metrics import METHODS, CallMetrics, ProxyMetrics, served_page
from dledger.proxy.service import MessagingService
from dledger.remoting.metrics import family_text
from dledger.testing.doubles import ManualClock, MemoryNetwork
from tests.harness.metrics_page import MetricsPage

ADDRESS = ("127.0.0.1", 5557)


def counted(calls: CallMetrics) -> dict[tuple[str, ...], float]:
    """Return how many calls there were, by name and code."""
    page = MetricsPage.read("".join(family_text(*calls.latency.family(), {})))
    return page.of("rocketmq_rpc_latency_count", "request_code", "response_code")


def test_calls_are_counted_by_name_and_code() -> None:
    clock = ManualClock()
    calls = CallMetrics(clock)
    with calls.counted("SendMessage") as call:
        clock.now_s += 0.004
        call.answered(pb.SendMessageResponse(status=pb.Status(code=pb.OK)))
        assert calls.open_calls == 1
    message = pb.ReceiveMessageResponse(message=pb.Message())
    status = pb.ReceiveMessageResponse(status=pb.Status(code=pb.MESSAGE_NOT_FOUND))
    with calls.counted("ReceiveMessage") as call:
        call.answered(message, status)
    with calls.counted("ReceiveMessage") as call:
        call.answered(message)
    with calls.counted("AckMessage") as call:
        call.answered(pb.AckMessageResponse(status=pb.Status(code=99_999)))  # type: ignore[arg-type]  # of a newer version
    assert counted(calls) == {
        ("send_message", "ok"): 1,
        ("receive_message", "message_not_found"): 1,
        ("receive_message", "given_up"): 1,
        ("ack_message", "99999"): 1,
    }
    assert calls.open_calls == 0
    took = MetricsPage.read("".join(family_text(*calls.latency.family(), {})))
    assert took.of("rocketmq_rpc_latency_sum", "request_code")["send_message",] == 4


def test_every_call_has_a_name_of_its_own() -> None:
    calls = CallMetrics(ManualClock())
    for name in METHODS:
        with calls.counted(name):
            pass
    names = [name for name, _ in counted(calls)]
    assert len(set(names)) == len(METHODS)
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", name) for name in names)


async def test_taken_port_is_left_out_and_the_proxy_serves() -> None:
    network = MemoryNetwork()
    service = MessagingService(connect("127.0.0.1:1"), ("127.0.0.1", 8081))
    metrics = ProxyMetrics(service, CallMetrics(ManualClock()), "127.0.0.1:8081")
    served = False
    with capture_logs() as logs:
        async with served_page(metrics, network, ADDRESS), served_page(metrics, network, ADDRESS):
            served = True
    assert served
    assert [line["event"] for line in logs] == ["metrics_served", "metrics_port_left_out"]
    assert logs[1]["address"] == "127.0.0.1:5557"
