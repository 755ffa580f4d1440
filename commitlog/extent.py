"""What the log notes about itself beside the segments, in two slot files.

The *extent* records how far the segments may have been written, so that recovery need not read a
gibibyte of zeros to know that nothing follows; and up to which entry the entry index is durable.
The *truncation* names a cut before it begins, so that a crash in the middle of it is finished
and not taken for damage.

Spec: docs/reference/formats.md, section 7.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from commitlog.errors import CorruptStoreError
from commitlog.mark import MARK_BYTES, Mark

_LIMIT: Final = struct.Struct(">qI")
_CUT: Final = struct.Struct(">qqI")


@dataclass(frozen=True, slots=True)
class Extent:
    """Nothing was ever written at or past *limit*; index units up to *indexed* are durable.

    With *exact* the log ended at *limit* and all of it was durable: nothing may be missing.
    """

    limit: int
    indexed: Mark
    exact: bool

    def encode(self) -> bytes:
        """Return the payload of the slot file."""
        return _LIMIT.pack(self.limit, self.exact) + self.indexed.encode()

    @classmethod
    def decode(cls, payload: bytes) -> Extent:
        """Return what a slot file holds.

        Raises:
            CorruptStoreError: The payload has another size.
        """
        if len(payload) != _LIMIT.size + MARK_BYTES:
            raise CorruptStoreError(f"an extent of {len(payload)} bytes")
        limit, exact = _LIMIT.unpack_from(payload)
        return cls(limit, Mark.decode(payload, _LIMIT.size), bool(exact))


@dataclass(frozen=True, slots=True)
class Truncation:
    """A cut: the log ends at *end_position*, everything up to *written_to* is to become zero.

    It is kept when it is *done*: an exact extent of before then ends here too.
    """

    end_position: int
    written_to: int
    done: bool = False

    def encode(self) -> bytes:
        """Return the payload of the slot file; an empty one means that there was no cut."""
        return _CUT.pack(self.end_position, self.written_to, self.done)

    @classmethod
    def decode(cls, payload: bytes) -> Truncation | None:
        """Return what a slot file holds, None when there was no cut since the log was opened.

        Raises:
            CorruptStoreError: The payload has another size.
        """
        if not payload:
            return None
        if len(payload) != _CUT.size:
            raise CorruptStoreError(f"a truncation of {len(payload)} bytes")
        end_position, written_to, done = _CUT.unpack(payload)
        return cls(end_position, written_to, bool(done))
