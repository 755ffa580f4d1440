"""Which messages of the timer topic wait for their time: one bit each, in pieces.

A message waits from the entry that stores it until the entry that delivers, recalls or moves it.
When each is due stands in its consume queue unit, so this is all that has to be replicated state.
A piece whose messages are all done is dropped: what is kept grows with the messages that wait and
with how far they are apart, 512 bytes for each stretch of 4096 offsets that one of them is in.

Spec: docs/internals/state.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import InvariantBroken
from dledger.state.table import Form, Table

PIECE_OFFSETS: Final = 4096
"""Offsets in one piece: small enough that one late message keeps little alive."""

RECALLED_KEPT: Final = 10_000
"""Newest recalls that are remembered, so that a repeated one is answered as done."""

_PIECE_BYTES: Final = PIECE_OFFSETS // 8


TIMER_PIECES: Final = Form[int, bytearray](
    "timer_pieces", int, bytes, copied=bytes, decoded=bytearray
)
RECALLED: Final = Form[int, bool]("recalled_timers", int, bool, in_order=True)


@dataclass(slots=True)
class PendingTimers:
    """Offsets of the timer queue that wait. Changed by apply alone; equal on equal replicas."""

    pieces: Table[int, bytearray] = field(default_factory=TIMER_PIECES.table)
    """In ascending order, as offsets are: the first piece has the lowest."""
    recalled: Table[int, bool] = field(default_factory=RECALLED.table)
    """The newest `RECALLED_KEPT` recalls, oldest first."""
    _total: int = field(default=0, compare=False)

    def count(self) -> None:
        """Count what waits, after the pieces were loaded."""
        self._total = sum(
            int.from_bytes(piece, "little").bit_count() for piece in self.pieces.values()
        )

    def __len__(self) -> int:
        return self._total

    def __contains__(self, offset: int) -> bool:
        piece = self.pieces.get(offset // PIECE_OFFSETS)
        if piece is None:
            return False
        bit = offset % PIECE_OFFSETS
        return bool(piece[bit >> 3] >> (bit & 7) & 1)

    @property
    def lowest(self) -> int | None:
        """The first offset that waits, or None when none does."""
        for number, piece in self.pieces.items():
            bits = int.from_bytes(piece, "little")
            return number * PIECE_OFFSETS + (bits & -bits).bit_length() - 1
        return None

    def was_recalled(self, offset: int) -> bool:
        """Whether this was one of the newest `RECALLED_KEPT` recalls."""
        return offset in self.recalled

    def mask(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Return for each of *count* offsets from *first* on whether it waits."""
        low, high = first // PIECE_OFFSETS, (first + count - 1) // PIECE_OFFSETS
        nothing = bytes(_PIECE_BYTES)
        packed = b"".join(
            bytes(self.pieces.get(number, nothing)) for number in range(low, high + 1)
        )
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        start = first - low * PIECE_OFFSETS
        return bits[start : start + count].astype(np.bool_)

    def add(self, offsets: Iterable[int]) -> None:
        """Let *offsets* wait; each is higher than all there were."""
        for offset in offsets:
            number, bit = divmod(offset, PIECE_OFFSETS)
            piece = self.pieces.get(number)
            if piece is None:
                piece = self.pieces[number] = bytearray(_PIECE_BYTES)
            piece[bit >> 3] |= 1 << (bit & 7)
            self.pieces.mark(number)
            self._total += 1

    def finish(self, offsets: Iterable[int]) -> None:
        """Let *offsets* wait no longer.

        Raises InvariantBroken: one of them does not wait: it would be delivered twice, or was
        recalled.
        """
        for offset in offsets:
            if offset not in self:
                raise InvariantBroken(f"timer message {offset} is done and did not wait")
            number, bit = divmod(offset, PIECE_OFFSETS)
            piece = self.pieces[number]
            piece[bit >> 3] &= ~(1 << (bit & 7))
            self.pieces.mark(number)
            self._total -= 1
            if piece.count(0) == _PIECE_BYTES:
                del self.pieces[number]

    def recall(self, offsets: Iterable[int]) -> None:
        """`finish` *offsets*, and remember that they were recalled."""
        taken = list(offsets)
        self.finish(taken)
        for offset in taken:
            self.recalled[offset] = True
        self.recalled.drop_oldest(RECALLED_KEPT)
