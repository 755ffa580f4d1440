"""A transaction from its half message to its end: the decision goes to the leader that holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    MessageIllegalError,
    RequestFailedError,
    RequestTimedOutError,
    TransactionDecidedError,
    UnknownOutcomeError,
)
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.core.retry import FailureKind, RetryPolicy, RetrySchedule, Where
from dledger.client.producer.results import asks_for_delay
from dledger.commitlog.errors import MQError
from dledger.commitlog.message_id import decode_offset_message_id
from dledger.commitlog.properties import PROPERTY_PRODUCER_GROUP, PROPERTY_TRANSACTION_PREPARED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import EndTransactionHeader
from dledger.remoting.protocol.outcome import DECISION_FIELD


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A message that is stored and that no consumer sees until its transaction is committed.

    Attributes:
        message: What was sent.
        send_result: Where the half message is; its queue offset is that of the half topic.
        group: The producer group that decides.
    """

    message: Message
    send_result: SendResult
    group: str

    @property
    def transaction_id(self) -> str:
        """Names the transaction; the message has it as `MessageExt.message_id` everywhere."""
        return self.send_result.message_id

    @property
    def broker_name(self) -> str:
        """The broker group that holds it."""
        return self.send_result.message_queue.broker_name

    @property
    def half_offset(self) -> int:
        """Its place in the half topic."""
        return self.send_result.queue_offset

    @property
    def position(self) -> int:
        """Its place in the broker's log."""
        if self.send_result.phy_offset >= 0:
            return self.send_result.phy_offset
        return decode_offset_message_id(self.send_result.offset_message_id)[-1]


@dataclass(frozen=True, slots=True)
class TransactionSendResult:
    """What became of a transactional send.

    Attributes:
        half: The half message.
        state: What the local part came to; ROLLBACK without asking it when the half message was
            not stored as safely as asked for.
        is_confirmed: The broker has the decision; nothing can change it any more. Never with a
            real RocketMQ, which answers nothing.
        end_error: Why the decision did not reach the broker. The transaction is open or decided so;
            the broker asks back, and `check_local_transaction` answers.
    """

    half: HalfMessage
    state: LocalTransactionState
    is_confirmed: bool
    end_error: ClientError | None = None


def half_of(message: Message, group: str) -> Message:
    """Return *message* as it is sent to wait for the decision of *group*.

    Raises MessageIllegalError: it asks for a delay.
    """
    if asks_for_delay(message):
        raise MessageIllegalError("a transactional message cannot be delayed")
    marks = {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: group}
    return replace(message, properties={**(message.properties or {}), **marks})


ENDS_MAX = 1_000_000
"""The same decision may be sent as often as one likes: it is written once."""


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """A decision on its way.

    Attributes:
        group: The producer group that decides.
        broker_name: The broker group that holds the half message.
        topic: The message's own; its route names the group's members.
        half_offset: Of the half message in the half topic.
        position: Of the half message in the log.
        transaction_id: The message's UNIQ_KEY.
        state: The decision; UNKNOWN shows only that a client was asked.
        is_answer: To a check-back.
    """

    group: str
    broker_name: str
    topic: str
    half_offset: int
    position: int
    transaction_id: str
    state: LocalTransactionState
    is_answer: bool = False

    def header(self) -> EndTransactionHeader:
        """Return the request's header."""
        return EndTransactionHeader(
            producer_group=self.group,
            tran_state_table_offset=self.half_offset,
            commit_log_offset=self.position,
            commit_or_rollback=self.state.value,
            msg_id=self.transaction_id,
            from_transaction_check=self.is_answer,
            transaction_id=self.transaction_id,
            topic=self.topic,
            bname=self.broker_name,
        )

    def oneway(self) -> RemotingCommand:
        """Return the request as RocketMQ's clients send it."""
        return request(RequestCode.END_TRANSACTION, dict(self.header().encode()))


