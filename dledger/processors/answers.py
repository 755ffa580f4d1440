"""What handlers share: refusals, outcomes, reads behind the read barrier, checks of a request.

Of a request they read alike: names, the account and host, confirmation, born host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import trio
from typing_extensions import Buffer

from dledger.broker_errors import NotLeaderError
from dledger.commitlog.errors import InvariantBroken, MQError
from dledger.commitlog.record import NO_HOST, QUEUE_ID_OFFSET, decode_record, pack_host
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.remoting.access.gate import admitted_account
from dledger.remoting.addresses import numeric
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition, answer, answer_error
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD
from dledger.remoting.protocol.topic_names import CLOSED_TOPICS, RETRY_PREFIX
from dledger.services.offset_commits import OffsetCommits, OffsetSlot
from dledger.services.pending_configs import PendingConfigs, noting
from dledger.state.state_record import state_batch
from dledger.state.table import StateChange
from dledger.state.topics import (
    ACCESS_QUEUE,
    MAX_GROUP_CHARS,
    is_secret,
    name_problem,
    topic_problem,
)
from dledger.waiting import Future

# --------------------------------------------------------------------------------- what is answered

TRACED: Final[Mapping[str, str]] = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
"""Fields by which RocketMQ's clients know where they sent to, and that traces are taken there."""


class RefusedError(MQError):
    """A request was checked and refused; nothing was stored."""

    def __init__(self, condition: Condition, remark: str) -> None:
        super().__init__(remark)
        self.condition = condition


def bad_request(remark: str) -> RefusedError:
    """Return the error of a request that asks for what cannot be."""
    return RefusedError(Condition.BAD_REQUEST, remark)


def refusal(command: RemotingCommand, error: MQError) -> RemotingCommand:
    """Return the answer for *error*: of a request that is answered after its handler returned.

    A handler raises the error instead, and the connection answers the same.

    Raises InvariantBroken: that is no answer; the node stops.
    """
    if isinstance(error, InvariantBroken):
        raise error
    return answer_error(command, error)


def not_leader(group: BrokerGroup) -> NotLeaderError:
    """Return the error that sends a client to the leader."""
    return NotLeaderError(group.leader_address, group.term)


def require_leader(group: BrokerGroup) -> None:
    """Return if this node leads. Raises NotLeaderError: it does not; nothing was done."""
    if group.leadership is None:
        raise not_leader(group)


def require_readable(group: BrokerGroup) -> None:
    """Return if queues and log are as the tables. Raises NotLeaderError: not while refilled."""
    if not group.readable:
        raise not_leader(group)


def failed_proposal(
    command: RemotingCommand, proposed: Proposed, group: BrokerGroup
) -> RemotingCommand:
    """Return the answer for a proposal that was not stored, or whose outcome is unknown."""
    if proposed.outcome == "not_stored":
        return answer_error(command, proposed.error or not_leader(group))
    return answer(
        command,
        Condition.LEADERSHIP_LOST,
        "leadership ended before a majority answered; the message may or may not be stored",
        leaderAddr=group.leader_address,
        term=group.term,
    )


def proposal_answer(
    command: RemotingCommand, proposed: Proposed, group: BrokerGroup
) -> RemotingCommand:
    """Return the answer for a proposal that needs no more than success where it is stored."""
    if proposed.outcome == "stored":
        return response_to(command)
    return failed_proposal(command, proposed, group)


def answer_when_done(
    connection: Connection,
    command: RemotingCommand,
    group: BrokerGroup,
    stored: Callable[[Proposed], RemotingCommand] | None = None,
    failed_fields: Mapping[str, str] | None = None,
) -> OnDone:
    """Return what answers *command* once the outcome of its proposal is known.

    Args:
        stored: Makes the answer of a proposal that is stored; None: success without fields.
        failed_fields: Further fields of the answer where it is not stored, or may not be.
    """

    def done(proposed: Proposed) -> None:
        if proposed.outcome != "stored":
            response = failed_proposal(command, proposed, group)
            if failed_fields is not None:
                response.ext.update(failed_fields)
        elif stored is None:
            response = response_to(command)
        else:
            response = stored(proposed)
        connection.reply(command, response)

    return done


