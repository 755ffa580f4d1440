"""Exactly-once steps: what a consumer sends and what it commits is one entry of one broker group.

A step begins at the offsets that its consumer last knew as committed, and is stored only while the
group still stands there. So of two consumers that read the same messages one is overtaken, and a
step that is repeated because its answer was lost is refused and not stored twice.

Spec: docs/reference/own-requests.md, CONSUME_STEP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    MessageIllegalError,
    NoRouteError,
    RequestFailedError,
    StepOvertakenError,
    UnknownOutcomeError,
)
from dledger.client.core.links import Link
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.encoder import SlotEncoder, goes_alone
from dledger.client.producer.lane import SendBatch, settle_batch
from dledger.client.producer.producer import unique_ids
from dledger.client.producer.state import SendSlot
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.outcome import outcome_of
from dledger.remoting.protocol.own_fields import COMMITS_FIELD, COMMITTED_FIELD, NO_OFFSET


@dataclass(frozen=True, slots=True)
class StoredAt:
    """Where a message of a step stands."""

    queue: MessageQueue
    queue_offset: int
    message_id: str


class ConsumeStep:
    """The messages and offsets of one step; `StepSender.store` sends them.

    Attributes:
        messages: What was sent, in its order.
        commits: What was committed.
        stored: Where each message stands, in the order in which they were sent; filled when the
            step is stored.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[Message, MessageQueue | None]] = []
        self.commits: dict[MessageQueue, int] = {}
        self.stored: list[StoredAt] = []

    def send(self, message: Message, queue: MessageQueue | None = None) -> None:
        """Add a message of the step; it is sent when the step ends.

        Args:
            queue: Where to, of the broker group that the step commits in; None: one of those.
        Raises:
            MessageIllegalError: It is delayed, timed or transactional: no part of a step.
        """
        if goes_alone(message):
            raise MessageIllegalError("a delayed or transactional message is no part of a step")
        self.messages.append((message, queue))

    def commit(self, queue: MessageQueue, offset: int) -> None:
        """Let the step commit that everything below *offset* of *queue* is dealt with."""
        self.commits[queue] = offset


