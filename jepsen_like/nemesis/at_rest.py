"""Which part of a log is data at rest, for faults that spoil what was written long ago.

Bad bytes in the newest entries look like a write that a crash has torn, and a start that finds
them takes them for that (docs/operations.md). What the commit mark covers cannot be mistaken.
"""

from __future__ import annotations

from typing_extensions import Buffer

from commitlog.mark import Mark
from commitlog.slot_file import SLOT_STRIDE_BYTES, decode_slot


def marked_end(mark_file: Buffer) -> int:
    """Return the byte position up to which the log is at rest, from the file of its commit mark."""
    view = memoryview(mark_file)
    slots = [decode_slot(bytes(view[at : at + 512])) for at in (0, SLOT_STRIDE_BYTES)]
    whole = [slot for slot in slots if slot is not None]
    return Mark.decode(max(whole)[1]).end_position if whole else 0
