"""A transaction from its half message to its end: the decision goes to the leader that holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    MessageIllegalError,
    RequestFailedError,
    TransactionDecidedError,
    refusal,
)
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.links import Link
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.core.retry import RetryPolicy, error_of_call
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

    def __str__(self) -> str:
        return f"{self.state.name} of transaction {self.transaction_id}"

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


class _SentOneWayError(Exception):
    """A real RocketMQ has the request, and answers nothing."""


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

    def sent_to(link: Link) -> int:
        if link.records:
            return RequestCode.END_TRANSACTION
        try:
            link.connection.invoke_oneway(end.oneway())
        except MQError as error:
            raise BrokerUnreachableError(f"broker {link.address}: {error}") from error
        raise _SentOneWayError

    try:
        answer = await instance.ask_leader(
            end.broker_name,
            RequestCode.END_TRANSACTION,
            end.header().encode(),
            topic=end.topic,
            timeout_s=timeout_s,
            adapt=sent_to,
            changes=True,
            until_known=True,
            policy=RetryPolicy(max_retries=ENDS_MAX, retry_unknown=retry_unknown),
        )
    except _SentOneWayError:
        return False
    except RequestFailedError as error:
        asks = "; the broker asks back if it does not"
        raise error_of_call(str(end), error, unknown=asks) from error
    if answer.code == ResponseCode.SUCCESS:
        return True
    decision = answer.ext.get(DECISION_FIELD)
    if isinstance(decision, str):
        raise TransactionDecidedError(
            f"{end} came too late: it is decided as {decision.upper()}",
            code=answer.code,
            remark=answer.remark or "",
            decision=decision,
        )
    raise refusal(str(end), answer, BrokerRefusedError)
