"""Which sends of which producer are stored, so that none is stored twice.

A session belongs to a producer id; its epoch is the index of the entry that opened it, so no epoch
ever comes twice. The producer numbers the sends of an epoch. Its *floor* is the lowest number it
still waits for: what is below is settled for it, and forgotten here. Every replica has the same
sessions in the same order, the one that was used longest ago first.

Spec: docs/concepts/idempotent-producer.md; docs/internals/state.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dledger.commitlog.errors import InvariantBroken

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


@dataclass(slots=True)
class ProducerSession:
    """What is known of one producer in one epoch.

    Attributes:
        floor: Lowest sequence that can be judged: lower ones are settled, or were forgotten.
        used_ms: Store time of the newest entry of the session.
        stored: What is stored from the floor on, by sequence.
    """

    epoch: int
    floor: int = 0
    used_ms: int = 0
    stored: dict[int, StoredSend] = field(default_factory=dict)


class ProducerSessions:
    """All sessions of a group; changed by `apply_entry` and `of_state` alone.

    Attributes:
        sessions_max: How many are kept; equal on all replicas.
        forgotten: Sessions that went since the start because there were more.
    """

    __slots__ = ("_sessions", "_touched", "forgotten", "sessions_max")

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self.sessions_max = sessions_max
        self.forgotten = 0
        self._sessions: dict[bytes, ProducerSession] = {}
        self._touched: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProducerSessions):
            return NotImplemented
        return [self.row(name) for name in self.ids()] == [other.row(name) for name in other.ids()]

    __hash__ = None  # type: ignore[assignment]  # it changes

    def get(self, producer_id: bytes) -> ProducerSession | None:
        """Return the session of a producer, or None when there is none (any more)."""
        return self._sessions.get(producer_id)

    def open(self, producer_id: bytes, epoch: int, now_ms: int) -> None:
        """Begin an epoch of a producer; what was known of an earlier one is forgotten.

        Raises InvariantBroken: the producer has an epoch that is not older.
        """
        old = self._sessions.pop(producer_id, None)
        if old is not None and old.epoch >= epoch:
            raise InvariantBroken(f"epoch {epoch} of a producer comes after its epoch {old.epoch}")
        self._sessions[producer_id] = ProducerSession(epoch, used_ms=now_ms)
        self._touch(producer_id)
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
        session = self._sessions.get(producer_id)
        if session is not None and session.epoch > epoch:
            return
        if session is None or session.epoch < epoch:
            session = ProducerSession(epoch, floor=sequence)
        self._sessions.pop(producer_id, None)
        self._sessions[producer_id] = session  # the last in the order of use
        self._touch(producer_id)
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
        sessions = self._sessions
        while sessions:
            oldest = next(iter(sessions))
            is_idle = sessions[oldest].used_ms + SESSION_IDLE_MAX_MS < now_ms
            if not is_idle and len(sessions) <= self.sessions_max:
                return
            self.forgotten += not is_idle
            del sessions[oldest]
            self._touch(oldest)

    def _touch(self, producer_id: bytes) -> None:
        self._touched.pop(producer_id, None)
        self._touched[producer_id] = None

    @property
    def touched_count(self) -> int:
        """How many sessions changed since they were taken last."""
        return len(self._touched)

    def take_touched(self) -> list[bytes]:
        """Return whose sessions changed since this was called last, in the order of use."""
        touched, self._touched = self._touched, {}
        return list(touched)

    def ids(self) -> list[bytes]:
        """Return all producers with a session, in the order of use."""
        return list(self._sessions)

    def row(self, producer_id: bytes) -> list[Any] | None:
        """Return one session as it stands in a snapshot, or None when there is none."""
        session = self._sessions.get(producer_id)
        if session is None:
            return None
        return [
            producer_id,
            session.epoch,
            session.floor,
            session.used_ms,
            [[sequence, send.position, *send.refused] for sequence, send in session.stored.items()],
        ]

    @classmethod
    def of_state(cls, value: list[list[Any]], sessions_max: int = SESSIONS_MAX) -> ProducerSessions:
        """Return the sessions in a snapshot: the rows of all producers in the order of use."""
        sessions = cls(sessions_max)
        for producer_id, epoch, floor, used_ms, stored in value:
            sessions._sessions[producer_id] = ProducerSession(
                epoch,
                floor,
                used_ms,
                {
                    sequence: StoredSend(position, tuple(refused))
                    for sequence, position, *refused in stored
                },
            )
        return sessions
