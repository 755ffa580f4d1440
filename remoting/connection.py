"""One connection, the same on both sides: requests go both ways over it.

One task reads, one writes what the socket did not take at once, and each handler that must wait has
its own. The reader handles every whole frame of a received chunk before it yields, so answers of
one chunk leave together.

::

    socket ─► reader ─► decoder ─┬─ response ─► call table ─► the caller
                                 └─ request ──► limiter ─► handler ─┐
    socket ◄───────── write buffer ◄────── reply ◄─────────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import trio
from typing_extensions import Buffer

from dledger.commitlog.errors import RemoteProtocolError
from dledger.remoting.addresses import join_address
from dledger.remoting.calls import Call, CallTable
from dledger.remoting.connection_limits import (
    DEFAULT_LIMITS,
    ConnectionEnds,
    ConnectionLimits,
    MemoryShare,
    Silence,
    Turn,
)
from dledger.remoting.errors import ConnectionLostError, TooManyInFlightError
from dledger.remoting.handling import (
    Handling,
    OnAnswer,
    OnResponse,
    OpenRequest,
    OpenRequests,
    Processors,
)
from dledger.remoting.memory_budget import NOTED_BYTES, MemoryBudget
from dledger.remoting.protocol.command import FLAG_ONEWAY, FLAG_RESPONSE, RemotingCommand
from dledger.remoting.protocol.frame import FrameDecoder, encode_command_parts
from dledger.remoting.protocol.outcome import GO_AWAY_FIELD, Condition
from dledger.remoting.seams import Stream, reset_at_close
from dledger.remoting.write_buffer import BROKEN, WriteBuffer

RECEIVE_BYTES: Final = 64 * 1024
# A large frame is taken in larger pieces.
MAX_RECEIVE_BYTES: Final = 1024 * 1024
# What is still to be sent when the peer has ended its side gets this long.
FLUSH_AT_END_S: Final = 1.0
# Requests before garbage get this long: storing takes less, only a wait for messages may take more.
ANSWERS_AT_END_S: Final = 60.0
# A client that sent a heartbeat keeps its place for so long (RocketMQ's channel expiry).
HEARTBEAT_COUNTS_S: Final = 120.0
# How long a side that shuts down refuses what a peer in the middle of its work goes on sending.
GOODBYE_S: Final = 1.0


class Connection:
    """A connection that is served by `run`.

    Attributes:
        attributes: For the code that serves the connection, e.g. the client id it announced.
        on_close: Called once, in order, when the connection has ended; must not raise.
        is_sent_away: The peer shuts down: no more requests to it; those that wait are answered.
        is_closed: It has ended or is ending; nothing can be sent any more.
        close_reason: Why the connection ended; empty while it is open.
        handling: Its `processors` answer requests; they may be replaced before `run`.
    """

    def __init__(
        self,
        stream: Stream,
        processors: Processors[Connection],
        *,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        after_batch: Callable[[], None] | None = None,
        sign: Callable[[RemotingCommand], None] | None = None,
        budget: MemoryBudget | None = None,
        always_taken: frozenset[int] = frozenset(),
        on_proven: Callable[[Connection], None] | None = None,
        ends: ConnectionEnds | None = None,
        turn: Turn | None = None,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """Wrap *stream*, which the connection owns from now on.

        Args:
            sign: Called with every request of ours before it is sent.
            after_batch: Called when every whole frame of one received chunk has been given to its
                handler, before anything else runs.
            budget: Memory that all connections of a daemon share; None: limits of its own only.
            always_taken: Codes of requests that are taken also when the budget is met.
            on_proven: Called once, when the first valid request has come.
            on_answer: Called with each answer to the peer: request code, response code, seconds.
        """
        self.peer_address = stream.peer_address
        self.local_address = stream.local_address
        self.attributes: dict[str, Any] = {}
        self.on_close: list[Callable[[Connection], None]] = []
        self._stream = stream
        self._limits = limits
        self._after_batch = after_batch
        self._sign = sign
        self._decoder = FrameDecoder(limits.max_frame_bytes)
        self._always_taken = always_taken
        self._on_proven = on_proven
        self._ends = ends
        self._turn = turn
        self._share = MemoryShare(budget, limits, stream.peer_address[0], self._give_way_to_a_frame)
        self._heartbeat_until_s = -math.inf
        self._nursery: trio.Nursery | None = None
        self.is_closed = False
        self.is_sent_away = False
        self.close_reason = ""
        self._silence = Silence(limits)

        self._out = WriteBuffer(
            stream, limits.write_timeout_s, sent=self._note_sent, broken=self.close
        )
        self._drained = trio.lowlevel.ParkingLot()

        self._calls = CallTable()
        self._open = OpenRequests(limits)
        self.handling = Handling(
            self, processors, self._open, self._send, self._note_finished, on_answer
        )

    # ------------------------------------------------------------------------------ asking

    @property
    def in_flight(self) -> int:
        """How many requests of the peer are not answered yet."""
        return len(self._open)

    @property
    def pending_calls(self) -> int:
        """How many requests of ours wait for an answer."""
        return len(self._calls)

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the write buffer, what is being sent just now included."""
        return self._out.unsent_bytes

    @property
    def is_proven(self) -> bool:
        """Whether a whole, valid request has come."""
        return self._share.ticket.is_proven

    @property
    def last_activity_s(self) -> float:
        """When bytes went over the connection last, on trio's clock."""
        return max(self._silence.last_received_s, self._out.last_sent_s)

    @property
    def silent_for_s(self) -> float:
        """How long nothing has come from the peer."""
        return trio.current_time() - self._silence.last_received_s

    def is_busy(self, now_s: float) -> bool:
        """Tell whether requests are open either way, or a heartbeat counts still."""
        return bool(self._open or self._calls or now_s < self._heartbeat_until_s)

    def note_heartbeat(self) -> None:
        """Mark that a client or a broker is behind this connection: it is not idle."""
        self._heartbeat_until_s = trio.current_time() + HEARTBEAT_COUNTS_S

    def unread_for_s(self, now_s: float) -> float:
        """Return how long the peer has taken nothing of what is being sent."""
        return self._out.unread_for_s(now_s)

    def give_way(self, reason: str) -> None:
        """End the connection because another needs what it holds."""
        self.close(reason)

    def leave_soon(self) -> None:
        """Refuse further requests, and close when what is open has been answered."""
        if self._nursery is not None and not self.handling.is_leaving:
            self.handling.is_leaving = True
            self._nursery.start_soon(self.drain)

    async def invoke(
        self, command: RemotingCommand, timeout_s: float, *, is_signed: bool = True
    ) -> RemotingCommand:
        """Send a request and return its answer, whatever its code.

        Args:
            command: Gets its opaque here; its body must not change until this returns.
        Raises:
            LocalProtocolError: The request cannot be written; nothing was sent.
            TooManyInFlightError: A limit of this side; nothing was sent.
            ConnectionLostError: The connection ended; `sent`: whether the request had left.
            RequestTimedOutError: No answer in time; a late one is ignored.
        Cancellation: The request stays sent, its answer is ignored.
        """
        arrived = trio.Event()
        call = self.start(command, lambda _call: arrived.set(), is_signed=is_signed)
        try:
            with trio.move_on_after(timeout_s):
                await arrived.wait()
        finally:
            self.forget(call)
        return call.result(join_address(*self.peer_address), timeout_s)

    def start(
        self, command: RemotingCommand, ended: Callable[[Call], None], *, is_signed: bool = True
    ) -> Call:
        """Send a request without waiting for its answer. Never blocks.

        Args:
            command: As for `invoke`.
            ended: Called once, with the call, when the answer has come or the connection has
                ended, on the connection's own task; must not raise. Never before this returns.
        Returns:
            To be given to `forget` when its answer does not matter any more.
        Raises:
            LocalProtocolError, TooManyInFlightError: As `invoke`; nothing was sent.
            ConnectionLostError: The connection has ended before; nothing was sent.
        """
        if len(self._calls) >= self._limits.max_pending_calls:
            raise TooManyInFlightError(
                f"{len(self._calls)} calls to {join_address(*self.peer_address)} wait for an answer"
                f"; the limit is max_pending_calls"
            )
        self._refuse_when_full()
        command.opaque = opaque = self._calls.new_opaque()
        command.flag &= ~(FLAG_RESPONSE | FLAG_ONEWAY)
        if self._sign is not None and is_signed:
            self._sign(command)
        call = Call(opaque, command.code, self._out.queued_total, ended)
        self._send(command)
        self._calls.add(call)
        return call

    @property
    def waiting(self) -> frozenset[int]:
        """Opaques of the requests that wait for an answer."""
        return self._calls.waiting()

    def forget(self, call: Call) -> None:
        """Pass over the answer to *call*, whose end is then not reported. Idempotent."""
        if self._calls.forget(call):
            self._leave_if_sent_away()

    def invoke_oneway(self, command: RemotingCommand) -> None:
        """Send a one-way request. Never blocks.

        Raises:
            LocalProtocolError: The request cannot be written; nothing was sent.
            TooManyInFlightError: The write buffer is full; nothing was sent.
            ConnectionLostError: The connection has ended; nothing was sent.
        """
        self._refuse_when_full()
        command.opaque = self._calls.new_opaque()
        command.flag = command.flag & ~FLAG_RESPONSE | FLAG_ONEWAY
        if self._sign is not None:
            self._sign(command)
        self._send(command)

    def _refuse_when_full(self) -> None:
        if self.is_closed:
            raise ConnectionLostError(
                f"connection to {join_address(*self.peer_address)} has ended ({self.close_reason})",
                sent=False,
            )
        if self._out.unsent_bytes > self._limits.write_buffer_bytes:
            raise TooManyInFlightError(
                f"{self._out.unsent_bytes} bytes wait to be sent to"
                f" {join_address(*self.peer_address)}; the limit is write_buffer_bytes"
            )

    # ------------------------------------------------------------------------------ answering

    def when_answered(self, asked: RemotingCommand, on_response: OnResponse) -> None:
        """Call *on_response* with the answer that the handler of *asked* gives, once.

        Also where the connection has ended meanwhile, or the request was one-way. Not at all where
        the handler never answers.
        """
        self.handling.when_answered[id(asked)] = (asked, on_response)

    def reply(self, asked: RemotingCommand, response: RemotingCommand) -> bool:
        """Answer a request whose handler returned DEFERRED. Never blocks.

        *response* gets the opaque and the header encoding of *asked*; its body must not change
        until it has been sent. False: it will not be read, since the connection has ended, or the
        request was one-way or has been answered already.
        """
        return self.handling.reply(asked, response)

    def _note_finished(self, request: OpenRequest) -> None:
        if request.size_bytes >= NOTED_BYTES:
            self._count()
        if self.handling.is_leaving:
            self._drained.unpark_all()

    # ------------------------------------------------------------------------------ serving

    async def run(self) -> None:
        """Serve the connection until it ends, from either side.

        Cancellation: Closes the connection; calls of ours end with ConnectionLostError.
        Raises:
            InvariantBroken: From a handler; everything else a handler raises becomes its answer.
        """
        self._silence.last_received_s = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = self.handling.nursery = nursery
                if self.is_closed:
                    return
                nursery.start_soon(self._write)
                await self._read_loop()
                nursery.cancel_scope.cancel()
        finally:
            self._end()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FLUSH_AT_END_S):
                await self._stream.aclose()

    def close(self, reason: str) -> None:
        """End the connection now; what is unsent is lost. Idempotent, returns at once."""
        if not self.is_closed:
            self.is_closed = True
            self.close_reason = reason
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def reset(self, reason: str) -> None:
        """Do what `close` does, and have the peer see a reset instead of an orderly end."""
        reset_at_close(self._stream)
        self.close(reason)

    async def drain(self) -> None:
        """Refuse new requests, let open ones be answered and sent, then close.

        A peer that has just asked something gets `GOODBYE_S` to hear of it and to close first.

        Cancellation: Leaves the connection open and draining.
        """
        self.handling.is_leaving = True
        while not self.is_closed and (self._open or self._out.unsent_bytes):
            await self._drained.park()
        if trio.current_time() - self.handling.last_request_s < GOODBYE_S:
            # What the peer has sent meanwhile gets a refusal instead of a reset; a peer that
            # knows GO_AWAY_FIELD then closes by itself, when it waits for nothing any more.
            with trio.move_on_after(GOODBYE_S):
                while not self.is_closed:
                    await self._drained.park()
        self.close("drained")

    def _end(self) -> None:
        self.is_closed = True
        self.close_reason = self.close_reason or "closed"
        self._open.end_all()
        self._calls.end_all(self.close_reason, self._out.handed_total)
        self._out.clear()
        # Now, and not when the collector of cycles comes by: it may hold megabytes.
        self._decoder.discard()
        self._count()
        self._share.end(trio.current_time())
        self._drained.unpark_all()
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback(self)

    # ------------------------------------------------------------------------------ reading

    async def _read_loop(self) -> None:
        while not self.is_closed:
            # What arrives does not move the deadline: it is looked at again when it has passed.
            # A scope for each read would cost more than the read.
            with trio.CancelScope(deadline=self._silence_ends_s()) as scope:
                if not await self._read(scope):
                    return None
            if not scope.cancelled_caught:
                return await self._flush_at_end()
            if trio.current_time() >= self._silence_ends_s():  # as the deadline
                return self._note_end(self._silence.reason)
        return None

    def _silence_ends_s(self) -> float:
        return self._silence.ends_s(self._out.last_sent_s)

    async def _read(self, scope: trio.CancelScope) -> bool:
        """Take what comes until the connection ends; tell whether answers are still to go out."""
        decoder = self._decoder
        while not self.is_closed:
            needed = decoder.bytes_needed
            if needed and self._share.needs_space(needed, decoder.pending_bytes):
                await self._wait_for_frame_space(scope, needed)
            size = RECEIVE_BYTES if needed <= RECEIVE_BYTES else min(needed, MAX_RECEIVE_BYTES)
            try:
                data = await self._stream.receive_some(size)
            except BROKEN as error:
                self._note_end(f"broken: {error}")
                return False
            if self._turn is not None and self._turn.is_over:
                await self._turn.wait_for_next()
                if self.is_closed:
                    return False
            now = trio.current_time()
            if not data:
                self._note_end("ended by the peer")
                return True
            self._silence.last_received_s = now
            try:
                has_commands = self._take(data, now)
            except RemoteProtocolError as error:
                self._note_end(f"protocol error: {error}")
                return False
            del data  # thousands of connections wait here: none with its last frame
            if decoder.error is not None:
                self._note_end(f"protocol error: {decoder.error}")
                # What came before the bad bytes was asked for in earnest: it is answered.
                self.handling.is_leaving = True
                scope.deadline = math.inf
                await self._wait_for_answers()
                return True
            self._silence.note_frames(now, has_commands, bool(decoder.pending_bytes))
            if self._out.unsent_bytes > self._limits.write_buffer_bytes:
                scope.deadline = math.inf
                await self._wait_for_space()
                self._silence.read_again(trio.current_time())
                scope.deadline = self._silence_ends_s()
            elif self._silence.is_in_frame:
                scope.deadline = min(scope.deadline, self._silence_ends_s())
        return False

    def _take(self, data: Buffer, now: float) -> bool:
        """Take the commands of one chunk; return whether there were any.

        Raises RemoteProtocolError: the bytes are not frames.
        """
        commands = self._decoder.feed(data)
        if self._share.ticket.held_bytes:
            self._share.note_frame_bytes(len(commands), len(memoryview(data)), now)
        budget = self._share.budget
        take = self.handling.take
        if budget is not None and budget.is_met:
            take = self._take_over_budget
        self._out.is_held = True
        for command in commands:
            if command.flag & FLAG_RESPONSE:
                self._take_response(command)
            else:
                take(command)
        if self._after_batch is not None:
            self._after_batch()
        self._out.release()
        if budget is not None:
            self._count()
            if not self.is_proven and self.handling.last_request_s >= 0:
                self._prove()
        return bool(commands)

    # ------------------------------------------------------------------------------ shares

    async def _wait_for_frame_space(self, scope: trio.CancelScope, needed: int) -> None:
        """Read on in a large frame only when there is memory for all of it."""
        granted = self._share.ask_for_space(needed, self._decoder.pending_bytes)
        if granted is None:
            return
        scope.deadline = math.inf
        await self._share.wait_for_space(granted)
        self._silence.read_again(trio.current_time())
        scope.deadline = self._silence_ends_s()

    def _give_way_to_a_frame(self) -> None:
        self.give_way("its unfinished frame holds memory that others need")

    def _count(self) -> None:
        """Count what this connection holds: once per chunk, never per message."""
        self._share.count(self, self._open.size_bytes + self._out.unsent_bytes)

    def _prove(self) -> None:
        self._share.ticket.is_proven = True
        if self._on_proven is not None:
            self._on_proven(self)

    def _take_over_budget(self, asked: RemotingCommand) -> None:
        if asked.code in self._always_taken:
            return self.handling.take(asked)
        self._share.note_refused()
        return self.handling.refuse(
            asked,
            Condition.BUSY,
            "[OVERLOAD]the memory for requests and answers is used up, nothing was stored; try"
            " again later, or raise server.memory_budget_bytes",
        )

    # ------------------------------------------------------------------------------ ending

    def _note_end(self, reason: str) -> None:
        if not self.close_reason:
            self.close_reason = reason
        ends = ConnectionEnds() if self._ends is None else self._ends
        ends.note(join_address(*self.peer_address), reason, trio.current_time())

    async def _wait_for_space(self) -> None:
        while self._out.unsent_bytes > self._limits.write_buffer_bytes // 2 and not self.is_closed:
            await self._drained.park()

    async def _wait_for_answers(self) -> None:
        with trio.move_on_after(ANSWERS_AT_END_S):
            while not self.is_closed and self._open:
                await self._drained.park()

    async def _flush_at_end(self) -> None:
        """Send the answers, when draining those to come too, to a peer that only sends no more."""
        handling = self.handling
        with trio.move_on_after(FLUSH_AT_END_S):
            while not self.is_closed and (
                self._out.unsent_bytes or (handling.is_leaving and self._open)
            ):
                await self._drained.park()

    def _take_response(self, response: RemotingCommand) -> None:
        self._calls.take(response)
        if GO_AWAY_FIELD in response.ext:
            self.is_sent_away = True
        self._leave_if_sent_away()

    def _leave_if_sent_away(self) -> None:
        if self.is_sent_away and not self._calls:
            self.close("the peer shuts down")

    # ------------------------------------------------------------------------------ writing

    def _send(self, command: RemotingCommand) -> None:
        head, body = encode_command_parts(command, self._limits.max_frame_bytes)
        if self.is_closed:
            return
        self._out.put(head, body)
        if self._out.unsent_bytes > self._share.look_at_bytes:
            self._count()
            if self._out.unsent_bytes > self._limits.max_write_buffer_bytes:
                self.close("the peer asks for more than it reads")

    def _note_sent(self) -> None:
        if self._drained and self._out.unsent_bytes <= self._limits.write_buffer_bytes // 2:
            self._drained.unpark_all()
        self._count()

    async def _write(self) -> None:
        try:
            await self._out.run()
        except BROKEN as error:
            return self.close(f"broken: {error}")
        self._note_end("the peer does not read")
        return self.close("the peer does not read")
