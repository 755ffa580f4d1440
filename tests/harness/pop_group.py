"""A fake broker group that hands messages out by POP, and answers in bad ways when asked to.

What is out, for whom and until when is kept once for all its members, as in their log.
"""

from collections import deque
from collections.abc import Callable
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
from dledger.remoting.protocol.pop_requests import PopMessageHeader
from tests.harness.pop_table import Key, PopTable
from tests.unit.client.fake_cluster import Broker, Group


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


@dataclass(eq=False)
class PopGroup(PopTable):
    """The messages of one topic, for one consumer group, at all members of a broker group.

    Attributes:
        fault: How a request of some code ends.
        late_s: How late a late answer is.
        decisions: What half messages were decided as, by their place in the log.
    """

    group: Group
    topic: str = "T"
    fault: Callable[[RemotingCommand], Fault] = lambda _: Fault.NONE
    late_s: float = 2.0
    decisions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._line: deque[object] = deque()
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
        for code in (
            RequestCode.ACK_MESSAGE,
            RequestCode.BATCH_ACK_MESSAGE,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
        ):
            broker.on(code, led(partial(self._faulty, do=self.marked)))
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

    # ------------------------------------------------------------------------------ receive

    async def _pop(self, asked: RemotingCommand) -> RemotingCommand:
        header = PopMessageHeader.decode(asked.ext)
        ends_s = trio.current_time() + header.poll_time / 1000
        me = object()
        self._line.append(me)
        try:
            while True:
                if self._line[0] is me and (found := self.take(header, self._counts())):
                    break
                if trio.current_time() >= ends_s:
                    return response_to(asked, ResponseCode.POLLING_TIMEOUT, "nothing")
                await self.moved(ends_s)
                await trio.lowlevel.checkpoint()
        finally:
            self._line.remove(me)
            self.move()
        done = self.granted(asked, found, self._record)
        fault = self.fault(asked)
        if fault is Fault.LATE:
            return await self._later(done)
        if fault in (Fault.DONE_LOST, Fault.LOST):
            await trio.sleep(300)
        return done if fault is Fault.NONE else answer(asked, Condition.LEADERSHIP_LOST)

    def _counts(self) -> dict[int, int]:
        queues = range(self.group.topics[self.topic])
        return {number: len(self.group.queue(self.topic, number)) for number in queues}

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
