"""Replication: what each follower has, what each data link sends next, which member repairs what.

A position is kept per follower, in the manner of the Raft thesis §3.3 and §10.2.1:

* *probing*: what the follower has is not known; one append is out at a time;
* *replicating*: appends are sent ahead of their acknowledgements, within a window of bytes.

Sending is pulled: a link calls `Sender.next_frame` when its socket accepts more. A data link also
carries copies for repair: any member's copy of a committed entry replaces a damaged one. Suspect
bytes are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from dledger.commitlog.damage import check_entries
from dledger.commitlog.errors import CorruptEntryError, CorruptStoreError
from dledger.raft.peers import Outgoing, PeerState, RaftState
from dledger.raft.settings import Guards
from dledger.raft.snapshot import Sending
from dledger.raft.wire import Kind, crc_of

log = structlog.get_logger(__name__)


class LogView(Protocol):
    """The part of the log that a `Replicator` reads."""

    @property
    def anchor_index(self) -> int:
        """Index just below the first kept entry."""

    @property
    def last_index(self) -> int:
        """Index of the newest entry."""

    def term_at(self, index: int) -> int:
        """Return the term of the entry at *index*."""

    def end_position_of(self, index: int) -> int:
        """Return the byte position just after the entry at *index*."""


@dataclass(slots=True)
class Append:
    """One append to send: the entries *first* … *last* within *max_bytes*, or none."""

    prev_index: int
    prev_term: int
    commit_index: int
    first: int
    last: int
    max_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether it only asks what the follower has."""
        return self.max_bytes == 0


REFILL_HOLD_S: Final = 60.0
"""How long log below the floor stays on disk for a follower that is being refilled; one that takes
longer gets a newer snapshot instead, so that a slow one does not fill the leader's disk."""


@dataclass(slots=True)
class Progress:
    """What the leader knows of one follower. Invariant: ``match_index < next_index``."""

    next_index: int
    match_index: int = 0
    probing: bool = True
    probe_out: bool = False
    snapshot: Sending | None = None
    last_max: int | None = None
    """Entries above it are not sent yet: the first of them removes this member."""
    snapshot_pauses: bool = False
    """No entry has followed the last one yet: the next is not offered before `stall_s`."""
    refilling_to: int = 0
    """Index of a snapshot that was offered, until the follower has the log up to it; 0: none."""
    refill_began_s: float | None = None
    acked_at_s: float = 0.0
    """When it last answered an append or a snapshot."""
    echoed_at_s: float = 0.0
    """When it last answered a heartbeat: nothing else is sent to it while nothing is appended."""
    bytes_sent: int = 0


