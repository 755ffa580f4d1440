"""Where a sparse file holds data, asked of the file system."""

from __future__ import annotations

import errno
import os


def data_extents(fd: int) -> list[tuple[int, int]]:
    """Return (offset, end) of the stretches of an open file that hold data, on disk or not yet.

    Space that was reserved and never written is none. Blocks for microseconds a stretch.
    """
    found: list[tuple[int, int]] = []
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return found
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, end))
