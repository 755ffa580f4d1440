"""What all roles of one member share: its Raft state, its owner's callbacks, its first failure.

As in etcd's ``raft`` struct there is one state; `dledger.raft.leader`, `.follower` and `.candidate`
are the step functions over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from commitlog.errors import FlushFailedError, InvariantBroken
from dledger.raft.guards import Guards
from dledger.raft.journal import CommitLogJournal
from dledger.raft.library import RaftCore
from dledger.raft.peers import Peers, Roster
from dledger.raft.settings import RaftSettings
from remoting.seams import Clock


def _no_snapshot() -> tuple[int, bytes]:
    raise InvariantBroken("this node has no tables to send")


def _ignore_snapshot(leader: str, data: bytes) -> None:
    raise InvariantBroken(f"no owner installs the snapshot of {len(data)} bytes from {leader}")


def _ignore_fetched(peer: str, entries: memoryview) -> None:
    """Drop the answer: this owner repairs nothing."""


@dataclass(slots=True)
class Owner:
    """The callbacks of a node's owner, which may be replaced at any time, also while it runs."""

    on_settled: Callable[[], None]
    """Called at the end of every event, synchronously; may append. Observers wrap this callback."""
    may_lead: Callable[[], bool] = lambda: True
    """Whether this member could serve if it led."""
    take_snapshot: Callable[[], tuple[int, bytes]] = _no_snapshot
    """Return the applied index of the tables, and the encoded tables."""
    on_snapshot: Callable[[str, bytes], None] = _ignore_snapshot
    """A whole snapshot has arrived from that leader; `RaftNode.installed`, `RaftNode.declined` or
    `RaftNode.refused` must follow."""
    on_suspect: Callable[[int], bool] = lambda _index: False
    """The entry at an index may be damaged; return whether it is."""
    on_fetched: Callable[[str, memoryview], None] = _ignore_fetched
    """That member's answer to `Sender.fetch`: whole entries, or nothing."""


class Failure:
    """The first error that a node cannot continue after; every later event raises it again.

    So a caller that takes the first one for an error of its own cannot keep the node running.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def raise_again(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def of_disk(self, error: OSError) -> FlushFailedError:
        """Keep a disk's error, and return what to raise."""
        # By its type it would pass for the error of a connection, which links merely dial again.
        failure = self.error = FlushFailedError(f"the disk failed: {error}")
        return failure


@dataclass(eq=False, slots=True)
class RaftState:
    """The state of one member, which its roles read and change.

    Attributes:
        core: Term, role, votes and commit index, as the library has them.
        journal: The log, and what of term and vote is on disk.
        roster: Which members this node knows and counts.
        peers: The state of each other member, with the frames that wait for its links.
        noop_index: Index of the first entry of this leader's term; 0 while it does not lead.
    """

    settings: RaftSettings
    guards: Guards
    clock: Clock
    owner: Owner
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    peers: Peers
    failure: Failure = field(default_factory=Failure)
    noop_index: int = 0

    @property
    def has_hole(self) -> bool:
        """Whether entries are damaged here that another voter may have.

        Until they are repaired this member neither votes nor acknowledges.
        """
        return len(self.journal.log.damaged) > 0 and bool(self.roster.other_voters)
