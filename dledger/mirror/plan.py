"""What a mirror decides, from what both clusters say. Pure.

::

    pair_brokers ─► Selection ─► topics_to_put ─► judge each queue ─► offsets_to_commit
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, NamedTuple, TypeVar

from msgspec import structs

from dledger.commitlog.errors import ConfigError
from dledger.filters.expiry import EXPIRES_ATTRIBUTE, expires
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from dledger.state.topics import (
    AUTO_CREATE_TOPIC_KEY_TOPIC,
    BENCHMARK_TOPIC,
    DLQ_PREFIX,
    NOT_ALLOWED_SEND_TOPICS,
    RETRY_PREFIX,
)

# ------------------------------------------------------------------------------- what is copied


SYSTEM_PREFIXES: Final = ("RMQ_SYS_", "rmq_sys_")

NEVER_COPIED: Final = NOT_ALLOWED_SEND_TOPICS | {AUTO_CREATE_TOPIC_KEY_TOPIC, BENCHMARK_TOPIC}
"""Topics of the brokers themselves, beside those that a broker names as its own: what waits in them
is what a service of a leader works through, and its copy would be done twice."""

EVERYTHING: Final = "*"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which topics and consumer groups are copied: shell patterns, several with commas."""

    topics: str = EVERYTHING
    groups: str = EVERYTHING

    def has_group(self, name: str) -> bool:
        """Whether the consumer group *name* is copied."""
        return _matches(name, self.groups)

    def has_topic(self, name: str) -> bool:
        """Whether the topic *name* is copied; those of a group for retries go with the group."""
        if name in NEVER_COPIED or name.startswith(SYSTEM_PREFIXES):
            return False
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            if name.startswith(prefix):
                return self.has_group(name.removeprefix(prefix))
        return _matches(name, self.topics)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split(","))


