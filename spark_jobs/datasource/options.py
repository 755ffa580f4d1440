"""Options of ``format("dledger")``, read once and checked before anything is asked of a broker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from commitlog.errors import ConfigError

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
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
        partition_messages: Messages of one task at most.
        columns: In this order.
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

    Raises:
        OptionError: Names the option, and what it may be.
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
        trigger_messages=_count(found, "maxmessagespertrigger", 0),
        partition_messages=_count(found, "maxmessagesperpartition", PARTITION_MESSAGES),
        columns=columns or tuple(COLUMNS),
        group=found.get("group", GROUP),
        filter_pushdown=_truth(found, "filterpushdown", default="false"),
        fail_on_data_loss=_truth(found, "failondataloss", default="true"),
        timeout_s=float(_count(found, "timeout", int(READ_TIMEOUT_S))),
    )


def _count(found: Mapping[str, str], name: str, default: int) -> int:
    text = found.get(name, str(default))
    if not text.isdecimal() or (name in found and int(text) < 1):
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
