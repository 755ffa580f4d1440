"""The proxy between real sockets: what passes, cuts and resets.

Measured by hand without faults, client, proxy and server a process each on two shared cores: a
round trip of 100 bytes takes 0.07 ms instead of 0.04; frames of 100 bytes pass at 360 MB/s (590 MB
per CPU second of the proxy), frames of 1,000 at 960 MB/s (2,200), of 64 KiB at 650 MB/s (2,600).

The proxy between real sockets: how late bytes pass, and what it does not do to them.
"""

import random
import socket

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.chaos.proxy import LinkProxy, Target
from dledger.jepsen_like.chaos.proxy_pump import WINDOW_BYTES
from dledger.jepsen_like.nemesis.ground import HEALTHY, CannotBeDone, LinkFault
from dledger.raft.wire import Kind, encode_frame, encode_head
from tests.harness.proxied_links import EPOCH, SETTLED_S, fault, frame, hello, proxied

pytestmark = pytest.mark.real_time


async def test_what_is_sent_in_odd_pieces_arrives_as_it_is_both_ways() -> None:
    drawn = random.Random(1)
    async with proxied() as net:
        stream = hello("a") + b"".join(
            frame(n, drawn.randbytes(drawn.choice((0, 1, 3, 4, 1000, 300_000)))) for n in range(60)
        )
        back = hello("b", kind=Kind.HELLO_ACK) + drawn.randbytes(500_000)
        ours = await net.dial()

        async def send_in_pieces() -> None:
            at = 0
            while at < len(stream):
                size = drawn.choice((1, 2, 3, 5, 7, 4096, 100_000))
                await ours.send(stream[at : at + size])
                at += size
            await ours.stream.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_in_pieces)
            theirs = await net.accept()
            nursery.start_soon(theirs.send, back)
            assert await theirs.exactly(len(stream)) == stream
            assert await theirs.stream.receive_some() == b""
        assert await ours.exactly(len(back)) == back
        await theirs.close()
        assert await ours.stream.receive_some() == b""
        assert net.proxy.sometimes == {"connections": 1}


async def test_sender_waits_for_a_slow_reader() -> None:
    big = [frame(n, random.Random(n).randbytes(16 * WINDOW_BYTES)) for n in range(3)]
    sent = False

    async def send() -> None:
        nonlocal sent
        await ours.send(*big)
        sent = True

    async with proxied() as net:
        ours, theirs = await net.link()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await wait_all_tasks_blocked(SETTLED_S)
            assert not sent
            for whole in big:
                assert await theirs.exactly(len(whole)) == whole


async def test_a_cut_holds_one_direction_and_mending_delivers_in_order() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.cut("a", "b")
        await ours.send(*map(frame, range(1, 6)))
        await theirs.send(frame(77))
        assert await ours.sequences(1) == [77]
        assert await theirs.is_silent()
        await ours.close()
        assert await theirs.is_silent()
        net.proxy.mend("a", "b")
        assert await theirs.sequences_to_the_end() == list(range(1, 6))


async def test_little_waits_at_a_cut_before_the_sender_does() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.cut("a", "b")
        stream, sent = random.Random(3).randbytes(32 * WINDOW_BYTES), 0

        async def send() -> None:
            nonlocal sent
            while sent < len(stream):
                await ours.send(stream[sent : sent + 65_536])
                sent += 65_536

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await theirs.is_silent()
            assert sent < len(stream) / 2
            net.proxy.mend("a", "b")
            assert await theirs.exactly(len(stream)) == stream


async def test_a_cut_in_the_middle_of_a_stream_stops_it_at_once() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send, frame(1, bytes(64 * WINDOW_BYTES)))
            await wait_all_tasks_blocked(SETTLED_S)
            net.proxy.cut("a", "b")
            passed = 0
            while not await theirs.is_silent():
                passed += len(await theirs.stream.receive_some(64 * WINDOW_BYTES))
            assert passed < 32 * WINDOW_BYTES
            net.proxy.mend("a", "b")
            assert not await theirs.is_silent()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
async def test_a_dialler_gets_no_answer_over_a_link_cut_either_way(way: tuple[str, str]) -> None:
    async with proxied() as net:
        net.proxy.cut(*way)
        gives_up = await net.dial(hello("a"))
        with trio.move_on_after(0.05) as timeout:
            await gives_up.stream.receive_some()
        assert timeout.cancelled_caught
        await gives_up.close()
        waits = await net.dial(hello("a"))
        other, _ = await net.link("c")
        assert await other.is_silent()
        assert await net.has_nobody()
        net.proxy.mend(*way)
        theirs = await net.accept()
        assert (await theirs.frames(1))[0].kind is Kind.HELLO
        await waits.send(frame(1))
        assert await theirs.sequences(1) == [1]
        assert await net.has_nobody()


async def test_a_reset_does_not_pass_a_cut() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.proxy.cut("a", "b")
        await ours.send(frame(1))
        await ours.break_off()
        assert await theirs.is_silent()
        net.proxy.mend("a", "b")
        with pytest.raises(trio.BrokenResourceError):
            await theirs.sequences_to_the_end()


async def test_heal_breaks_only_connections_with_waiting_bytes() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        idle, theirs_idle = await net.link(channel="data")
        net.proxy.cut("a", "b")
        net.proxy.cut("b", "a")
        await ours.send(frame(1))
        assert await theirs.is_silent()
        net.proxy.mend_all(reset=1.0)
        for end in (ours, theirs):
            with pytest.raises(trio.BrokenResourceError):
                await end.stream.receive_some()
        await idle.send(frame(1))
        assert await theirs_idle.sequences(1) == [1]


