"""Idempotent producers: a session is opened (51110), and a repeated send is recognised.

OPEN_PRODUCER has the fields ``producerId``, 16 bytes in hexadecimal, and ``producerEpoch``, the
epoch the producer had here before, 0 for none. The answer has ``producerEpoch`` and leaves when the
session is applied. A repeated request opens nothing: the producer gets the epoch it has, unless
that is the one it wants to leave.

A send that was stored before, or is in flight, gets the answer of its first attempt.

Spec: docs/reference/own-requests.md; docs/concepts/idempotent-producer.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Buffer

from commitlog.errors import CorruptRecordError, OffsetOutOfRangeError
from commitlog.properties import PROPERTY_UNIQ_KEY, get_property
from commitlog.record import Record, decode_record, iter_records
from dledger.broker_errors import SequenceReusedError, SequenceTooOldError
from dledger.group_api import BrokerGroup, OnDone, Proposed, QueueTouched
from dledger.processors.answers import answer_when_done, require_leader
from dledger.processors.handles import Limit, handles
from dledger.state.state_record import ProducerOpenedChange, state_batch
from remoting.access.accounts import SIGNED
from remoting.connection import Connection
from remoting.errors import BadRequestError
from remoting.processor import DEFERRED, Handled
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.producer_stamp import EPOCH_FIELD, ID_FIELD, producer_id_of


class OpenProducerProcessor:
    """Opens sessions; several requests for one producer share one proposal."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._opening: dict[bytes, list[OnDone]] = {}
        self._unapplied: list[tuple[int, OnDone, Proposed]] = []

    def on_applied(self, _touched: Sequence[QueueTouched]) -> None:
        """Answer the requests whose session is applied by now."""
        if not self._unapplied:
            return
        applied = self._group.state.applied_index
        ready = [item for item in self._unapplied if item[0] <= applied]
        self._unapplied = [item for item in self._unapplied if item[0] > applied]
        for _, answer, proposed in ready:
            answer(proposed)

    @handles(RequestCode.OPEN_PRODUCER, limit=Limit.ADMIN, rule=SIGNED)
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51110. A session alone stores no message: each send of it is checked."""
        group = self._group
        require_leader(group)
        producer_id = producer_id_of(command.ext.get(ID_FIELD))
        try:
            left = int(command.ext.get(EPOCH_FIELD, 0))
        except (TypeError, ValueError) as error:
            raise BadRequestError(f"{EPOCH_FIELD} is not a number") from error
        session = group.state.producers.get(producer_id)
        if session is not None and session.epoch > left:
            return response_to(command, 0, None, {EPOCH_FIELD: str(session.epoch)})

        def opened(proposed: Proposed) -> RemotingCommand:
            return response_to(command, 0, None, {EPOCH_FIELD: str(proposed.index)})

        answer = answer_when_done(connection, command, group, opened)
        waiting = self._opening.get(producer_id)
        if waiting is not None:
            waiting.append(answer)
            return DEFERRED
        waiting = [answer]

        def done(proposed: Proposed) -> None:
            del self._opening[producer_id]
            for answered in waiting:
                if proposed.outcome == "stored" and proposed.index > group.state.applied_index:
                    # Answered before it is applied: a send that came now would find no session.
                    self._unapplied.append((proposed.index, answered, proposed))
                else:
                    answered(proposed)

        group.propose(state_batch(ProducerOpenedChange(producer_id)), done)
        self._opening[producer_id] = waiting
        return DEFERRED


_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()

MessageIdentity = tuple[bytes | None, bytes]
"""UNIQ_KEY and body: what a repetition has in common with the first attempt."""


def identities(records: Buffer) -> list[MessageIdentity]:
    """Return what identifies the messages in *records*, in their order.

    Raises:
        CorruptRecordError: Something in it is no record.
    """
    return [_identity(record) for record in iter_records(records)]


def stored_records(
    group: BrokerGroup, position: int, sent: Sequence[MessageIdentity]
) -> list[Record]:
    """Return the records of the first attempt, which stand at *position*.

    Args:
        sent: What the repetition holds.
    Raises:
        SequenceTooOldError: They are stored, but no longer kept here or damaged.
        SequenceReusedError: They are other messages.
    """
    records: list[Record] = []
    try:
        for identity in sent:
            record = decode_record(group.log.record_at(position))
            if _identity(record) != identity:
                raise _reused()
            records.append(record)
            position += record.size
    except OffsetOutOfRangeError as error:
        raise SequenceTooOldError(
            "the first attempt was stored, but its messages are not kept any more; where they "
            "stood is not known"
        ) from error
    except CorruptRecordError as error:
        group.report_damage(position, 1)
        raise SequenceTooOldError(
            "the first attempt was stored, but its messages are damaged here and being repaired"
        ) from error
    return records


def check_same(first: Buffer, sent: Sequence[MessageIdentity]) -> None:
    """Check that a repetition holds the messages of the *first* attempt.

    Raises:
        SequenceReusedError: It does not.
    """
    if identities(first) != list(sent):
        raise _reused()


def _identity(record: Record) -> MessageIdentity:
    return get_property(record.properties, _UNIQ_KEY), bytes(record.body)


def _reused() -> SequenceReusedError:
    return SequenceReusedError(
        "another message was stored under this sequence; this one is not stored"
    )