@dataclass(slots=True)
class Replicator:
    """Progress of all followers in one term of this leader. Pure: it reads the log and decides."""

    log: LogView
    window_bytes: int
    append_bytes: int
    stall_s: float
    guards: Guards
    peers: dict[str, Progress] = field(default_factory=dict)

    def start(self, peers: Iterable[str], now_s: float) -> None:
        """Begin a term as leader: nothing is known of any follower."""
        self.peers = {
            peer: Progress(next_index=self.log.last_index + 1, acked_at_s=now_s) for peer in peers
        }

    def needs_snapshot(self, peer: str) -> bool:
        """Whether what *peer* lacks begins before the first kept entry."""
        return self.peers[peer].next_index <= self.log.anchor_index

    def may_offer_snapshot(self, peer: str) -> bool:
        """Whether a chunk may go to *peer*: each offer costs the tables of the whole group."""
        progress = self.peers[peer]
        return progress.snapshot is not None or not progress.snapshot_pauses

    def offered(self, peer: str, index: int) -> None:
        """Record that *peer* is sent the snapshot of *index*; it needs the log from there on."""
        self.peers[peer].refilling_to = index

    def holds_log(self, now_s: float) -> bool:
        """Whether a follower with a snapshot still needs log that may be below the floor by now.

        Without it the entry that follows the snapshot could be removed before the follower has it.
        """
        is_held = False
        for progress in self.peers.values():
            if progress.refilling_to > progress.match_index:
                if progress.refill_began_s is None:
                    progress.refill_began_s = now_s
                is_held |= now_s - progress.refill_began_s < REFILL_HOLD_S
        return is_held

    def follow(self, peers: Iterable[str], now_s: float) -> None:
        """Send to exactly *peers* from now on; of those that are new nothing is known."""
        wanted = set(peers)
        for peer in self.peers.keys() - wanted:
            del self.peers[peer]
        for peer in sorted(wanted - self.peers.keys()):
            self.reset(peer, now_s)

    def reset(self, peer: str, now_s: float) -> None:
        """Forget what *peer* had: another incarnation has its name."""
        self.peers[peer] = Progress(next_index=self.log.last_index + 1, acked_at_s=now_s)

    def lag_bytes(self, peer: str) -> int | None:
        """Return how many bytes of the log *peer* lacks; None before it acknowledged anything."""
        match = self.peers[peer].match_index
        if match < self.log.anchor_index or not match:
            return None
        return self.log.end_position_of(self.log.last_index) - self.log.end_position_of(match)

    def next_append(self, peer: str, commit_index: int) -> Append | None:
        """Decide what to send to *peer* now; the answer counts as sent.

        Returns:
            None when the window is full, a probe is out, or there is nothing to send.
        """
        progress = self.peers[peer]
        if progress.probe_out or progress.next_index <= self.log.anchor_index:
            return None
        prev = progress.next_index - 1
        last = self._last_for(progress)
        free_bytes = self._free_bytes(progress) if progress.next_index <= last else 0
        has_entries = free_bytes > 0
        if not (has_entries or progress.probing):
            return None
        progress.probe_out = progress.probing
        return Append(
            prev_index=prev,
            prev_term=self.log.term_at(prev),
            commit_index=commit_index,
            first=progress.next_index,
            last=last,
            max_bytes=min(free_bytes, self.append_bytes) if has_entries else 0,
        )

    def has_work(self, peer: str) -> bool:
        """Whether `next_append` would send entries or a probe now."""
        progress = self.peers[peer]
        if progress.probe_out:
            return False
        if progress.next_index <= self.log.anchor_index:
            return self.may_offer_snapshot(peer)
        if progress.probing:
            return True
        return progress.next_index <= self._last_for(progress) and self._free_bytes(progress) > 0

    def hold_back(self, peer: str, index: int | None) -> None:
        """Send *peer* no entry from *index* on until the next call; None: send all."""
        progress = self.peers.get(peer)
        if progress is not None:
            progress.last_max = None if index is None else index - 1

    def _last_for(self, progress: Progress) -> int:
        last = self.log.last_index
        return last if progress.last_max is None else min(last, progress.last_max)

    def sent(self, peer: str, last: int, size_bytes: int) -> None:
        """Record the last index that fitted into the append just decided."""
        progress = self.peers[peer]
        progress.next_index = max(progress.next_index, last + 1)
        progress.bytes_sent += size_bytes

    def _free_bytes(self, progress: Progress) -> int:
        if progress.probing or progress.match_index == 0:
            return self.append_bytes
        # The window is what is on its way: bytes after the follower's match, before its next.
        match = max(progress.match_index, self.log.anchor_index)
        sent = progress.next_index - 1
        if match >= sent:
            return self.window_bytes
        return self.window_bytes - (
            self.log.end_position_of(sent) - self.log.end_position_of(match)
        )

    def matched(self, peer: str, index: int, now_s: float) -> None:
        """Record that *peer* has everything up to *index*, durably."""
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        progress.snapshot_pauses = False
        if not self.guards.next_index_never_back:
            progress.next_index = index + 1
        progress.match_index = max(progress.match_index, index)
        if progress.match_index >= progress.refilling_to:
            progress.refilling_to, progress.refill_began_s = 0, None
        progress.next_index = max(progress.next_index, progress.match_index + 1)
        if progress.match_index == progress.next_index - 1:
            # A lower match may be an older answer: the probe's own has yet to come.
            progress.probing = progress.probe_out = False

    def rejected(self, peer: str, hint: int, now_s: float) -> None:
        """Continue at *hint*, the first index that *peer* lacks.

        A hint below what it had acknowledged is late, or of a member that lost its disk: it is
        followed all the same, since sending too much is harmless and sending too little never
        ends.
        """
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        progress.next_index = max(1, min(hint, progress.next_index - 1, self.log.last_index + 1))
        progress.match_index = min(progress.match_index, progress.next_index - 1)
        progress.probing, progress.probe_out = True, False

    def link_reset(self, peer: str) -> None:
        """Probe again: a new link replaced the one to *peer*, and appends may be lost."""
        progress = self.peers[peer]
        progress.next_index = max(progress.match_index, self.log.anchor_index) + 1
        if progress.match_index == 0:
            progress.next_index = self.log.last_index + 1
        progress.probing, progress.probe_out = True, False

    def snapshot_acked(self, peer: str, index: int, offset: int, now_s: float) -> None:
        """Record that *peer* has *offset* bytes of the snapshot at *index*."""
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        sending = progress.snapshot
        if sending is not None and sending.index == index:
            sending.offset = min(offset, len(sending.data))
            progress.probe_out = False

    def installed(self, peer: str, next_index: int, now_s: float) -> None:
        """Continue with appends at *next_index*: *peer* has installed a snapshot, or needs none."""
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        progress.snapshot = None
        progress.snapshot_pauses = True
        progress.next_index = max(1, min(next_index, self.log.last_index + 1))
        progress.match_index = min(progress.match_index, progress.next_index - 1)
        progress.probing, progress.probe_out = True, False

    def stalled(self, peer: str, now_s: float) -> bool:
        """Probe again if appends have had no answer for `stall_s`; return whether they had none."""
        progress = self.peers[peer]
        if now_s - progress.acked_at_s >= self.stall_s:
            progress.snapshot_pauses = False
        waiting = progress.probe_out or progress.match_index < progress.next_index - 1
        if not waiting or now_s - progress.acked_at_s < self.stall_s:
            return False
        self.link_reset(peer)
        progress.acked_at_s = now_s
        return True


