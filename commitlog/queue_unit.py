"""The unit of a consume queue: position, size and tag code; Java's hashes of many strings at once.

Spec: docs/reference/formats.md, sections 3 and 4.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UNIT_DTYPE: Final = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
UNIT_BYTES: Final = UNIT_DTYPE.itemsize

Units = npt.NDArray[Any]
"""Array of `UNIT_DTYPE`."""

FILLER_SIZE: Final = 0x7FFFFFFF
"""Size in a unit that stands before a queue's first one in its file."""


def fillers(count: int) -> bytes:
    """Return the bytes of *count* units that point at nothing."""
    units = np.zeros(count, UNIT_DTYPE)
    units["size"] = FILLER_SIZE
    return units.tobytes()


def java_hash_matrix(
    texts: npt.NDArray[np.uint8], prefix_hash: int | npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return Java's hashes of many ASCII strings of one length.

    Args:
        texts: One string a row; every byte below 128.
        prefix_hash: Hash of what stands before each string: one for all, or one a row.
    """
    length = texts.shape[1]
    # 31^k is cut into two halves of 16 bits, so that sums stay exact in float64 and the product
    # is one call to BLAS: 255 · 65535 · length < 2^53.
    halves = texts.astype(np.float64) @ _power_halves(length)
    value = halves[:, 0].astype(np.uint64) + (halves[:, 1].astype(np.uint64) << np.uint64(16))
    prefix = np.asarray(prefix_hash, np.int32).astype(np.uint32).astype(np.uint64)
    value += prefix * np.uint64(pow(31, length, 1 << 32))
    return value.astype(np.uint32).view(np.int32)


def index_hashes(java_hashes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return index key hashes for Java hashes: the absolute value, 0 for the smallest integer."""
    hashes = np.abs(java_hashes)
    hashes[hashes < 0] = 0
    return hashes


@lru_cache(64)
def _power_halves(length: int) -> npt.NDArray[np.float64]:
    powers = [pow(31, length - 1 - k, 1 << 32) for k in range(length)]
    return np.array([(power & 0xFFFF, power >> 16) for power in powers], np.float64).reshape(-1, 2)
