"""What is held for clients takes a bounded number of bytes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from dledger.aio.guest import Guest
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.held_bytes import (
    HOST_SHARE,
    REQUEST_BYTES_MAX,
    UNREAD_BYTES_MAX,
    HeldBytes,
)
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.open_receives import Received
from dledger.proxy.server import COMMANDS_BYTES_MAX, _Commands, _Handlers
from dledger.proxy.service import MessagingService
from dledger.testing.doubles import ManualClock
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
    asyncio.run(handlers.table()[name].unary_stream(ASKED, context))
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


class Commands(Context):
    """A stream that brings one command, and ends when something was written."""

    def __init__(self, command: pb.TelemetryCommand) -> None:
        super().__init__(ends_at=9)
        self._commands = [command]

    async def read(self) -> Any:
        if self._commands:
            return self._commands.pop()
        while not self.written:
            await asyncio.sleep(0)
        return grpc.aio.EOF


def held_send() -> tuple[HeldSend, _Handlers]:
    service = HeldSend()
    handlers = _Handlers(
        cast(MessagingService, service), cast(Guest, Carrier()), CallMetrics(ManualClock())
    )
    service.handlers, service.seen = handlers, []
    return service, handlers


REQUEST = b"x" * 4096


async def code_of(handlers: _Handlers, name: str) -> int:
    """Make a call whose request has 4 KiB and return the code of its answer."""
    handler = handlers.table()[name]
    if name == "SendMessage":
        message = pb.Message(body=REQUEST)
        sent = await handler.unary_unary(pb.SendMessageRequest(messages=[message]), Context(9))
        return int(sent.status.code)
    if name == "Telemetry":
        message = pb.Message(body=REQUEST)
        stream = Commands(
            pb.TelemetryCommand(verify_message_command=pb.VerifyMessageCommand(message=message))
        )
        await handler.stream_stream(None, stream)
        return int(stream.written[0].status.code)
    context = Context(ends_at=9)
    asked = pb.ReceiveMessageRequest(
        filter_expression=pb.FilterExpression(expression=REQUEST.decode())
    )
    if name == "PullMessage":
        asked = pb.PullMessageRequest(filter_expression=asked.filter_expression)
    await handler.unary_stream(asked, context)
    return int(context.written[0].status.code) or pb.OK


@pytest.mark.parametrize(
    ("held_bytes", "host", "code"),
    [
        (REQUEST_BYTES_MAX // HOST_SHARE - 1, "127.0.0.1", pb.OK),
        (REQUEST_BYTES_MAX // HOST_SHARE, "127.0.0.1", pb.TOO_MANY_REQUESTS),
        (REQUEST_BYTES_MAX // HOST_SHARE, "10.0.0.1", pb.OK),
        (REQUEST_BYTES_MAX, "10.0.0.1", pb.TOO_MANY_REQUESTS),
    ],
    ids=["less", "of the host", "of another host", "of all"],
)
@pytest.mark.parametrize("name", ["SendMessage", "ReceiveMessage", "PullMessage", "Telemetry"])
def test_much_under_way_refuses_more_requests(
    name: str, held_bytes: int, host: str, code: int
) -> None:
    service, handlers = held_send()
    handlers._requests.count(host, held_bytes)
    assert asyncio.run(code_of(handlers, name)) == code
    size_bytes = [seen - held_bytes for seen in service.seen]
    assert len(size_bytes) == (code == pb.OK)
    assert all(len(REQUEST) < size < len(REQUEST) + 64 for size in size_bytes)
    assert handlers._requests.used_bytes == held_bytes


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
