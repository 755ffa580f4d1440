"""Keeps freed memory in the process (glibc).

A check allocates and frees large arrays all the time. The C library returns each to the system and
asks for it again, and new pages cost more than the work done in them, most of all on a virtual
machine.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = (1 << 31) - 1
"""Free memory kept at most, and the largest array taken from it: all that the call can say."""


def keep_memory() -> bool:
    """Let this process keep what it frees; return whether its C library can be set so (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
