"""Members of a Raft group driven by hand: no tasks, no sockets, one step at a time.

Frames pass through the real codec. The test decides when a disk flushes, which frames arrive,
in which order and how often, and what time it is.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.mark import SlotFile
from dledger.commitlog.record import encode_record
from dledger.commitlog.recovery import DamagedLogError
from dledger.commitlog.seams import Disk
from dledger.raft.channel import frame_of
from dledger.raft.identity import Hello, Identity
from dledger.raft.journal import Proposal, TermVote
from dledger.raft.member import RaftNode, Stored
from dledger.raft.peers import NotAMemberError, Outgoing
from dledger.raft.settings import ALL_ON, Guards, RaftSettings
from dledger.raft.wire import PeerFrame, PeerFrameDecoder
from dledger.testing.doubles import ManualClock

SEGMENT_BYTES = 1 << 20


def batch(
    *bodies: bytes, topic: str = "T", queue_id: int = 0, properties: bytes = b""
) -> RecordBatch:
    """Return a batch of one run."""
    records = [
        encode_record(topic=topic, queue_id=queue_id, body=body, properties=properties)
        for body in bodies
    ]
    sizes = np.array([len(record) for record in records], np.uint32)
    return RecordBatch(b"".join(records), sizes, (Run(topic, queue_id, len(bodies)),))


@dataclass
class Letter:
    """A frame on its way."""

    sender: str
    receiver: str
    frame: PeerFrame


@dataclass
class Member:
    """A node with its disk, and what it has committed so far."""

    name: str
    root: Path
    node: RaftNode
    log: EntryLog
    term_vote: TermVote
    flushes_by_itself: bool = True
    committed: list[tuple[int, int]] = field(default_factory=list)

    def flush(self) -> None:
        """Make everything durable, allocate ahead, and let the node notice."""
        if self.log.allocator.needs_reserve:
            self.log.allocator.reserve_next()
        if not self.term_vote.is_durable:
            version, record = self.term_vote.snapshot()
            self.term_vote.write(record)
            self.term_vote.mark_durable(version)
        ticket = self.log.begin_flush()
        if ticket is not None:
            ticket.run()
            self.log.complete_flush(ticket)
        self.node.settle()


class Cluster:
    """A group of members whose network is a list of letters."""

    def __init__(
        self,
        root: Path,
        size: int = 3,
        *,
        guards: Guards = ALL_ON,
        seed: int = 1,
        disks: Callable[[], Disk] = OsDisk,
        segment_bytes: int = SEGMENT_BYTES,
        sync_flush: bool = True,
    ) -> None:
        self.clock = ManualClock()
        self.sync_flush = sync_flush
        self.segment_bytes = segment_bytes
        self.rng = random.Random(seed)
        self.guards = guards
        self.root = root
        self.disks: dict[str, Disk] = defaultdict(disks)
        self.names = [f"n{number}" for number in range(size)]
        self.members: dict[str, Member] = {}
        self.queue_offsets: dict[str, int] = {}
        self.post: list[Letter] = []
        self.cut: set[tuple[str, str]] = set()
        for name in self.names:
            self.start(name)
        for member in self.members.values():
            for other in self.names:
                if other != member.name:
                    member.node.link_up(
                        other, "control", self.members[other].node.contacts.hello("control")
                    )
                    member.node.link_up(
                        other, "data", self.members[other].node.contacts.hello("data")
                    )
        for member in self.members.values():
            heard = {name: peer.hello for name, peer in member.node.peers.items() if peer.hello}
            member.node.identity.agree(member.node.settings.others, heard)
            member.node.contacts.note_agreed()
        for member in self.members.values():
            for other in self.names:
                if other != member.name:
                    member.node.contacts.on_hello(
                        self.members[other].node.contacts.hello("control")
                    )

    def start(self, name: str, *, restored_commit_index: int = 0) -> Member:
        """Open the member's folder and make its node; what was unflushed is still there."""
        root = self.root / name
        disk = self.disks[name]
        disk.make_dir(str(root))
        doubtful = False
        try:
            log = EntryLog.open(disk, str(root), segment_bytes=self.segment_bytes, trusted=None)
        except DamagedLogError:
            doubtful = True
            log = EntryLog.open(
                disk, str(root), segment_bytes=self.segment_bytes, trusted=None, repair=True
            )
        if log.allocator.needs_reserve:
            log.allocator.reserve_next()
        term_vote = TermVote(SlotFile(disk, str(root / "vote")))
        identity = Identity(
            disk, str(root / "identity"), cluster="C", group="G", name=name, rng=self.rng
        )
        settings = RaftSettings(
            cluster="C",
            group="G",
            self_id=name,
            peers=dict.fromkeys(self.names, ("127.0.0.1", 1)),
            client_address=f"{name}:10911",
            sync_flush=self.sync_flush,
        )
        committed: list[tuple[int, int]] = []
        node = RaftNode(
            settings,
            Stored(log, term_vote, identity, commit_index=restored_commit_index, doubtful=doubtful),
            store_host=bytes(8),
            clock=self.clock,
            rng=self.rng,
            on_settled=lambda: self._note(name),
            guards=self.guards,
        )
        self.members[name] = Member(name, root, node, log, term_vote, committed=committed)
        return self.members[name]

    def link(self, name: str) -> None:
        """Connect *name* with everybody that runs, both ways."""
        mine = self.node(name)
        for other in self.names:
            if other != name and other in self.members:
                for channel in ("control", "data"):
                    self.node(other).link_up(name, channel, self._answer(name, other, channel))
                    mine.link_up(other, channel, self._answer(other, name, channel))

    def _answer(self, called: str, caller: str, channel: str) -> Hello:
        """Return what *called* answers *caller*: members receive the list of members."""
        key = self.node(caller).contacts.hello(channel).key
        to_member = self.node(called).roster.is_member(key)
        return self.node(called).contacts.hello(channel, to_member=to_member)

    def _ask_again(self, name: str) -> None:
        """Let *name*, to which an unknown one spoke, ask the others for the list of members."""
        for other in self.names:
            if other != name and other in self.members and (name, other) not in self.cut:
                self.node(name).roster.found(self._answer(other, name, "data"))

    def stop(self, name: str) -> None:
        """End a member; its disk stays as it is."""
        self.members.pop(name).log.close()
        self.post = [letter for letter in self.post if name not in (letter.sender, letter.receiver)]
        for member in self.members.values():
            for channel in ("control", "data"):
                member.node.link_down(name, channel)

    def join(self, name: str) -> Member:
        """Start *name* on its folder, which may be empty or missing, and connect it."""
        if name not in self.names:
            self.names.append(name)
        member = self.start(name)
        self.link(name)
        heard = {other: peer.hello for other, peer in member.node.peers.items() if peer.hello}
        member.node.identity.agree(member.node.settings.others, heard)
        member.node.contacts.note_agreed()
        self.link(name)
        return member

    def wipe(self, name: str) -> Member:
        """Lose a member's folder and start it with an empty one."""
        self.stop(name)
        (self.root / name).rename(self.root / f"{name}-{self.rng.random()}")
        return self.join(name)

    def pass_time(self, leader: str, seconds: float) -> None:
        """Let heartbeats go by for *seconds*."""
        end = self.clock.now_s + seconds
        while self.clock.now_s < end:
            self.clock.now_s += 0.1
            self.heartbeat(leader)

    def _note(self, name: str) -> None:
        member = self.members.get(name)
        if member is None:
            return
        first = len(member.committed) + 1
        for index in range(first, member.node.commit_index + 1):
            member.committed.append((index, member.log.chain_at(index)))

    def node(self, name: str) -> RaftNode:
        """Return the node of *name*."""
        return self.members[name].node

    # -- letters ---------------------------------------------------------------------------

    def collect(self, name: str) -> None:
        """Put what *name* has to send into the post."""
        node = self.node(name)
        for other, peer in node.peers.items():
            while peer.control:
                self._post(name, other, peer.control.popleft(), [])
            while peer.replies:
                self._post(name, other, peer.replies.popleft(), [])
            while (append := node.next_frame(other)) is not None:
                self._post(name, other, *append)

    def _post(
        self, sender: str, receiver: str, outgoing: Outgoing, views: list[memoryview]
    ) -> None:
        (frame,) = PeerFrameDecoder().feed(frame_of(outgoing, 1, 1, views))
        if (sender, receiver) not in self.cut:
            self.post.append(Letter(sender, receiver, frame))

    def deliver(self, letter: Letter) -> None:
        """Deliver one frame, if there is a member to receive it."""
        if letter.receiver not in self.members:
            return
        node = self.node(letter.receiver)
        try:
            node.receive(letter.sender, letter.frame)
        except NotAMemberError:
            self._ask_again(letter.receiver)  # as links do, which close the connection as well
        node.settle()

    def step(self) -> bool:
        """Flush where members do so by themselves, deliver all letters once; false if none."""
        for name, member in self.members.items():
            if member.flushes_by_itself:
                member.flush()
            self.collect(name)
        letters, self.post = self.post, []
        for letter in letters:
            self.deliver(letter)
        return bool(letters)

    def run(self, steps: int = 60) -> None:
        """Step until nothing moves any more."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {steps} steps")

    def heartbeat(self, name: str) -> None:
        """Let a leader's heartbeat pass, and all that follows from it."""
        self.node(name).leader.send_heartbeats()
        self.run()

    def elect(self, name: str) -> RaftNode:
        """Make *name* leader by the ordinary way: pre-vote, vote, no-op committed."""
        node = self.node(name)
        self.clock.now_s += 10.0
        node.begin_election()
        node.settle()
        self.run()
        assert node.is_leader, f"{name} was not elected"
        return node

    def append(self, name: str, *bodies: bytes) -> int:
        """Append one entry on *name*, which must lead."""
        node = self.node(name)
        first = self.queue_offsets.get("T", 0)
        self.queue_offsets["T"] = first + len(bodies)
        index = node.append(Proposal([batch(*bodies)], [first], self.clock.wall_ms()))
        node.settle()
        return index

    def chains(self) -> dict[str, list[int]]:
        """Return every member's chain checksums."""
        return {
            name: [member.log.chain_at(i) for i in range(1, member.log.last_index + 1)]
            for name, member in self.members.items()
        }

    def close(self) -> None:
        """Close all logs."""
        for member in self.members.values():
            member.log.close()
