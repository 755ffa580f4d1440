"""The descriptors of a disk's files: which are open, and which are given back for others.

A file may be used for as long as its owner likes; whether it has a descriptor meanwhile is decided
here. One that was given back is opened again at the next use, by its path.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has no descriptor left: the disk itself may be sound."""


class DescriptorUser(Protocol):
    """What this module sees of a file."""

    last_use: int
    """`Descriptors.uses` at its last use."""

    @property
    def descriptors(self) -> int:
        """How many it has: a mapping holds one of its own."""

    def give_up_descriptors(self) -> bool:
        """Close what is not in use; tell whether anything was closed. Called under the lock."""


class Descriptors:
    """Files with a descriptor, of one disk.

    Attributes:
        lock: Held while a file gets or gives back a descriptor.
        uses: Goes up with each use of a file. Without the lock: it only decides which one goes
            first.
    """

    __slots__ = ("_count", "_files", "_most", "lock", "uses")

    def __init__(self, most: int | None) -> None:
        """Hold none yet.

        Args:
            most: Number that is kept; None: as many as the process may have.
        """
        # A file that is opened gives others up, under the same lock.
        self.lock = threading.RLock()
        self._most = most
        self.uses = 0
        self._count = 0
        self._files: dict[DescriptorUser, None] = {}

    @property
    def count(self) -> int:
        """How many descriptors the files have now."""
        return self._count

    def taken(self, file: DescriptorUser, more: int) -> None:
        """Note that *file* has *more* descriptors than before; others give theirs back for it."""
        with self.lock:
            self._count += more
            self._files[file] = None
            while self._most is not None and self._count > self._most:
                if not self._give_one_back(file):
                    return

    def given_back(self, file: DescriptorUser, count: int) -> None:
        """Note that *file* has *count* descriptors less."""
        with self.lock:
            self._count -= count
            if not file.descriptors:
                self._files.pop(file, None)

    def opened(self, get: Callable[[], T]) -> T:
        """Return what *get* opens; where no descriptor is left, files give theirs back first.

        Raises:
            OSError: As *get*; with EMFILE or ENFILE when no file has one that can be given back.
        """
        while True:
            try:
                return get()
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                with self.lock:
                    if not self._give_one_back(None):
                        raise

    def _give_one_back(self, spared: DescriptorUser | None) -> bool:
        """Close the file that was not used for longest; tell whether there was one."""
        others = (file for file in self._files if file is not spared)
        return any(
            file.give_up_descriptors() for file in sorted(others, key=lambda file: file.last_use)
        )