async def test_reset_reaches_both_ends() -> None:
    async with proxied() as net:
        both = [*await net.link(channel="control"), *await net.link(channel="data")]
        other, theirs = await net.link("c")
        assert net.proxy.reset_between("b", "a") == 2
        for end in both:
            with pytest.raises(trio.BrokenResourceError):
                await end.stream.receive_some()
        await other.send(frame(1))
        assert await theirs.sequences(1) == [1]
        assert net.proxy.reset_between("b", "a") == 0
        assert net.proxy.sometimes == {"connections": 3, "resets": 2}


async def test_a_reset_reaches_a_dialler_that_waits_at_a_cut() -> None:
    async with proxied() as net:
        net.proxy.cut("a", "b")
        ours = await net.dial(hello("a"))
        assert await ours.is_silent()
        assert net.proxy.reset_between("a", "b") == 1
        with pytest.raises(trio.BrokenResourceError):
            await ours.stream.receive_some()


async def test_connection_may_be_reset_at_once() -> None:
    async with proxied(source="clients") as net:
        net.proxy.cut("clients", "b")
        for number in range(1, 21):
            # In one step, so that accepting is the next thing that happens.
            with socket.create_connection(("127.0.0.1", net.port)) as ours:
                while net.proxy.sometimes["connections"] < number:
                    await trio.lowlevel.checkpoint()
                assert net.proxy.reset_between("clients", "b") == 1
                with pytest.raises(ConnectionResetError):
                    ours.recv(1)


async def test_connection_may_be_reset_when_bytes_have_just_come() -> None:
    async with proxied(source="clients") as net:
        for steps in range(40):
            ours = await net.dial()
            await net.accept()
            await wait_all_tasks_blocked()
            with socket.fromfd(
                ours.stream.socket.fileno(), socket.AF_INET, socket.SOCK_STREAM
            ) as raw:
                raw.send(b"x")
            for _ in range(steps % 4):  # the proxy is about to read, reads, or has read
                await trio.lowlevel.checkpoint()
            assert net.proxy.reset_between("clients", "b") == 1
            with pytest.raises(trio.BrokenResourceError):
                await ours.stream.receive_some()


async def test_killed_target_breaks_its_connections() -> None:
    async with proxied() as net:
        await net.listener.aclose()
        ours = await net.dial(hello("a"))
        with pytest.raises(trio.BrokenResourceError):
            await ours.stream.receive_some()
        assert net.proxy.sometimes == {"connections": 1, "resets": 1}


async def test_reset_arrives_behind_the_bytes_sent() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        await ours.send(frame(1))
        assert await theirs.sequences(1) == [1]
        await theirs.break_off()
        with pytest.raises(trio.BrokenResourceError):
            await ours.stream.receive_some()
        assert net.proxy.sometimes == {"connections": 1}


async def test_closed_side_breaks_a_sender() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        await ours.close()
        assert await theirs.sequences_to_the_end() == []
        with pytest.raises(trio.BrokenResourceError):
            await theirs.send(frame(1, bytes(64 * WINDOW_BYTES)))


async def test_stranger_without_a_hello_is_refused() -> None:
    async with proxied() as net:
        for bad in (frame(1), hello("a")[:-1] + b"\xff", b"\xff" * 8):
            ours = await net.dial(bad)
            with pytest.raises(trio.BrokenResourceError):
                await ours.stream.receive_some()
        assert await net.has_nobody()


async def test_newer_member_is_refused_by_its_peer() -> None:
    said = {"v": 99, "name": "a", "channel": "data", "new": [1]}
    data = encode_frame(encode_head(Kind.HELLO, 1, EPOCH, 0, (said,)))
    async with proxied() as net:
        await net.dial(data)
        theirs = await net.accept()
        assert await theirs.exactly(len(data)) == data


async def test_clients_need_no_frames_and_the_server_may_speak_first() -> None:
    async with proxied(source="clients") as net:
        ours = await net.dial()
        theirs = await net.accept()
        await theirs.send(b"\xff\xff")
        assert await ours.exactly(2) == b"\xff\xff"
        await ours.send(b"\xff\xff\xff\xff\xff")
        await ours.stream.send_eof()
        assert await theirs.exactly(5) == b"\xff" * 5
        assert await theirs.stream.receive_some() == b""


async def test_clients_wait_at_a_cut_from_their_first_byte() -> None:
    async with proxied(source="clients") as net:
        net.proxy.cut("b", "clients")
        ours = await net.dial()
        assert await net.has_nobody()
        await ours.send(b"early")
        assert await net.has_nobody()
        net.proxy.mend("b", "clients")
        theirs = await net.accept()
        assert await theirs.exactly(5) == b"early"


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with proxied() as net:
        other = LinkProxy(random.Random(1), {net.port: Target("b", "127.0.0.1", 1)})
        with pytest.raises(OSError, match="in use"):
            await other.serve()


def test_a_target_on_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"only 127\.0\.0\.1"):
        LinkProxy(random.Random(1), {1: Target("b", "0.0.0.0", 1)})


async def test_cancelling_resets_what_stands_and_closes_the_port() -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        net.stop()
        for end in (ours, theirs):
            with pytest.raises(trio.BrokenResourceError):
                await end.stream.receive_some()
        with pytest.raises(OSError, match="connect"):
            await net.dial()


@pytest.mark.parametrize("harm", ["loss", "duplicate", "reorder", "hold", "corrupt"])
async def test_proxy_refuses_to_harm_frames(harm: str) -> None:
    async with proxied() as net:
        ours, theirs = await net.link()
        with pytest.raises(CannotBeDone, match="the simulator does this to frames"):
            net.proxy.set_fault("a", "b", fault(**{harm: 0.5}))
        await ours.send(*map(frame, range(1, 50)))
        assert await theirs.sequences(49) == list(range(1, 50))


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