@dataclass(eq=False)
class StepSender:
    """Sends the steps of one consumer."""

    instance: ClientInstance
    group: str
    committed: dict[MessageQueue, int]
    _turn: int = field(default=0, init=False)
    _encoder: SlotEncoder = field(init=False)

    def __post_init__(self) -> None:
        config, clock = self.instance.config, self.instance.clock
        self._encoder = SlotEncoder(
            ProducerConfig(),
            clock,
            unique_ids(self.instance),
            group=self.group,
            default_topic_queue_nums=config.default_topic_queue_nums,
        )

    async def store(self, step: ConsumeStep, timeout_s: float) -> None:
        """Store *step*: its messages and its offsets, or neither.

        Raises:
            MessageIllegalError: It commits nothing, in several broker groups, or from an offset
                that the consumer does not know, or has messages and moves no offset; not stored.
            StepOvertakenError: The group stands elsewhere; not stored.
            RequestFailedError, BrokerUnreachableError, NoRouteError: Not stored.
            UnknownOutcomeError: It may be stored: read what is committed and go on from there.
        Cancellation: It may be stored.
        """
        queue = self._first_of(step)
        before = self._before(step)
        slots = [
            self._encoder.record(message, await self._queue_for(message, to, queue), True, None)
            for message, to in step.messages
        ]
        # One run for each queue: the order within a queue is the step's.
        runs = groupby(sorted(slots, key=_queue_of), key=_queue_of)
        batch = SendBatch([(to, list(run)) for to, run in runs])
        # Known again only from an answer: until then another attempt may be on its way.
        for each in step.commits:
            self.committed.pop(each, None)
        answer, attempts = await self._ask(queue, step, before, batch, timeout_s)
        self._check(queue, answer, attempts)
        self.committed.update(step.commits)
        settle_batch(batch, answer.ext)
        step.stored = [
            StoredAt(slot.queue, slot.base_offset, str(slot.message_ids)) for slot in slots
        ]

    def _first_of(self, step: ConsumeStep) -> MessageQueue:
        names = {queue.broker_name for queue in step.commits}
        if len(names) != 1:
            raise MessageIllegalError(
                f"a step commits in one broker group, and this one in {sorted(names) or 'none'}"
            )
        return next(iter(step.commits))

    def _before(self, step: ConsumeStep) -> dict[MessageQueue, int]:
        unknown = [str(queue) for queue in step.commits if queue not in self.committed]
        if unknown:
            raise MessageIllegalError(
                f"read committed_offset first: what is committed in {', '.join(unknown)} is unknown"
            )
        back = [str(queue) for queue, to in step.commits.items() if to < self.committed[queue]]
        if back:
            raise MessageIllegalError(f"a step does not go back: {', '.join(back)}")
        if step.messages and all(to == self.committed[q] for q, to in step.commits.items()):
            # Its repetition would find the group where it began, and be stored once more.
            raise MessageIllegalError("a step with messages that moves no offset is none")
        return {queue: self.committed[queue] for queue in step.commits}

    async def _queue_for(
        self, message: Message, queue: MessageQueue | None, beside: MessageQueue
    ) -> MessageQueue:
        name = beside.broker_name
        if queue is None:
            for fresh in (False, True):
                route = await self.instance.route(message.topic, fresh=fresh)
                # A group that elects a leader has its queues: the step waits for the leader.
                queues = [each for each in route.writable_queues if each.broker_name == name]
                if queues:
                    break
            else:
                raise NoRouteError(f"{message.topic} has no queues in {name}")
            self._turn += 1
            queue = queues[self._turn % len(queues)]
        if queue.broker_name != name or queue.topic != message.topic:
            raise MessageIllegalError(
                f"a message of {message.topic} for {queue} is no part of a step in {name}"
            )
        return queue

    async def _ask(
        self,
        queue: MessageQueue,
        step: ConsumeStep,
        before: dict[MessageQueue, int],
        batch: SendBatch,
        timeout_s: float,
    ) -> tuple[RemotingCommand, int]:
        """Return the answer, and how many times the request may have arrived."""
        ext: dict[str, Any] = {
            "group": self.group,
            "consumer_group": self.group,
            "runs": batch.run_list(),
            COMMITS_FIELD: [
                [each.topic, each.queue_id, before[each], to] for each, to in step.commits.items()
            ],
        }
        attempts = 0

        def count(link: Link) -> int:
            nonlocal attempts
            if not link.records:
                raise RequestFailedError(
                    f"{queue.broker_name} is no broker that knows steps",
                    code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                )
            attempts += 1
            return RequestCode.CONSUME_STEP

        answer = await self.instance.ask_leader(
            queue.broker_name,
            RequestCode.CONSUME_STEP,
            ext,
            batch.body(),
            topic=queue.topic,
            timeout_s=timeout_s,
            adapt=count,
        )
        return answer, attempts

    def _check(self, queue: MessageQueue, answer: RemotingCommand, attempts: int) -> None:
        code, remark = answer.code, answer.remark or ""
        if code == ResponseCode.SUCCESS:
            return
        text = f"the step in {queue.broker_name}: refused with code {code}: {remark}"
        if outcome_of(answer) == "unknown":
            raise UnknownOutcomeError(text)
        if attempts > 1:
            # An earlier attempt may have had no answer: perhaps that is what stands there now.
            raise UnknownOutcomeError(f"{text}; an earlier attempt may be stored")
        if code != ResponseCode.COMMIT_NOT_EXPECTED:
            raise RequestFailedError(text, code=code, remark=remark)
        committed = whole_number(answer.ext.get(COMMITTED_FIELD, NO_OFFSET))
        raise StepOvertakenError(text, code=code, remark=remark, committed_offset=committed)


def _queue_of(slot: SendSlot) -> MessageQueue:
    return slot.queue
