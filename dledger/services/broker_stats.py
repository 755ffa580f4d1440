"""How many messages a topic took and a group got, over the last minute, hour and day.

Counters only grow; three rings keep copies of them, so a span costs two copies and a subtraction,
and sending costs nothing: what a topic took is read from where its queues end.

Spec: docs/internals/protocol/remoting.md, section 10.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dledger.state.names import STATE_TOPIC

TOPIC_PUT_NUMS = "TOPIC_PUT_NUMS"
"""Keyed by topic."""
GROUP_GET_NUMS = "GROUP_GET_NUMS"
"""Keyed by ``topic@group``."""
GROUP_GET_SIZE = "GROUP_GET_SIZE"
"""Bytes, keyed by ``topic@group``."""
BROKER_PUT_NUMS = "BROKER_PUT_NUMS"
BROKER_GET_NUMS = "BROKER_GET_NUMS"
"""Of this node, all topics together; keyed by the cluster's name, whatever it is."""

MAX_PAIRS = 5_000
"""Pairs of topic and group that are counted; later ones are not. 39 copies of these counters are
about 20 MB."""

EVERY_S = (10, 600, 3600)
COPIES = (7, 7, 25)
"""RocketMQ's: a minute in steps of ten seconds, an hour in steps of ten minutes, a day in hours."""


@dataclass(frozen=True, slots=True)
class Span:
    """How many messages there were between two copies."""

    count: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Messages a second."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Copy:
    at: float
    counts: Mapping[str, Mapping[str, int]]


@dataclass(slots=True)
class _Ring:
    every_s: int
    copies: deque[_Copy]
    next_s: float = 0.0


class BrokerStats:
    """What one node took and gave since it started.

    Args:
        ends: Where the queues of each topic end, summed up.
    """

    def __init__(self, ends: Callable[[], Mapping[str, int]]) -> None:
        self._ends = ends
        self._got: dict[tuple[str, str], int] = {}
        self._got_bytes: dict[tuple[str, str], int] = {}
        self._rings = [
            _Ring(every_s, deque(maxlen=copies))
            for every_s, copies in zip(EVERY_S, COPIES, strict=True)
        ]

    def count_got(self, topic: str, group: str, messages: int, size_bytes: int = 0) -> None:
        """Count messages that a group was given."""
        pair = (topic, group)
        before = self._got.get(pair)
        if before is not None:
            self._got[pair] = before + messages
            self._got_bytes[pair] += size_bytes
        elif len(self._got) < MAX_PAIRS:
            self._got[pair] = messages
            self._got_bytes[pair] = size_bytes

    def copy_counters(self, now: float) -> None:
        """Keep copies of the counters where it is time; to be called every second or so."""
        due = [ring for ring in self._rings if now >= ring.next_s]
        if not due:
            return
        copy = _Copy(now, self._counts())
        for ring in due:
            ring.copies.append(copy)
            ring.next_s = now + ring.every_s

    def spans(self, name: str, key: str, now: float) -> tuple[Span, ...] | None:
        """Return the last minute, hour and day; None when nothing was ever counted."""
        counts = self._counts()
        if name in (BROKER_PUT_NUMS, BROKER_GET_NUMS):
            key = ""
        count = counts.get(name, {}).get(key)
        if count is None:
            return None
        spans = []
        for ring in self._rings:
            then = ring.copies[0] if ring.copies else _Copy(now, counts)
            before = then.counts[name].get(key, 0)
            # A topic that was made again ends before where it ended.
            spans.append(Span(max(0, count - before), now - then.at))
        return tuple(spans)

    def _counts(self) -> dict[str, dict[str, int]]:
        put = dict(self._ends())
        got = {f"{topic}@{group}": count for (topic, group), count in self._got.items()}
        sizes = {f"{topic}@{group}": size for (topic, group), size in self._got_bytes.items()}
        return {
            TOPIC_PUT_NUMS: put,
            GROUP_GET_NUMS: got,
            GROUP_GET_SIZE: sizes,
            BROKER_PUT_NUMS: {"": sum(put.values()) - put.get(STATE_TOPIC, 0)},
            BROKER_GET_NUMS: {"": sum(got.values())},
        }
