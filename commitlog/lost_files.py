"""Files of consume queues that the disk does not give back, until their units were put again."""

from __future__ import annotations

QueueKey = tuple[str, int]
"""Topic and queue id."""


class LostFiles:
    """Which files are lost, by queue and by the first offset they have.

    At first such a file takes no units. Once a new one stands in its place, it takes units, and
    gives none before `end`: some of them are still missing.
    """

    __slots__ = ("_filling", "_unreadable")

    def __init__(self) -> None:
        self._unreadable: dict[QueueKey, set[int]] = {}
        self._filling: dict[QueueKey, set[int]] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._unreadable or self._filling)

    @property
    def unreadable(self) -> list[tuple[QueueKey, int]]:
        """Those in whose place no new file stands."""
        return [(key, begin) for key, begins in self._unreadable.items() for begin in begins]

    @property
    def filling(self) -> dict[QueueKey, list[int]]:
        """First offsets of the new files that do not have all their units yet, by queue."""
        return {key: sorted(begins) for key, begins in self._filling.items()}

    def add(self, key: QueueKey, begin: int) -> bool:
        """Note that a file is lost; tell whether that is new."""
        if not self.takes_units(key, begin):
            return False
        _discard(self._filling, key, begin)
        self._unreadable.setdefault(key, set()).add(begin)
        return True

    def has(self, key: QueueKey) -> bool:
        """Whether a file of that queue is lost."""
        return key in self._unreadable or key in self._filling

    def takes_units(self, key: QueueKey, begin: int) -> bool:
        """Whether units may be put into that file."""
        return begin not in self._unreadable.get(key, ())

    def gives_units(self, key: QueueKey, begin: int) -> bool:
        """Whether units may be read from that file."""
        return self.takes_units(key, begin) and begin not in self._filling.get(key, ())

    def fill(self, key: QueueKey, begin: int) -> None:
        """Note that a new file stands in the place of an unreadable one."""
        _discard(self._unreadable, key, begin)
        self._filling.setdefault(key, set()).add(begin)

    def forget(self, key: QueueKey, begin: int) -> None:
        """Note that a file is not wanted any more."""
        _discard(self._unreadable, key, begin)
        _discard(self._filling, key, begin)

    def end(self) -> None:
        """Note that the new files have their units."""
        self._filling.clear()


def _discard(begins_of: dict[QueueKey, set[int]], key: QueueKey, begin: int) -> None:
    begins = begins_of.get(key)
    if begins is not None:
        begins.discard(begin)
        if not begins:
            del begins_of[key]
