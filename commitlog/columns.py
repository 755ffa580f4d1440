"""Fixed-width fields at arbitrary byte offsets of a buffer, read and written by the thousand.

numpy sees the buffer as one overlapping item per byte; fancy indexing then copies whole fields,
one memcpy each, whatever their alignment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def gather(
    buffer: bytes | bytearray | memoryview, offsets: npt.NDArray[np.int64], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return the fields of type *dtype* that begin at *offsets* (a copy).

    The caller has checked that all of them lie inside *buffer*.
    """
    width = dtype.itemsize
    if not len(offsets) or not width:
        return np.empty(len(offsets), dtype)
    windows: npt.NDArray[np.void] = np.ndarray(
        (len(buffer) - width + 1,), np.dtype((np.void, width)), buffer, strides=(1,)
    )
    return windows[offsets].view(dtype)


def gather_bytes(
    buffer: bytes | bytearray | memoryview, offsets: npt.NDArray[np.int64], width: int
) -> npt.NDArray[np.uint8]:
    """Return *width* bytes from each of *offsets* on, one row each (a copy)."""
    fields = gather(buffer, offsets, np.dtype((np.void, width)))
    return np.frombuffer(fields.tobytes(), np.uint8).reshape(len(offsets), width)


def scatter(buffer: bytearray, offsets: npt.NDArray[np.int64], fields: npt.NDArray[Any]) -> None:
    """Write *fields* (as many as offsets, or one for all) at *offsets* of *buffer*."""
    width = fields.dtype.itemsize
    windows: npt.NDArray[np.void] = np.ndarray(
        (len(buffer) - width + 1,), np.dtype((np.void, width)), buffer, strides=(1,)
    )
    windows[offsets] = fields.view(windows.dtype)
