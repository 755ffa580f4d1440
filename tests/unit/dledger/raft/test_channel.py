"""The data link: frames in order, each once, whatever the stream takes at once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from typing_extensions import Buffer

from dledger.raft.channel import DataLink
from dledger.raft.peers import PeerState
from dledger.raft.wire import Kind, PeerFrame, PeerFrameDecoder
from tests.harness.beside import beside
from tests.harness.raft_cluster import Cluster


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


def test_an_acknowledgement_of_what_is_committed_ends_no_event(tmp_path: Path) -> None:
    """The slower follower's: nothing follows from it but that more may be sent."""
    cluster = Cluster(tmp_path)
    leader = cluster.elect("n0")
    cluster.append("n0", b"one")
    cluster.run()
    index = leader.commit_index
    reply = PeerFrame(Kind.APPEND_REPLY, leader.term, 1, 1, [True, index], memoryview(b""))
    assert not leader.receive("n2", reply)
    assert leader.replicator.peers["n2"].match_index == index
    reply.fields = [False, index]
    assert leader.receive("n2", reply)
