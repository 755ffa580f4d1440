"""Is this send new, or is it one that is stored or on its way? Decided before anything is appended.

Judged by the applied sessions and what this leader has in flight:

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

Spec: docs/concepts/idempotent-producer.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from typing_extensions import Buffer

from dledger.broker_errors import (
    ProducerUnknownError,
    SequenceGapError,
    SequenceTooOldError,
    SequenceUndecidedError,
)
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.state.producer_sessions import ProducerSession, StoredSend
from remoting.protocol.producer_stamp import OPEN_SEQUENCES_MAX, ProducerStamp


@dataclass(slots=True, eq=False)
class SendInFlight:
    """A stamped send that was proposed.

    Attributes:
        records: What was proposed of it, without what the broker put before.
        refused: Numbers of its runs that were refused.
        waiting: Called with what became of it, by the places of its own records.
        proposed: What became of it, once that is known.
    """

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
        self._term = 0
        self._flying: dict[bytes, _Flying] = {}
        self._undecided: dict[bytes, None] = {}
        """Producers with a send that is answered and not applied: looked after at the next one."""

    def __len__(self) -> int:
        return sum(len(flying.sends) for flying in self._flying.values())

    def judge(self, stamp: ProducerStamp) -> Judged:
        """Return what the send with *stamp* is; this node leads.

        Raises:
            ProducerUnknownError, SequenceTooOldError, SequenceUndecidedError: Nothing is stored
                by this request; what an earlier one did is not known.
            SequenceGapError: Not stored: one before it is missing.
        """
        self._begin_term()
        if self._undecided:
            self._forget_decided()
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

    def add(self, stamp: ProducerStamp, send: SendInFlight) -> None:
        """Note that *send*, judged new, was proposed under *stamp*."""
        flying = self._flying.get(stamp.producer_id)
        if flying is None or flying.epoch != stamp.epoch:
            flying = self._flying[stamp.producer_id] = _Flying(stamp.epoch)
        flying.floor = max(flying.floor, stamp.first_open)
        flying.sends[stamp.sequence] = send

    def answered(self, stamp: ProducerStamp, send: SendInFlight, placed: Proposed) -> None:
        """Call all that wait for *send* with what became of it."""
        send.proposed = placed
        self._note_answer(stamp, send, placed)
        waiting, send.waiting = send.waiting, []
        for tell in waiting:
            tell(placed)

    def _begin_term(self) -> None:
        leadership = self._group.leadership
        term = leadership.term if leadership is not None else 0
        if term != self._term:
            self._term = term
            self._flying.clear()
            self._undecided.clear()

    def _note_answer(self, stamp: ProducerStamp, send: SendInFlight, proposed: Proposed) -> None:
        flying = self._flying.get(stamp.producer_id)
        if flying is None or flying.sends.get(stamp.sequence) is not send:
            return
        if proposed.outcome == "not_stored" or self._is_applied(stamp.producer_id, stamp.sequence):
            self._forget(stamp.producer_id, flying, stamp.sequence)
        else:
            self._undecided[stamp.producer_id] = None

    def _forget_decided(self) -> None:
        for producer_id in list(self._undecided):
            flying = self._flying.get(producer_id)
            answered = (
                []
                if flying is None
                else [at for at, send in flying.sends.items() if send.proposed is not None]
            )
            for sequence in answered:
                if flying is not None and self._is_applied(producer_id, sequence):
                    self._forget(producer_id, flying, sequence)
                    answered = [at for at in answered if at != sequence]
            if not answered:
                del self._undecided[producer_id]

    def _forget(self, producer_id: bytes, flying: _Flying, sequence: int) -> None:
        del flying.sends[sequence]
        if not flying.sends:
            del self._flying[producer_id]

    def _is_applied(self, producer_id: bytes, sequence: int) -> bool:
        session = self._group.state.producers.get(producer_id)
        return session is not None and (sequence in session.stored or sequence < session.floor)


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


def behind(proposed: Proposed, runs: int, nbytes: int) -> Proposed:
    """Return the answer for what stands behind the first *runs* of a proposal, *nbytes* further."""
    if not runs or proposed.outcome != "stored":
        return proposed
    return replace(
        proposed,
        first_offsets=proposed.first_offsets[runs:],
        phy_offset=proposed.phy_offset + nbytes,
    )
