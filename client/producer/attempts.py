"""One attempt to send a request, and what its answer settles.

::

    make ──► waits for connection, sequence, answer ─┐
    begin ─► nothing to wait for: sent at once ──────┴─► stored, runs refused, or `Missed`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.links import Link
from dledger.client.core.retry import (
    Failure,
    FailureKind,
    RetryPolicy,
    RetrySchedule,
    failure_from_answer,
    failure_from_error,
    time_left_s,
)
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.encoder import SlotEncoder
from dledger.client.producer.lane import Lane, RunRefusal, SendBatch, settle_batch, settle_one
from dledger.client.producer.queue_selection import PublishTopics
from dledger.client.producer.results import LiveSends
from dledger.client.producer.sequences import HeldSend, OpenRefusedError, SessionLeftError
from dledger.client.producer.state import SendSlot, SlotState, Standing
from dledger.commitlog.errors import MQError
from dledger.remoting.calls import Call
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request
from dledger.remoting.protocol.outcome import STORED_CODES
from dledger.remoting.protocol.own_fields import STAMP_FIELD

_NO_ANSWER: Final = Failure(FailureKind.UNKNOWN)


class RefusedError(Exception):
    """A broker refused a whole request."""

    def __init__(self, answer: RemotingCommand) -> None:
        super().__init__(answer.remark)
        self.answer = answer


@dataclass(slots=True)
class Missed:
    """An attempt that failed.

    Attributes:
        lane: The group it went to.
        address: The broker asked; None: no leader was known.
        term: The term known at the time.
        held: The sequence it went under.
    """

    lane: Lane
    batch: SendBatch
    address: str | None
    term: int
    held: HeldSend | None
    failure: Failure

    @property
    def standing(self) -> Standing:
        """What the broker may know of it."""
        if self.held is None:
            return Standing.UNNUMBERED
        return Standing.UNCERTAIN if self.held.sent else Standing.NUMBERED


@dataclass(slots=True)
class Answered:
    """An attempt that was answered, and the sends in it that are not settled by that.

    Attributes:
        missed: The attempt, for the next step of those sends.
        refused: Runs that were not taken.
        alone: Sends that the broker takes only one by one; they were not sent.
    """

    missed: Missed
    refused: list[RunRefusal]
    alone: list[SendSlot]


class Attempt:
    """A request that was sent without waiting, until its answer or its time has come.

    Attributes:
        missed: What it is if it fails.
        deadline: Monotonic seconds at which its time is over.
    """

    __slots__ = (
        "_call",
        "_connection",
        "_ended",
        "_timeout_s",
        "batch",
        "began",
        "deadline",
        "missed",
    )

    def __init__(
        self,
        batch: SendBatch,
        missed: Missed,
        connection: Connection,
        began: float,
        timeout_s: float,
        ended: Callable[[Attempt], None],
    ) -> None:
        """Prepare; *ended* is called once, when it has ended in whatever way."""
        self.batch = batch
        self.missed = missed
        self.began = began
        self.deadline = began + timeout_s
        self._call: Call | None = None
        self._connection = connection
        self._timeout_s = timeout_s
        self._ended = ended

    def start(self, command: RemotingCommand) -> None:
        """Send it. Raises what `Connection.start` does."""
        self._call = self._connection.start(command, self._end)

    def _end(self, _call: Call) -> None:
        self._ended(self)

    def expire(self) -> None:
        """End it without an answer."""
        self.forget()
        self._ended(self)

    def forget(self) -> None:
        """Pass over its answer; its end is not reported."""
        if self._call is not None:
            self._connection.forget(self._call)

    def result(self) -> RemotingCommand:
        """Return its answer.

        Raises RemotingError: the connection has ended, or no answer has come in time.
        """
        assert self._call is not None
        host, port = self._connection.peer_address
        return self._call.result(f"{host}:{port}", self._timeout_s)


class Attempts:
    """Makes the attempts of one producer."""

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        config: ProducerConfig,
        encoder: SlotEncoder,
        topics: PublishTopics,
        sends: LiveSends,
    ) -> None:
        """Prepare."""
        self.policy = RetryPolicy(
            max_retries=config.max_retries, retry_unknown=config.retry_unknown
        )
        self._instance = instance
        self._clock = instance.clock
        self._group = group
        self._config = config
        self._encoder = encoder
        self._topics = topics
        self._sends = sends

    async def make(self, lane: Lane, batch: SendBatch, held: HeldSend | None) -> Answered | Missed:
        """Send *batch* once, and settle what is stored.

        Cancellation: The request may have been sent.
        """
        instance, name = self._instance, lane.broker_name
        began = self._clock.monotonic()
        timeout_s = time_left_s(batch.deadline, began, self._config.attempt_timeout_s)
        address, term = instance.leaders.address(name), instance.leaders.term(name)
        nothing = Failure(FailureKind.NOT_LEADER, remark=f"no leader of {name} is known")
        missed = Missed(lane, batch, address, term, held, nothing)
        if address is None:
            return missed
        if batch.is_alone and timeout_s <= 0:
            self._sends.expire(batch.slots()[0])
            return Answered(missed, [], [])
        try:
            return await self._exchange(missed, batch, address, timeout_s, began)
        except (MQError, OpenRefusedError, RefusedError) as error:
            self._note_failure(missed, error, began)
            return missed
        except SessionLeftError:
            missed.failure = Failure(
                FailureKind.BUSY, ResponseCode.SYSTEM_BUSY, remark="the session is lost"
            )
            return missed

    def begin(
        self, lane: Lane, batch: SendBatch, ended: Callable[[Attempt], None]
    ) -> Attempt | Missed | None:
        """Send *batch* at once; None, and nothing done, when something has to be waited for."""
        instance, name = self._instance, lane.broker_name
        address = instance.leaders.address(name)
        if address is None or not lane.records:
            return None
        link = instance.links.ready(address, name)
        if link is None or not link.records:
            return None
        now = self._clock.monotonic()
        timeout_s = time_left_s(batch.deadline, now, self._config.attempt_timeout_s)
        held: HeldSend | None = None
        if self._is_numbered(link, None):
            held = lane.sequences.enter_nowait(self.policy, batch.deadline)
            if held is None:
                return None
        missed = Missed(lane, batch, address, instance.leaders.term(name), held, _NO_ANSWER)
        attempt = Attempt(batch, missed, link.connection, now, timeout_s, ended)
        self._count(batch)
        try:
            attempt.start(self._records_request(batch, timeout_s, held))
        except MQError as error:
            self._note_failure(missed, error, now)
            return missed
        return attempt

    def finish(self, attempt: Attempt) -> Answered | Missed:
        """Settle what *attempt*, which has ended, sent and the broker stored."""
        try:
            return self._settle(attempt.missed, attempt.batch, attempt.result(), attempt.began)
        except (MQError, RefusedError) as error:
            self._note_failure(attempt.missed, error, attempt.began)
            return attempt.missed

    def _note_failure(self, missed: Missed, error: Exception, began: float) -> None:
        """Read why an attempt failed, and what that shows of the leader."""
        name, address = missed.lane.broker_name, missed.address
        if isinstance(error, OpenRefusedError | RefusedError):
            assert address is not None
            kind = self._instance.leader_search.note_refusal(name, address, error.answer)
            if kind is FailureKind.UNKNOWN and isinstance(error, OpenRefusedError):
                kind = FailureKind.NOT_LEADER  # of the messages nothing was sent
            missed.failure = failure_from_answer(error.answer, kind)
        else:
            assert isinstance(error, MQError)
            missed.failure = failure_from_error(error)
        self._topics.note_send(name, (self._clock.monotonic() - began) * 1000, failed=True)

    def _settle(
        self, missed: Missed, batch: SendBatch, response: RemotingCommand, began: float
    ) -> Answered:
        """Settle what is stored.

        Raises:
            RefusedError: All of it was refused.
            MQError: The answer makes no sense.
        """
        if response.code not in (STORED_CODES if batch.is_alone else (ResponseCode.SUCCESS,)):
            raise RefusedError(response)
        refused: list[RunRefusal] = []
        if batch.is_alone:
            stored = settle_one(batch.slots()[0], response.code, response.ext)
        else:
            stored, refused = settle_batch(batch, response.ext)
        if missed.held is not None:
            missed.held.settle()
        self._sends.store(stored)
        took_ms = (self._clock.monotonic() - began) * 1000
        self._topics.note_send(missed.lane.broker_name, took_ms, failed=False)
        return Answered(missed, refused, [])

    async def _exchange(
        self, missed: Missed, batch: SendBatch, address: str, timeout_s: float, began: float
    ) -> Answered:
        """Send *batch* and settle what is stored.

        Raises:
            RefusedError, OpenRefusedError: All of it was refused.
            MQError: No answer, or one that makes no sense.
        """
        lane, held = missed.lane, missed.held
        link = await self._instance.link(address, timeout_s, group=lane.broker_name)
        if held is None and not batch.is_alone:
            switched = lane.records is False
            lane.records = link.records
            if switched or not link.records:
                return Answered(missed, [], batch.slots())
        command: RemotingCommand | None = None
        if batch.is_alone:
            command = self._encoder.request_of(batch.slots()[0])
        if held is None and self._is_numbered(link, command):
            held = missed.held = await lane.sequences.enter(
                link, timeout_s, self._schedule_under_sequence(batch), is_alone=batch.is_alone
            )
        if batch.is_alone or held is None or not held.sent:
            # What failed as "not stored" meanwhile must not be stored.
            batch = missed.batch = batch.without_settled()
            if not batch.runs:
                if held is not None:
                    held.settle()
                return Answered(missed, [], [])
        if command is None:
            command = self._records_request(batch, timeout_s, held)
        elif held is not None:
            command.ext.update(held.stamp.as_texts())
        self._count(batch)
        answer = await link.connection.invoke(command, timeout_s)
        return self._settle(missed, batch, answer, began)

    def _is_numbered(self, link: Link, command: RemotingCommand | None) -> bool:
        is_reply = command is not None and command.code == RequestCode.SEND_REPLY_MESSAGE_V2
        return self._config.idempotent and link.idempotent and not is_reply

    def _schedule_under_sequence(self, batch: SendBatch) -> RetrySchedule:
        if batch.is_alone:
            return batch.slots()[0].schedule_under(self.policy)
        return RetrySchedule(self.policy, batch.deadline)

    def _records_request(
        self, batch: SendBatch, timeout_s: float, held: HeldSend | None
    ) -> RemotingCommand:
        ext: dict[str, Any] = {
            "group": self._group,
            "runs": batch.run_list(),
            "default_topic_queue_nums": self._instance.config.default_topic_queue_nums,
            "timeout_ms": max(1, int(timeout_s * 1000)),
        }
        if held is not None:
            ext[STAMP_FIELD] = held.stamp.as_field()
        return request(RequestCode.SEND_RECORDS, ext, batch.body(), serialize=SerializeType.CBOR)

    def _count(self, batch: SendBatch) -> None:
        slots = batch.slots()
        for slot in slots:
            if slot.state < SlotState.STORED:
                slot.state = SlotState.IN_FLIGHT
        counters = self._sends.counters
        counters.requests += 1
        counters.records += batch.record_count
        counters.attempts += len(slots)
