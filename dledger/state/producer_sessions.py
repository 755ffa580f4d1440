"""Which sends of which producer are stored, so that none is stored twice.

A session belongs to a producer id; its epoch is the index of the entry that opened it, so no epoch
ever comes twice. The producer numbers the sends of an epoch. Its *floor* is the lowest number it
still waits for: what is below is settled for it, and forgotten here. Every replica has the same
sessions in the same order, the one that was used longest ago first.

Spec: docs/concepts/idempotent-producer.md; docs/internals/state.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dledger.commitlog.errors import InvariantBroken
from dledger.state.table import Form, Table

SESSIONS_MAX: Final = 4096
"""Sessions of a group. About 1 KiB each at most, in memory and in each snapshot; beyond it the one
that was used longest ago goes. The same on all replicas, so it is no setting of a broker."""

SESSION_IDLE_MAX_MS: Final = 60 * 60 * 1000
"""A session unused for so long, by store time, is closed: far longer than any send is retried."""


class StoredSend(NamedTuple):
    """Where the records of one sequence stand.

    *refused*: numbers of the request's runs that were refused and are not there.
    """

    position: int
    refused: tuple[int, ...] = ()


class ProducerSession(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What is known of one producer in one epoch.

    Attributes:
        floor: Lowest sequence that can be judged: lower ones are settled, or were forgotten.
        used_ms: Store time of the newest entry of the session.
        stored: What is stored from the floor on, by sequence.
    """

    epoch: int
    floor: int = 0
    used_ms: int = 0
    stored: dict[int, StoredSend] = msgspec.field(default_factory=dict)

    def copied(self) -> ProducerSession:
        """Return a copy that shares nothing that changes."""
        return ProducerSession(self.epoch, self.floor, self.used_ms, self.stored.copy())


SESSIONS: Final = Form[bytes, ProducerSession](
    "producer_sessions", bytes, ProducerSession, copied=ProducerSession.copied, in_order=True
)
"""In the order of use."""


@dataclass(slots=True)
class ProducerSessions:
    """All sessions of a group; changed by `apply_entry` and `load` alone."""

    sessions_max: int = SESSIONS_MAX
    """How many are kept; equal on all replicas."""
    forgotten: int = field(default=0, compare=False)
    """Sessions that went since the start because there were more."""
    table: Table[bytes, ProducerSession] = field(default_factory=SESSIONS.table)

    def __len__(self) -> int:
        return len(self.table)

    def get(self, producer_id: bytes) -> ProducerSession | None:
        """Return the session of a producer, or None when there is none (any more)."""
        return self.table.get(producer_id)

    def open(self, producer_id: bytes, epoch: int, now_ms: int) -> None:
        """Begin an epoch of a producer; what was known of an earlier one is forgotten.

        Raises InvariantBroken: the producer has an epoch that is not older.
        """
        old = self.table.get(producer_id)
        if old is not None and old.epoch >= epoch:
            raise InvariantBroken(f"epoch {epoch} of a producer comes after its epoch {old.epoch}")
        self.table[producer_id] = ProducerSession(epoch, used_ms=now_ms)
        self._expire(now_ms)

    def note(
        self,
        producer_id: bytes,
        epoch: int,
        sequence: int,
        first_open: int,
        stored: StoredSend,
        now_ms: int,
    ) -> None:
        """Note that *sequence* is stored, and that the producer has settled all below *first_open*.

        A session that expired while the send was on its way begins again, with what is known: no
        sequence before this one can be judged. One whose epoch ended meanwhile stays forgotten.

        Raises InvariantBroken: the sequence is stored already.
        """
        session = self.table.get(producer_id)
        if session is not None and session.epoch > epoch:
            return
        if session is None or session.epoch < epoch:
            session = ProducerSession(epoch, floor=sequence)
        self.table[producer_id] = session  # the last in the order of use
        session.used_ms = now_ms
        if sequence in session.stored:
            raise InvariantBroken(
                f"sequence {sequence} of epoch {epoch} stands at "
                f"{session.stored[sequence].position} and was stored again at {stored.position}"
            )
        if first_open > session.floor:
            session.floor = first_open
            for settled in [known for known in session.stored if known < first_open]:
                del session.stored[settled]
        if sequence >= session.floor:
            session.stored[sequence] = stored
        self._expire(now_ms)

    def _expire(self, now_ms: int) -> None:
        sessions = self.table
        while sessions:
            oldest = next(iter(sessions))
            is_idle = sessions[oldest].used_ms + SESSION_IDLE_MAX_MS < now_ms
            if not is_idle and len(sessions) <= self.sessions_max:
                return
            self.forgotten += not is_idle
            del sessions[oldest]
