"""One attempt to send a request, and what its answer settles.

::

    begin ─┬─► start: sent at once ─► finish ───────────────┐
           └─► make: waits for connection, sequence, answer ┴─► stored, runs refused, or failed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from dledger.client.producer.sequences import (
    HeldSend,
    OpenRefusedError,
    RefusedError,
    SessionLeftError,
)
from dledger.client.producer.state import SendSlot, SlotState, Standing
from dledger.commitlog.errors import MQError
from dledger.remoting.addresses import join_address
from dledger.remoting.calls import Call
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request
from dledger.remoting.protocol.outcome import STORED_CODES
from dledger.remoting.protocol.own_fields import STAMP_FIELD


@dataclass(slots=True, eq=False)
class Attempt:
    """A request on its way, until its answer or its time has come.

    Attributes:
        lane: The group it goes to.
        held: The sequence it goes under.
        address: The broker asked; None: no leader was known.
        term: The term known at the time.
        deadline: Monotonic seconds at which its time is over.
        failure: Why it has failed; None: it was answered.
        refused: Runs that were not taken.
        alone: Sends that the broker takes only one by one; they were not sent.
    """

    lane: Lane
    batch: SendBatch
    held: HeldSend | None
    address: str | None
    term: int
    began: float
    timeout_s: float
    deadline: float
    failure: Failure | None = None
    refused: Sequence[RunRefusal] = ()
    alone: Sequence[SendSlot] = ()
    _connection: Connection = field(init=False)
    _call: Call = field(init=False)
    _ended: Callable[[Attempt], None] = field(init=False)

    @property
    def standing(self) -> Standing:
        """What the broker may know of it."""
        if self.held is None:
            return Standing.UNNUMBERED
        return Standing.UNCERTAIN if self.held.sent else Standing.NUMBERED

    def start(
        self, connection: Connection, command: RemotingCommand, ended: Callable[[Attempt], None]
    ) -> None:
        """Send it; *ended* is called once, when it has ended in whatever way.

        Raises MQError: as `Connection.start`; *ended* is not called then.
        """
        self._connection, self._ended = connection, ended
        self._call = connection.start(command, self._end)

    def _end(self, _call: Call) -> None:
        self._ended(self)

    def expire(self) -> None:
        """End it without an answer."""
        self.forget()
        self._ended(self)

    def forget(self) -> None:
        """Pass over its answer; its end is not reported."""
        self._connection.forget(self._call)

    def answer(self) -> RemotingCommand:
        """Return its answer.

        Raises RemotingError: the connection has ended, or no answer has come in time.
        """
        return self._call.result(join_address(*self._connection.peer_address), self.timeout_s)


@dataclass(eq=False, repr=False)
class Attempts:
    """Makes the attempts of one producer."""

    _instance: ClientInstance
    _group: str
    _config: ProducerConfig
    _encoder: SlotEncoder
    _topics: PublishTopics
    _sends: LiveSends

    def __post_init__(self) -> None:
        self.policy = RetryPolicy(
            max_retries=self._config.max_retries, retry_unknown=self._config.retry_unknown
        )
        self._clock = self._instance.clock

    def begin(self, lane: Lane, batch: SendBatch, held: HeldSend | None = None) -> Attempt:
        """Return an attempt to send *batch* to the leader; nothing is sent yet."""
        leaders, name = self._instance.leaders, lane.broker_name
        now = self._clock.monotonic()
        timeout_s = time_left_s(batch.deadline, now, self._config.attempt_timeout_s)
        address, term = leaders.address(name), leaders.term(name)
        return Attempt(lane, batch, held, address, term, now, timeout_s, now + timeout_s)

    def start(self, attempt: Attempt, ended: Callable[[Attempt], None]) -> bool:
        """Send *attempt* at once; false when something has to be waited for, or it has failed.

        *ended*: called once, when it is to be finished.
        """
        lane, batch = attempt.lane, attempt.batch
        if attempt.address is None or not lane.records:
            return False
        link = self._instance.links.ready(attempt.address, lane.broker_name)
        if link is None or not link.records:
            return False
        if self._is_numbered(link, None):
            attempt.held = lane.sequences.enter_nowait(self.policy, batch.deadline)
            if attempt.held is None:
                return False
        self._count(batch)
        try:
            attempt.start(link.connection, self._records_request(attempt), ended)
        except MQError as error:
            self._note_failure(attempt, error)
            return False
        return True

    def finish(self, attempt: Attempt) -> None:
        """Settle what *attempt*, which was started and has ended, has stored."""
        try:
            self._settle(attempt, attempt.answer())
        except (MQError, RefusedError) as error:
            self._note_failure(attempt, error)

    async def make(self, attempt: Attempt) -> None:
        """Send *attempt*, and settle what is stored.

        Cancellation: The request may have been sent.
        """
        batch = attempt.batch
        if attempt.address is None:
            remark = f"no leader of {attempt.lane.broker_name} is known"
            attempt.failure = Failure(FailureKind.NOT_LEADER, remark=remark)
        elif batch.is_alone and attempt.timeout_s <= 0:
            self._sends.expire(batch.slots()[0])
        else:
            try:
                await self._exchange(attempt, attempt.address)
            except (MQError, RefusedError) as error:
                self._note_failure(attempt, error)
            except SessionLeftError:
                attempt.failure = Failure(
                    FailureKind.BUSY, ResponseCode.SYSTEM_BUSY, remark="the session is lost"
                )

    def _note_failure(self, attempt: Attempt, error: MQError | RefusedError) -> None:
        """Read why an attempt failed, and what that shows of the leader."""
        name, address = attempt.lane.broker_name, attempt.address
        if isinstance(error, RefusedError):
            assert address is not None
            kind = self._instance.leader_search.note_refusal(name, address, error.answer)
            if kind is FailureKind.UNKNOWN and isinstance(error, OpenRefusedError):
                kind = FailureKind.NOT_LEADER  # of the messages nothing was sent
            attempt.failure = failure_from_answer(error.answer, kind)
        else:
            attempt.failure = failure_from_error(error)
        self._topics.note_send(name, attempt.began, failed=True)

    def _settle(self, attempt: Attempt, response: RemotingCommand) -> None:
        """Settle what is stored.

        Raises:
            RefusedError: All of it was refused.
            MQError: The answer makes no sense.
        """
        batch = attempt.batch
        if response.code not in (STORED_CODES if batch.is_alone else (ResponseCode.SUCCESS,)):
            raise RefusedError(response)
        if batch.is_alone:
            stored = settle_one(batch.slots()[0], response.code, response.ext)
        else:
            stored, attempt.refused = settle_batch(batch, response.ext)
        if attempt.held is not None:
            attempt.held.settle()
        self._sends.store(stored)
        self._topics.note_send(attempt.lane.broker_name, attempt.began, failed=False)

    async def _exchange(self, attempt: Attempt, address: str) -> None:
        """Send *attempt* and settle what is stored.

        Raises:
            RefusedError: All of it was refused, or no session was opened.
            SessionLeftError: It belongs into the line again.
            MQError: No answer, or one that makes no sense.
        """
        lane, batch, held, timeout_s = attempt.lane, attempt.batch, attempt.held, attempt.timeout_s
        link = await self._instance.link(address, timeout_s, group=lane.broker_name)
        if held is None and not batch.is_alone:
            switched = lane.records is False
            lane.records = link.records
            if switched or not link.records:
                attempt.alone = batch.slots()
                return
        command: RemotingCommand | None = None
        if batch.is_alone:
            command = self._encoder.request_of(batch.slots()[0])
        if held is None and self._is_numbered(link, command):
            held = attempt.held = await lane.sequences.enter(
                link, timeout_s, self._schedule_under_sequence(batch), is_alone=batch.is_alone
            )
        if batch.is_alone or held is None or not held.sent:
            # What failed as "not stored" meanwhile must not be stored.
            batch = attempt.batch = batch.without_settled()
            if not batch.runs:
                if held is not None:
                    held.settle()
                return
        if command is None:
            command = self._records_request(attempt)
        elif held is not None:
            command.ext.update(held.stamp.as_texts())
        self._count(batch)
        self._settle(attempt, await link.connection.invoke(command, timeout_s))

    def _is_numbered(self, link: Link, command: RemotingCommand | None) -> bool:
        is_reply = command is not None and command.code == RequestCode.SEND_REPLY_MESSAGE_V2
        return self._config.idempotent and link.idempotent and not is_reply

    def _schedule_under_sequence(self, batch: SendBatch) -> RetrySchedule:
        if batch.is_alone:
            return batch.slots()[0].schedule_under(self.policy)
        return RetrySchedule(self.policy, batch.deadline)

    def _records_request(self, attempt: Attempt) -> RemotingCommand:
        batch, held = attempt.batch, attempt.held
        ext: dict[str, Any] = {
            "group": self._group,
            "runs": batch.run_list(),
            "default_topic_queue_nums": self._instance.config.default_topic_queue_nums,
            "timeout_ms": max(1, int(attempt.timeout_s * 1000)),
        }
        if held is not None:
            ext[STAMP_FIELD] = held.stamp.as_field()
        return request(RequestCode.SEND_RECORDS, ext, batch.body(), serialize=SerializeType.CBOR)

    def _count(self, batch: SendBatch) -> None:
        slots, records = batch.slots(), 0
        for slot in slots:
            records += slot.count
            if slot.state < SlotState.STORED:
                slot.state = SlotState.IN_FLIGHT
        counters = self._sends.counters
        counters.requests += 1
        counters.records += records
        counters.attempts += len(slots)
