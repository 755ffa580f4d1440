"""What members have sent of unfinished frames is bounded for all of them together."""

from __future__ import annotations

import pytest
import trio

from commitlog.errors import RemoteProtocolError
from dledger.raft.frame_memory import UNFINISHED_BYTES, FrameMemory, peer_frame_room
from dledger.raft.wire import (
    FRAME_BYTES_MAX,
    PREFIX_BYTES,
    Kind,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from remoting.clock import TrioClock
from remoting.frame_room import STALLED_S, FrameRoom
from remoting.memory_budget import BudgetLimits, MemoryBudget

pytestmark = pytest.mark.usefixtures("autojump_clock")

CHUNK = 256 << 10
LARGE = (FRAME_BYTES_MAX).to_bytes(4, "big") + bytes(4)
HEARTBEAT = encode_frame(encode_head(Kind.HEARTBEAT, 1, 1, 1, (1, 1)))


class Caller:
    """A connection on which a member sends, as `Links` reads it."""

    def __init__(self, room: FrameRoom, address: str) -> None:
        self.decoder = PeerFrameDecoder()
        self.scope = trio.CancelScope()
        self.memory = FrameMemory(room, address, self.scope.cancel, clock=TrioClock())
        self.frames = 0
        self.gave_way = False

    async def read(self, data: bytes) -> None:
        found = len(self.decoder.feed(data))
        self.frames += found
        await self.memory.note(self.decoder, len(data), found)

    async def send_and_stall(self, size: int) -> None:
        """Send so much of the largest frame, and then nothing."""
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
            self.memory.leave()


async def test_half_frames_of_all_members_stay_within_the_limit(nursery: trio.Nursery) -> None:
    room = peer_frame_room()
    callers = [Caller(room, f"10.0.0.{number}") for number in range(6)]
    for caller in callers:
        nursery.start_soon(caller.send_and_stall, FRAME_BYTES_MAX - CHUNK)
    most = 0
    for _ in range(200):
        await trio.sleep(0.01)
        held = sum(caller.decoder.pending_bytes for caller in callers)
        assert held <= room.used_bytes + room.waiting_bytes <= UNFINISHED_BYTES + 6 * CHUNK
        most = max(most, held)
    assert most > FRAME_BYTES_MAX // 2
    # One that stalls gives way to one that waits: so in the end all but the last have.
    await trio.sleep(20 * STALLED_S)
    assert sum(caller.gave_way for caller in callers) == 5
    assert room.given_way == 5


async def test_small_frames_never_wait_behind_large_ones() -> None:
    room = peer_frame_room()
    large, small = Caller(room, "a"), Caller(room, "b")
    await large.read(LARGE)
    with trio.fail_after(0.001):
        await small.read(HEARTBEAT[:9])
        await small.read(HEARTBEAT[9:])
    assert small.frames == 1
    assert room.used_bytes == FRAME_BYTES_MAX + PREFIX_BYTES


async def test_room_is_given_back_when_a_frame_is_whole(nursery: trio.Nursery) -> None:
    room = peer_frame_room()
    first, second = Caller(room, "a"), Caller(room, "b")
    payload = memoryview(bytes(20 << 20))
    frame = encode_frame(encode_head(Kind.HEARTBEAT, 1, 1, 1, (1, 1)), [payload])
    await first.read(frame[:CHUNK])
    assert room.used_bytes == len(frame)
    nursery.start_soon(second.read, frame[:CHUNK])
    await trio.sleep(STALLED_S / 2)
    assert room.is_wanted
    await first.read(frame[CHUNK:])
    assert first.frames == 1
    await trio.testing.wait_all_tasks_blocked()
    assert not room.is_wanted
    assert room.used_bytes == len(frame)
    second.memory.leave()
    assert (room.used_bytes, room.given_way) == (0, 0)


async def test_frames_of_members_count_against_the_budget() -> None:
    """New requests are refused before members' frames go beyond what the daemon may hold."""

    class Peer:
        peer_address = ("c", 1)
        unsent_bytes = 0

        def unread_for_s(self, now_s: float) -> float:
            return 0.0

        def give_way(self, reason: str) -> None:
            raise AssertionError(reason)

    room, member, client = peer_frame_room(), None, Peer()
    budget = MemoryBudget(BudgetLimits(total_bytes=FRAME_BYTES_MAX + CHUNK), peer_frames=room)
    budget.count(client, 0, CHUNK - PREFIX_BYTES, 0.0)
    assert not budget.is_met
    member = Caller(room, "a")
    await member.read(LARGE)
    budget.count(client, CHUNK - PREFIX_BYTES, CHUNK - PREFIX_BYTES, 0.0)
    assert budget.is_met
    member.memory.leave()
    budget.count(client, CHUNK - PREFIX_BYTES, 0, 0.0)
    assert not budget.is_met
