from collections.abc import Awaitable, Callable

import pytest
import trio

from dledger.jepsen_like.nemesis.ground import LinkFault
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.event_trace import Trace
from dledger.jepsen_like.simulation.sim_network import PEER_PORT, NodeNetwork, SimNetwork
from dledger.jepsen_like.simulation.sim_stream import WINDOW_BYTES, Host, SimListener, SimStream
from dledger.jepsen_like.simulation.virtual_time import START_S, VirtualTime, run_virtual

CLIENT_PORT = 10911


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def bodies(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


class Net:
    """Two hosts, and a listener of members and of clients on the second."""

    def __init__(self, time: VirtualTime, seed: int) -> None:
        self.time = time
        self.trace = Trace(time)
        self.network = SimNetwork(time, rng_stream(seed), self.trace)
        self.a: Host = self.network.add_host("a", 1, "10.0.0.1")
        self.b: Host = self.network.add_host("b", 2, "10.0.0.2")
        self.view: NodeNetwork = self.network.view(self.a)
        self.listeners: dict[int, SimListener] = {}

    async def listen(self) -> None:
        for port in (PEER_PORT, CLIENT_PORT):
            self.listeners[port] = await self.network.view(self.b).listen("10.0.0.2", port)

    async def connect(self, port: int = CLIENT_PORT) -> tuple[SimStream, SimStream]:
        ours = await self.view.connect("10.0.0.2", port, timeout_s=2)
        return ours, await self.listeners[port].accept()

    @property
    def elapsed_s(self) -> float:
        return self.time.now_s - START_S


def play(main: Callable[[Net], Awaitable[None]], seed: int = 1) -> None:
    async def run(time: VirtualTime) -> None:
        net = Net(time, seed)
        await net.listen()
        await main(net)

    run_virtual(seed, run)


async def read(stream: SimStream, seconds: float) -> bytes:
    """Return all that arrives within *seconds*."""
    got = b""
    with trio.move_on_after(seconds):
        while data := await stream.receive_some(1 << 20):
            got += bytes(data)
    return got


def test_bytes_arrive_later_in_order_and_the_end_after_them() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect()
        sent_s = net.time.now_s
        for number in range(50):
            await ours.send_all(b"%02d" % number)
        await ours.aclose()
        got = b""
        while data := await theirs.receive_some(7):
            got += bytes(data)
        assert got == b"".join(b"%02d" % number for number in range(50))
        assert 0 < net.time.now_s - sent_s < 0.01
        assert theirs.peer_address == ours.local_address
        with pytest.raises(trio.ClosedResourceError):
            await ours.send_all(b"x")

    play(main)


def test_no_listener_refuses_and_a_cut_link_times_out() -> None:
    async def main(net: Net) -> None:
        with pytest.raises(ConnectionRefusedError):
            await net.view.connect("10.0.0.2", 1, timeout_s=2)
        net.network.cut("b", "a")
        before_s = net.time.now_s
        with pytest.raises(TimeoutError):
            await net.view.connect("10.0.0.2", CLIENT_PORT, timeout_s=2)
        assert net.time.now_s - before_s == pytest.approx(2, abs=0.1)
        net.network.mend("b", "a")
        await net.connect()

    play(main)


def test_a_cut_holds_one_direction_and_healing_delivers() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect()
        net.network.cut("a", "b")
        await ours.send_all(b"there")
        await theirs.send_all(b"back")
        assert await read(ours, 1) == b"back"
        assert await read(theirs, 60) == b""
        net.network.mend("a", "b")
        assert await read(theirs, 1) == b"there"

    play(main)


def test_healing_may_break_connections_with_bytes_waiting() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect()
        net.network.cut("a", "b")
        await ours.send_all(b"there")
        net.network.mend("a", "b", reset=1.0)
        with pytest.raises(trio.BrokenResourceError):
            await theirs.receive_some(10)
        with pytest.raises(trio.BrokenResourceError):
            await ours.send_all(b"x")

    play(main)


def test_a_killed_process_closes_its_ends_and_refuses() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect()
        net.network.kill(net.b, silent=False)
        assert await ours.receive_some(10) == b""
        await theirs.send_all(b"from the dead")
        assert await read(ours, 1) == b""
        with pytest.raises(ConnectionRefusedError):
            await net.view.connect("10.0.0.2", CLIENT_PORT, timeout_s=2)

    play(main)


def test_a_machine_without_power_resets_when_it_is_back() -> None:
    async def main(net: Net) -> None:
        ours, _ = await net.connect()
        net.network.kill(net.b, silent=True)
        net.b.is_up = False
        await ours.send_all(b"anybody?")
        assert await read(ours, 300) == b""
        with pytest.raises(TimeoutError):
            await net.view.connect("10.0.0.2", CLIENT_PORT, timeout_s=2)
        net.network.power_on(net.b)
        with pytest.raises(trio.BrokenResourceError):
            await ours.receive_some(10)

    play(main)


def test_a_blocked_sender_gets_the_reset_of_a_returned_machine() -> None:
    """TCP sends again what was not acknowledged, whether or not more is sent."""

    async def main(net: Net) -> None:
        ours, _ = await net.connect()
        quiet, _ = await net.connect()
        net.network.kill(net.b, silent=True)
        net.b.is_up = False
        with trio.move_on_after(60) as waiting:
            await ours.send_all(b"x" * (WINDOW_BYTES + 1))
        assert waiting.cancelled_caught
        net.network.cut("b", "a")
        net.network.power_on(net.b)
        assert await read(ours, 60) == b""
        net.network.mend("b", "a")
        with pytest.raises(trio.BrokenResourceError):
            await ours.send_all(b"y")
        # Nothing was sent on this one: it stays half-open until something is.
        assert await read(quiet, 60) == b""
        await quiet.send_all(b"hello?")
        with pytest.raises(trio.BrokenResourceError):
            await quiet.receive_some(10)

    play(main)


def test_a_paused_process_accepts_and_reads_when_it_goes_on() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect()
        net.b.gate.close()
        await ours.send_all(b"wait")
        await net.view.connect("10.0.0.2", CLIENT_PORT, timeout_s=2)
        assert await read(theirs, 30) == b""
        net.b.gate.open()
        assert await read(theirs, 1) == b"wait"
        await net.listeners[CLIENT_PORT].accept()

    play(main)


def test_a_sender_waits_for_a_reader() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect()
        chunk = b"x" * (WINDOW_BYTES // 2)
        await ours.send_all(chunk)
        await ours.send_all(chunk)
        with trio.move_on_after(10) as waiting:
            await ours.send_all(b"y")
        assert waiting.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, b"z")
            assert len(await read(theirs, 1)) == 2 * len(chunk) + 2

    play(main)


def test_a_slow_link_takes_its_time() -> None:
    async def main(net: Net) -> None:
        net.network.set_fault("a", "b", LinkFault(bytes_per_s=100.0))
        ours, theirs = await net.connect()
        before_s = net.time.now_s
        await ours.send_all(b"x" * 500)
        await ours.send_all(b"y" * 500)
        got = 0
        while got < 1000:
            got += len(bytes(await theirs.receive_some(1000)))
        assert net.time.now_s - before_s == pytest.approx(10, abs=0.1)

    play(main)


def test_what_a_slow_link_carries_is_fast_once_mended() -> None:
    async def main(net: Net) -> None:
        net.network.set_fault("a", "b", LinkFault(delay_s=3.0))
        ours, theirs = await net.connect()
        before_s = net.time.now_s
        await ours.send_all(b"1")
        net.network.set_fault("a", "b", LinkFault(bytes_per_s=10.0))
        for part in (b"2" * 500, b"3" * 500):
            await ours.send_all(part)
        await net.time.sleep(1.0)
        net.network.set_fault("a", "b", LinkFault())
        await ours.send_all(b"4")
        got = b""
        while not got.endswith(b"4"):
            got += bytes(await theirs.receive_some(1000))
        assert got == b"1" + b"2" * 500 + b"3" * 500 + b"4"
        assert net.time.now_s - before_s == pytest.approx(3, abs=0.1)

    play(main)


@pytest.mark.parametrize("fault", [LinkFault(loss=1.0, silent=True), LinkFault(hold=1.0)])
def test_frames_that_a_link_swallows_are_not_waited_for(fault: LinkFault) -> None:
    async def main(net: Net) -> None:
        ours, _ = await net.connect(PEER_PORT)
        await ours.send_all(frame(b"hello"))
        net.network.set_fault("a", "b", fault)
        with trio.fail_after(60):
            for _ in range(40):
                await ours.send_all(frame(b"x" * (WINDOW_BYTES // 10)))

    play(main)


def test_loss_breaks_streams_of_clients_not_of_members() -> None:
    async def main(net: Net) -> None:
        net.network.set_fault("a", "b", LinkFault(loss=1.0, silent=True))
        ours, theirs = await net.connect()
        await ours.send_all(frame(b"lost"))
        with pytest.raises(trio.BrokenResourceError):
            await theirs.receive_some(10)
        net.network.set_fault("a", "b", LinkFault(loss=0.5, silent=True))
        ours, theirs = await net.connect(PEER_PORT)
        for number in range(100):
            await ours.send_all(frame(b"%d" % number))
        arrived = [int(body) for body in bodies(await read(theirs, 5))]
        assert 20 < len(arrived) < 80
        assert arrived == sorted(set(arrived))

    play(main)


def test_members_frames_come_twice_and_reordered_but_whole() -> None:
    async def main(net: Net) -> None:
        net.network.set_fault("a", "b", LinkFault(duplicate=0.3, reorder=0.3))
        ours, theirs = await net.connect(PEER_PORT)
        for number in range(100):
            whole = frame(b"%d" % number)
            await ours.send_all(whole[:3])
            await ours.send_all(whole[3:])
        arrived = [int(body) for body in bodies(await read(theirs, 5))]
        assert set(arrived) == set(range(100))
        assert len(arrived) > 110
        assert arrived != sorted(arrived)

    play(main)


def test_a_held_frame_arrives_on_a_later_connection() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect(PEER_PORT)
        await ours.send_all(frame(b"hello"))
        net.network.set_fault("a", "b", LinkFault(hold=1.0))
        await ours.send_all(frame(b"held"))
        assert bodies(await read(theirs, 5)) == [b"hello"]
        await ours.aclose()
        net.network.set_fault("a", "b", LinkFault())
        again, theirs = await net.connect(PEER_PORT)
        await again.send_all(frame(b"hello again"))
        for number in range(20):
            await again.send_all(frame(b"%d" % number))
        arrived = bodies(await read(theirs, 5))
        assert b"held" in arrived
        assert [b for b in arrived if b != b"held"] == [
            b"hello again",
            *(b"%d" % number for number in range(20)),
        ]

    play(main)


def test_a_reset_reaches_both_ends() -> None:
    async def main(net: Net) -> None:
        ours, theirs = await net.connect()
        assert net.network.reset_between("a", "b") == 1
        for stream in (ours, theirs):
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)

    play(main)
