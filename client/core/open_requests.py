"""Requests of this client that wait for their replies, which brokers push to it (code 326).

Spec: remoting fact sheet, section 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio

from client.core.errors import BackpressureError
from client.core.message import MessageExt
from commitlog.errors import LocalProtocolError, MQError
from commitlog.properties import (
    PROPERTY_ARRIVE_TIME,
    PROPERTY_CORRELATION_ID,
    decode_properties,
    encode_properties,
)
from commitlog.record import (
    NO_HOST,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_TYPE_MASK,
    encode_record,
    pack_host,
)
from remoting.connection import Connection
from remoting.log import get_logger
from remoting.processor import Limiter, ProcessorTable
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import ReplyMessageHeader
from remoting.seams import Clock, Rng

OPEN_REQUESTS_MAX: Final = 65_536
"""Requests that wait at a time; more wait for nothing but a slow replier, and would only grow."""

REPLIES_MAX: Final = 1024
"""Replies looked at at a time; they are handed over at once."""

CORRELATION_ID_BYTES: Final = 16
"""Too many to be guessed: whoever knows an id could answer in the replier's place."""

_BODY_FLAGS: Final = SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_TYPE_MASK

_log = get_logger(__name__)


class OpenRequest:
    """A request that waits.

    Attributes:
        correlation_id: What its reply will carry.
        reply: What came.
        ended: Set when it came, or when nothing can come any more.
    """

    __slots__ = ("correlation_id", "ended", "reply")

    def __init__(self, correlation_id: str) -> None:
        self.correlation_id = correlation_id
        self.reply: MessageExt | None = None
        self.ended = trio.Event()


class OpenRequests:
    """The requests of one client.

    Attributes:
        in_use: A request was made: from then on all brokers are to know this client.
        unmatched: Replies nobody waited for: late ones, and those that came twice.
    """

    def __init__(self, server_requests: ProcessorTable, clock: Clock, rng: Rng) -> None:
        self.in_use = False
        self.unmatched = 0
        self._clock = clock
        self._rng = rng
        self._open: dict[str, OpenRequest] = {}
        server_requests.register(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            self._pushed,
            Limiter("push reply message", REPLIES_MAX),
        )

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def opened(self) -> Iterator[OpenRequest]:
        """Wait for a reply inside the block.

        Raises:
            BackpressureError: `OPEN_REQUESTS_MAX` wait already.
        """
        if len(self._open) >= OPEN_REQUESTS_MAX:
            raise BackpressureError(f"{len(self._open)} requests wait for their replies")
        waiting = OpenRequest(self._rng.randbytes(CORRELATION_ID_BYTES).hex())
        self._open[waiting.correlation_id] = waiting
        try:
            yield waiting
        finally:
            self._open.pop(waiting.correlation_id, None)

    def _pushed(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Take code 326. A reply that comes too late, or again, is confirmed as well."""
        try:
            reply = _message_of(command, self._clock.wall_ms())
            correlation_id = reply.properties.get(PROPERTY_CORRELATION_ID, "")
        except MQError as error:
            _log.warning("reply_unreadable", error=str(error))
            return response_to(command, ResponseCode.SYSTEM_ERROR, "process reply message fail")
        waiting = self._open.pop(correlation_id, None)
        if waiting is None:
            self.unmatched += 1
            _log.info("reply_for_nobody", correlation_id=correlation_id, sender=reply.born_host)
        else:
            waiting.reply = reply
            waiting.ended.set()
        return response_to(command)


def _message_of(command: RemotingCommand, arrived_ms: int) -> MessageExt:
    header = ReplyMessageHeader.decode(command.ext)
    properties = decode_properties(header.properties or "")
    properties[PROPERTY_ARRIVE_TIME] = str(arrived_ms)
    record = encode_record(
        topic=header.topic,
        queue_id=header.queue_id,
        body=command.body,
        properties=encode_properties(properties),
        flag=header.flag,
        sys_flag=header.sys_flag & _BODY_FLAGS,
        born_timestamp_ms=header.born_timestamp,
        born_host=_packed(header.born_host),
        reconsume_times=header.reconsume_times or 0,
        store_timestamp_ms=header.store_timestamp,
        store_host=_packed(header.store_host),
    )
    return MessageExt(memoryview(record), 0)


def _packed(address: str | None) -> bytes:
    host, _, port = (address or "").rpartition(":")
    try:
        return pack_host(host.strip("[]"), int(port))
    except (LocalProtocolError, ValueError):
        return NO_HOST
