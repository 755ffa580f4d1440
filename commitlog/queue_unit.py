"""The unit of a consume queue: position, size and hash of the tags of one message.

Spec: docs/reference/formats.md, section 3.
"""

from __future__ import annotations

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
