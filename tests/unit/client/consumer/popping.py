"""A client instance whose broker hands messages out by POP, in memory and on trio's clock."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError, RequestTimedOutError
from dledger.client.core.links import Link
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.commitlog.record import encode_record
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.pop_requests import BatchAckMessageRequestBody, PopMessageHeader
from tests.harness.pop_table import Key, PopTable


@dataclass(eq=False)
class PopBroker(PopTable):
    """One queue of one consumer group, as a broker keeps it.

    Attributes:
        delay_s: From a request to its answer.
        failures: In place of the answers to the next requests, which are done; None: as usual.
        seen: The requests: code, and for how many messages.
    """

    nursery: trio.Nursery
    messages: int = 0
    delay_s: float = 0.01
    failures: list[MQError | None] = field(default_factory=list)
    refusals: dict[int, int] = field(default_factory=dict)
    attempts: int = 1
    seen: list[tuple[int, int]] = field(default_factory=list)
    holds_s: list[float] = field(default_factory=list)
    handed_out: Counter[int] = field(default_factory=Counter)
    is_closed: bool = False

    @property
    def instance(self) -> ClientInstance:
        """Return the client instance that asks this broker."""
        return cast("ClientInstance", _Instance(self))

    @property
    def acked(self) -> set[int]:
        """Offsets of the messages that were acknowledged."""
        return {offset for _, offset in self.settled}

    def send(self, count: int = 1) -> None:
        """Store messages; held requests get them."""
        self.messages += count
        self.move()

    def count(self, code: RequestCode) -> int:
        """Return how many such requests came."""
        return sum(seen == code for seen, _ in self.seen)

    # ------------------------------------------------------------------------------ requests

    async def answer(self, code: int, ext: dict[str, str], body: bytes) -> RemotingCommand:
        """Do what a request asks for, and answer after a while."""
        asked = request(code, dict(ext), body)
        done = await self._pop(asked) if code == RequestCode.POP_MESSAGE else self._marked(asked)
        await trio.sleep(self.delay_s)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return done

    async def _pop(self, asked: RemotingCommand) -> RemotingCommand:
        header = PopMessageHeader.decode(asked.ext)
        self.seen.append((asked.code, header.max_msg_nums))
        self.holds_s.append(header.poll_time / 1000)
        ends_s = trio.current_time() + header.poll_time / 1000
        while not (found := self.take(header, {0: self.messages})):
            if trio.current_time() >= ends_s:
                return response_to(asked, ResponseCode.POLLING_TIMEOUT)
            await self.moved(ends_s)
        self.handed_out.update(offset for _, offset in found)
        return self.granted(asked, found, self._record)

    def _record(self, key: Key) -> bytes:
        return encode_record(
            topic="T", queue_id=0, body=b"%d" % key[1], properties=b"", queue_offset=key[1],
            reconsume_times=self.out[key].attempts - 1,
        )  # fmt: skip

    def _marked(self, asked: RemotingCommand) -> RemotingCommand:
        count = 1
        if asked.code == RequestCode.BATCH_ACK_MESSAGE:
            items = BatchAckMessageRequestBody.decode(asked.body).acks
            count = sum(len(item.offsets) for item in items)
        self.seen.append((asked.code, count))
        if asked.code in self.refusals:
            return response_to(asked, self.refusals[asked.code])
        return self.marked(asked)


class _Instance:
    def __init__(self, broker: PopBroker) -> None:
        self._broker = broker
        self.clock = TrioClock()
        self.rng = random.Random(1)

    @property
    def nursery(self) -> trio.Nursery:
        if self._broker.is_closed:
            raise ClientClosedError("closed")
        return self._broker.nursery

    async def route(self, _topic: str) -> SimpleNamespace:
        return SimpleNamespace(subscribe_queues=[MessageQueue("T", "b", 0)])

    async def ask_leader(
        self,
        name: str,
        code: int,
        ext: dict[str, str],
        body: bytes = b"",
        *,
        timeout_s: float = 10.0,
        adapt: Callable[[Link], int] | None = None,
        **rest: Any,
    ) -> RemotingCommand:
        if adapt is not None:
            for _ in range(self._broker.attempts):
                is_ours = self._broker.names_stale
                adapt(cast("Link", SimpleNamespace(names_stale=is_ours, cbor=is_ours)))
        with trio.move_on_after(timeout_s):
            return await self._broker.answer(code, ext, body)
        raise RequestTimedOutError("no answer in time")