async def send_end(
    instance: ClientInstance, end: TransactionEnd, timeout_s: float, *, retry_unknown: bool = True
) -> bool:
    """Send a decision to the leader, through fail-overs; sent twice it is written once.

    Args:
        timeout_s: Budget over all attempts.
        retry_unknown: Also try again when the outcome of an attempt is unknown.
    Returns:
        Whether the broker has confirmed it; a real RocketMQ does not.
    Raises:
        TransactionDecidedError: The transaction has another decision, for good.
        BrokerRefusedError: The broker refuses it; it is not decided by this call.
        BrokerBusyError: Likewise, for now, to the end of the time.
        BrokerUnreachableError: No leader could be reached.
        UnknownOutcomeError: Sent, but no answer confirms it.
    Cancellation: The decision may count.
    """
    clock = instance.clock
    deadline = clock.monotonic() + timeout_s
    policy = RetryPolicy(max_retries=ENDS_MAX, retry_unknown=retry_unknown)
    schedule = RetrySchedule(policy, deadline)
    is_unknown = False
    while True:
        name = end.broker_name
        address, term = instance.leaders.address(name), instance.leaders.term(name)
        is_busy = False
        error: ClientError
        if address is None:
            kind = FailureKind.NOT_LEADER
            error = BrokerUnreachableError(f"no leader of {name} is known")
        else:
            left_s = max(deadline - clock.monotonic(), 0.001)
            try:
                answer = await _ask(instance, address, end, left_s)
            except RequestTimedOutError as failed:
                kind, error = FailureKind.UNKNOWN, UnknownOutcomeError(_unknown(end, str(failed)))
            except BrokerUnreachableError as failed:
                kind, error = FailureKind.UNREACHABLE, failed
            except RequestFailedError as failed:
                kind, error = FailureKind.FINAL, _not_let_in(end, failed, is_unknown=is_unknown)
            else:
                if answer is None or answer.code == ResponseCode.SUCCESS:
                    return answer is not None
                kind = instance.leader_search.note_refusal(name, address, answer)
                is_busy = answer.code == ResponseCode.SYSTEM_BUSY
                error = _refused(end, kind, answer, is_unknown=is_unknown)
        is_unknown = is_unknown or kind is FailureKind.UNKNOWN
        step = None
        if kind not in (FailureKind.FINAL, FailureKind.REFUSED_HERE):
            step = schedule.next(kind, clock.monotonic())
        if step is None:
            if is_unknown and error.outcome != "unknown" and kind is not FailureKind.FINAL:
                # What an earlier attempt may have done, a later refusal does not undo.
                raise UnknownOutcomeError(_unknown(end, str(error))) from error
            raise error
        if is_busy:
            await clock.sleep(step.delay_s)
        elif step.where is not Where.NAMED_LEADER:
            await instance.leader_search.pause(
                name, step.delay_s, topic=end.topic, failed=address, failed_term=term
            )


async def _ask(
    instance: ClientInstance, address: str, end: TransactionEnd, left_s: float
) -> RemotingCommand | None:
    """Return the answer; None when there will be none, as this is a real RocketMQ."""
    attempt_s = min(instance.config.rpc_timeout_s, left_s)
    name = end.broker_name
    link = await instance.link(address, attempt_s, group=name)
    if link.records:
        ext = dict(end.header().encode())
        code = RequestCode.END_TRANSACTION
        return await instance.ask(address, code, ext, timeout_s=attempt_s, group=name)
    try:
        link.connection.invoke_oneway(end.oneway())
    except MQError as error:
        raise BrokerUnreachableError(f"broker {address}: {error}") from error
    return None


def _not_let_in(
    end: TransactionEnd, failed: RequestFailedError, *, is_unknown: bool
) -> ClientError:
    if is_unknown:
        return UnknownOutcomeError(_unknown(end, str(failed)))
    text = f"{end.state.name} of transaction {end.transaction_id}: {failed}"
    return BrokerRefusedError(text, code=failed.code, remark=failed.remark)


def _refused(
    end: TransactionEnd, kind: FailureKind, answer: RemotingCommand, *, is_unknown: bool
) -> ClientError:
    remark = answer.remark or f"code {answer.code}"
    decision = answer.ext.get(DECISION_FIELD)
    if isinstance(decision, str):
        return TransactionDecidedError(
            f"{end.state.name} of transaction {end.transaction_id} came too late: it is decided "
            f"as {decision.upper()}",
            code=answer.code,
            remark=remark,
            decision=decision,
        )
    if kind is FailureKind.UNKNOWN or (kind is FailureKind.FINAL and is_unknown):
        # Or an earlier attempt was what made this one impossible.
        return UnknownOutcomeError(_unknown(end, remark))
    text = f"{end.state.name} of transaction {end.transaction_id}: {remark}"
    if kind in (FailureKind.FINAL, FailureKind.REFUSED_HERE):
        return BrokerRefusedError(text, code=answer.code, remark=remark)
    return BrokerBusyError(text, code=answer.code, remark=remark)


def _unknown(end: TransactionEnd, remark: str) -> str:
    return (
        f"{end.state.name} of transaction {end.transaction_id} may or may not count: {remark}; "
        "the broker asks back if it does not"
    )
