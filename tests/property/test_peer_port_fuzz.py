"""Whatever a peer sends, member or not, in whatever state a node is: the node goes on.

Well formed frames with hostile fields, of all kinds. A few thousand in every run; ``make
peer-fuzz`` tries a million.
"""

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import cbor2
import pytest

from dledger.broker_errors import ChangeRefusedError
from dledger.commitlog.entry import seal_config, seal_no_op
from dledger.commitlog.errors import CorruptEntryError, RemoteProtocolError
from dledger.raft.identity import Hello
from dledger.raft.member import RaftNode
from dledger.raft.membership import MEMBERS_MAX, Member, Members, Standing
from dledger.raft.peers import NotAMemberError
from dledger.raft.wire import (
    FIELDS,
    FIXED,
    INDEX_MAX,
    NUMBER_MAX,
    TERM_JUMP_MAX,
    TERM_MAX,
    Field,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from dledger.testing.crash_disk import CrashDisk
from tests.harness.present import present
from tests.harness.raft_cluster import Cluster

KINDS: Final = tuple(FIELDS)

EDGES: Final = (0, 1, 2, INDEX_MAX, TERM_MAX, NUMBER_MAX, 2**31, 2**32, 2**48, 2**62)

BEYOND: Final = (-1, TERM_MAX + 1, 2**63 - 1, 2**63, 2**64, 2**200, 2**20_000)

NO_NUMBERS: Final[tuple[object, ...]] = (
    None, 1.5, "1", b"1",
    [],
    {},
    [[]],
    float("nan"),
    float("inf"),
)  # fmt: skip

TEXTS: Final = (
    "", "n0", "n1", "n9", "a..b", "x" * 300, "\0",
    "\x1b[2J",
    "\ud7ff", "é", " ", "%", "..",
)  # fmt: skip

ADDRESSES: Final = (
    "", "127.0.0.1:1", "127.0.0.1:" + "9" * 19, "127.0.0.1:" + "9" * 5000, "x" * 300 + ":1",
    "a..b:1", "\ud7ff:1", ":1", "h:0", "h:-1",
    "[::1]:7",
    "h",
)  # fmt: skip


@dataclass
class Hostile:
    """Draws frames and hellos.

    Attributes:
        refused: How many the decoder did not take.
    """

    rng: random.Random
    refused: int = 0
    sequence: int = 0
    _old: list[bytes] = field(default_factory=list)

    def frame(self, node: RaftNode, kind: Kind | None = None) -> PeerFrame | None:
        """Return a frame for *node* as its decoder lets it pass; None: it does not."""
        kind = kind or self.rng.choice(KINDS)
        self.sequence += 1
        head = [int(kind), self._term(node), 1, self.sequence, *self._fields(node, kind)]
        if self.rng.random() < 0.02:
            head[self.rng.randrange(len(head))] = self.rng.choice((*BEYOND, *NO_NUMBERS))
        if self.rng.random() < 0.01:
            del head[self.rng.randrange(len(head))]
        payload = [memoryview(self._payload(node, kind))]
        data = bytearray(encode_frame(self._encoded(kind, head), payload))
        if self.rng.random() < 0.01:
            data[self.rng.randrange(8, len(data))] ^= 1 << self.rng.randrange(8)
        try:
            return PeerFrameDecoder().feed(bytes(data))[0]
        except RemoteProtocolError:
            self.refused += 1
            return None

    def _encoded(self, kind: Kind, head: list[Any]) -> bytes:
        """Return *head* as a row of numbers, every other one that can be; else as CBOR."""
        if (
            self.sequence % 2
            and kind in FIXED
            and len(head) == 4 + len(FIELDS[kind])
            and all(type(value) is int and 0 <= value < 1 << 64 for value in head)
            and head[0] < 1 << 8
        ):
            return encode_head(kind, head[1], head[2], head[3], tuple(head[4:]))
        encoded = cbor2.dumps(head)
        return len(encoded).to_bytes(2, "big") + encoded

    def hello(self, honest: Hello) -> dict[str, Any]:
        """Return the fields of a peer, a few of them not what they should be."""
        said = honest.encode()
        said["members"] = [1, [["n1", "ab"]]]
        for _ in range(self.rng.randrange(1, 3)):
            key = self.rng.choice(sorted(said))
            said[key] = self.rng.choice(
                (*TEXTS, *ADDRESSES, *BEYOND[:-1], *NO_NUMBERS[:-2], {"n1": 7}, {7: "n1"}, [1, 2])
            )
        if self.rng.random() < 0.2:
            said.pop(self.rng.choice(sorted(said)), None)
        return said

    # -- numbers ---------------------------------------------------------------------------

    def _term(self, node: RaftNode) -> int:
        near = [max(0, node.term + by) for by in (-1, 0, 0, 0, 0, 0, 0, 1)]
        if self.rng.random() < 0.9:
            return self.rng.choice(near)
        far = (0, node.term + TERM_JUMP_MAX, node.term + TERM_JUMP_MAX + 1, TERM_MAX)
        return self.rng.choice((*far, *BEYOND[1:]))

    def _fields(self, node: RaftNode, kind: Kind) -> list[Any]:
        return [self._value(node, each) for each in FIELDS[kind]]

    def _value(self, node: RaftNode, each: Field) -> Any:
        if self.rng.random() < 0.02:
            return self.rng.choice((*EDGES, *BEYOND, *NO_NUMBERS))
        if each is Field.FLAG:
            return self.rng.choice((True, False, 0, 1))
        if each is Field.TERM:
            return self._term(node)
        if each is Field.NUMBER:
            return self.rng.choice(EDGES)
        journal = node.journal
        near = (journal.last_index, node.commit_index, journal.anchor_index, 1)
        return max(0, self.rng.choice(near) + self.rng.randrange(-2, 3))

    # -- payloads --------------------------------------------------------------------------

    def _payload(self, node: RaftNode, kind: Kind) -> bytes:
        if kind not in (Kind.APPEND, Kind.SNAPSHOT, Kind.FETCH_REPLY):
            return b"" if self.rng.random() < 0.98 else self.rng.randbytes(9)
        draw = self.rng.random()
        if draw < 0.1:
            return self.rng.randbytes(self.rng.randrange(200))
        if draw < 0.2:
            return b""
        data = bytearray(self._config(node) if draw < 0.7 else self._no_op(node))
        if self.rng.random() < 0.2:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        if self.rng.random() < 0.1 and self._old:
            data += self.rng.choice(self._old)
        self._old = [*self._old[-7:], bytes(data)]
        return bytes(data)

    def _place(self, node: RaftNode, size: int) -> dict[str, Any]:
        log, draw = node.journal.log, self.rng.random()
        index = log.last_index + 1 if draw < 0.8 else self.rng.choice((1, 2, log.last_index, 2**40))
        term = max(0, node.term + self.rng.choice((-1, 0, 0, 0, 1)))
        position = log.place(size) if draw < 0.9 else self.rng.choice((0, 1, 2**40, 2**62))
        chain = log.last_chain if draw < 0.95 else self.rng.randrange(2**32)
        when = self.rng.choice((0, log.last_store_time_ms, 2**62))
        return {
            "index": index, "term": term, "position": position, "prev_chain": chain,
            "store_time_ms": when,
        }  # fmt: skip

    def _no_op(self, node: RaftNode) -> bytes:
        return seal_no_op(**self._place(node, 100))

    def _config(self, node: RaftNode) -> bytes:
        body = self.members_body()
        return seal_config(body, **self._place(node, 100 + len(body)))

    def members_body(self) -> bytes:
        """Return what may stand in an entry that holds the list of members."""
        draw = self.rng.random()
        if draw < 0.1:
            return self.rng.randbytes(self.rng.randrange(40))
        if draw < 0.2:
            return cbor2.dumps(
                self.rng.choice([*NO_NUMBERS[:-2], {"v": 1}, {"v": 1, "members": 7}])
            )
        count = self.rng.choice((0, 1, 2, 3, MEMBERS_MAX, MEMBERS_MAX + 1))
        members = tuple(self._member(at) for at in range(count))
        return Members(members).encode()

    def _member(self, at: int) -> Member:
        host, _, port = self.rng.choice(ADDRESSES).rpartition(":")
        return Member(
            self.rng.choice((f"n{at}", f"n{at}", *TEXTS)),
            self.rng.choice(("ab" * 16, "", "x" * 300)),
            host,
            int(port) if port.isdecimal() and len(port) < 30 else 0,
            self.rng.choice(ADDRESSES),
            self.rng.choice((Standing.VOTER, *Standing)),
        )


FRAMES = int(os.environ.get("DLEDGER_PEER_FUZZ_FRAMES", "6000"))
"""Over all states."""

ROUND_FRAMES = 400
"""On one cluster; then it may have left what can be attacked at all, and another is made."""

STATES = ("follower", "candidate", "leader", "learner", "unconfigured", "removed")


def in_state(root: Path, state: str, seed: int) -> tuple[Cluster, RaftNode]:
    """Return a group, and the member of it that is attacked."""
    cluster = Cluster(root, seed=seed, disks=CrashDisk, segment_bytes=1 << 16)
    if state == "unconfigured":
        cluster.names.append("n3")
        return cluster, cluster.start("n3").node
    leader = cluster.elect("n0")
    cluster.append("n0", b"kept")
    cluster.run()
    cluster.heartbeat("n0")
    members = present(leader.roster.members)
    match state:
        case "leader":
            return cluster, leader
        case "candidate":
            node = cluster.node("n1")
            cluster.clock.now_s += 10.0
            node.begin_election()
            return cluster, node
        case "learner":
            node = cluster.join("n3").node
            hello = node.contacts.hello("control")
            leader.changes.change(members.with_learner(Member("n3", hello.incarnation)))
            leader.settle()
            cluster.run()
            return cluster, node
        case "removed":
            voter = present(members.voter("n2"))
            leader.changes.change(members.without(voter))
            leader.settle()
            cluster.run()
            cluster.heartbeat("n0")
            return cluster, cluster.node("n2")
        case _:
            return cluster, cluster.node("n1")


def attack(cluster: Cluster, node: RaftNode, hostile: Hostile, frames: int) -> Counter[str]:
    """Send hostile frames under the names of members and others; count what became of them."""
    ends: Counter[str] = Counter()
    name = node.settings.self_id
    senders = [*(other for other in cluster.names if other != name), "evil"]
    committed = list(cluster.members[name].committed)
    for number in range(frames):
        frame = hostile.frame(node)
        if frame is None:
            ends["not decoded"] += 1
            continue
        sender = hostile.rng.choice(senders)
        before = node.term
        try:
            node.receive(sender, frame)
            ends["taken"] += 1
        except NotAMemberError:
            ends["no member"] += 1
        except RemoteProtocolError:
            ends["refused"] += 1
        assert sender != "evil" or node.term == before
        if number % 7 == 0:
            cluster.clock.now_s += hostile.rng.random()
            node.begin_election()
        node.settle()
        if number % 5 == 0:
            cluster.members[name].flush()
            drain(node)
        if number % 11 == 0:
            node.leader.send_heartbeats()
    assert cluster.members[name].committed[: len(committed)] == committed
    assert node.term <= TERM_MAX
    return ends


def drain(node: RaftNode) -> None:
    """Take away what the node wants to send, as links do."""
    for name, state in list(node.peers.items()):
        state.control.clear()
        state.replies.clear()
        for _ in range(4):
            if node.next_frame(name) is None:
                break


@pytest.mark.parametrize("state", STATES)
def test_no_frame_ends_a_node(tmp_path: Path, state: str) -> None:
    ends: Counter[str] = Counter()
    left, seed = FRAMES // len(STATES), 0
    while left > 0:
        hostile = Hostile(random.Random(f"{state} {seed}"))
        cluster, node = in_state(tmp_path / str(seed), state, seed)
        node.owner.on_snapshot = lambda _leader, _data: None
        ends += attack(cluster, node, hostile, min(left, ROUND_FRAMES))
        cluster.close()
        left, seed = left - ROUND_FRAMES, seed + 1
    assert min(ends["taken"], ends["no member"], ends["not decoded"]) > 0, ends


def test_no_hello_is_more_than_refused() -> None:
    honest = Hello("C", "G", "n1", "ab" * 16, {}, False, "h:1", "data", "127.0.0.1:2", (1, 2))
    hostile = Hostile(random.Random(5))
    taken = 0
    for _ in range(FRAMES // 2):
        said = hostile.hello(honest)
        try:
            hello = Hello.decode(said)
        except RemoteProtocolError:
            continue
        taken += 1
        assert hello.peer_address is None or 0 < hello.peer_address[1] <= 65_535
        hello.encode()
    assert taken > 0


def test_no_list_of_members_is_more_than_refused() -> None:
    hostile = Hostile(random.Random(6))
    taken = 0
    for _ in range(FRAMES // 2):
        body = hostile.members_body()
        try:
            members = Members.decode(body)
            members.check_usable()
        except (CorruptEntryError, ChangeRefusedError):
            continue
        taken += 1
        assert all(member.is_usable for member in members.members)
    assert taken > 0
