"""What a query of ``format("dledger")`` asks for: options, and filters of Spark's.

Options are read once and checked before anything is asked of a broker. From them and the filters
follow the offsets that are read, and the tasks that read them (`QueueRange`). Only terms that are
joined by AND come here. A term that is taken is exact; store times are taken and handed back as
well, because brokers find them by whole milliseconds. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal

from dledger.commitlog.errors import ConfigError

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_NUMBER: Final = re.compile("[0-9]{1,9}")
PARTITION_MESSAGES: Final = 100_000
"""Messages of one task: some seconds of reading, so that a lost task costs little."""
READ_TIMEOUT_S: Final = 60.0
"""How long a read goes on asking without a leader: many elections."""
GROUP: Final = "spark-readers"
"""Consumer group that pulls are made as; it commits no offset."""
COLUMNS: Final[Mapping[str, str]] = {
    "topic": "string",
    "broker": "string",
    "queue_id": "int",
    "queue_offset": "bigint",
    "born_timestamp": "timestamp",
    "store_timestamp": "timestamp",
    "message_id": "string",
    "keys": "string",
    "tags": "string",
    "properties": "map<string,string>",
    "body": "binary",
}
"""Every column there is, with its type in SQL."""

KNOWN: Final = frozenset(
    {
        "namesrv", "path", "topic", "startingoffsets", "endingoffsets", "maxmessagespertrigger",
        "maxmessagesperpartition", "columns", "group", "failondataloss", "timeout",
        "checkpointlocation", "filterpushdown",
    }
)  # fmt: skip

Offsets = Mapping[str, int]
"""Queue, as `queue_name` writes it, to offset."""


class OptionError(ConfigError):
    """An option is unknown, missing or has a bad value; nothing was read or sent."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a read or a write was asked for.

    Attributes:
        namesrv: NameServers, ``host:port;host:port``; empty: segment folders are read.
        path: Data folders of one replica of each group, separated by commas.
        topics: What to read; for a write the topic of rows without one. Empty: all in a folder.
        starting, ending: `EARLIEST`, `LATEST` or offsets per queue.
        trigger_messages: Messages of one micro-batch at most; 0: all there are.
        filter_pushdown: Whether terms of a query narrow what is read. Off by default: Spark 4.3
            keeps one plan per `load()`, so two filters on one of them would read each other's.
        fail_on_data_loss: Whether messages that retention took are an error.
        timeout_s: Of one read without an answer.
    """

    namesrv: str = ""
    path: str = ""
    topics: tuple[str, ...] = ()
    starting: str | Offsets = EARLIEST
    ending: str | Offsets = LATEST
    trigger_messages: int = 0
    partition_messages: int = PARTITION_MESSAGES
    columns: tuple[str, ...] = tuple(COLUMNS)
    group: str = GROUP
    filter_pushdown: bool = False
    fail_on_data_loss: bool = True
    timeout_s: float = READ_TIMEOUT_S

    @property
    def schema(self) -> str:
        """The columns as SQL."""
        return ", ".join(f"{name} {COLUMNS[name]}" for name in self.columns)


def parse_options(given: Mapping[str, str], *, use: Literal["read", "write"] = "read") -> Options:
    """Return what *given* asks for; names in any case.

    Raises OptionError: names the option, and what it may be.
    """
    found = {name.lower(): value for name, value in given.items()}
    unknown = sorted(found.keys() - KNOWN)
    if unknown:
        raise OptionError(f"option {unknown[0]} is not known; there are {', '.join(sorted(KNOWN))}")
    namesrv, path = found.get("namesrv", ""), found.get("path", "")
    if bool(namesrv) == bool(path):
        raise OptionError("give either namesrv (host:port;host:port) or path (data folders)")
    topics = tuple(name.strip() for name in found.get("topic", "").split(",") if name.strip())
    if namesrv and not topics and use == "read":
        raise OptionError("option topic is missing: one topic, or several separated by commas")
    if use == "write" and (path or len(topics) > 1):
        raise OptionError("a write needs namesrv, and at most one topic")
    columns = tuple(name.strip() for name in found.get("columns", "").split(",") if name.strip())
    strange = [name for name in columns if name not in COLUMNS]
    if strange:
        raise OptionError(f"column {strange[0]} is not known; there are {', '.join(COLUMNS)}")
    return Options(
        namesrv=namesrv,
        path=path,
        topics=topics,
        starting=_offsets(found, "startingoffsets", EARLIEST),
        ending=_offsets(found, "endingoffsets", LATEST),
        trigger_messages=count_of(found, "maxmessagespertrigger", 0),
        partition_messages=count_of(found, "maxmessagesperpartition", PARTITION_MESSAGES),
        columns=columns or tuple(COLUMNS),
        group=found.get("group", GROUP),
        filter_pushdown=_truth(found, "filterpushdown", default="false"),
        fail_on_data_loss=_truth(found, "failondataloss", default="true"),
        timeout_s=float(count_of(found, "timeout", int(READ_TIMEOUT_S))),
    )


def count_of(found: Mapping[str, str], name: str, default: int) -> int:
    """Return an option that is a number. Raises OptionError: it is none."""
    text = found.get(name, str(default))
    if not _NUMBER.fullmatch(text) or (name in found and int(text) < 1):
        raise OptionError(f"option {name} is {text!r}; it must be a whole number above 0")
    return int(text)


def _truth(found: Mapping[str, str], name: str, *, default: str) -> bool:
    text = found.get(name, default).lower()
    if text not in ("true", "false"):
        raise OptionError(f"option {name} is {text!r}; it must be true or false")
    return text == "true"


def _offsets(found: Mapping[str, str], name: str, default: str) -> str | Offsets:
    text = found.get(name, default)
    if text in (EARLIEST, LATEST):
        return text
    try:
        offsets = json.loads(text)
    except ValueError:
        offsets = None
    if not isinstance(offsets, dict) or not all(
        isinstance(offset, int) and offset >= 0 and key.count("/") >= 2
        for key, offset in offsets.items()
    ):
        raise OptionError(
            f"option {name} is {text!r}; it must be {EARLIEST}, {LATEST} or JSON like "
            '{"topic/broker/0": 17}'
        )
    return offsets


def queue_name(topic: str, broker: str, queue_id: int) -> str:
    """Return a queue as offsets name it."""
    return f"{topic}/{broker}/{queue_id}"


def parse_queue_name(name: str) -> tuple[str, str, int]:
    """Return topic, broker and queue id of what `queue_name` wrote; topics have no slash."""
    topic, broker, queue_id = name.split("/")
    return topic, broker, int(queue_id)


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """Offsets *begin* up to and without *end* of one queue."""

    topic: str
    broker: str
    queue_id: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """The queue, as offsets name it."""
        return queue_name(self.topic, self.broker, self.queue_id)


def chosen(
    bounds: Iterable[QueueRange], starting: str | Offsets, ending: str | Offsets
) -> list[QueueRange]:
    """Return what of each queue is read; queues that offsets do not name are read whole."""
    return sorted(
        replace(
            queue,
            begin=max(queue.begin, _offset(queue, starting, queue.begin)),
            end=min(queue.end, _offset(queue, ending, queue.end)),
        )
        for queue in bounds
    )


def _offset(queue: QueueRange, wanted: str | Offsets, default: int) -> int:
    if wanted == EARLIEST:
        return queue.begin
    if wanted == LATEST:
        return queue.end
    assert not isinstance(wanted, str)
    return wanted.get(queue.name, default)


def cut(ranges: Iterable[QueueRange], messages: int) -> list[QueueRange]:
    """Return the same offsets in pieces of at most *messages*; empty ranges go."""
    return [
        replace(one, begin=begin, end=min(begin + messages, one.end))
        for one in sorted(ranges)
        for begin in range(one.begin, one.end, messages)
    ]


def between(start: Offsets, end: Offsets) -> list[QueueRange]:
    """Return what lies between two positions of a stream; a new queue begins at 0."""
    return sorted(
        QueueRange(*parse_queue_name(name), start.get(name, 0), offset)
        for name, offset in end.items()
        if offset > start.get(name, 0)
    )


def advance(start: Offsets, latest: Offsets, messages: int) -> dict[str, int]:
    """Return a position at most *messages* after *start*: each queue gets its share of them.

    A queue with less than its share gives the rest to the others, so no queue waits without end and
    a batch is as large as it may be. The same arguments give the same answer.
    """
    left = {name: latest[name] - start.get(name, 0) for name in latest}
    given = dict.fromkeys(left, 0)
    waiting = sorted((name for name in left if left[name] > 0), key=lambda name: (left[name], name))
    for number, name in enumerate(waiting):
        share = -(-messages // (len(waiting) - number))
        given[name] = min(left[name], share, messages)
        messages -= given[name]
    return {name: start.get(name, 0) + given[name] for name in sorted(latest)}


FAR: Final = 1 << 62


@dataclass(slots=True)
class Bounds:
    """What a read has to look at: offsets and times from and without the second one."""

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    first_queue_id: int = 0
    end_queue_id: int = FAR
    first_offset: int = 0
    end_offset: int = FAR
    from_ms: int = -FAR
    until_ms: int = FAR

    @property
    def has_times(self) -> bool:
        """Whether store times bound it."""
        return self.from_ms > -FAR or self.until_ms < FAR

    def has(self, queue: QueueRange) -> bool:
        """Whether anything of a queue is wanted."""
        return (
            (self.topics is None or queue.topic in self.topics)
            and (self.brokers is None or queue.broker in self.brokers)
            and (self.queue_ids is None or queue.queue_id in self.queue_ids)
            and self.first_queue_id <= queue.queue_id < self.end_queue_id
        )

    def narrow(self, ranges: Iterable[QueueRange]) -> list[QueueRange]:
        """Return what is wanted of each range, by all but store time."""
        return [
            replace(
                one,
                begin=max(one.begin, self.first_offset),
                end=min(one.end, self.end_offset),
            )
            for one in ranges
            if self.has(one)
        ]

    def take(self, kind: str, column: str, value: Any) -> bool:
        """Take in one term; return whether it is taken exactly."""
        if kind == "IsNotNull":
            return column in _NEVER_NULL
        values = tuple(value) if kind == "In" else (value,)
        if any(one is None for one in values):
            return False
        if kind in ("EqualTo", "EqualNullSafe", "In"):
            return self._take_values(column, values)
        if kind not in _LOW and kind not in _HIGH:
            return False
        return self._take_bound(kind, column, values[0])

    def _take_values(self, column: str, values: tuple[Any, ...]) -> bool:
        match column:
            case "topic":
                self.topics = _both(self.topics, values)
            case "broker":
                self.brokers = _both(self.brokers, values)
            case "queue_id":
                self.queue_ids = _both(self.queue_ids, values)
            case "queue_offset" if len(values) == 1:
                self.first_offset = max(self.first_offset, values[0])
                self.end_offset = min(self.end_offset, values[0] + 1)
            case "store_timestamp" if len(values) == 1 and isinstance(values[0], datetime):
                self._take_bound("GreaterThanOrEqual", column, values[0])
                self._take_bound("LessThanOrEqual", column, values[0])
                return False
            case _:
                return False
        return True

    def _take_bound(self, kind: str, column: str, value: Any) -> bool:
        low, past = kind in _LOW, kind in ("GreaterThan", "LessThanOrEqual")
        if column == "store_timestamp" and isinstance(value, datetime):
            ms = int(value.timestamp() * 1000)
            # A millisecond too much on either side: Spark checks every row again.
            if low:
                self.from_ms = max(self.from_ms, ms - 1)
            else:
                self.until_ms = min(self.until_ms, ms + 2)
            return False
        if column not in ("queue_offset", "queue_id"):
            return False
        bound = int(value) + past
        if column == "queue_id":
            if low:
                self.first_queue_id = max(self.first_queue_id, bound)
            else:
                self.end_queue_id = min(self.end_queue_id, bound)
        elif low:
            self.first_offset = max(self.first_offset, bound)
        else:
            self.end_offset = min(self.end_offset, bound)
        return True


_NEVER_NULL: Final = frozenset({"topic", "broker", "queue_id", "queue_offset", "store_timestamp"})
_LOW: Final = frozenset({"GreaterThan", "GreaterThanOrEqual"})
_HIGH: Final = frozenset({"LessThan", "LessThanOrEqual"})


def _both(known: frozenset[Any] | None, values: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(values) if known is None else known & frozenset(values)
