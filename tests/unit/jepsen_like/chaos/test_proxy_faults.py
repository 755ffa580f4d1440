"""The proxy between real sockets: how late bytes pass, and what it does not do to them."""

import random

import pytest
import trio

from dledger.jepsen_like.nemesis.ground import HEALTHY, CannotBeDone, LinkFault
from tests.harness.proxied_links import fault, frame, proxied

pytestmark = pytest.mark.real_time


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
