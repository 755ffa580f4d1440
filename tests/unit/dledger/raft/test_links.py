"""Links: their frames, their faults, and the memory of unfinished frames.

The data link: frames in order, each once, whatever the stream takes at once.
"""

import errno
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
from typing_extensions import Buffer

from dledger.commitlog.errors import RemoteProtocolError
from dledger.processors.raft import MembershipChanges
from dledger.raft.channel import DataLink
from dledger.raft.links import UNFINISHED_BYTES, FrameMemory, Links, local_fault, peer_frame_space
from dledger.raft.peers import PeerState
from dledger.raft.settings import Guards
from dledger.raft.wire import (
    FRAME_BYTES_MAX,
    PREFIX_BYTES,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from dledger.remoting.machine import TrioClock
from dledger.remoting.memory_budget import STALLED_S, BudgetLimits, FrameSpace, MemoryBudget
from dledger.remoting.seams import Network, Stream
from dledger.testing.doubles import InlineExecutor, MemoryNetwork
from tests.harness.beside import beside
from tests.harness.groups import Groups, running_groups
from tests.harness.guard_proofs import proves
from tests.harness.raft_cluster import Cluster, batch


def links_of(cluster: Cluster, name: str) -> Links:
    return Links(
        cluster.node(name),
        network=MemoryNetwork(),
        clock=cluster.clock,
        rng=random.Random(1),
        executor=InlineExecutor(),
    )


@proves("envelope")
def test_a_frame_counts_once_and_only_in_its_own_connection(guards: Guards, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, guards=guards)
    leader = cluster.elect("n0")
    links = links_of(cluster, "n0")
    received: list[tuple[int, int]] = []
    take = leader.receive

    def noted(peer: str, frame: PeerFrame) -> bool:
        received.append((frame.epoch, frame.sequence))
        return take(peer, frame)

    leader.receive = noted  # type: ignore[method-assign] # watches what comes through

    def frame(epoch: int, sequence: int) -> PeerFrame:
        fields = [True, leader.journal.last_index]
        return PeerFrame(Kind.APPEND_REPLY, leader.term, epoch, sequence, fields, memoryview(b""))

    hello = cluster.node("n1").contacts.hello("data")
    last = links._deliver(hello, 7, 0, [frame(7, 1), frame(7, 1), frame(6, 2), frame(7, 3)])
    last = links._deliver(hello, 7, last, [frame(7, 2), frame(7, 3), frame(7, 4)])
    assert received == [(7, 1), (7, 3), (7, 4)]
    assert last == 4


FAULTY_S = 65.0
"""Longer than the pause between two lines about the same fault."""


@dataclass
class Faults:
    """Errors of a machine, by what fails; none: it works."""

    errors: dict[str, int] = field(default_factory=dict)
    raised: Counter[str] = field(default_factory=Counter)

    def check(self, what: str) -> None:
        if what in self.errors:
            self.raised[what] += 1
            raise OSError(self.errors[what], "as the kernel reports")


class FaultyStream:
    """A stream of a machine with faults."""

    def __init__(self, stream: Stream, faults: Faults) -> None:
        self._stream = stream
        self._faults = faults
        self.peer_address, self.local_address = stream.peer_address, stream.local_address

    async def send_all(self, data: Any) -> None:
        self._faults.check("send")
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> Any:
        data = await self._stream.receive_some(max_bytes)
        self._faults.check("receive")
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


class FaultyNetwork:
    """The network of a machine with faults."""

    def __init__(self, network: Network, faults: Faults) -> None:
        self._network = network
        self._faults = faults

    async def listen(self, host: str, port: int, **options: Any) -> Any:
        self._faults.check("listen")
        listener: Any = await self._network.listen(host, port, **options)
        accept: Callable[[], Any] = listener.accept

        async def faulty() -> FaultyStream:
            return FaultyStream(await accept(), self._faults)

        listener.accept = faulty
        return listener

    async def connect(self, host: str, port: int, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self._faults.check("connect")
        return FaultyStream(await self._network.connect(host, port, **options), self._faults)


def lines_of(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "peer_link_broken"]


def break_machine(groups: Groups, name: str) -> Faults:
    """Let the network of *name*, which has not started, fail as is set later."""
    faults, network_of = Faults(), groups.network_of

    def faulty(asked: str) -> Any:
        network = network_of(asked)
        return FaultyNetwork(network, faults) if asked == name else network

    groups.network_of = faulty  # type: ignore[method-assign, assignment] # the seam it gets
    return faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("connect", errno.EMFILE),
        ("receive", errno.EIO),
        pytest.param("send", errno.ENOBUFS, marks=pytest.mark.hunt),
    ],
)
async def test_a_faulty_machine_loses_its_links_and_gets_them_back(
    tmp_path: Path, nursery: trio.Nursery, what: str, number: int
) -> None:
    groups = Groups(tmp_path, nursery)
    faults = break_machine(groups, "n0")
    for name in groups.names:
        await groups.start(name)
    await (await groups.leader()).group.submit(batch(b"before"))
    with structlog.testing.capture_logs() as lines:
        faults.errors[what] = number
        await groups.isolate("n0")  # what stands breaks, so that it dials again
        groups.heal()
        await trio.sleep(FAULTY_S)
        others = groups.others("n0")
        await (await groups.leader(among=others)).group.submit(batch(b"meanwhile"))
        faults.errors.clear()
        await trio.sleep(10)
    assert faults.raised[what] > 50
    reported = lines_of(lines)
    assert all(f"[Errno {number}]" in line["error"] for line in reported)
    assert 1 <= len(reported) <= 3
    assert sum(line["times"] for line in reported) > 10
    await (await groups.leader()).group.submit(batch(b"after"))
    await groups.settle()
    rows = (await groups.leader()).group.status()["peers"].values()
    assert [row["connected"] for row in rows] == [True, True]


