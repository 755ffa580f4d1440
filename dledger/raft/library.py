"""pysyncobj's own election and commit code, with the parts of it that are unsafe replaced.

========================================  ======================================================
pysyncobj decides                         ours
========================================  ======================================================
term, vote, which candidate wins          when to campaign: timer, pre-vote, lost connections
log matching, what to truncate            which part of an append is new; CRC, chain, position
commit index, from a majority of its own  what counts: only what is on disk; sending, window
term
stepping down                             leadership scope; apply; snapshots of the tables
========================================  ======================================================

Switched off in the library, and how:

========================  ======================================================================
its election timer        infinite; `RaftCore.campaign` delivers a ``timeout_now`` instead
its sender                ``__sendAppendEntries`` does nothing; links pull from our replicator
its state machine         ``__applyLogEntries`` only moves ``lastApplied``; apply follows the log
its command queue         ``_checkCommandsToApply`` does nothing; `RaftCore.append` is the only way
its dumps                 ``__tryLogCompaction`` does nothing, ``__loadDumpFile`` raises
its sockets and threads   a null poller, ``autoTick`` off, our Transport
========================  ======================================================================

Each correction is a guard (`dledger.raft.settings`). Everything that depends on private names of
the library stands in this file, and a test compares the hash of the installed ``syncobj.py`` with
the one it was written against.
"""

from __future__ import annotations

import threading  # noqa: TID251  # only what each thread has of its own
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import pysyncobj.syncobj as library
from pysyncobj.config import SyncObjConf
from pysyncobj.journal import Journal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from dledger.commitlog.errors import InvariantBroken, RemoteProtocolError
from dledger.raft.journal import CommitLogJournal, ConfigProposal, Proposal
from dledger.raft.settings import Guards
from dledger.remoting.seams import Clock, Rng

LIBRARY_SHA256: Final = "e8bdf06797085d734df86e24ab4802fe87893dff77268565ec036f7ad4a1cfe4"
"""SHA-256 of the ``syncobj.py`` these overrides were written against (pysyncobj 0.3.17)."""

NEVER_S: Final = 1e9
"""The library's election timeout: out of the way, ours runs instead."""

LIBRARY_FALLBACK_S: Final = 30.0
"""The library's default for a leader without a quorum; used only with the guard off."""

ENTRY_BYTES_MAX: Final = 1 << 30
"""The library chunks, with pickle, what is larger than this; no entry of ours can be."""

KNOWN_MESSAGES: Final = frozenset(
    {"append_entries", "next_node_idx", "request_vote", "response_vote", "timeout_now"}
)
"""Library messages that may travel. All others execute commands."""

PICKLED_PARTS: Final = frozenset({"serialized", "transmission"})
"""Parts of an append that the library would unpickle, or commit unverified."""

Message = dict[str, Any]


class Role(Enum):
    """What a member is at this moment."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


_LEADER: Final = 2
_ROLES: Final = {0: Role.FOLLOWER, 1: Role.CANDIDATE, _LEADER: Role.LEADER}


@dataclass(slots=True)
class _Seams:
    """Clock and randomness of the node whose library code runs now."""

    clock: Clock
    rng: Rng


class _Ambient(threading.local):
    """Stands where the library imported the time and random modules.

    Each thread has its own: embedded brokers of one process run in threads beside each other.
    """

    current: _Seams | None = None

    def monotonic(self) -> float:
        if self.current is None:
            raise InvariantBroken("consensus code ran outside a node")
        # Above zero, because for the library a deadline of 0 has passed.
        return 1.0 + self.current.clock.monotonic()

    def random(self) -> float:
        if self.current is None:
            raise InvariantBroken("consensus code ran outside a node")
        return self.current.rng.random()


_ambient: Final = _Ambient()


def _journal_as_given(journal: Journal) -> Journal:
    return journal


library.createJournal = _journal_as_given
library.monotonicTime = _ambient.monotonic
library.random = _ambient


class _Member(Node):
    """A node whose hash is the same in every process.

    The library keeps sets of nodes and sends in their order, which therefore does not depend on the
    hash seed of the interpreter.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hash = zlib.crc32(name.encode())

    def __hash__(self) -> int:
        return self._hash


class _NullPoller:
    """The library polls sockets here; it has none."""

    def poll(self, timeout: float) -> None:
        """Return at once."""


class _CappedMatch(dict[Node, int]):
    """Match indexes as the library may count them.

    The library always counts the leader itself. Reading every follower as no further than what
    is stable here makes that count true: an index reaches a majority only when it is durable on
    this node too. With one voter nothing is read, and `RaftCore.commit_index` caps instead.
    """

    def __init__(self, journal: CommitLogJournal) -> None:
        super().__init__()
        self._journal = journal

    def __getitem__(self, node: Node) -> int:
        return min(super().__getitem__(node), self._journal.stable_index)

    def __setitem__(self, node: Node, index: int) -> None:
        # The library compares with what it reads, the capped value, and would count a late
        # lower answer. Only a new term begins again at 0.
        super().__setitem__(node, max(index, super().get(node, 0)) if index else 0)


