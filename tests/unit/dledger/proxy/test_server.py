"""The server of a proxy: bytes held for clients are bounded, calls are counted."""

import asyncio
import re
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health
from structlog.testing import capture_logs

from dledger.aio.guest import Guest
from dledger.client.connect import connect
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import server
from dledger.proxy.caller import HOST_SHARE, REQUEST_MESSAGE_BYTES_MAX, Caller, HeldBytes
from dledger.proxy.metrics import METHODS, CallMetrics, ProxyMetrics, served_page
from dledger.proxy.open_receives import Received
from dledger.proxy.server import (
    COMMANDS_BYTES_MAX,
    REQUEST_BYTES_MAX,
    UNREAD_BYTES_MAX,
    _Commands,
    _Handlers,
)
from dledger.proxy.service import MessagingService
from dledger.remoting.metrics import family_text
from dledger.testing.doubles import ManualClock, MemoryNetwork
from tests.harness.metrics_page import MetricsPage
from tests.unit.dledger.proxy.grpc_doubles import Carrier, Context, OneReceive

ASKED = pb.ReceiveMessageRequest(group=pb.Resource(name="clerks"))


@pytest.mark.parametrize(
    ("held_bytes", "host", "code"),
    [
        (UNREAD_BYTES_MAX // HOST_SHARE - 1, "127.0.0.1", None),
        (UNREAD_BYTES_MAX // HOST_SHARE, "127.0.0.1", pb.TOO_MANY_REQUESTS),
        (UNREAD_BYTES_MAX // HOST_SHARE, "10.0.0.1", None),
        (UNREAD_BYTES_MAX, "10.0.0.1", pb.TOO_MANY_REQUESTS),
    ],
    ids=["less", "of the host", "of another host", "of all"],
)
@pytest.mark.parametrize("name", ["ReceiveMessage", "PullMessage"])
def test_much_that_is_unread_refuses_more(
    name: str, held_bytes: int, host: str, code: int | None
) -> None:
    guest, context = Carrier(), Context(ends_at=9)
    handlers = _Handlers(
        cast(MessagingService, OneReceive()), cast(Guest, guest), CallMetrics(ManualClock())
    )
    handlers._unread.count(host, held_bytes)
    handle = handlers._receive if name == "ReceiveMessage" else handlers._pull
    asyncio.run(handle(cast(Any, ASKED), context))
    codes = [each.status.code for each in context.written if each.HasField("status")]
    assert codes == ([] if code is None else [code])
    assert len(context.written) == (3 if code is None else 1)
    assert handlers._unread.used_bytes == held_bytes


class HeldSend(OneReceive):
    """A service whose calls note what is held meanwhile, and how often they run."""

    handlers: _Handlers
    seen: list[int]

    async def in_time(self, call: Any, request: Any, caller: Caller) -> Any:
        self.seen.append(self.handlers._requests.used_bytes)
        if isinstance(request, pb.PullMessageRequest):
            return await super().in_time(call, request, caller)
        return pb.SendMessageResponse(status=pb.Status(code=pb.OK))

    async def receive_message(
        self, request: Any, caller: Caller, received: Received | None = None
    ) -> Received:
        self.seen.append(self.handlers._requests.used_bytes)
        return await super().receive_message(request, caller, received)

    async def telemetry(self, command: Any, caller: Caller) -> pb.TelemetryCommand:
        self.seen.append(self.handlers._requests.used_bytes)
        return pb.TelemetryCommand(status=pb.Status(code=pb.OK))

    def open_stream(self, caller: Caller, push: Any) -> object:
        return object()

    def close_stream(self, caller: Caller, stream: object) -> None:
        pass


class Reading(Context):
    """A call whose request is read; a stream ends when something was written.

    Attributes:
        reads: How often the program asked for a request; with *is_unfinished* none ever comes.
        aborted: With what the program ended it.
    """

    def __init__(self, asked: Any, *, is_unfinished: bool = False) -> None:
        super().__init__(ends_at=9)
        self.reads, self.aborted = 0, grpc.StatusCode.OK
        self._asked, self._is_unfinished = [asked], is_unfinished

    async def read(self) -> Any:
        self.reads += 1
        if self._is_unfinished:
            await asyncio.Event().wait()
        if self._asked:
            return self._asked.pop()
        while not self.written:
            await asyncio.sleep(0)
        return grpc.aio.EOF

    async def abort(self, code: grpc.StatusCode, _details: str) -> None:
        self.aborted = code
        raise grpc.aio.AbortError


def held_send() -> tuple[HeldSend, _Handlers]:
    service = HeldSend()
    handlers = _Handlers(
        cast(MessagingService, service), cast(Guest, Carrier()), CallMetrics(ManualClock())
    )
    service.handlers, service.seen = handlers, []
    return service, handlers


REQUEST = b"x" * 4096


BODY = pb.Message(body=REQUEST)
FILTER = pb.FilterExpression(expression=REQUEST.decode())
CALLS: dict[str, Any] = {
    "SendMessage": pb.SendMessageRequest(messages=[BODY]),
    "ReceiveMessage": pb.ReceiveMessageRequest(filter_expression=FILTER),
    "PullMessage": pb.PullMessageRequest(filter_expression=FILTER),
    "Telemetry": pb.TelemetryCommand(verify_message_command=pb.VerifyMessageCommand(message=BODY)),
}


async def made(handlers: _Handlers, name: str, context: Reading) -> None:
    handler = (handlers.table() | handlers.checks(health.aio.HealthServicer()))[name]
    await (handler.stream_unary or handler.stream_stream)(None, context)


SHARE = REQUEST_BYTES_MAX // HOST_SHARE


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("held_bytes", "host", "waits"),
    [
        (SHARE - REQUEST_MESSAGE_BYTES_MAX, "127.0.0.1", False),
        (SHARE - REQUEST_MESSAGE_BYTES_MAX + 1, "127.0.0.1", True),
        (SHARE, "10.0.0.1", False),
        (REQUEST_BYTES_MAX - REQUEST_MESSAGE_BYTES_MAX + 1, "10.0.0.1", True),
    ],
    ids=["less", "of the host", "of another host", "of all"],
)
def test_request_is_read_when_its_host_has_its_turn(
    name: str, held_bytes: int, host: str, waits: bool
) -> None:
    """What is not read yet is in no buffer: gRPC takes a request whole once it is asked for."""
    service, handlers = held_send()
    handlers._requests.count(host, held_bytes)
    context = Reading(CALLS[name])

    async def run() -> None:
        call = asyncio.create_task(made(handlers, name, context))
        for _ in range(9):
            await asyncio.sleep(0)
        assert (context.reads == 0) is waits
        if waits:
            handlers._requests.count(host, -held_bytes)
        await call
        assert handlers._requests.used_bytes == (0 if waits else held_bytes)

    asyncio.run(run())
    (seen,) = service.seen
    is_held = name != "ReceiveMessage"
    assert 0 <= seen - (0 if waits else held_bytes) - is_held * len(REQUEST) < 64
    assert handlers._receives.used_bytes == 0


@pytest.mark.parametrize("name", [*CALLS, "Check", "Watch"])
@pytest.mark.parametrize("held_bytes", [0, SHARE], ids=["unfinished", "without a turn"])
def test_request_that_does_not_come_ends_its_call(
    name: str, held_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READ_S", 0.0)
    service, handlers = held_send()
    handlers._requests.count("127.0.0.1", held_bytes)
    context = Reading(None, is_unfinished=True)
    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(made(handlers, name, context))
    assert context.aborted == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (service.seen, handlers._requests.used_bytes) == ([], held_bytes)
    assert handlers._requests._waiting.keys() <= {"127.0.0.1"}


def test_answer_without_space_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many receives may wait when one large message comes."""
    guest, context = Carrier(), Context(ends_at=9)
    handlers = _Handlers(
        cast(MessagingService, OneReceive()), cast(Guest, guest), CallMetrics(ManualClock())
    )
    monkeypatch.setattr(handlers._unread, "fits", lambda size_bytes: False)
    asyncio.run(handlers._receive(ASKED, context))
    assert [each.status.code for each in context.written] == [pb.TOO_MANY_REQUESTS]
    assert [function.__name__ for function, _ in guest.started] == ["abandon"]
    assert handlers._unread.used_bytes == 0


def test_commands_that_are_unread_are_bounded_in_bytes() -> None:
    unread = HeldBytes(UNREAD_BYTES_MAX)
    commands = _Commands(Caller("c", peer="ipv4:127.0.0.1:1"), unread)
    large = pb.TelemetryCommand(
        verify_message_command=pb.VerifyMessageCommand(message=pb.Message(body=b"x" * (5 << 20)))
    )
    with capture_logs() as lines:
        for _ in range(9):
            commands.push(large)
    assert [line["event"] for line in lines] == ["command_dropped"]
    assert 15 << 20 < unread.used_bytes <= COMMANDS_BYTES_MAX
    commands.push(pb.TelemetryCommand())  # a small one has space still
    context = Context(ends_at=2)

    async def write() -> None:
        with pytest.raises(asyncio.CancelledError):
            await commands.keep_writing(context)

    asyncio.run(write())
    assert context.written == [large, large]
    assert 5 << 20 < unread.used_bytes < 6 << 20
    commands.close()
    commands.push(large)
    assert unread.used_bytes == 0


def test_host_that_reads_nothing_has_no_space_of_another() -> None:
    unread = HeldBytes(UNREAD_BYTES_MAX)
    unread.count("10.0.0.1", UNREAD_BYTES_MAX // HOST_SHARE)
    full = _Commands(Caller("c", peer="ipv4:10.0.0.1:1"), unread)
    other = _Commands(Caller("c", peer="ipv4:10.0.0.2:1"), unread)
    for commands in (full, other):
        commands.push(pb.TelemetryCommand(status=pb.Status(code=pb.OK)))
    assert unread.used_bytes > UNREAD_BYTES_MAX // HOST_SHARE
    full.close()
    other.close()
    unread.count("10.0.0.1", -(UNREAD_BYTES_MAX // HOST_SHARE))
    assert (unread.used_bytes, len(unread._by_host)) == (0, 0)


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