FrameWithBytes = tuple[Outgoing, list[memoryview]]
"""A frame and the log bytes that follow its head: views that pin their segment."""

FETCH_BYTES: Final = 1 << 20
"""Entries in one answer, bytes; at least one entry is sent."""

FETCH_ENTRIES_MAX: Final = 4096
"""Entries requested at once: more than fit into an answer as a rule."""


@dataclass(eq=False)
class Sender:
    """Decides what each data link sends: entries, chunks of a snapshot, copies for repair."""

    state: RaftState
    replicator: Replicator
    _newest_sent: tuple[object, int, int, int] | None = field(default=None, init=False)
    _newest_crc: int = field(default=0, init=False)
    """CRC-32 of the entries that were sent last: log, its generation, first index, bytes."""

    def next_frame(self, peer: str) -> FrameWithBytes | None:
        """Decide what the data link to *peer* sends next; None when there is nothing now.

        Returns:
            The frame and the log bytes that follow its head: views that pin their segment.
        """
        peer_state = self.state.peers.of(peer)
        if peer_state.wanted is not None:
            return self._copy(peer_state)
        if not self.state.core.is_leader or peer not in self.replicator.peers:
            return None
        if self.replicator.needs_snapshot(peer):
            return self._chunk(peer)
        return self._append(peer_state)

    # -- entries ---------------------------------------------------------------------------

    def _append(self, peer_state: PeerState) -> FrameWithBytes | None:
        peer, core = peer_state.name, self.state.core
        # A single voter's library commits before the flush; no other member may learn that.
        commit = core.commit_index
        is_probe = self.replicator.peers[peer].probing
        append = self.replicator.next_append(peer, commit)
        if append is None:
            return None
        views = self._entries(append)
        # A follower that is sent bad bytes drops the connection; what follows is a probe.
        if not views and not append.is_empty:
            return None
        if is_probe and views and not self._are_sound(append.first, views):
            return None
        size = sum(map(len, views))
        self.replicator.sent(peer, self._last_in(append, size), size)
        fields = (append.prev_index, append.prev_term, append.commit_index)
        crc = self._crc_of(append.first, size, views, is_probe=is_probe)
        return Outgoing(Kind.APPEND, core.term, fields, crc), views

    def _crc_of(self, first: int, size: int, views: list[memoryview], *, is_probe: bool) -> int:
        """Return the checksum of entries that as a rule were sent to another member just now."""
        entry_log = self.state.journal.log
        sent = (entry_log, entry_log.generation, first, size)
        if is_probe or self._newest_sent != sent:
            self._newest_sent, self._newest_crc = sent, crc_of(views)
        return self._newest_crc

    def _entries(self, append: Append) -> list[memoryview]:
        if append.is_empty:
            return []
        try:
            return self.state.journal.log.frames(append.first, append.max_bytes, append.last)
        except CorruptEntryError as error:
            log.error("append_of_damaged_entry", error=str(error))
            return []

    def _last_in(self, append: Append, size: int) -> int:
        last = append.first - 1
        while size > 0:
            last += 1
            size -= self.state.journal.log.size_at(last)
        return last

    def _are_sound(self, first: int, views: list[memoryview]) -> bool:
        entry_log = self.state.journal.log
        checked = check_entries(entry_log, first, entry_log.last_index, sum(map(len, views)))
        damaged = [index for index in checked.suspects if self.state.owner.on_suspect(index)]
        return not damaged

    # -- snapshots -------------------------------------------------------------------------

    def _chunk(self, peer: str) -> FrameWithBytes | None:
        progress = self.replicator.peers[peer]
        if progress.probe_out or not self.replicator.may_offer_snapshot(peer):
            return None
        if progress.snapshot is None:
            progress.snapshot = Sending(*self.state.owner.take_snapshot())
            self.replicator.offered(peer, progress.snapshot.index)
            log.info("snapshot_offered", peer=peer, index=progress.snapshot.index)
        sending = progress.snapshot
        progress.probe_out = True
        fields = (sending.index, sending.offset, len(sending.data))
        return Outgoing(Kind.SNAPSHOT, self.state.core.term, fields), [sending.chunk()]

    # -- copies for repair -----------------------------------------------------------------

    def fetch(self, peer: str, first: int, last: int) -> None:
        """Request entries that are damaged here from *peer*; `Owner.on_fetched` gets its answer."""
        self.state.peers.reply(peer, Kind.FETCH, first, last)

    def on_fetch(self, peer: str, first: int, last: int) -> None:
        """Send *peer* the sound ones of the entries that it requests, before anything else."""
        peer_state = self.state.peers.of(peer)
        peer_state.wanted = (first, last)
        peer_state.send_data()

    def _copy(self, peer_state: PeerState) -> FrameWithBytes:
        core, entry_log = self.state.core, self.state.journal.log
        first, last = peer_state.wanted or (0, 0)
        peer_state.wanted = None
        views: list[memoryview] = []
        last = entry_log.damaged.whole_until(first, min(last, core.commit_index))
        if entry_log.first_index <= first <= last:
            try:
                views = entry_log.frames(first, FETCH_BYTES, last)
            except (CorruptEntryError, CorruptStoreError) as error:
                log.warning("cannot_help_with_repair", peer=peer_state.name, error=str(error))
            if views and not self._are_sound(first, views):
                views = []
        return Outgoing(Kind.FETCH_REPLY, core.term, (first,)), views