async def test_a_member_that_cannot_listen_yet_serves_on(tmp_path: Path) -> None:
    """One that was alone gets company, and its port is taken or there is no descriptor."""
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery, 1)
        faults = break_machine(groups, "n0")
        alone = await groups.start("n0")
        await (await groups.leader()).group.submit(batch(b"alone"))
        faults.errors["listen"] = errno.EMFILE
        groups.names.append("n1")
        added = await groups.start("n1")
        with structlog.testing.capture_logs() as lines:
            changes = MembershipChanges(alone.group, alone.clock)
            nursery.start_soon(changes.add, "n1", ("127.0.0.1", 40912))
            await trio.sleep(5)
            await alone.group.submit(batch(b"still alone"))
            faults.errors.clear()
            with trio.fail_after(60):
                while not added.group.node.roster.is_self_voter:
                    await trio.sleep(0.1)
        assert [line["times"] for line in lines_of(lines)] == [1]
        assert faults.raised["listen"] >= 3
        await groups.settle()
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        replica.group.store.close(clean=False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, "no more"), "[Errno 24] no more"),
        (ConnectionResetError(errno.ECONNRESET, "gone"), None),
        (trio.BrokenResourceError("gone"), None),
        (TimeoutError("late"), None),
    ],
)
def test_local_faults_are_distinguished_from_lost_peers(
    error: Exception, expected: str | None
) -> None:
    assert local_fault(error) == expected
    outer = OSError("all attempts to connect failed")
    outer.__cause__ = ExceptionGroup("all", [ConnectionRefusedError(111, "no"), error])
    assert local_fault(outer) == expected
    broken = trio.BrokenResourceError("socket connection broken")
    broken.__cause__ = error
    assert local_fault(broken) == expected


