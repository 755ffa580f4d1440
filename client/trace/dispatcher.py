"""Sends what message trace has to say, many records at a time, beside the messages themselves.

What is said waits in a bounded queue. A full one, or a trace topic that takes nothing, costs
records of the trace and never anything else: nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from client.core.client_instance import ManagedScope
from client.core.message import Message
from client.trace.data import TraceContext, encode, keys_of
from commitlog.errors import MQError
from remoting.log import get_logger
from remoting.seams import Clock

if TYPE_CHECKING:
    from client.producer.producer import Producer

TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
TRACE_PRODUCER_GROUP: Final = "_INNER_TRACE_PRODUCER"
WAITING_TRACES_MAX: Final = 2048
"""RocketMQ's. Steps that wait to be sent; further ones are dropped and counted, as a message must
not wait for its trace."""
TRACE_BATCH_MAX: Final = 100
"""RocketMQ's. Steps in one trace message."""
TRACE_BODY_BYTES: Final = 118_000
"""RocketMQ's: a trace message is sent when its body has grown to this."""
TRACE_KEYS_BYTES: Final = 16_384
"""Of the keys of a trace message, which have to fit into its properties (32,767 bytes)."""
TRACE_LINGER_S: Final = 0.1
"""How long the first step waits for company."""
TRACE_SEND_TIMEOUT_S: Final = 5.0
"""RocketMQ's. Of one trace message; meanwhile others wait, or are dropped."""
TRACE_FLUSH_S: Final = 0.5
"""RocketMQ's. How long what still waits at the end may take; the rest is dropped."""

_log = get_logger(__name__)


@dataclass(slots=True)
class TraceCounters:
    """What became of steps so far.

    Attributes:
        sent: Steps in trace messages that are stored.
        dropped: Steps that met a full queue, or waited when all was over.
        failed: Steps in trace messages that are not known to be stored.
    """

    sent: int = 0
    dropped: int = 0
    failed: int = 0


class TraceDispatcher(ManagedScope):
    """Takes steps from hooks and sends them. Open it with ``async with``.

    Attributes:
        topic: Where to.
        counters: See `TraceCounters`.
    """

    def __init__(self, producer: Producer, clock: Clock, topic: str = TRACE_TOPIC) -> None:
        """Prepare.

        Args:
            producer: Not yet open, and without hooks: it is opened and closed with this.
        """
        self.topic = topic
        self.counters = TraceCounters()
        self._producer = producer
        self._clock = clock
        self._waiting: deque[TraceContext] = deque()
        self._arrived = trio.Event()
        self._idle = trio.Event()
        self._is_dropping = False

    def append(self, context: TraceContext) -> bool:
        """Put a step in line; tell whether there was room. Never blocks."""
        if len(self._waiting) >= WAITING_TRACES_MAX:
            self.counters.dropped += 1
            if not self._is_dropping:
                self._is_dropping = True
                _log.warning("trace_dropped", topic=self.topic, waiting=WAITING_TRACES_MAX)
            return False
        self._waiting.append(context)
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._arrived.set()
        return True

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        async with self._producer, trio.open_nursery() as nursery:
            nursery.start_soon(self._run)
            try:
                yield
            finally:
                # A cancellation does not wait: then what is left is lost.
                with trio.move_on_after(TRACE_FLUSH_S):
                    await self._flush()
                nursery.cancel_scope.cancel()
                self.counters.dropped += len(self._waiting)
                self._waiting.clear()

    async def _flush(self) -> None:
        if self._waiting or self._arrived.is_set():
            await self._idle.wait()

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._clock.sleep(TRACE_LINGER_S)
            while self._waiting:
                await self._send(self._take())
            self._arrived = trio.Event()
            self._is_dropping = False
            self._idle.set()

    def _take(self) -> tuple[Message, int]:
        """Return the next trace message and how many steps are in it."""
        body: list[str] = []
        keys: dict[str, None] = {}
        body_bytes = key_bytes = 0
        while self._waiting and len(body) < TRACE_BATCH_MAX:
            context = self._waiting[0]
            text, more = encode(context), keys_of(context)
            body_bytes += len(text.encode())
            key_bytes += sum(len(key.encode()) + 1 for key in more)
            if body and (body_bytes > TRACE_BODY_BYTES or key_bytes > TRACE_KEYS_BYTES):
                break
            self._waiting.popleft()
            body.append(text)
            keys.update(dict.fromkeys(more))
        return Message(self.topic, "".join(body).encode(), keys=tuple(keys)), len(body)

    async def _send(self, taken: tuple[Message, int]) -> None:
        message, steps = taken
        try:
            await self._producer.send(message, timeout_s=TRACE_SEND_TIMEOUT_S)
        except MQError as error:
            self.counters.failed += steps
            _log.info("trace_not_sent", topic=self.topic, steps=steps, error=str(error))
        else:
            self.counters.sent += steps
