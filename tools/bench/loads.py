"""What the three load programs are given and print.

Arguments: mode, address, topic, outstanding, messages of a batch, bytes of a body, seconds of
warming up, seconds measured, messages of a backlog. Modes: ``send``; ``drain`` (write the backlog,
then read all of it again and again, as many readers as outstanding); ``kill`` (send without end).

Lines on standard output: ``begin`` and ``end`` of the measured seconds, ``result {…}`` as `Result`,
in mode ``kill`` ``ack BEGAN ENDED`` at most once a millisecond: wall time in ms of a send that is
acknowledged. An acknowledgement counts when it comes between ``begin`` and ``end``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

BODY_BYTES: Final = 256
BATCH_MESSAGES: Final = 100
READERS: Final = 4
"""A topic of RocketMQ has four queues by default; NATS gets four fetches at a time of a stream."""

KILL_OUTSTANDING: Final = 64

NOT_BEFORE_MS: Final = 5
"""A send begun this long after SIGKILL cannot be one that the killed leader acknowledged."""


class Case(msgspec.Struct, frozen=True):
    """One load: what is sent or read, and how much is outstanding."""

    name: str
    mode: str
    outstanding: int
    batch: int
    about: str


CASES: Final = (
    Case("1", "send", 1, 1, "1 outstanding"),
    Case("64", "send", 64, 1, "64 outstanding"),
    Case("512", "send", 512, 1, "512 outstanding"),
    Case("batches", "send", 16, BATCH_MESSAGES, "16 batches of 100 outstanding"),
    Case("drain", "drain", READERS, 1, "drain of a backlog"),
    Case("kill", "kill", KILL_OUTSTANDING, 1, "kill of the leader → next ack"),
)
CASE: Final = {case.name: case for case in CASES}


class Result(msgspec.Struct, frozen=True):
    """What a load program measured; times are those of one send, batch or pull."""

    messages: int
    failed: int
    seconds: float
    p50_ms: float
    p99_ms: float
    p999_ms: float


def arguments(
    case: Case, address: str, topic: str, *, warm_s: float, seconds: float, backlog: int
) -> list[str]:
    """Return the arguments of a load program."""
    numbers = (case.outstanding, case.batch, BODY_BYTES, f"{warm_s:g}", f"{seconds:g}", backlog)
    return [case.mode, address, topic, *map(str, numbers)]


@dataclass(slots=True)
class Lines:
    """Takes a load program's lines one by one and keeps what they mean.

    Attributes:
        on_begin: Called when the measured seconds begin; `on_end` when they have ended.
        result: None until it came.
        acks: How many ``ack`` lines came.
        gap_ms: From `killed` to the first acknowledgement of a send begun after it; else None.
    """

    on_begin: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None
    result: Result | None = None
    acks: int = 0
    gap_ms: float | None = None
    _killed_ms: int | None = field(default=None, init=False)

    def killed(self, now_ms: int) -> None:
        """Begin to wait for the acknowledgement after a kill at this wall time."""
        self._killed_ms = now_ms
        self.gap_ms = None

    def acks_beyond(self, count: int) -> bool:
        """Return whether more than *count* acknowledgements were reported."""
        return self.acks > count

    def take(self, line: str) -> None:
        """Take one line; unknown ones (a client's own log) are left out."""
        word, _, rest = line.partition(" ")
        if word == "begin":
            self.on_begin()
        elif word == "end":
            self.on_end()
        elif word == "result":
            self.result = msgspec.json.decode(rest, type=Result)
        elif word == "ack":
            began_ms, _, ended_ms = rest.partition(" ")
            self._acknowledged(int(began_ms), int(ended_ms))

    def _acknowledged(self, began_ms: int, ended_ms: int) -> None:
        self.acks += 1
        if self._killed_ms is not None and began_ms >= self._killed_ms + NOT_BEFORE_MS:
            self.gap_ms = ended_ms - self._killed_ms
            self._killed_ms = None
