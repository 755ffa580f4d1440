"""A fake broker group that hands messages out by POP, and answers in bad ways when asked to.

What is out, for whom and until when is kept once for all its members, as in their log.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import partial
from typing import Final

import trio

from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import EndTransactionHeader
from dledger.remoting.protocol.outcome import DECISION_FIELD, OUTCOME_FIELD, Condition, answer
from dledger.remoting.protocol.own_fields import STALE_FIELD, UNSEEN_FIELD, encode_stale
from dledger.remoting.protocol.pop_requests import (
    AckMessageHeader,
    BatchAckMessageRequestBody,
    ChangeInvisibleTimeHeader,
    ChangeInvisibleTimeResponseHeader,
    PopMessageHeader,
    PopMessageResponseHeader,
    ReceiptHandle,
    encode_offsets,
    revive_queue_of,
)
from tests.unit.client.fake_cluster import Broker, Group

Key = tuple[int, int]
"""Queue and offset of a message."""


@unique
class Fault(Enum):
    """How a request ends."""

    NONE = "as it should"
    DONE_LOST = "done, no answer"
    LOST = "not done, no answer"
    DONE_UNKNOWN = "done, answered as unknown"
    UNKNOWN = "not done, answered as unknown"
    BUSY = "refused for now"
    REFUSED = "refused for good"
    LATE = "done, answered late"


DONE: Final = frozenset({Fault.NONE, Fault.DONE_LOST, Fault.DONE_UNKNOWN, Fault.LATE})


@dataclass(slots=True)
class Out:
    """A message that is out: how often, under which token, until when, for which receive."""

    attempts: int
    token: int
    popped_ms: int
    ends_s: float
    attempt_id: str


@dataclass(eq=False)
class PopGroup:
    """The messages of one topic, for one consumer group.

    Attributes:
        fault: How a request of some code ends.
        late_s: How late a late answer is.
        retries: A message is handed out once more than that, and is a dead letter then.
        dead: Dead letters that a broker has made because they were out too often.
        settled: Messages that were acknowledged.
    """

    group: Group
    topic: str = "T"
    fault: Callable[[RemotingCommand], Fault] = lambda _: Fault.NONE
    late_s: float = 2.0
    retries: int = 16
    out: dict[Key, Out] = field(default_factory=dict)
    settled: set[Key] = field(default_factory=set)
    dead: set[Key] = field(default_factory=set)
    decisions: dict[int, int] = field(default_factory=dict)
    """What half messages were decided as, by their place in the log."""

    def __post_init__(self) -> None:
        self._token = 0
        self._next: Counter[int] = Counter()
        self._line: deque[object] = deque()
        self._moved = trio.Event()
        for broker in self.group.brokers:
            self._attach(broker)

    @property
    def waiting(self) -> int:
        """How many receives wait for messages."""
        return len(self._line)

    def _attach(self, broker: Broker) -> None:
        def led(handler: Callable[[RemotingCommand], Handled]) -> Callable[..., Handled]:
            def handle(asked: RemotingCommand) -> Handled:
                if broker.leads:
                    return handler(asked)
                ext = {"outcome": "not_stored", "term": str(self.group.term)}
                if self.group.leader is not None:
                    ext["leaderAddr"] = self.group.leader
                return response_to(asked, ResponseCode.SERVICE_NOT_AVAILABLE, "no leader", ext)

            return handle

        def store_one(asked: RemotingCommand) -> RemotingCommand:
            broker.intercept = None
            done = broker._send(asked)
            broker.intercept = store
            assert isinstance(done, RemotingCommand)
            return done

        def store(asked: RemotingCommand) -> Handled:
            is_records = asked.code == RequestCode.SEND_RECORDS
            return self._faulty(asked, broker.store_records if is_records else store_one)

        broker.intercept = store
        broker.on(RequestCode.POP_MESSAGE, led(self._pop))
        for code, handler in (
            (RequestCode.ACK_MESSAGE, self._ack),
            (RequestCode.BATCH_ACK_MESSAGE, self._ack_batch),
            (RequestCode.CHANGE_MESSAGE_INVISIBLETIME, self._change),
        ):
            broker.on(code, led(partial(self._faulty, do=handler)))
        broker.on(RequestCode.END_TRANSACTION, led(lambda asked: self._faulty(asked, self._decide)))
        broker.on(
            RequestCode.CONSUMER_SEND_MSG_BACK,
            led(lambda asked: self._faulty(asked, self._send_back)),
        )

    def _faulty(
        self, asked: RemotingCommand, do: Callable[[RemotingCommand], RemotingCommand]
    ) -> Handled:
        fault = self.fault(asked)
        done = do(asked) if fault in DONE else None
        self.move()
        return self._ended(asked, fault, done)

    def _ended(self, asked: RemotingCommand, fault: Fault, done: RemotingCommand | None) -> Handled:
        if fault is Fault.NONE:
            assert done is not None
            return done
        if fault is Fault.LATE:
            assert done is not None
            return self._later(done)
        if fault in (Fault.DONE_LOST, Fault.LOST):
            return DEFERRED
        if fault in (Fault.DONE_UNKNOWN, Fault.UNKNOWN):
            return answer(asked, Condition.LEADERSHIP_LOST, "the leader has lost its leadership")
        if fault is Fault.BUSY:
            return answer(asked, Condition.BUSY)
        return answer(asked, Condition.NO_PERMISSION, "no right")

    async def _later(self, done: RemotingCommand) -> RemotingCommand:
        await trio.sleep(self.late_s)
        return done

    def move(self) -> None:
        """Let receives look again."""
        self._moved.set()
        self._moved = trio.Event()

    # ------------------------------------------------------------------------------ receive

    async def _pop(self, asked: RemotingCommand) -> RemotingCommand:
        header = PopMessageHeader.decode(asked.ext)
        ends_s = trio.current_time() + header.poll_time / 1000
        me = object()
        self._line.append(me)
        try:
            while True:
                if self._line[0] is me and (found := self._take(header)):
                    break
                if trio.current_time() >= ends_s:
                    return response_to(asked, ResponseCode.POLLING_TIMEOUT, "nothing")
                over_s = (each.ends_s for each in self.out.values())
                with trio.move_on_at(min([ends_s, *over_s])):
                    await self._moved.wait()
                await trio.lowlevel.checkpoint()
        finally:
            self._line.remove(me)
            self.move()
        done = self._granted(asked, header, found)
        fault = self.fault(asked)
        if fault is Fault.LATE:
            return await self._later(done)
        if fault in (Fault.DONE_LOST, Fault.LOST):
            await trio.sleep(300)
        return done if fault is Fault.NONE else answer(asked, Condition.LEADERSHIP_LOST)

    def _take(self, header: PopMessageHeader) -> list[Key]:
        now_s = trio.current_time()
        found = [key for key, out in sorted(self.out.items()) if out.ends_s <= now_s]
        for key in [each for each in found if self.out[each].attempts > self.retries]:
            found.remove(key)
            del self.out[key]
            self.dead.add(key)
        for queue_id in range(self.group.topics[self.topic]):
            count = len(self.group.queue(self.topic, queue_id))
            while len(found) < header.max_msg_nums and self._next[queue_id] < count:
                found.append((queue_id, self._next[queue_id]))
                self._next[queue_id] += 1
        found = sorted(found[: header.max_msg_nums])
        self._token += 1
        for key in found:
            attempts = self.out[key].attempts if key in self.out else 0
            self._put(key, attempts + 1, header.invisible_time, header.attempt_id or "")
        return found

    def _put(self, key: Key, attempts: int, invisible_ms: int, attempt_id: str) -> None:
        now_s = trio.current_time()
        ends_s = now_s + invisible_ms / 1000
        self.out[key] = Out(attempts, self._token, round(now_s * 1000), ends_s, attempt_id)

    def _granted(
        self, asked: RemotingCommand, header: PopMessageHeader, found: Sequence[Key]
    ) -> RemotingCommand:
        by_queue: dict[int, list[int]] = {}
        for queue_id, offset in found:
            by_queue.setdefault(queue_id, []).append(offset)
        starts, texts = encode_offsets(by_queue)
        out = self.out[found[0]]
        fields = PopMessageResponseHeader(
            out.popped_ms, header.invisible_time, revive_queue_of(out.token), 0, starts, texts
        )
        return response_to(asked, 0, None, fields.encode(), b"".join(map(self._record, found)))

    def _record(self, key: Key) -> bytes:
        queue_id, offset = key
        record = decode_record(self.group.queue(self.topic, queue_id)[offset])
        return encode_record(
            topic=self.topic,
            queue_id=queue_id,
            body=record.body,
            properties=record.properties,
            queue_offset=offset,
            phy_offset=record.phy_offset,
            reconsume_times=self.out[key].attempts - 1,
        )

    # ------------------------------------------------------------------------------ receipts

    def _settle(self, key: Key, popped_ms: int, revive: int) -> Out | None:
        out = self.out.get(key)
        if out is None or (out.popped_ms, revive_queue_of(out.token)) != (popped_ms, revive):
            return None
        return self.out.pop(key)

    def _shown(self, text: str) -> tuple[Key, int, int]:
        receipt = ReceiptHandle.decode(text)
        return (receipt.queue_id, receipt.offset), receipt.pop_time_ms, receipt.revive_queue_id

    def _ack(self, asked: RemotingCommand) -> RemotingCommand:
        key, *shown = self._shown(AckMessageHeader.decode(asked.ext).extra_info)
        if self._settle(key, *shown) is None:
            return answer(asked, Condition.STALE_RECEIPT)
        self.settled.add(key)
        return response_to(asked)

    def _ack_batch(self, asked: RemotingCommand) -> RemotingCommand:
        accepted = []
        for item in BatchAckMessageRequestBody.decode(asked.body).acks:
            for offset in item.offsets:
                accepted.append(self._settle((item.q, offset), item.pt, item.rq) is not None)
                if accepted[-1]:
                    self.settled.add((item.q, offset))
        if all(accepted):
            return response_to(asked)
        refusal = answer(asked, Condition.STALE_RECEIPT)
        refusal.ext[STALE_FIELD] = encode_stale(accepted)
        return refusal

    def _change(self, asked: RemotingCommand) -> RemotingCommand:
        header = ChangeInvisibleTimeHeader.decode(asked.ext)
        key, *shown = self._shown(header.extra_info)
        out = self._settle(key, *shown)
        if out is None:
            return answer(asked, Condition.STALE_RECEIPT)
        self._token += 1
        attempts = out.attempts - (UNSEEN_FIELD in asked.ext)
        self._put(key, attempts, header.invisible_time, out.attempt_id)
        new = ChangeInvisibleTimeResponseHeader(
            self.out[key].popped_ms, header.invisible_time, revive_queue_of(self._token)
        )
        return response_to(asked, 0, None, dict(new.encode()))

    def _decide(self, asked: RemotingCommand) -> RemotingCommand:
        header = EndTransactionHeader.decode(asked.ext)
        wanted = header.commit_or_rollback
        if self.decisions.setdefault(header.commit_log_offset, wanted) == wanted:
            return response_to(asked)
        ext = {OUTCOME_FIELD: "not_stored", DECISION_FIELD: "the other"}
        return response_to(asked, ResponseCode.SYSTEM_ERROR, "decided otherwise", ext)

    def _send_back(self, asked: RemotingCommand) -> RemotingCommand:
        record = decode_record(self.group.by_position[int(asked.ext["offset"])])
        self.group.store(f"%DLQ%{asked.ext['group']}", 0, record)
        return response_to(asked)
