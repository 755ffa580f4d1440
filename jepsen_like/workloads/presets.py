"""The workloads that have a name on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from jepsen_like.plans.plan import Workload

BODY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload by name.

    Attributes:
        about: What it is for.
        workload: How many of each client there are for a rate of 1,000 operations a second.
    """

    about: str
    workload: Workload


def _workload(**shape: int) -> Workload:
    base = Workload(
        interval_ms=40,
        queues=4,
        body_bytes=BODY_BYTES,
        delayed_per_mille=0,
        batch_per_mille=0,
        producers=24,
        consumers=8,
        readers=8,
    )
    return msgspec.structs.replace(base, **shape)


PRESETS: Final[dict[str, Preset]] = {
    "queue-log": Preset(
        "send, pull and max-offset on many queues; every queue is one list in real time",
        _workload(queues=8, consumers=0, readers=16),
    ),
    "offsets": Preset(
        "consumers that commit and go on where they committed; each offset is a register",
        _workload(producers=12, consumers=24, readers=12),
    ),
    "delayed": Preset(
        "messages with a delay: never early, exactly once, none lost",
        _workload(delayed_per_mille=500, producers=28, consumers=8, readers=4),
    ),
    "drain": Preset(
        "send as much as goes, read everything at the end: nothing lost, nothing doubled",
        _workload(producers=40, consumers=0, readers=0, batch_per_mille=200),
    ),
    "mixed": Preset(
        "all of it together",
        _workload(delayed_per_mille=50, batch_per_mille=200),
    ),
}


def workload_for(name: str, rate: float) -> Workload:
    """Return the workload *name* at about *rate* operations a second, every client in turn.

    Raises:
        KeyError: There is none of that name.
    """
    workload = PRESETS[name].workload
    clients = workload.producers + workload.consumers + workload.readers
    return msgspec.structs.replace(
        workload, interval_ms=max(1, round(1000 * clients / max(rate, 1.0)))
    )
