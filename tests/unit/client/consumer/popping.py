"""A client instance whose broker hands messages out by POP, in memory and on trio's clock."""

from __future__ import annotations

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
from dledger.remoting.protocol.own_fields import STALE_FIELD, encode_stale
from dledger.remoting.protocol.pop_requests import (
    AckMessageHeader,
    BatchAckMessageRequestBody,
    ChangeInvisibleTimeHeader,
    PopMessageHeader,
    PopMessageResponseHeader,
    ReceiptHandle,
    encode_offsets,
    revive_queue_of,
)


@dataclass
class Out:
    """A message that is out."""

    token: int
    popped_ms: int
    ends_s: float


@dataclass
class PopBroker:
    """One queue of one consumer group, as a broker keeps it.

    Attributes:
        delay_s: From a request to its answer.
        names_stale: It names the stale receipts of a batch.
        failures: In place of the answers to the next requests, which are done; None: as usual.
        seen: The requests: code, and for how many messages.
    """

    nursery: trio.Nursery
    messages: int = 0
    delay_s: float = 0.01
    names_stale: bool = True
    failures: list[MQError | None] = field(default_factory=list)
    refusals: dict[int, int] = field(default_factory=dict)
    attempts: int = 1
    seen: list[tuple[int, int]] = field(default_factory=list)
    holds_s: list[float] = field(default_factory=list)
    out: dict[int, Out] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    handed_out: Counter[int] = field(default_factory=Counter)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self._token = 0
        self._next = 0
        self._moved = trio.Event()

    @property
    def instance(self) -> ClientInstance:
        """Return the client instance that asks this broker."""
        return cast("ClientInstance", _Instance(self))

    def send(self, count: int = 1) -> None:
        """Store messages; held requests get them."""
        self.messages += count
        self._move()

    def count(self, code: RequestCode) -> int:
        """Return how many such requests came."""
        return sum(seen == code for seen, _ in self.seen)

    def _move(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    def take(self, wanted: int, invisible_ms: int) -> list[int]:
        """Hand messages out: those whose time is over, then new ones."""
        now_s = trio.current_time()
        found = [offset for offset, out in sorted(self.out.items()) if out.ends_s <= now_s]
        while len(found) < wanted and self._next < self.messages:
            found.append(self._next)
            self._next += 1
        found = found[:wanted]
        self._token += 1
        for offset in found:
            self._put(offset, invisible_ms)
            self.handed_out[offset] += 1
        return sorted(found)

    def _put(self, offset: int, invisible_ms: int) -> None:
        now_s = trio.current_time()
        self.out[offset] = Out(self._token, round(now_s * 1000), now_s + invisible_ms / 1000)

    def settle(self, offset: int, popped_ms: int, revive: int) -> bool:
        """Acknowledge a message; tell whether it is out under this receipt."""
        out = self.out.get(offset)
        if out is None or (out.popped_ms, revive_queue_of(out.token)) != (popped_ms, revive):
            return False
        del self.out[offset]
        self.acked.add(offset)
        return True

    # ------------------------------------------------------------------------------ requests

    async def answer(self, code: int, ext: dict[str, str], body: bytes) -> RemotingCommand:
        """Do what a request asks for, and answer after a while."""
        asked = request(code, dict(ext))
        if code == RequestCode.POP_MESSAGE:
            answer = await self._pop(asked)
        else:
            answer = self._marked(asked, body)
        await trio.sleep(self.delay_s)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return answer

    async def _pop(self, asked: RemotingCommand) -> RemotingCommand:
        header = PopMessageHeader.decode(asked.ext)
        self.seen.append((asked.code, header.max_msg_nums))
        self.holds_s.append(header.poll_time / 1000)
        ends_s = trio.current_time() + header.poll_time / 1000
        while True:
            found = self.take(header.max_msg_nums, header.invisible_time)
            token = self._token
            if found or trio.current_time() >= ends_s:
                break
            wake_s = min([ends_s, *(out.ends_s for out in self.out.values())])
            with trio.move_on_at(wake_s):
                await self._moved.wait()
        if not found:
            return response_to(asked, ResponseCode.POLLING_TIMEOUT)
        starts, texts = encode_offsets({0: found})
        popped_ms = self.out[found[0]].popped_ms
        fields = PopMessageResponseHeader(
            popped_ms, header.invisible_time, revive_queue_of(token), 0, starts, texts
        )
        records = [
            encode_record(
                topic="T", queue_id=0, body=b"%d" % offset, properties=b"", queue_offset=offset,
                reconsume_times=self.handed_out[offset] - 1,
            )
            for offset in found
        ]  # fmt: skip
        return response_to(asked, 0, None, fields.encode(), b"".join(records))

    def _marked(self, asked: RemotingCommand, body: bytes) -> RemotingCommand:
        if asked.code == RequestCode.BATCH_ACK_MESSAGE:
            items = BatchAckMessageRequestBody.decode(body).acks
            named = [(offset, item.pt, item.rq) for item in items for offset in item.offsets]
            self.seen.append((asked.code, len(named)))
            if asked.code in self.refusals:
                return response_to(asked, self.refusals[asked.code])
            accepted = [self.settle(*each) for each in named]
            if all(accepted):
                return response_to(asked)
            fields = {STALE_FIELD: encode_stale(accepted)} if self.names_stale else {}
            return response_to(asked, ResponseCode.NO_MESSAGE, "some are stale", fields)
        self.seen.append((asked.code, 1))
        if asked.code in self.refusals:
            return response_to(asked, self.refusals[asked.code])
        is_ack = asked.code == RequestCode.ACK_MESSAGE
        header = (AckMessageHeader if is_ack else ChangeInvisibleTimeHeader).decode(asked.ext)
        receipt = ReceiptHandle.decode(header.extra_info)
        if not self.settle(receipt.offset, receipt.pop_time_ms, receipt.revive_queue_id):
            return response_to(asked, ResponseCode.NO_MESSAGE, "it is stale")
        if is_ack:
            return response_to(asked)
        assert isinstance(header, ChangeInvisibleTimeHeader)
        self.acked.discard(receipt.offset)
        self._token += 1
        self._put(receipt.offset, header.invisible_time)
        self._move()
        out = self.out[receipt.offset]
        ext = {
            "popTime": str(out.popped_ms),
            "invisibleTime": str(header.invisible_time),
            "reviveQid": str(revive_queue_of(out.token)),
        }
        return response_to(asked, 0, None, ext)


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
