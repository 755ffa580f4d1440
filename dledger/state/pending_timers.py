"""Which messages of the timer topic wait for their time: one bit each, in pieces.

A message waits from the entry that stores it until the entry that delivers, recalls or moves it.
When each is due stands in its consume queue unit, so this is all that has to be replicated state.
A piece whose messages are all done is dropped: what is kept grows with the messages that wait and
with how far they are apart, 512 bytes for each stretch of 4096 offsets that one of them is in.

Spec: docs/internals/state.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import InvariantBroken

PIECE_OFFSETS: Final = 4096
"""Offsets in one piece: small enough that one late message keeps little alive."""

RECALLED_KEPT: Final = 10_000
"""Newest recalls that are remembered, so that a repeated one is answered as done."""

_PIECE_BYTES: Final = PIECE_OFFSETS // 8


def piece_of(offset: int) -> int:
    """Return the number of the piece that an offset is in."""
    return offset // PIECE_OFFSETS


class PendingTimers:
    """Offsets of the timer queue that wait. Changed by apply alone; equal on equal replicas."""

    __slots__ = ("_counts", "_pieces", "_recalled", "_total")

    def __init__(self) -> None:
        # In ascending order, as offsets are: the first piece has the lowest.
        self._pieces: dict[int, bytearray] = {}
        self._counts: dict[int, int] = {}
        self._recalled: dict[int, None] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def __contains__(self, offset: int) -> bool:
        piece = self._pieces.get(offset // PIECE_OFFSETS)
        if piece is None:
            return False
        bit = offset % PIECE_OFFSETS
        return bool(piece[bit >> 3] >> (bit & 7) & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PendingTimers) and self.to_state() == other.to_state()

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def lowest(self) -> int | None:
        """The first offset that waits, or None when none does."""
        for number, piece in self._pieces.items():
            bits = int.from_bytes(piece, "little")
            return number * PIECE_OFFSETS + (bits & -bits).bit_length() - 1
        return None

    def pieces(self) -> Iterable[int]:
        """Return the numbers of the pieces that are kept."""
        return self._pieces.keys()

    def piece(self, number: int) -> bytes | None:
        """Return a copy of a piece; None when nothing in it waits."""
        piece = self._pieces.get(number)
        return None if piece is None else bytes(piece)

    def recalled(self) -> list[int]:
        """Return the newest recalls, oldest first."""
        return list(self._recalled)

    def was_recalled(self, offset: int) -> bool:
        """Whether this was one of the newest `RECALLED_KEPT` recalls."""
        return offset in self._recalled

    def mask(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Return for each of *count* offsets from *first* on whether it waits."""
        low, high = first // PIECE_OFFSETS, (first + count - 1) // PIECE_OFFSETS
        nothing = bytes(_PIECE_BYTES)
        packed = b"".join(
            bytes(self._pieces.get(number, nothing)) for number in range(low, high + 1)
        )
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        start = first - low * PIECE_OFFSETS
        return bits[start : start + count].astype(np.bool_)

    def add(self, offsets: Iterable[int]) -> None:
        """Let *offsets* wait; each is higher than all there were."""
        for offset in offsets:
            number, bit = divmod(offset, PIECE_OFFSETS)
            piece = self._pieces.get(number)
            if piece is None:
                piece = self._pieces[number] = bytearray(_PIECE_BYTES)
                self._counts[number] = 0
            piece[bit >> 3] |= 1 << (bit & 7)
            self._counts[number] += 1
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
            self._pieces[number][bit >> 3] &= ~(1 << (bit & 7))
            self._counts[number] -= 1
            self._total -= 1
            if not self._counts[number]:
                del self._pieces[number], self._counts[number]

    def recall(self, offsets: Iterable[int]) -> None:
        """`finish` *offsets*, and remember that they were recalled."""
        taken = list(offsets)
        self.finish(taken)
        for offset in taken:
            self._recalled[offset] = None
        while len(self._recalled) > RECALLED_KEPT:
            del self._recalled[next(iter(self._recalled))]

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a snapshot."""
        return {
            "pieces": {number: bytes(piece) for number, piece in self._pieces.items()},
            "recalled": list(self._recalled),
        }

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> PendingTimers:
        """Read what `to_state` made."""
        made = cls()
        for number, piece in sorted(value["pieces"].items()):
            made._pieces[number] = bytearray(piece)
            made._counts[number] = int.from_bytes(piece, "little").bit_count()
            made._total += made._counts[number]
        made._recalled = dict.fromkeys(value["recalled"])
        return made
