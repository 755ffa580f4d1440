"""END_TRANSACTION (37) decides a half message; CHECK_TRANSACTION_STATE (39) requests a decision.

RocketMQ's clients send 37 one-way; our SDK waits for the answer, and repeats the request after a
fail-over. A repeated decision succeeds both times and is written once; a different one is refused.

Spec: docs/internals/protocol/remoting.md, sections 7.3 and 9; docs/internals/protocol/semantics.md,
    section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from dledger.broker_errors import UnprocessableMessageError
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.message_id import encode_offset_message_id
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    Outcome,
    RefusedError,
    answer_when_done,
    bad_request,
    proposal_answer,
    require_leader,
)
from dledger.processors.client_table import ClientTable
from dledger.processors.handles import PUB, Limit, handles, message_at
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import CheckTransactionStateHeader, EndTransactionHeader
from dledger.remoting.protocol.outcome import DECISION_FIELD, Condition
from dledger.remoting.seams import Clock
from dledger.services.half_message import HalfMessage, TransactionDecisions, half_message_at
from dledger.services.pending_configs import TopicView
from dledger.services.stored_record import StoredRecords
from dledger.settings.parts import BrokerSettings
from dledger.state.transactions import TransactionDecision

UNDECIDED = 0
"""What a client sends that has no decision yet."""


class DecidedOtherwiseError(RefusedError):
    """The half message has another decision; it stays."""

    def __init__(self, remark: str, decision: TransactionDecision) -> None:
        super().__init__(Condition.BAD_REQUEST, remark)
        self.answer_fields = {DECISION_FIELD: decision.name.lower()}


@dataclass(eq=False, repr=False)
class EndTransactionProcessor:
    """Turns decisions into proposals."""

    _group: BrokerGroup
    _topics: TopicView
    _decisions: TransactionDecisions
    _clock: Clock

    @handles(RequestCode.END_TRANSACTION, limit=Limit.SEND, rule=message_at("commitLogOffset", PUB))
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 37: refusals at once, everything else when the decision's outcome is known."""
        require_leader(self._group)
        header = EndTransactionHeader.decode(command.ext)
        half = self._half(header)
        if header.commit_or_rollback == UNDECIDED:
            return response_to(command)
        decision = _decision(header)
        half_offset = header.tran_state_table_offset
        if self._decisions.is_open(half_offset):
            self._refuse_early(header, half)
            self._decide(connection, command, half, decision)
            return DEFERRED
        known = self._decisions.decision(half_offset)
        if known is None:
            raise bad_request(
                f"half message {half_offset} was decided so long ago that it is not known how"
            )
        if known is not decision:
            raise DecidedOtherwiseError(
                f"{decision.name} comes too late: half message {half_offset} is decided as "
                f"{known.name}",
                known,
            )
        return self._wait(connection, command, half_offset)

    def _half(self, header: EndTransactionHeader) -> HalfMessage:
        position = header.commit_log_offset
        try:
            if not 0 <= position < self._group.state.applied_end_position:
                raise OffsetOutOfRangeError(f"{position} is not applied")
            message = half_message_at(StoredRecords(self._group), position)
        except CorruptEntryError as error:
            raise RefusedError(
                Condition.NOT_READY, f"the half message is damaged and being repaired: {error}"
            ) from error
        except (OffsetOutOfRangeError, CorruptRecordError, UnprocessableMessageError) as error:
            raise bad_request(
                f"no half message stands at {position} (any more): {error}"
            ) from error
        record = message.record
        for what, there, named in (
            ("producer group", message.group, header.producer_group),
            ("transaction state table offset", record.queue_offset, header.tran_state_table_offset),
            ("commit log offset", record.phy_offset, header.commit_log_offset),
        ):
            if there != named:
                raise bad_request(f"the {what} is wrong: {named}, the half has {there}")
        return message

    def _refuse_early(self, header: EndTransactionHeader, half: HalfMessage) -> None:
        if not (header.from_transaction_check and half.immunity_s):
            return
        known = self._group.state.transactions.open.get(half.record.queue_offset)
        if known is not None and known.checks:
            # It was asked for, so its time was over, whatever a clock shows that was set back.
            return
        age_ms = self._clock.wall_ms() - half.record.store_timestamp_ms
        if age_ms < half.immunity_s * 1000:
            raise RefusedError(
                Condition.ILLEGAL_OPERATION,
                f"the answer to a check comes {age_ms} ms after the half message, whose producers "
                f"are not to be asked for {half.immunity_s} s",
            )

    def _decide(
        self,
        connection: Connection,
        command: RemotingCommand,
        half: HalfMessage,
        decision: TransactionDecision,
    ) -> None:
        message = None
        if decision is TransactionDecision.COMMIT:
            message = half.committed(self._real_queue(half))
        done = answer_when_done(connection, command, self._group)
        self._decisions.decide(half.record.queue_offset, decision, done, message)

    def _real_queue(self, half: HalfMessage) -> int:
        topic, position = half.topic, half.record.phy_offset
        if self._topics.is_ending(topic) or self._group.state.was_deleted_since(position, topic):
            raise RefusedError(
                Condition.TOPIC_NOT_EXIST,
                f"topic[{topic}] was deleted since; the transaction stays open",
            )
        return self._topics.real_queue(topic, half.queue_id, position)

    def _wait(self, connection: Connection, command: RemotingCommand, half_offset: int) -> Handled:
        outcome = Outcome(connection, command)
        self._decisions.wait(
            half_offset,
            lambda proposed: outcome.answer(proposal_answer(command, proposed, self._group)),
        )
        return outcome.handled()


def _decision(header: EndTransactionHeader) -> TransactionDecision:
    if header.commit_or_rollback == TransactionDecision.COMMIT:
        return TransactionDecision.COMMIT
    if header.commit_or_rollback == TransactionDecision.ROLLBACK:
        return TransactionDecision.ROLLBACK
    raise bad_request(f"commitOrRollback {header.commit_or_rollback} is neither")


class CheckBack:
    """Implements `dledger.services.transaction_check.Producers` with the connected clients."""

    def __init__(self, clients: ClientTable[Connection], settings: BrokerSettings) -> None:
        self._clients = clients
        self._settings = settings
        self._turn = 0

    def is_there(self, group: str) -> bool:
        """Return whether a producer of *group* has sent a heartbeat over an open connection."""
        return bool(self._clients.producers(group))

    def ask(self, half: HalfMessage, checks: int) -> bool:
        """Ask the next producer of the group that takes it, all in turn."""
        clients = self._clients.producers(half.group)
        self._turn += 1
        question = half.question(checks)
        for step in range(len(clients)):
            client = clients[(self._turn + step) % len(clients)]
            try:
                client.channel.invoke_oneway(self._question(half, question))
            except MQError:
                continue  # it is leaving, or reads too slowly; another one knows as well
            return True
        return False

    def _question(self, half: HalfMessage, question: bytes) -> RemotingCommand:
        record = half.record
        header = CheckTransactionStateHeader(
            tran_state_table_offset=record.queue_offset,
            commit_log_offset=record.phy_offset,
            msg_id=half.transaction_id,
            transaction_id=half.transaction_id,
            offset_msg_id=encode_offset_message_id(self._settings.store_host, record.phy_offset),
            topic=half.topic,
            bname=self._settings.broker.broker_name,
        )
        return request(RequestCode.CHECK_TRANSACTION_STATE, dict(header.encode()), question)
