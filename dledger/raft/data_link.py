"""The data link to one member: entries, replies, copies for repair; never votes or heartbeats.

A frame leaves in the turn that has it while the stream takes it: a wake-up of a task, and a turn of
its own for each frame, would cost more than the frame.
"""

from __future__ import annotations

from dledger.raft.introduction import frame_of
from dledger.raft.member import RaftNode
from remoting.seams import Stream, send_at_once


class DataLink:
    """Sends what waits for one member, in order; what its stream does not take waits for `run`."""

    def __init__(self, node: RaftNode, stream: Stream, peer: str, epoch: int) -> None:
        self._node = node
        self._stream = stream
        self._state = node.peers[peer]
        self._epoch = epoch
        self._sequence = 0
        self._send_now = send_at_once(stream)
        # What the stream did not take at once.
        self._rest = memoryview(b"")

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError: The connection ended.
            FlushFailedError: The disk failed: stop the node.
        """
        state = self._state
        while True:
            if self._rest:
                rest, self._rest = self._rest, memoryview(b"")
                await self._stream.send_all(rest)
            while (frame := self._next_frame()) is not None:
                await self._stream.send_all(frame)
            if self._send_now is not None:
                state.push = self._push
            try:
                await state.data_wake.wait()
            finally:
                state.push = None

    def _next_frame(self) -> bytes | None:
        replies = self._state.replies
        if replies:
            outgoing, views = replies.popleft(), None
        else:
            found = self._node.next_frame(self._state.name)
            if found is None:
                return None
            outgoing, views = found
        self._sequence += 1
        return frame_of(outgoing, self._epoch, self._sequence, views)

    def _push(self) -> None:
        """Send what there is; the task, which waits, goes on with what the stream does not take."""
        send, state = self._send_now, self._state
        assert send is not None
        while (frame := self._next_frame()) is not None:
            try:
                sent = send(frame)
            except OSError:
                sent = 0  # the task meets the same error and ends the connection
            if sent < len(frame):
                self._rest = memoryview(frame)[sent:]
                state.push = None
                state.data_wake.set()
                return
