"""How fast a consumer pulls and consumes, topic by topic: what an operator is told when asked."""

from __future__ import annotations

from collections import deque
from typing import Final

from client.core.route import MessageQueue
from remoting.protocol.bodies import ConsumeStatus
from remoting.seams import Clock

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
    """Counts for one consumer.

    Attributes:
        pulled_at_ms: When each queue was asked for messages last, ms since the epoch.
        consumed_at_ms: When messages of each queue were handed to the listener last.
    """

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
