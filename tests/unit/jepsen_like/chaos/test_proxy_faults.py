"""The proxy between real sockets: what it does to single frames, and how fast they pass."""

from __future__ import annotations

import random

import pytest
import trio

from dledger.commitlog.errors import RemoteProtocolError
from dledger.jepsen_like.nemesis.ground import HEALTHY, LinkFault
from dledger.raft.wire import PeerFrameDecoder
from tests.harness.proxied_links import chances, fault, frame, proxied


async def test_frames_lost_in_silence_are_missing_and_the_rest_goes_on() -> None:
    chance = chances()
    kept = [n for n in range(1, 101) if chance() >= 0.5]
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(loss=0.5, silent=True))
        await ours.send(*(frame(n) for n in range(1, 101)))
        await ours.stream.send_eof()
        assert await theirs.sequences_to_the_end() == kept
        assert net.proxy.sometimes["frame_lost"] == 100 - len(kept)
        await theirs.send(frame(1))
        assert await ours.sequences(1) == [1]


async def test_a_lost_frame_that_is_not_silent_breaks_the_connection() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("b", "a", fault(loss=1.0))
        await ours.send(frame(1))
        assert await theirs.sequences(1) == [1]
        await theirs.send(frame(1))
        for end in (ours, theirs):
            with pytest.raises(trio.BrokenResourceError):
                await end.stream.receive_some()
        assert net.proxy.sometimes == {"connections": 1, "frame_lost": 1, "resets": 1}


async def test_a_doubled_frame_arrives_twice_and_a_hello_once() -> None:
    async with proxied() as net:
        net.proxy.set_fault("a", "b", fault(duplicate=1.0, spread_s=0.0))
        ours, theirs = await net.link()
        await ours.send(frame(1), frame(2))
        await ours.close()
        assert sorted(await theirs.sequences_to_the_end()) == [1, 1, 2, 2]
        assert net.proxy.sometimes["frame_doubled"] == 2


async def test_a_frame_is_overtaken_and_the_others_keep_their_order() -> None:
    chance = chances()
    overtaken = []
    for number in range(1, 41):
        if chance() < 0.5:
            overtaken.append(number)
            chance()  # how late it comes
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(reorder=0.5, spread_s=0.1))
        await ours.send(*(frame(n) for n in range(1, 41)))
        arrived = await theirs.sequences(40)
        assert sorted(arrived) == list(range(1, 41))
        assert arrived != sorted(arrived)
        in_turn = [n for n in range(1, 41) if n not in overtaken]
        assert [n for n in arrived if n not in overtaken] == in_turn
        assert net.proxy.sometimes["frame_overtaken"] == len(overtaken)


async def test_held_frame_arrives_on_its_own_channel() -> None:
    async with proxied() as net:
        net.proxy.set_fault("a", "b", fault(hold=1.0))
        ours, theirs = await net.link(channel="control")
        await ours.send(frame(1), frame(2), frame(3))
        assert await theirs.is_silent()
        assert net.proxy.sometimes["frame_held"] == 3
        net.proxy.mend_all()
        later = list(range(11, 31))
        await ours.send(*map(frame, later))
        await ours.close()
        assert await theirs.sequences_to_the_end() == later
        for name, channel in (("a", "data"), ("c", "control")):
            ours, theirs = await net.link(name, channel)
            await ours.send(*map(frame, later))
            await ours.close()
            assert await theirs.sequences_to_the_end() == later
        ours, theirs = await net.link(channel="control")
        await ours.send(*map(frame, later))
        await ours.close()
        arrived = await theirs.sequences_to_the_end()
        assert [n for n in arrived if n > 10] == later
        assert [n for n in arrived if n <= 10] == [1, 2, 3]
        assert net.proxy.sometimes["frame_from_old_connection"] == 3


async def test_a_corrupted_frame_differs_in_one_bit_behind_its_length() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(corrupt=1.0))
        sent = frame(1, b"payload")
        await ours.send(sent)
        got = await theirs.exactly(len(sent))
        assert got[:4] == sent[:4]
        changed = [one ^ other for one, other in zip(got, sent, strict=True) if one != other]
        assert [bits.bit_count() for bits in changed] == [1]
        with pytest.raises(RemoteProtocolError):
            PeerFrameDecoder().feed(got)
        assert net.proxy.sometimes["frame_corrupted"] == 1


@pytest.mark.parametrize("at", [1, 3, 4, 6, 30])
async def test_a_fault_that_begins_within_a_frame_begins_with_the_next(at: int) -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        first = frame(1, bytes(50))
        await ours.send(frame(0))
        await theirs.frames(1)
        await ours.send(first[:at])
        assert await theirs.exactly(at) == first[:at]
        net.proxy.set_fault("a", "b", fault(duplicate=1.0, spread_s=0.0))
        await ours.send(first[at:], frame(2), frame(3))
        await ours.close()
        assert await theirs.exactly(len(first) - at) == first[at:]
        assert sorted(await theirs.sequences_to_the_end()) == [2, 2, 3, 3]


@pytest.mark.parametrize("at", [1, 3, 4, 6, 30])
async def test_fault_that_ends_in_a_frame_leaves_it_whole(at: int) -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(duplicate=1.0, spread_s=0.0))
        second = frame(2, bytes(50))
        await ours.send(frame(1), second[:at])
        assert await theirs.sequences(2) == [1, 1]
        assert await theirs.is_silent()
        net.proxy.mend_all()
        await ours.send(second[at:], frame(3))
        assert await theirs.sequences(2) == [2, 3]


async def test_the_begin_of_a_frame_arrives_though_its_end_never_comes() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(duplicate=1.0, spread_s=0.0))
        await ours.send(frame(1)[:10])
        await ours.close()
        assert await theirs.exactly(10) == frame(1)[:10]
        assert await theirs.stream.receive_some() == b""


async def test_delay_and_jitter_make_frames_late_and_keep_their_order() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(delay_s=0.05, jitter_s=0.02))
        began_s = trio.current_time()
        for number in range(1, 31):
            await ours.send(frame(number))
            await trio.lowlevel.checkpoint()
        assert await theirs.sequences(30) == list(range(1, 31))
        assert trio.current_time() - began_s >= 0.05


async def test_a_connection_takes_a_round_trip_to_stand() -> None:
    async with proxied() as net:
        net.proxy.set_fault("a", "b", fault(delay_s=0.02))
        net.proxy.set_fault("b", "a", fault(delay_s=0.03))
        began_s = trio.current_time()
        await net.link()
        assert trio.current_time() - began_s >= 0.02 + 0.03 + 0.02


async def test_limited_link_passes_its_bytes_per_second() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(bytes_per_s=20_000.0))
        data = frame(1, random.Random(2).randbytes(4000))
        began_s = trio.current_time()
        await ours.send(data)
        early = await theirs.exactly(1)
        first_s = trio.current_time() - began_s
        assert early + await theirs.exactly(len(data) - 1) == data
        whole_s = trio.current_time() - began_s
        assert whole_s >= 0.2
        assert first_s < whole_s  # bytes trickle


@pytest.mark.parametrize("then", [HEALTHY, fault(delay_s=0.01)])
async def test_slow_link_sends_all_when_healed(then: LinkFault) -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.set_fault("a", "b", fault(bytes_per_s=1.0, delay_s=1000.0))
        await ours.send(*map(frame, range(1, 50)))
        assert await theirs.is_silent()
        net.proxy.set_fault("a", "b", then)
        assert await theirs.sequences(49) == list(range(1, 50))
        await ours.send(frame(50))
        assert await theirs.sequences(1) == [50]
