"""The messages of one queue between broker and listener, and the rates of a topic. Pure state.

::

    pulled ──put──► waiting ──take──► in hand ──acknowledge──► removed
                       ▲                 │
                       └────put_back─────┘

Messages may be acknowledged in any order; the committed offset is the smallest one that is not
acknowledged. So a crash repeats messages and skips none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from dledger.client.core.route import MessageQueue
from dledger.remoting.protocol.bodies import ConsumeStatus
from dledger.remoting.seams import Clock

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
    """What was pulled of one queue and is not dealt with yet."""

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
        """Messages that are not handed out yet."""
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


WINDOW_S: Final = 60.0
"""RocketMQ's: rates and times are those of the last minute."""
FAILED_WINDOW_S: Final = 3600.0
"""RocketMQ's: failures are counted over the last hour."""
SLOTS: Final = 60
"""Parts of a window that are forgotten one after the other."""
MS_PER_S: Final = 1000.0


class RollingSum:
    """Numbers added within the last *window_s*. Pure; times must not go back."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._slot_s = window_s / SLOTS
        # At most SLOTS + 1: one that begins now, and those the window touches still.
        self._slots: deque[tuple[float, list[float]]] = deque()

    def add(self, now_s: float, events: float, total: float = 0.0) -> None:
        """Note that there were *events* that make up *total*."""
        slots = self._slots
        if not slots or now_s - slots[-1][0] >= self._slot_s:
            self._forget(now_s)
            slots.append((now_s, [0.0, 0.0]))
        sums = slots[-1][1]
        sums[0] += events
        sums[1] += total

    def sums(self, now_s: float) -> tuple[float, float]:
        """Return the events within the window that ends now, and their total."""
        self._forget(now_s)
        return sum(sums[0] for _, sums in self._slots), sum(sums[1] for _, sums in self._slots)

    def _forget(self, now_s: float) -> None:
        while self._slots and now_s - self._slots[0][0] >= self._window_s:
            self._slots.popleft()


class _TopicMeter:
    def __init__(self) -> None:
        self.pulled = RollingSum(WINDOW_S)
        self.pulls = RollingSum(WINDOW_S)
        self.calls = RollingSum(WINDOW_S)
        self.succeeded = RollingSum(WINDOW_S)
        self.failed = RollingSum(WINDOW_S)
        self.failed_in_hour = RollingSum(FAILED_WINDOW_S)


class ConsumeMeter:
    """Counts for one consumer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._topics: dict[str, _TopicMeter] = {}
        self.pulled_at_ms: dict[MessageQueue, int] = {}
        self.consumed_at_ms: dict[MessageQueue, int] = {}

    def pulling(self, queue: MessageQueue) -> float:
        """Note that *queue* is asked now; return what `pulled` wants to know of it."""
        self.pulled_at_ms[queue] = self._clock.wall_ms()
        return self._clock.monotonic()

    def pulled(self, topic: str, messages: int, began_s: float) -> None:
        """Note that a pull brought *messages*."""
        now_s = self._clock.monotonic()
        meter = self._topic(topic)
        meter.pulls.add(now_s, 1, (now_s - began_s) * MS_PER_S)
        meter.pulled.add(now_s, messages)

    def consuming(self, queue: MessageQueue) -> float:
        """Note that the listener is called now; return what `consumed` wants to know of it."""
        self.consumed_at_ms[queue] = self._clock.wall_ms()
        return self._clock.monotonic()

    def consumed(self, topic: str, messages: int, began_s: float, *, is_success: bool) -> None:
        """Note that a call with *messages* has ended."""
        now_s = self._clock.monotonic()
        meter = self._topic(topic)
        meter.calls.add(now_s, 1, (now_s - began_s) * MS_PER_S)
        if is_success:
            meter.succeeded.add(now_s, messages)
        else:
            meter.failed.add(now_s, messages)
            meter.failed_in_hour.add(now_s, messages)

    def status(self, topic: str) -> ConsumeStatus:
        """Return how it went with *topic* lately; zeros when nothing happened."""
        now_s = self._clock.monotonic()
        meter = self._topics.get(topic) or _TopicMeter()
        return ConsumeStatus(
            pull_rt=_mean(meter.pulls, now_s),
            pull_tps=meter.pulled.sums(now_s)[0] / WINDOW_S,
            consume_rt=_mean(meter.calls, now_s),
            consume_ok_tps=meter.succeeded.sums(now_s)[0] / WINDOW_S,
            consume_failed_tps=meter.failed.sums(now_s)[0] / WINDOW_S,
            consume_failed_msgs=int(meter.failed_in_hour.sums(now_s)[0]),
        )

    def _topic(self, topic: str) -> _TopicMeter:
        meter = self._topics.get(topic)
        if meter is None:
            meter = self._topics[topic] = _TopicMeter()
        return meter


def _mean(rolling: RollingSum, now_s: float) -> float:
    events, total = rolling.sums(now_s)
    return total / events if events else 0.0
