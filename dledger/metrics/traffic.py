"""Messages and bytes that came in by topic, and went out by topic and consumer group.

Counted only while they may be asked for. What came in is counted by the leader that applies
it, so that the sum over the members of a group is what the group took; what went out by the broker
that answered the pull.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from dledger.state.apply import QueueUnits

MAX_COUNTERS: Final = 5_000
"""Topics, and pairs of topic and group, that are counted: as many series as a page shows. They
take about 2 MB."""

MAX_KNOWN_LEFT_OUT: Final = 5_000
"""Keys remembered only to say how many are not counted; at this number it means *at least*."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class Count:
    """What was counted since the start."""

    messages: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Counters(Generic[KeyT]):
    """Counts by key, for a limited number of keys; they are the first ones, until these are
    forgotten."""

    counts: dict[KeyT, Count] = field(default_factory=dict)
    left_out: dict[KeyT, None] = field(default_factory=dict)

    def add(self, key: KeyT, messages: int, size_bytes: int) -> None:
        """Count messages of *key*, unless there are too many keys already."""
        count = self.counts.get(key)
        if count is None:
            if len(self.counts) >= MAX_COUNTERS:
                if len(self.left_out) < MAX_KNOWN_LEFT_OUT:
                    self.left_out[key] = None
                return
            count = self.counts[key] = Count()
        count.messages += messages
        count.size_bytes += size_bytes

    def keep(self, wanted: Callable[[KeyT], bool]) -> None:
        """Forget the keys that are not *wanted*."""
        for key in [key for key in self.counts if not wanted(key)]:
            del self.counts[key]
        for key in [key for key in self.left_out if not wanted(key)]:
            del self.left_out[key]


class Traffic:
    """What one node took and gave since it started.

    Args:
        leads: Whether this node leads now.

    Attributes:
        taken: By topic.
        given: By topic and consumer group.
    """

    def __init__(self, leads: Callable[[], bool]) -> None:
        self._leads = leads
        self.taken: Counters[str] = Counters()
        self.given: Counters[tuple[str, str]] = Counters()

    def on_units(self, units: Sequence[QueueUnits]) -> None:
        """Count applied messages; to be put into the group's `on_units`."""
        if self._leads():
            for item in units:
                self.taken.add(item.topic, len(item.units), int(item.units["size"].sum()))

    def count_given(self, topic: str, group: str, messages: int, size_bytes: int) -> None:
        """Count an answered pull."""
        self.given.add((topic, group), messages, size_bytes)

    def keep(self, has_topic: Callable[[str], bool], has_group: Callable[[str], bool]) -> None:
        """Forget what was deleted, so that others can be counted in its place.

        Groups without a configuration are forgotten only when there are too many: a consumer that
        only pulls need not have one.
        """
        self.taken.keep(has_topic)
        is_full = bool(self.given.left_out)
        self.given.keep(lambda pair: has_topic(pair[0]) and (not is_full or has_group(pair[1])))