@dataclass(frozen=True, slots=True)
class Fetch:
    """A request for entries *first* … *last* of member *peer*."""

    peer: str
    first: int
    last: int


@dataclass(slots=True)
class Repair:
    """Which member is asked for damaged entries next. Pure bookkeeping; one request at a time."""

    retry_s: float
    pending: Fetch | None = None
    sent_at_s: float = 0.0
    _turn: int = 0

    def next_fetch(
        self, damaged: Sequence[tuple[int, int]], peers: Sequence[str], now_s: float
    ) -> Fetch | None:
        """Return what to request now; None while an answer is due, or no member is connected."""
        if self.pending is not None and now_s - self.sent_at_s < self.retry_s:
            return None
        if self.pending is not None:
            self._turn += 1
        self.pending = None
        if not damaged or not peers:
            return None
        first, last = damaged[0]
        last = min(last, first + FETCH_ENTRIES_MAX - 1)
        self.pending = Fetch(peers[self._turn % len(peers)], first, last)
        self.sent_at_s = now_s
        return self.pending

    def expects(self, peer: str) -> bool:
        """Whether an answer of *peer* is due."""
        return self.pending is not None and self.pending.peer == peer

    def mark_useful(self) -> None:
        """The answer helped: the next request may follow at once, to the same member."""
        self.pending = None
