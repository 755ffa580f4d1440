"""Arrays of 64 bits in few bytes, before they cross a JVM and a shuffle.

Offsets, op ids and times of one split grow in small steps; values are a client and a counter that
do so each. Each array keeps its differences in the narrowest unsigned type that holds them, exact
for any content: sums and differences of 64 bits wrap, and what fits nothing stays as it is.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.checkers.kernel.facts import I64

_HEAD: Final = struct.Struct("<BxxxIqq")
"""Form, length in entries, the first entry, the least difference."""
_EQUAL_STEPS: Final = 0
_PLAIN: Final = 8
_HALVES: Final = 9
"""Forms; those between are bytes of a difference."""
_KINDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_HALF_BYTES: Final = 4
_HALVES_MIN: Final = 64
"""Entries from which on halves are tried: two heads are 48 bytes."""


def narrowed(array: I64) -> bytes:
    """Return an array as bytes; see `widened`."""
    plain = _stepwise(array)
    if len(plain) <= _HEAD.size + _HALF_BYTES * len(array) or len(array) < _HALVES_MIN:
        return plain
    high = _stepwise(array >> 32)
    if len(high) > _HEAD.size + 2 * len(array):
        return plain  # a hash
    halves = high + _stepwise(array & 0xFFFFFFFF)
    found = _HEAD.pack(_HALVES, len(array), len(high), 0) + halves
    return found if len(found) < len(plain) else plain


def _stepwise(array: I64) -> bytes:
    size = len(array)
    if not size:
        return b""
    first = int(array[0])
    steps = np.diff(array)
    least = int(steps.min()) if size > 1 else 0
    span = int(steps.max()) - least if size > 1 else 0
    if span == 0:
        return _HEAD.pack(_EQUAL_STEPS, size, first, least)
    for width, kind in _KINDS.items():
        if span < 1 << (8 * width):
            return _HEAD.pack(width, size, first, least) + (steps - least).astype(kind).tobytes()
    return _HEAD.pack(_PLAIN, size, 0, 0) + array.tobytes()


def widened(data: bytes | memoryview) -> npt.NDArray[np.int64]:
    """Return the array that `narrowed` made bytes of; it may be read-only, over *data*."""
    if not len(data):
        return np.zeros(0, dtype=np.int64)
    form, size, first, least = _HEAD.unpack_from(data)
    rest = memoryview(data)[_HEAD.size :]
    if form == _PLAIN:
        return np.frombuffer(rest, dtype=np.int64)
    if form == _HALVES:
        low = widened(rest[first:])
        return (widened(rest[:first]) << 32) | low
    steps = np.empty(size, dtype=np.int64)
    steps[0] = first
    if form == _EQUAL_STEPS:
        steps[1:] = least
    else:
        np.add(np.frombuffer(rest, dtype=_KINDS[form]), np.int64(least), out=steps[1:])
    np.cumsum(steps, out=steps)
    return steps
