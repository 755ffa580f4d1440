"""What tests of connections send and hear over a wire, and handlers that answer or do not."""

from collections.abc import Callable
from typing import Any

from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.frame import FrameDecoder, encode_command

Linked = Callable[..., tuple[Connection, Connection]]


ECHO = 900


def echo(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked, 0, None, dict(asked.ext), asked.body)


def hold_in(held: list[RemotingCommand]) -> Any:
    """A handler that answers nothing and keeps what it was asked."""

    def hold(_: Connection, asked: RemotingCommand) -> Any:
        held.append(asked)
        return DEFERRED

    return hold


def table(handler: Any = echo, *, code: int = ECHO, limit: int = 100) -> ProcessorTable:
    processors = ProcessorTable()
    processors.register(code, handler, Limiter("test", limit))
    return processors


def asked_with(opaque: int, code: int = ECHO, **fields: Any) -> bytes:
    command = request(code, **fields)
    command.opaque = opaque
    return encode_command(command)


async def heard(stream: Any, count: int) -> list[RemotingCommand]:
    decoder = FrameDecoder()
    commands: list[RemotingCommand] = []
    while len(commands) < count:
        data = await stream.receive_some(65536)
        assert data, "the connection ended"
        commands += decoder.feed(data)
    return commands


async def until_closed(stream: Any) -> None:
    while await stream.receive_some(65536):
        pass
