"""The messages of one queue between broker and listener. Pure state.

::

    pulled ──put──► waiting ──take──► in hand ──acknowledge──► gone
                       ▲                 │
                       └────put_back─────┘

Messages may be acknowledged in any order; what may be committed is the smallest offset that is
not acknowledged. So a crash repeats messages, and skips none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

MAX_CACHED_MESSAGES: Final = 1000
"""RocketMQ's pullThresholdForQueue: a listener that is slow must not fill the memory."""
MAX_CACHED_BYTES: Final = 100 * 1024 * 1024
"""RocketMQ's pullThresholdSizeForQueue."""
MAX_OFFSET_SPAN: Final = 2000
"""RocketMQ's consumeConcurrentlyMaxSpan: one stuck message holds the commit back, and a crash
would repeat all that came after it."""


class Queued(Protocol):
    """What a process queue needs to know of a message."""

    @property
    def queue_offset(self) -> int:
        """Place in its queue."""

    @property
    def size(self) -> int:
        """Bytes of it."""


M = TypeVar("M", bound=Queued)


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Above any of these a queue is not pulled.

    Attributes:
        max_messages: Messages that are not acknowledged.
        max_bytes: Their bytes.
        max_offset_span: From the first to the last of them; None: it does not matter.
    """

    max_messages: int = MAX_CACHED_MESSAGES
    max_bytes: int = MAX_CACHED_BYTES
    max_offset_span: int | None = MAX_OFFSET_SPAN


class ProcessQueue(Generic[M]):
    """What was pulled of one queue and is not dealt with yet.

    Attributes:
        next_offset: Where to pull next.
        cached_bytes: Bytes of the messages that are not acknowledged.
    """

    def __init__(self, next_offset: int) -> None:
        """Begin with nothing, at *next_offset*."""
        self.next_offset = next_offset
        self.cached_bytes = 0
        self._waiting: deque[M] = deque()
        # Offsets in order, acknowledged ones too while an earlier one is not.
        self._order: deque[int] = deque()
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        """Messages that are not acknowledged."""
        return len(self._sizes)

    @property
    def waiting(self) -> int:
        """Messages nobody has taken yet."""
        return len(self._waiting)

    @property
    def in_hand(self) -> int:
        """Messages that were taken and are not acknowledged."""
        return len(self._sizes) - len(self._waiting)

    @property
    def commit_offset(self) -> int:
        """Everything below it is dealt with, or was not wanted."""
        return self._order[0] if self._order else self.next_offset

    @property
    def offset_span(self) -> tuple[int, int] | None:
        """First and last offset that is not dealt with; None when there is none."""
        return (self._order[0], self._order[-1]) if self._order else None

    @property
    def span_in_hand(self) -> tuple[int, int] | None:
        """First and last offset in hand, of a queue that is consumed in order; None: nothing is."""
        in_hand = self.in_hand
        return (self._order[0], self._order[in_hand - 1]) if in_hand else None

    def held_back_by(self, limits: FlowLimits) -> str | None:
        """Return the limit that forbids to pull now, or None."""
        if len(self._sizes) >= limits.max_messages:
            return "max_messages"
        if self.cached_bytes >= limits.max_bytes:
            return "max_bytes"
        span = limits.max_offset_span
        if span is not None and self._order and self.next_offset - 1 - self._order[0] > span:
            return "max_offset_span"
        return None

    def put(self, messages: Iterable[M], next_offset: int) -> None:
        """Take in what a pull at `next_offset` found; go on at the new *next_offset*."""
        for message in messages:
            offset = message.queue_offset
            self._waiting.append(message)
            self._order.append(offset)
            self._sizes[offset] = message.size
            self.cached_bytes += message.size
        self.next_offset = next_offset

    def take(self, most: int) -> list[M]:
        """Return up to *most* messages, in order; they are in hand until they are acknowledged."""
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def put_back(self, messages: list[M]) -> None:
        """Let messages in hand be taken again, before all others."""
        self._waiting.extendleft(reversed(messages))

    def acknowledge(self, messages: Iterable[M]) -> None:
        """Messages in hand are dealt with; those that were acknowledged before are passed over."""
        for message in messages:
            self.cached_bytes -= self._sizes.pop(message.queue_offset, 0)
        order, sizes = self._order, self._sizes
        while order and order[0] not in sizes:
            order.popleft()
