"""Idempotent producers: a session is opened (51110), and a repeated send is recognised.

A send is judged by the applied sessions and what this leader has in flight:

===========================================  ===========================  =====================
the stamp                                    answer                       outcome
===========================================  ===========================  =====================
its sequence is stored                       the first attempt's places   stored
its sequence is in flight here               that of the same proposal    as that one's
no session, or of another epoch              ProducerUnknownError         unknown
below the session's floor                    SequenceTooOldError          unknown
a sequence before it, still open, is missing SequenceGapError             not stored
otherwise                                    it is proposed               as the proposal's
===========================================  ===========================  =====================

An entry whose outcome is unknown stays in flight until it is applied or the term ends; what asks
for it meanwhile is answered so. A new leader begins with nothing in flight: by then it has applied
whatever can still be stored of earlier terms.

OPEN_PRODUCER has the fields ``producerId``, 16 bytes in hexadecimal, and ``producerEpoch``, the
epoch the producer had here before, 0 for none. The answer has ``producerEpoch`` and leaves when
the session is applied. A repeated request opens nothing: the producer gets the epoch it has,
unless that is the one it wants to leave.

Spec: docs/concepts/idempotent-producer.md; docs/reference/own-requests.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import Buffer

from dledger.broker_errors import (
    ProducerUnknownError,
    SequenceGapError,
    SequenceReusedError,
    SequenceTooOldError,
    SequenceUndecidedError,
)
from dledger.commitlog.errors import CorruptRecordError, OffsetOutOfRangeError
from dledger.commitlog.properties import PROPERTY_UNIQ_KEY, get_property
from dledger.commitlog.record import Record, decode_record, iter_records
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.processors.answers import answer_when_done, require_leader
from dledger.processors.handles import Limit, handles
from dledger.remoting.access.accounts import SIGNED
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.own_fields import (
    EPOCH_FIELD,
    ID_FIELD,
    OPEN_SEQUENCES_MAX,
    ProducerStamp,
    producer_id_of,
)
from dledger.state.producer_sessions import ProducerSession, StoredSend
from dledger.state.state_record import ProducerOpenedChange, state_batch

# ---------------------------------------------------------------------------------- new or repeated


@dataclass(slots=True, eq=False)
class SendInFlight:
    """A stamped send that was proposed.

    Attributes:
        records: What was proposed of it, without what the broker put before.
        refused: Numbers of its runs that were refused.
        waiting: Called with what became of it, by the places of its own records.
    """

    stamp: ProducerStamp
    records: Buffer
    refused: tuple[int, ...]
    waiting: list[OnDone] = field(default_factory=list)
    proposed: Proposed | None = None

    def join(self, tell: OnDone) -> None:
        """Call `tell` with the result, too; at once when it is known already."""
        if self.proposed is not None:
            tell(self.proposed)
        else:
            self.waiting.append(tell)

    def answered(self, placed: Proposed) -> None:
        """Call all that wait with what became of it."""
        self.proposed = placed
        waiting, self.waiting = self.waiting, []
        for tell in waiting:
            tell(placed)


@dataclass(slots=True)
class _Flying:
    """What is in flight of one producer in one epoch."""

    epoch: int
    floor: int = 0
    sends: dict[int, SendInFlight] = field(default_factory=dict)


Judged = StoredSend | SendInFlight | None
"""Where it stands; what it is the same as; or None: it is new."""


class ProducerSends:
    """The stamped sends of one broker's leaderships."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._flying: dict[bytes, _Flying] = {}

    def __len__(self) -> int:
        return sum(len(flying.sends) for flying in self._flying.values())

    def judge(self, stamp: ProducerStamp) -> Judged:
        """Return what the send with *stamp* is; this node leads.

        Raises:
            ProducerUnknownError, SequenceTooOldError, SequenceUndecidedError: Nothing is stored
                by this request; what an earlier one did is not known.
            SequenceGapError: Not stored: one before it is missing.
        """
        session = self._group.state.producers.get(stamp.producer_id)
        flying = self._flying.get(stamp.producer_id)
        if flying is not None and flying.epoch != stamp.epoch:
            flying = None
        if session is not None and session.epoch != stamp.epoch:
            raise ProducerUnknownError(
                f"epoch {stamp.epoch} of this producer is over, it has epoch {session.epoch} now; "
                "whether an earlier attempt was stored is not known any more"
            )
        if session is None and flying is None:
            raise ProducerUnknownError(
                "this producer has no session here, or it was unused for too long; whether an "
                "earlier attempt was stored is not known any more"
            )
        return _judge(stamp, session, flying)

    def add(self, send: SendInFlight) -> None:
        """Note that *send*, judged new, was proposed."""
        stamp = send.stamp
        flying = self._flying.get(stamp.producer_id)
        if flying is None or flying.epoch != stamp.epoch:
            flying = self._flying[stamp.producer_id] = _Flying(stamp.epoch)
        flying.floor = max(flying.floor, stamp.first_open)
        flying.sends[stamp.sequence] = send

    def settled(self, send: SendInFlight, _proposed: Proposed) -> None:
        """Forget *send*: what is applied shows what became of it."""
        stamp = send.stamp
        flying = self._flying.get(stamp.producer_id)
        if flying is not None and flying.sends.get(stamp.sequence) is send:
            del flying.sends[stamp.sequence]
            if not flying.sends:
                del self._flying[stamp.producer_id]