def propose_change(
    connection: Connection,
    command: RemotingCommand,
    group: BrokerGroup,
    change: StateChange,
    pending: PendingConfigs[Any],
    when_known: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Propose a change of tables; answer *command* once its outcome is known.

    Args:
        pending: Changes of that table in flight.
        when_known: Calls its argument when others know of the change, too: what is stored is
            answered then.
    """
    answer = answer_when_done(connection, command, group)

    def known(proposed: Proposed) -> None:
        if when_known is not None and proposed.outcome == "stored":
            when_known(lambda: answer(proposed))
        else:
            answer(proposed)

    with noting((pending, change)) as settled:
        group.propose(state_batch(change), known, settled=settled)


class Outcome:
    """The answer of a request whose outcome is known inside its handler, or later."""

    def __init__(self, connection: Connection, command: RemotingCommand) -> None:
        self._connection, self._command = connection, command
        self._answer: RemotingCommand | None = None
        self._is_deferred = False

    def answer(self, response: RemotingCommand) -> None:
        """Answer; to be called once."""
        if self._is_deferred:
            self._connection.reply(self._command, response)
        self._answer = response

    def handled(self) -> Handled:
        """Return what the handler is to return: the answer, or DEFERRED when it comes later."""
        self._is_deferred = self._answer is None
        return DEFERRED if self._answer is None else self._answer


def when_current(
    group: BrokerGroup,
    connection: Connection,
    command: RemotingCommand,
    read: Callable[[], RemotingCommand | None],
) -> Handled:
    """Answer *command* with what *read* returns once this node is known to lead still.

    Args:
        read: Called once at most, when the applied state holds all that was stored before now;
            None: it answers later.
    Returns:
        The answer, or DEFERRED when it comes later: *read*'s, or a refusal that names the leader.
    Raises:
        NotLeaderError: This node does not lead.
    """
    return _when_passed(group.read_barrier, connection, command, read)


def when_stored(
    group: BrokerGroup,
    offsets: OffsetCommits,
    slots: Iterable[OffsetSlot],
    connection: Connection,
    command: RemotingCommand,
    read: Callable[[], RemotingCommand],
    *,
    is_current: bool = True,
) -> Handled:
    """As `when_current`, once the offsets that were taken of these queues are stored.

    Args:
        is_current: Whether this node has to be known to lead still.
    """

    def passes(done: _Passed) -> None:
        def stored() -> None:
            try:
                if is_current:
                    group.read_barrier(done)
                else:
                    done(None)
            except NotLeaderError as error:
                done(error)

        offsets.store_first(slots, stored)

    return _when_passed(passes, connection, command, read)


_Passed: TypeAlias = Callable[[NotLeaderError | None], None]


def _when_passed(
    passes: Callable[[_Passed], None],
    connection: Connection,
    command: RemotingCommand,
    read: Callable[[], RemotingCommand | None],
) -> Handled:
    outcome = Outcome(connection, command)

    def done(error: NotLeaderError | None) -> None:
        response = _read_answer(command, read, error)
        if response is not None:
            outcome.answer(response)

    passes(done)
    return outcome.handled()


def nothing_to_change(
    group: BrokerGroup, connection: Connection, command: RemotingCommand
) -> Handled:
    """Answer success for a change that is there already, once this node is known to lead still."""
    return when_current(group, connection, command, lambda: response_to(command))


async def until_current(group: BrokerGroup) -> None:
    """Wait until the applied state holds all that was stored before this call.

    Raises:
        NotLeaderError: This node does not lead, or stopped leading while it waited.
    Cancellation: Nothing is left behind.
    """
    passed = Future[NotLeaderError | None]()
    group.read_barrier(passed)
    error = await passed.wait()
    if error is not None:
        raise error


async def until_stored(
    group: BrokerGroup, offsets: OffsetCommits, slots: Iterable[OffsetSlot]
) -> None:
    """As `until_current`, once the offsets that were taken of these queues are stored."""
    stored = trio.Event()
    offsets.store_first(slots, stored.set)
    await stored.wait()
    await until_current(group)


def _read_answer(
    command: RemotingCommand,
    read: Callable[[], RemotingCommand | None],
    error: NotLeaderError | None,
) -> RemotingCommand | None:
    if error is not None:
        return refusal(command, error)
    try:
        return read()
    except MQError as failure:
        return refusal(command, failure)


# ------------------------------------------------------------------------ what is read of a request


_BORN_HOST = "born_host"


def check_topic_name(topic: str) -> None:
    """Check the name of a topic.

    Raises RefusedError: empty, too long, or with characters that no folder name may have.
    """
    problem = topic_problem(topic)
    if problem is not None:
        raise bad_request(problem)


def check_group_name(group: str) -> None:
    """Check the name of a consumer group.

    Raises RefusedError: as for topics: the group names its retry topic.
    """
    problem = name_problem(group, "group", MAX_GROUP_CHARS - len(RETRY_PREFIX))
    if problem is not None:
        raise bad_request(problem)


def check_sendable(topic: str) -> None:
    """Check that clients may send to a topic of that name.

    Raises RefusedError: bad name, or a topic that the broker alone writes.
    """
    check_topic_name(topic)
    if topic in CLOSED_TOPICS:
        raise RefusedError(
            Condition.NO_PERMISSION, f"sending to the system topic {topic} is forbidden"
        )


def check_readable(data: Buffer) -> None:
    """Check that clients may read a record, which they name by its position.

    Raises:
        RefusedError: It holds the secrets of accounts.
        CorruptRecordError: What has the number of their queue is damaged, or no record.
    """
    view = memoryview(data)
    if int.from_bytes(view[QUEUE_ID_OFFSET : QUEUE_ID_OFFSET + 4], "big") != ACCESS_QUEUE:
        return
    record = decode_record(view)
    if is_secret(record.topic, record.queue_id):
        raise RefusedError(
            Condition.NO_PERMISSION, f"queue {record.queue_id} of {record.topic} is not readable"
        )


def asked_by(connection: Connection) -> str:
    """Return the account, where there is access control, and the host that a request came from.

    A name that was not checked is not shown. Call it before the handler returns or waits.
    """
    host = connection.peer_address[0]
    account = admitted_account(connection)
    return f"{account} at {host}" if account else host


def is_confirmed(command: RemotingCommand) -> bool:
    """Return whether the request confirms that messages are given up."""
    return command.ext.get(CONFIRMED_FIELD) == "true"


def born_host_of(connection: Connection) -> bytes:
    """Return the packed address of the other end; computed once for each connection."""
    known = connection.attributes.get(_BORN_HOST)
    if known is None:
        host, port = connection.peer_address
        address = numeric(host)
        known = NO_HOST if address is None else pack_host(str(address), port)
        connection.attributes[_BORN_HOST] = known
    return bytes(known)
