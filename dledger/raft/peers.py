"""The others as this node talks to them, and the frames that wait for a link.

Links take from these queues (`dledger.raft.links`); nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from dledger.raft.core import RaftCore
from dledger.raft.identity import Hello
from dledger.raft.wakeup import Wakeup
from dledger.raft.wire import Kind

CONTROL_QUEUE_FRAMES: Final = 64
"""Heartbeats and votes waiting for a link, frames; older ones are dropped, Raft repeats them."""


@dataclass(slots=True)
class Outgoing:
    """A frame without connection numbers; the link adds them."""

    kind: Kind
    term: int
    fields: tuple[Any, ...]


@dataclass(slots=True)
class PeerState:
    """What this node knows of one other member, and what waits to be sent to it."""

    name: str
    hello: Hello | None = None
    control: deque[Outgoing] = field(default_factory=lambda: deque(maxlen=CONTROL_QUEUE_FRAMES))
    replies: deque[Outgoing] = field(default_factory=lambda: deque(maxlen=CONTROL_QUEUE_FRAMES))
    control_wake: Wakeup = field(default_factory=Wakeup)
    data_wake: Wakeup = field(default_factory=Wakeup)
    up: set[str] = field(default_factory=set)
    wanted: tuple[int, int] | None = None
    """Entries it asked for, because its own are damaged."""
    hello_since_s: float = 0.0
    """Since when it has been this incarnation that speaks."""
    close_since_s: float | None = None
    """Since when it has had almost everything."""
    close_commit_index: int = 0
    """What was committed then."""

    @property
    def is_connected(self) -> bool:
        """Whether heartbeats and votes reach it, as far as known."""
        return "control" in self.up


class Peers(dict[str, PeerState]):
    """Everybody this node has ever talked to, by name."""

    def __init__(self, names: Iterable[str], core: RaftCore) -> None:
        """Know *names*; frames carry the term that *core* is in when they are made."""
        super().__init__((name, PeerState(name)) for name in names)
        self._core = core

    def of(self, name: str) -> PeerState:
        """Return what is known of *name*; nothing, when it is new."""
        state = self.get(name)
        if state is None:
            state = self[name] = PeerState(name)
        return state

    def send(self, name: str, kind: Kind, *fields: Any) -> None:
        """Send a frame over the control link, ahead of all data."""
        self.send_made(name, Outgoing(kind, self._core.term, fields))

    def send_made(self, name: str, frame: Outgoing) -> None:
        """Send a frame that was made earlier over the control link."""
        state = self.of(name)
        state.control.append(frame)
        state.control_wake.set()

    def reply(self, name: str, kind: Kind, *fields: Any) -> None:
        """Send a frame over the data link, ahead of entries."""
        state = self.of(name)
        state.replies.append(Outgoing(kind, self._core.term, fields))
        state.data_wake.set()