def pair_brokers(
    source: Collection[str], target: Collection[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return broker group of the source → the one of the target that its queues are copied to.

    Those that *given* names first; then those of one name; then the last one of each side.

    Raises:
        ConfigError: A group has no counterpart, or two have the same, or the source has none.
    """
    if not source:
        raise ConfigError("the source has no broker group: none is registered at its NameServers")
    unknown = [f"{name} at the source" for name in given if name not in source]
    unknown += [f"{name} at the target" for name in given.values() if name not in target]
    if unknown:
        raise ConfigError(
            f"there is no broker group {', nor '.join(unknown)}: the source has"
            f" {_names(source)}, the target has {_names(target)}"
        )
    pairs = dict(given)
    free = sorted(set(target) - set(pairs.values()))
    for name in sorted(set(source) - set(pairs)):
        if name in free:
            pairs[name] = name
            free.remove(name)
    left = sorted(set(source) - set(pairs))
    if len(left) == 1 and len(free) == 1:
        pairs[left[0]] = free[0]
        left = []
    if left:
        raise ConfigError(
            f"it is not given where the broker groups {_names(left)} are copied to: the target has"
            f" {_names(target)}; give --pair SOURCE=TARGET for each"
        )
    if len(set(pairs.values())) < len(pairs):
        raise ConfigError("two broker groups cannot be copied to one: their offsets would mix")
    return pairs


def _names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


ConfigT = TypeVar("ConfigT")


def configs_to_put(source: Mapping[str, ConfigT], target: Mapping[str, ConfigT]) -> list[ConfigT]:
    """Return what the target does not have as the source has it, by name."""
    return [config for name, config in sorted(source.items()) if target.get(name) != config]


def topics_to_put(
    source: Mapping[str, TopicConfig], target: Mapping[str, TopicConfig]
) -> list[TopicConfig]:
    """Return the topics that the target does not have as the source has them.

    A broker does not take from a topic that it has messages which expire: that is no difference.
    """
    marked = {name for name, config in target.items() if expires(config.attributes)}
    wanted = {
        name: structs.replace(config, attributes={**config.attributes, EXPIRES_ATTRIBUTE: "true"})
        if name in marked
        else config
        for name, config in source.items()
    }
    return configs_to_put(wanted, target)


def groups_to_put(
    source: Mapping[str, SubscriptionGroupConfig], target: Mapping[str, SubscriptionGroupConfig]
) -> list[SubscriptionGroupConfig]:
    """Return the consumer groups that the target does not have as the source has them.

    What RocketMQ's brokers note of the subscriptions of a group is not kept by ours.
    """
    wanted = {
        name: structs.replace(config, subscription_data_set=None) for name, config in source.items()
    }
    return configs_to_put(wanted, target)


# ------------------------------------------------------------------------------- where it stands


class Bounds(NamedTuple):
    """First offset that a queue holds, and one past the last."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Level:
    """The target has all that the source has."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The messages from *first* on and before *end* are copied; the target ends at *first*."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The target's queue, which never had a message, begins at *first*; then as `Copy`."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing is copied into this queue; *why* is a sentence that names what to do."""

    why: str


Step = Level | Copy | Begin | Stopped

AGAIN: Final = (
    "to have this queue again, delete the topic at the target and let the mirror copy it again"
)


def judge(source: Bounds, target: Bounds) -> Step:
    """Return what is to be done with one queue. The target was asked first."""
    if target.end > source.end:
        return Stopped(
            f"the target has offsets {source.end} to {target.end - 1}, which the source does not"
            " have: a producer sends to the target, or the topic was made again at the source."
            f" Nothing is copied: let nothing but the mirror write to the target; {AGAIN}"
        )
    if target.end < source.begin:
        if target.end == 0:
            return Begin(source.begin, source.end)
        return Stopped(
            f"the source does not keep offsets {target.end} to {source.begin - 1} any more, and"
            " the target does not have them: retention at the source was quicker than the mirror."
            f" Nothing is copied: {AGAIN}; it will begin at offset {source.begin}"
        )
    if target.end == source.end:
        return Level()
    return Copy(target.end, source.end)


def differs_at(offset: int) -> Stopped:
    """Return why a queue stops whose newest message at the target is another one there."""
    return Stopped(
        f"the message at offset {offset} is another one at the target than at the source: a"
        " producer sent to the target, or the topic was made again at the source. Nothing is"
        f" copied: let nothing but the mirror write to the target; {AGAIN}"
    )


def missing_at(offset: int, side: str = "source") -> Stopped:
    """Return why a queue stops of which a cluster returns no message at an offset it holds."""
    return Stopped(
        f"the {side} returns no message at offset {offset}, which it holds. Nothing is copied from"
        " there on: see its log; its members repair a damaged message by themselves, and the"
        " mirror then goes on"
    )


def follows(first: int, offsets: Iterable[int]) -> int:
    """Return how many of *offsets* follow each other from *first* on."""
    count = 0
    for offset in offsets:
        if offset != first + count:
            break
        count += 1
    return count


# ------------------------------------------------------------------------------- committed offsets


QueueKey = tuple[str, int]
"""Topic and queue id, in one broker group."""

Committed = Mapping[tuple[str, str], Mapping[int, int]]
"""(Consumer group, topic) → queue id → committed offset."""


class Commit(NamedTuple):
    """An offset to be committed at the target."""

    group: str
    topic: str
    queue_id: int
    offset: int


def offsets_to_commit(
    source: Committed, target: Committed, ends: Mapping[QueueKey, int], groups: Selection
) -> list[Commit]:
    """Return the offsets that the target lacks, each at or before the end of its queue there.

    An offset never moves back: consumers may have begun at the target, and one that was reset at
    the source is reset at the target by hand.

    Args:
        ends: One past the last message at the target, of queues that are copied.
    """
    found = []
    for (group, topic), offsets in sorted(source.items()):
        if not groups.has_group(group):
            continue
        there = target.get((group, topic), {})
        for queue_id, offset in sorted(offsets.items()):
            end = ends.get((topic, queue_id))
            if end is not None and min(offset, end) > there.get(queue_id, -1):
                found.append(Commit(group, topic, queue_id, min(offset, end)))
    return found
