"""What a node asks of its owner, and tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commitlog.errors import InvariantBroken


def _no_snapshot() -> tuple[int, bytes]:
    raise InvariantBroken("this node has no tables to send")


def _ignore_snapshot(leader: str, data: bytes) -> None:
    raise InvariantBroken(f"a snapshot of {len(data)} bytes from {leader}, and nobody to take it")


def _ignore_fetched(peer: str, entries: memoryview) -> None:
    """Nobody repairs anything here."""


@dataclass(slots=True)
class Owner:
    """The owner's side of a node. Each may be replaced at any time, also while the node runs."""

    on_settled: Callable[[], None]
    """Called at the end of every event, synchronously; it may append. Lookers-on wrap it."""
    may_lead: Callable[[], bool] = lambda: True
    """Whether this member could serve if it led."""
    take_snapshot: Callable[[], tuple[int, bytes]] = _no_snapshot
    """Return the index at which the tables stand, and the tables."""
    on_snapshot: Callable[[str, bytes], None] = _ignore_snapshot
    """A whole snapshot has come from that leader; `RaftNode.installed` must follow."""
    on_suspect: Callable[[int], bool] = lambda _index: False
    """The entry at an index looks damaged; tell whether it is."""
    on_fetched: Callable[[str, memoryview], None] = _ignore_fetched
    """That member's answer to `RaftNode.fetch`: whole entries, or nothing."""
