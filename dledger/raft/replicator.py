"""The leader's sender: what each follower has, and what to send it next.

The library's own sender backs off one entry per heartbeat, re-sends whole tails and has no
window. This one keeps a position per follower, in the manner of the Raft thesis §3.3 and §10.2.1:

* *probing*: what the follower has is not known; one append is out at a time;
* *replicating*: appends are sent ahead of their acknowledgements, within a window of bytes.

Pure: it reads the log and decides; links do the sending.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from dledger.raft.guards import Guards
from dledger.raft.snapshot import Sending


class LogView(Protocol):
    """What the sender reads of the log."""

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
"""For so long log below the floor is kept on disk for a follower that is being refilled; one that
takes longer gets a newer snapshot instead, so that a slow one does not fill the leader's disk."""


@dataclass(slots=True)
class Progress:
    """What the leader knows of one follower.

    Invariant: ``match_index < next_index``.
    """

    next_index: int
    match_index: int = 0
    probing: bool = True
    probe_out: bool = False
    snapshot: Sending | None = None
    last_max: int | None = None
    """Entries above it are not sent yet: the first of them removes this member."""
    snapshot_rests: bool = False
    """The last one brought no entry across yet: the next is not offered before `stall_s`."""
    refilling_to: int = 0
    """Index of a snapshot that was offered, until the follower has the log up to it; 0: none."""
    refill_began_s: float | None = None
    acked_at_s: float = 0.0
    bytes_sent: int = 0


@dataclass(slots=True)
class Replicator:
    """Progress of all followers in one reign. Made anew when a member becomes leader."""

    log: LogView
    window_bytes: int
    append_bytes: int
    stall_s: float
    guards: Guards
    peers: dict[str, Progress] = field(default_factory=dict)

    def start(self, peers: Iterable[str], now_s: float) -> None:
        """Begin a reign: nothing is known of anybody."""
        self.peers = {
            peer: Progress(next_index=self.log.last_index + 1, acked_at_s=now_s) for peer in peers
        }

    def needs_snapshot(self, peer: str) -> bool:
        """Whether what *peer* lacks begins before the first kept entry."""
        return self.peers[peer].next_index <= self.log.anchor_index

    def may_offer_snapshot(self, peer: str) -> bool:
        """Whether a chunk may go to *peer*: each offer costs the tables of the whole group."""
        progress = self.peers[peer]
        return progress.snapshot is not None or not progress.snapshot_rests

    def offered(self, peer: str, index: int) -> None:
        """A snapshot of *index* goes to *peer*, which then needs the log from its floor on."""
        self.peers[peer].refilling_to = index

    def holds_log(self, now_s: float) -> bool:
        """Whether a follower with a snapshot still needs log that may be below the floor by now.

        Without it the entry that follows the snapshot could be gone before the follower has it.
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
            self.begin_anew(peer, now_s)

    def begin_anew(self, peer: str, now_s: float) -> None:
        """Forget what *peer* had: another one speaks under its name."""
        self.peers[peer] = Progress(next_index=self.log.last_index + 1, acked_at_s=now_s)

    def lag_bytes(self, peer: str) -> int | None:
        """Return how many bytes of the log *peer* lacks; None before it acknowledged anything."""
        match = self.peers[peer].match_index
        if match < self.log.anchor_index or not match:
            return None
        return self.log.end_position_of(self.log.last_index) - self.log.end_position_of(match)

    def next_append(self, peer: str, commit_index: int) -> Append | None:
        """Decide what to send to *peer* now; the answer counts as sent.

        What is committed later than that, a heartbeat tells.

        Returns:
            None when the window is full, a probe is out, or there is nothing to say.
        """
        progress = self.peers[peer]
        if progress.probe_out or progress.next_index <= self.log.anchor_index:
            return None
        prev = progress.next_index - 1
        room = self._room(progress)
        last = self._last_for(progress)
        has_entries = progress.next_index <= last and room > 0
        if not (has_entries or progress.probing):
            return None
        progress.probe_out = progress.probing
        return Append(
            prev_index=prev,
            prev_term=self.log.term_at(prev),
            commit_index=commit_index,
            first=progress.next_index,
            last=last,
            max_bytes=min(room, self.append_bytes) if has_entries else 0,
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
        return progress.next_index <= self._last_for(progress) and self._room(progress) > 0

    def hold_back(self, peer: str, index: int | None) -> None:
        """Send *peer* no entry from *index* on until this is called again; None: send it all."""
        progress = self.peers.get(peer)
        if progress is not None:
            progress.last_max = None if index is None else index - 1

    def _last_for(self, progress: Progress) -> int:
        last = self.log.last_index
        return last if progress.last_max is None else min(last, progress.last_max)

    def sent(self, peer: str, last: int, size_bytes: int) -> None:
        """Take note of the last index that really went into the append just decided."""
        progress = self.peers[peer]
        progress.next_index = max(progress.next_index, last + 1)
        progress.bytes_sent += size_bytes

    def _room(self, progress: Progress) -> int:
        # The window is what is on its way: bytes after the follower's match, before its next.
        match = max(progress.match_index, self.log.anchor_index)
        on_its_way = self.log.end_position_of(progress.next_index - 1) - self.log.end_position_of(
            min(match, progress.next_index - 1)
        )
        if progress.probing or progress.match_index == 0:
            return self.append_bytes
        return self.window_bytes - on_its_way

    def matched(self, peer: str, index: int, now_s: float) -> None:
        """The follower has everything up to *index*, durably."""
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        progress.snapshot_rests = False
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
        """The follower lacks what came before; *hint* is the first index it asks for.

        A hint below what it had acknowledged comes late, or from a member that lost its disk: it
        is followed all the same, since asking for too much is harmless and asking for too little
        never ends.
        """
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        progress.next_index = max(1, min(hint, progress.next_index - 1, self.log.last_index + 1))
        progress.match_index = min(progress.match_index, progress.next_index - 1)
        progress.probing, progress.probe_out = True, False

    def link_reset(self, peer: str) -> None:
        """The link was made anew: what was on its way may be lost."""
        progress = self.peers[peer]
        progress.next_index = max(progress.match_index, self.log.anchor_index) + 1
        if progress.match_index == 0:
            progress.next_index = self.log.last_index + 1
        progress.probing, progress.probe_out = True, False

    def snapshot_taken(self, peer: str, index: int, offset: int, now_s: float) -> None:
        """The follower has *offset* bytes of the snapshot at *index*."""
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        sending = progress.snapshot
        if sending is not None and sending.index == index:
            sending.offset = min(offset, len(sending.data))
            progress.probe_out = False

    def installed(self, peer: str, next_index: int, now_s: float) -> None:
        """The follower begins anew at *next_index*: appends go on from there."""
        progress = self.peers[peer]
        progress.acked_at_s = now_s
        progress.snapshot = None
        progress.snapshot_rests = True
        progress.next_index = max(1, min(next_index, self.log.last_index + 1))
        progress.match_index = min(progress.match_index, progress.next_index - 1)
        progress.probing, progress.probe_out = True, False

    def stalled(self, peer: str, now_s: float) -> bool:
        """Whether entries are on their way and no answer came for `stall_s`; if so, probe again."""
        progress = self.peers[peer]
        if now_s - progress.acked_at_s >= self.stall_s:
            progress.snapshot_rests = False
        waiting = progress.probe_out or progress.match_index < progress.next_index - 1
        if not waiting or now_s - progress.acked_at_s < self.stall_s:
            return False
        self.link_reset(peer)
        progress.acked_at_s = now_s
        return True