async def test_members_of_a_sound_machine_have_nothing_to_say(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with running_groups(tmp_path) as groups:
            await groups.leader()
            groups.replicas.pop("n2").kill()
            await trio.sleep(5)
    assert lines_of(lines) == []


CHUNK = 256 << 10
LARGE = (FRAME_BYTES_MAX).to_bytes(4, "big") + bytes(4)
HEARTBEAT = encode_frame(encode_head(Kind.HEARTBEAT, 1, 1, 1, (1, 1)))


class Caller:
    """A connection on which a member sends, as `Links` reads it."""

    def __init__(self, space: FrameSpace, address: str) -> None:
        self.decoder = PeerFrameDecoder()
        self.scope = trio.CancelScope()
        self.memory = FrameMemory(space, address, self.scope.cancel, clock=TrioClock())
        self.frames = 0
        self.gave_way = False

    async def read(self, data: bytes) -> None:
        found = len(self.decoder.feed(data))
        self.frames += found
        await self.memory.update(self.decoder, len(data), found)

    async def send_and_stall(self, size: int) -> None:
        """Send *size* bytes of the largest frame, and then nothing."""
        try:
            with self.scope:
                await self.read(LARGE)
                for _ in range(size // CHUNK):
                    await self.read(bytes(CHUNK))
                    await trio.sleep(0.001)
                await trio.sleep_forever()
            self.memory.check()
        except RemoteProtocolError:
            self.gave_way = True
        finally:
            self.decoder = PeerFrameDecoder()
            self.memory.release()


async def test_half_frames_of_all_members_stay_within_the_limit(nursery: trio.Nursery) -> None:
    space = peer_frame_space()
    callers = [Caller(space, f"10.0.0.{number}") for number in range(6)]
    for caller in callers:
        nursery.start_soon(caller.send_and_stall, FRAME_BYTES_MAX - CHUNK)
    most = 0
    for _ in range(200):
        await trio.sleep(0.01)
        held = sum(caller.decoder.pending_bytes for caller in callers)
        assert held <= space.used_bytes + space.waiting_bytes <= UNFINISHED_BYTES + 6 * CHUNK
        most = max(most, held)
    assert most > FRAME_BYTES_MAX // 2
    # One that stalls gives way to one that waits: so in the end all but the last have.
    await trio.sleep(20 * STALLED_S)
    assert sum(caller.gave_way for caller in callers) == 5
    assert space.given_way == 5


async def test_small_frames_never_wait_behind_large_ones() -> None:
    space = peer_frame_space()
    large, small = Caller(space, "a"), Caller(space, "b")
    await large.read(LARGE)
    with trio.fail_after(0.001):
        await small.read(HEARTBEAT[:9])
        await small.read(HEARTBEAT[9:])
    assert small.frames == 1
    assert space.used_bytes == FRAME_BYTES_MAX + PREFIX_BYTES


async def test_frame_memory_is_returned_with_a_whole_frame(nursery: trio.Nursery) -> None:
    space = peer_frame_space()
    first, second = Caller(space, "a"), Caller(space, "b")
    payload = memoryview(bytes(20 << 20))
    frame = encode_frame(encode_head(Kind.HEARTBEAT, 1, 1, 1, (1, 1)), [payload])
    await first.read(frame[:CHUNK])
    assert space.used_bytes == len(frame)
    nursery.start_soon(second.read, frame[:CHUNK])
    await trio.sleep(STALLED_S / 2)
    assert space.is_wanted
    await first.read(frame[CHUNK:])
    assert first.frames == 1
    await trio.testing.wait_all_tasks_blocked()
    assert not space.is_wanted
    assert space.used_bytes == len(frame)
    second.memory.release()
    assert (space.used_bytes, space.given_way) == (0, 0)


async def test_frames_of_members_count_against_the_budget() -> None:
    """New requests are refused before members' frames go beyond what the daemon may hold."""

    class Peer:
        peer_address = ("c", 1)
        unsent_bytes = 0

        def unread_for_s(self, now_s: float) -> float:
            return 0.0

        def give_way(self, reason: str) -> None:
            raise AssertionError(reason)

    space, member, client = peer_frame_space(), None, Peer()
    budget = MemoryBudget(BudgetLimits(total_bytes=FRAME_BYTES_MAX + CHUNK), peer_frames=space)
    budget.count(client, 0, CHUNK - PREFIX_BYTES, 0.0)
    assert not budget.is_met
    member = Caller(space, "a")
    await member.read(LARGE)
    budget.count(client, CHUNK - PREFIX_BYTES, CHUNK - PREFIX_BYTES, 0.0)
    assert budget.is_met
    member.memory.release()
    budget.count(client, CHUNK - PREFIX_BYTES, 0, 0.0)
    assert not budget.is_met


class Part:
    """The sending side of a stream that takes a number of bytes at once."""

    peer_address = local_address = ("n1", 1)

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = bytearray()
        self.at_once = 0
        self.breaks = False

    def send_some_nowait(self, data: Buffer) -> int:
        if self.breaks:
            raise BrokenPipeError
        view = memoryview(data)[: self.most]
        self.taken += view
        self.at_once += 1
        return len(view)

    async def send_all(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()
        if self.breaks:
            raise trio.BrokenResourceError
        self.taken += memoryview(data)

    async def receive_some(self, max_bytes: int) -> Buffer:
        await trio.sleep_forever()
        return b""

    async def aclose(self) -> None:
        """Nothing to close."""

    def frames(self) -> list[PeerFrame]:
        return PeerFrameDecoder().feed(self.taken)


@asynccontextmanager
async def linked(folder: Path, stream: Part) -> AsyncIterator[tuple[Cluster, PeerState]]:
    """Run the data link of the leader n0 to n1 over *stream*, until it waits."""
    cluster = Cluster(folder)
    leader = cluster.elect("n0")
    link = DataLink(leader, stream, "n1", 7)
    async with beside(link.run):
        await trio.testing.wait_all_tasks_blocked()
        yield cluster, leader.peers["n1"]


async def test_data_link_sends_in_the_turn_that_has_a_frame(tmp_path: Path) -> None:
    stream = Part(most=1 << 20)
    async with linked(tmp_path, stream) as (cluster, state):
        before = len(stream.frames())
        state.replies.clear()
        cluster.node("n0").peers.reply("n1", Kind.APPEND_REPLY, True, 3)
        assert [frame.kind for frame in stream.frames()[before:]] == [Kind.APPEND_REPLY]
        assert stream.at_once > 0
        assert state.push is not None
    assert state.push is None


@pytest.mark.parametrize("most", [0, 1, 17, 1 << 20])
async def test_data_link_sends_each_frame_once_and_in_order(tmp_path: Path, most: int) -> None:
    stream, rng = Part(most), random.Random(most)
    async with linked(tmp_path, stream) as (cluster, _):
        peers = cluster.node("n0").peers
        for index in range(40):
            peers.reply("n1", Kind.APPEND_REPLY, True, index)
            if rng.random() < 0.3:
                await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        frames = stream.frames()
        assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
        replies = [frame for frame in frames if frame.kind is Kind.APPEND_REPLY]
        assert [frame.fields[1] for frame in replies] == list(range(40))


async def test_data_link_ends_when_the_stream_broke_at_once(tmp_path: Path) -> None:
    stream = Part(most=1 << 20)
    cluster = Cluster(tmp_path)
    leader = cluster.elect("n0")
    with pytest.RaisesGroup(trio.BrokenResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(DataLink(leader, stream, "n1", 7).run)
            await trio.testing.wait_all_tasks_blocked()
            stream.breaks = True
            leader.peers.reply("n1", Kind.APPEND_REPLY, True, 1)
            await trio.sleep(1)
    assert leader.peers["n1"].push is None


def test_an_acknowledgement_of_what_is_committed_ends_no_event(cluster: Cluster) -> None:
    """The slower follower's: nothing follows from it but that more may be sent."""
    leader = cluster.elect("n0")
    cluster.append("n0", b"one")
    cluster.run()
    index = leader.commit_index
    reply = PeerFrame(Kind.APPEND_REPLY, leader.term, 1, 1, [True, index], memoryview(b""))
    assert not leader.receive("n2", reply)
    assert leader.replicator.peers["n2"].match_index == index
    reply.fields = [False, index]
    assert leader.receive("n2", reply)
