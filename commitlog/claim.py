"""One holder at a time, in whatever thread."""

from __future__ import annotations

from threading import Lock


class Claim:
    """Keeps the thread that appends and one that allocates ahead for it from each other's files."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()

    def take(self) -> bool:
        """Take it if it is free; tell whether it was."""
        return self._lock.acquire(blocking=False)

    def wait(self) -> None:
        """Take it as soon as it is free. Blocking."""
        self._lock.acquire()

    def give_back(self) -> None:
        """Let the next one have it."""
        self._lock.release()