class _Outbox(Transport):
    """The library's Transport: hands every message to the node instead of a socket."""

    def __init__(self, deliver: Callable[[str, Message], None]) -> None:
        super().__init__(None, None, ())
        self._deliver = deliver

    def send(self, node: Node, message: Message) -> bool:
        self._deliver(node.id, message)
        return True

    def destroy(self) -> None:
        """Nothing to close."""


class _Library(library.SyncObj):
    """The library with its unsafe parts replaced.

    No properties that need state: the library's ``__init__`` evaluates every attribute.
    """

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        """Sending is pulled by the links, see `dledger.raft.replicator`."""

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        self._SyncObj__raftLastApplied = max(self._SyncObj__raftLastApplied, self.raftCommitIndex)
        return False

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        """`RaftCore.append` is the only way into the log."""

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        """Retention removes a prefix, never the library."""

    _SyncObj__raftLastApplied: int


class _LibraryWithoutDump(_Library):
    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:  # noqa: N802, N803
        raise InvariantBroken("the library tried to load a dump")


class RaftCore:
    """One member's consensus state machine. Synchronous; the caller delivers and sends messages.

    Args:
        peer_ids: The other voters' names, until `set_voters` changes them.
        journal: The log; owned by the caller.
        send: Called with (peer, message) for each message the library wants to send. It must not
            call back into the core.
        leader_fallback_s: A leader without answers of a majority for this long steps down.
    """

    def __init__(
        self,
        self_id: str,
        peer_ids: Iterable[str],
        journal: CommitLogJournal,
        *,
        send: Callable[[str, Message], None],
        clock: Clock,
        rng: Rng,
        leader_fallback_s: float,
        guards: Guards,
    ) -> None:
        self._seams = _Seams(clock, rng)
        self._journal = journal
        self._guards = guards
        self._nodes = {peer: _Member(peer) for peer in sorted(peer_ids)}
        self._outbox = _Outbox(send)
        self._connected: set[str] = set()
        conf = SyncObjConf(
            autoTick=False,
            raftMinTimeout=NEVER_S,
            raftMaxTimeout=2 * NEVER_S,
            connectionTimeout=2 * NEVER_S,
            appendEntriesPeriod=leader_fallback_s / 10,
            appendEntriesUseBatch=True,
            appendEntriesBatchSizeBytes=ENTRY_BYTES_MAX,
            leaderFallbackTimeout=leader_fallback_s
            if guards.leader_gives_up
            else max(LIBRARY_FALLBACK_S, leader_fallback_s),
            commandsWaitLeader=False,
            dynamicMembershipChange=False,
            fullDumpFile=None,
            useFork=False,
            journalFile=journal,
        )
        kind = _LibraryWithoutDump if guards.no_library_dump else _Library
        with self._ambient():
            self._library = kind(
                _Member(self_id), self._nodes.values(), conf=conf, transport=self._outbox
            )
            # Read at each event, and more than once: as values, not by calls of the library.
            self._fields = vars(self._library)
            self._library._poller = _NullPoller()
            self._library._SyncObj__raftLastApplied = journal.commit_index
            if guards.durable_before_promise:
                vars(self._library)["_SyncObj__raftMatchIndex"] = _CappedMatch(journal)

    def _ambient(self) -> _Entered:
        return _Entered(self._seams)

    # -- what the node reads ---------------------------------------------------------------

    @property
    def role(self) -> Role:
        """What this member is now."""
        return _ROLES[self._fields["_SyncObj__raftState"]]

    @property
    def is_leader(self) -> bool:
        """Whether this member believes it leads."""
        return bool(self._fields["_SyncObj__raftState"] == _LEADER)

    @property
    def term(self) -> int:
        """The newest term this member has seen."""
        term: int = self._fields["_SyncObj__raftCurrentTerm"]
        return term

    @property
    def leader_id(self) -> str | None:
        """The leader of this term, as far as known."""
        leader = self._library._getLeader()
        return None if leader is None else leader.id

    @property
    def commit_index(self) -> int:
        """Newest index that is committed *and* stable here: what may be applied."""
        return min(self._library.raftCommitIndex, self._journal.stable_index)

    @property
    def known_commit_index(self) -> int:
        """Newest index known to be committed; may be above what is stable here."""
        known: int = self._fields["_SyncObj__raftCommitIndex"]
        return known

    # -- what the node does ----------------------------------------------------------------

    def tick(self) -> None:
        """Let the library elect, count and step down. Cheap: call after every event.

        Raises DiskFullError: this member was elected but its first entry does not fit; the caller
        steps down with `observe_term`.
        """
        with self._ambient():
            self._library.doTick(0)

    def step(self, peer: str | None, message: Message) -> None:
        """Deliver one message of the library's own kinds.

        Raises:
            RemoteProtocolError: The kind may not travel; nothing was changed.
            InvariantBroken: A committed entry would be cut, or entries disagree: stop the node.
        """
        if self._guards.never_forwarded and message["type"] not in KNOWN_MESSAGES:
            raise RemoteProtocolError(f"peer {peer} sent a {message['type']!r}; refused")
        if self._guards.no_pickle and not PICKLED_PARTS.isdisjoint(message):
            raise RemoteProtocolError(f"peer {peer} sent a pickled {message['type']!r}; refused")
        node = None if peer is None else self._node(peer)
        with self._ambient():
            self._outbox._onMessageReceived(node, message)

    def _node(self, peer: str) -> Node:
        # Also for members that are no voters: this log may not know the leader yet.
        node = self._nodes.get(peer)
        if node is None:
            node = self._nodes[peer] = _Member(peer)
        return node

    def set_voters(self, others: Iterable[str]) -> None:
        """Count these members from now on, and this one; to be called when the list changes."""
        wanted = {self._node(peer) for peer in sorted(others)}
        state = vars(self._library)
        counted: set[Node] = state["_SyncObj__otherNodes"]
        per_voter = [
            state[name]
            for name in (
                "_SyncObj__raftNextIndex",
                "_SyncObj__raftMatchIndex",
                "_SyncObj__lastResponseTime",
            )
        ]
        for node in counted - wanted:
            for table in per_voter:
                table.pop(node, None)
        with self._ambient():
            begin = (self._journal.last_index + 1, 0, _ambient.monotonic())
        for node in wanted - counted:
            for table, value in zip(per_voter, begin, strict=True):
                table[node] = value
        state["_SyncObj__otherNodes"] = wanted
        state["_SyncObj__connectedNodes"] = {node for node in wanted if node.id in self._connected}

    def campaign(self) -> None:
        """Campaign now, in the next term; nothing happens while no other voter is connected."""
        state = vars(self._library)
        if state["_SyncObj__otherNodes"] and not state["_SyncObj__connectedNodes"]:
            # The library would wait for a connection and then depose the leader.
            return
        self.step(self._known_leader(), {"type": "timeout_now", "term": self.term})
        self.tick()

    def _known_leader(self) -> str | None:
        # A ``timeout_now`` counts only when it names the leader the library knows of.
        return self.leader_id

    def observe_term(self, term: int) -> None:
        """Enter a higher *term* as follower, without a vote in it."""
        if term <= self.term:
            return
        any_peer = next(iter(self._nodes), None)
        self.step(
            any_peer,
            {"type": "request_vote", "term": term, "last_log_term": -1, "last_log_index": -1},
        )

    def append(self, proposal: Proposal | ConfigProposal) -> int:
        """Append one entry in this leader's term and return its index.

        Raises:
            DiskFullError: Nothing was appended.
            InvariantBroken: This member does not lead.
        """
        if not self.is_leader:
            raise InvariantBroken("append on a member that does not lead")
        index = self._journal.last_index + 1
        self._journal.add(proposal, index, self.term)
        return index

    def begin_at(self, index: int) -> None:
        """Count everything up to *index*, and nothing else, as committed and applied."""
        state = vars(self._library)
        for name in ("_SyncObj__raftCommitIndex", "_SyncObj__raftLastApplied"):
            state[name] = index

    def connected(self, peer: str, up: bool) -> None:
        """Record that the link to *peer* is up or down."""
        node = self._node(peer)
        if not up:
            self._connected.discard(peer)
            with self._ambient():
                self._outbox._onNodeDisconnected(node)
            return
        self._connected.add(peer)
        if node in vars(self._library)["_SyncObj__otherNodes"]:
            with self._ambient():
                self._outbox._onNodeConnected(node)

    def forget_match(self, peer: str) -> None:
        """Count nothing of what *peer* has acknowledged: it may have lost it."""
        matches = vars(self._library)["_SyncObj__raftMatchIndex"]
        node = self._node(peer)
        if node in matches:
            matches[node] = 0


class _Entered:
    """Makes a node's clock and randomness the library's for the length of one call."""

    __slots__ = ("_before", "_seams")

    def __init__(self, world: _Seams) -> None:
        self._seams = world
        self._before: _Seams | None = None

    def __enter__(self) -> None:
        self._before = _ambient.current
        _ambient.current = self._seams

    def __exit__(self, *exc: object) -> None:
        _ambient.current = self._before
