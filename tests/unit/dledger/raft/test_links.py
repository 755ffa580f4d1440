"""Connections between members: what half-dead ones may not hold up."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock
from typing_extensions import Buffer

from dledger.raft.wire import Kind, encode_frame, encode_head
from tests.harness.groups import Groups, running_groups
from tests.harness.memory_network import MemoryStream
from tests.harness.raft_cluster import batch

PORT = 40911


async def test_connections_that_a_peer_left_behind_do_not_keep_it_out(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A host that loses power says no goodbye: its connections stand here for ever."""
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader(among=["n0", "n1", "n2"])
        await leader.group.submit(batch(b"before"))
        address = ("127.0.0.1", PORT + groups.names.index(leader.name))
        lost = groups.replicas[groups.others(leader.name)[0]]
        lost.kill()
        await trio.sleep(0.1)
        left = []
        for channel in ["control", "data"] * 8:
            stream = await groups.network.view(lost.name).connect(*address, timeout_s=1)
            hello = lost.group.node.hello(channel).encode()
            await stream.send_all(encode_frame(encode_head(Kind.HELLO, 1, 7, 0, (hello,))))
            await stream.receive_some(1000)
            left.append(stream)
        again = await groups.start(lost.name)
        await groups.settle()
        leader = await groups.leader()
        await leader.group.submit(batch(b"after"))
        with trio.fail_after(5):
            await groups.settle()
        assert again.group.node.peers[leader.name].up == {"control", "data"}
        assert len(left) == 16


async def test_an_older_connection_ends_when_the_peer_makes_a_new_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        term = leader.group.term
        address = ("127.0.0.1", PORT + groups.names.index(leader.name))
        peer = groups.replicas[groups.others(leader.name)[0]].group.node
        network = groups.network.view(peer.settings.self_id)
        streams = []
        for _ in range(2):
            stream = await network.connect(*address, timeout_s=1)
            head = encode_head(Kind.HELLO, 1, 7, 0, (peer.hello("control").encode(),))
            await stream.send_all(encode_frame(head))
            assert await stream.receive_some(1000)
            streams.append(stream)
        with trio.fail_after(1):
            assert await streams[0].receive_some(1000) == b""
        await trio.sleep(5)
        assert (await groups.leader()).group.term == term


async def test_a_connection_that_ends_slowly_may_outlive_the_one_that_took_its_place(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive_some = MemoryStream.receive_some

    async def slow_to_end(self: MemoryStream, max_bytes: int) -> Buffer:
        try:
            return await receive_some(self, max_bytes)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.5)
            raise

    async with running_groups(tmp_path) as groups:
        leader = await groups.leader()
        address = ("127.0.0.1", PORT + groups.names.index(leader.name))
        peer = groups.replicas[groups.others(leader.name)[0]].group.node
        network = groups.network.view(peer.settings.self_id)
        groups.replicas[peer.settings.self_id].kill()
        await trio.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStream, "receive_some", slow_to_end)
            for _ in range(2):
                stream = await network.connect(*address, timeout_s=1)
                head = encode_head(Kind.HELLO, 1, 7, 0, (peer.hello("data").encode(),))
                await stream.send_all(encode_frame(head))
                await trio.sleep(0.01)
            await stream.aclose()
            await trio.sleep(2)
        leader = await groups.leader()
        await leader.group.submit(batch(b"x"))


async def test_an_election_does_not_wait_for_an_async_flush(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery)
        groups.sync_flush = False
        for name in groups.names:
            await groups.start(name)
        leader = await groups.leader()
        for _ in range(3):
            groups.network.isolate(leader.name, groups.others(leader.name))
            began = trio.current_time()
            await groups.leader(among=groups.others(leader.name))
            assert trio.current_time() - began < leader.group.node.settings.flush_interval_s / 2
            groups.network.heal()
            await trio.sleep(3)
            leader = await groups.leader()
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        replica.group.store.close(clean=False)


async def test_one_voter_with_async_flush_answers_at_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery, 1)
        groups.sync_flush = False
        await groups.start("n0")
        leader = await groups.leader()
        began = trio.current_time()
        for _ in range(20):
            await leader.group.submit(batch(b"x"))
        assert trio.current_time() - began < 0.1
        nursery.cancel_scope.cancel()
    leader.group.store.close(clean=False)