def _judge(stamp: ProducerStamp, session: ProducerSession | None, flying: _Flying | None) -> Judged:
    stored = session.stored if session is not None else {}
    in_flight = flying.sends if flying is not None else {}
    sequence = stamp.sequence
    where = stored.get(sequence)
    if where is not None:
        return where
    same = in_flight.get(sequence)
    if same is not None:
        if same.proposed is not None and same.proposed.outcome == "unknown":
            raise SequenceUndecidedError(
                f"an earlier attempt of send {sequence} is on its way and it is not known yet what "
                "becomes of it; ask again"
            )
        return same
    floor = max(
        # Of a session that expired meanwhile nothing older is known than what is on its way.
        session.floor if session is not None else min(in_flight, default=0),
        flying.floor if flying is not None else 0,
    )
    if sequence < floor:
        raise SequenceTooOldError(
            f"send {sequence} is older than {floor}, from where on this producer's sends are "
            "remembered; whether it was stored is not known any more"
        )
    if sequence - stamp.first_open >= OPEN_SEQUENCES_MAX:
        raise SequenceGapError(
            f"send {sequence} is not stored: {stamp.first_open} is still open, and at most "
            f"{OPEN_SEQUENCES_MAX} may be"
        )
    for before in range(max(stamp.first_open, floor), sequence):
        if before not in stored and before not in in_flight:
            raise SequenceGapError(
                f"send {sequence} is not stored: send {before} comes before it and is not here yet"
            )
    return None


# -------------------------------------------------------------------------- sessions and identities


class OpenProducerProcessor:
    """Opens sessions; several requests for one producer share one proposal."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._opening: dict[bytes, list[OnDone]] = {}

    @handles(RequestCode.OPEN_PRODUCER, limit=Limit.ADMIN, rule=SIGNED)
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51110. A session alone stores no message: each send of it is checked."""
        group = self._group
        require_leader(group)
        producer_id = producer_id_of(command.ext.get(ID_FIELD))
        try:
            left = whole_number(command.ext.get(EPOCH_FIELD, 0))
        except ValueError as error:
            raise BadRequestError(f"{EPOCH_FIELD} is not a number") from error
        session = group.state.producers.get(producer_id)
        if session is not None and session.epoch > left:
            return response_to(command, ext={EPOCH_FIELD: str(session.epoch)})

        def opened(proposed: Proposed) -> RemotingCommand:
            return response_to(command, ext={EPOCH_FIELD: str(proposed.index)})

        answer = answer_when_done(connection, command, group, opened)
        waiting = self._opening.get(producer_id)
        if waiting is not None:
            waiting.append(answer)
            return DEFERRED
        waiting = [answer]

        def done(proposed: Proposed) -> None:
            del self._opening[producer_id]
            for answered in waiting:
                answered(proposed)

        group.propose(state_batch(ProducerOpenedChange(producer_id)), done)
        self._opening[producer_id] = waiting
        return DEFERRED


_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()

MessageIdentity = tuple[bytes | None, bytes]
"""UNIQ_KEY and body: what a repetition has in common with the first attempt."""


def identities(records: Buffer) -> list[MessageIdentity]:
    """Return what identifies the messages in *records*, in their order.

    Raises CorruptRecordError: something in it is no record.
    """
    return [_identity(record) for record in iter_records(records)]


def first_records(
    group: BrokerGroup, first: StoredSend | SendInFlight, sent: Sequence[MessageIdentity]
) -> list[Record]:
    """Return the records of the *first* attempt, which is stored or in flight.

    Raises:
        SequenceTooOldError: They are stored, but no longer kept here or damaged.
        SequenceReusedError: They are other messages.
    """
    if isinstance(first, SendInFlight):
        in_flight = list(iter_records(first.records))
        if [_identity(record) for record in in_flight] != list(sent):
            raise _reused()
        return in_flight
    records: list[Record] = []
    position = first.position
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


def _identity(record: Record) -> MessageIdentity:
    return get_property(record.properties, _UNIQ_KEY), bytes(record.body)


def _reused() -> SequenceReusedError:
    return SequenceReusedError(
        "another message was stored under this sequence; this one is not stored"
    )
