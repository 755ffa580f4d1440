"""What clients leave unread takes a bounded number of bytes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from dledger.aio.guest import Guest
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.server import COMMANDS_BYTES_MAX, _Commands, _Handlers
from dledger.proxy.service import MessagingService, Received
from dledger.proxy.unread import HOST_SHARE, UNREAD_BYTES_MAX, UnreadBytes
from dledger.testing.doubles import ManualClock
from tests.unit.dledger.proxy.grpc_doubles import Carrier, Context, OneReceive

ASKED = pb.ReceiveMessageRequest(group=pb.Resource(name="clerks"))


class LargeReceive(OneReceive):
    """A service whose receives get three messages of 1 KiB."""

    async def receive_message(
        self, request: Any, caller: Caller, received: Received | None = None
    ) -> Received:
        received = await super().receive_message(request, caller, received)
        for answer in received.answers:
            answer.message.body = b"x" * 1024
        return received


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


def test_ended_receive_holds_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    guest, context = Carrier(), Context(ends_at=1)
    handlers = _Handlers(
        cast(MessagingService, LargeReceive()), cast(Guest, guest), CallMetrics(ManualClock())
    )
    held: list[int] = []

    def done() -> bool:
        held.append(handlers._unread.used_bytes)
        return False

    monkeypatch.setattr(context, "done", done)

    async def call() -> None:
        with pytest.raises(asyncio.CancelledError):
            await handlers._receive(ASKED, context)

    asyncio.run(call())
    assert min(held) > 3 * 1024
    assert handlers._unread.used_bytes == 0


def test_commands_that_are_unread_are_bounded_in_bytes() -> None:
    unread = UnreadBytes()
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
    unread = UnreadBytes()
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
