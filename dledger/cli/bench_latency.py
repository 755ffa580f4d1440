"""``dledger bench latency``: how long sends take at a rate that the answers do not set.

The load is open: each message has an intended time, fixed before the first one leaves, and its
latency counts from that time. A closed loop, as `bench produce` is, sends less while the cluster
is slow, and so leaves out the sends that would have waited (coordinated omission).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

import trio
from cyclopts import Parameter

from dledger.cli.bench_load import (
    POSITIVE,
    WARM_UP_S,
    Duration,
    Figures,
    Queues,
    Size,
    Target,
    Topic,
    percentiles_ms,
)
from dledger.cli.commands import open_admin, open_client
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.output import CliError

MAX_OUTSTANDING: Final = 10_000
"""Sends under way at the same time; beyond it one waits, and the wait is part of its latency."""

SEND_TIMEOUT_S: Final = 30.0
"""More than a producer's 10 s: a late acknowledgement is a latency, a failed send is none."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLoad:
    """What is sent; measured after `WARM_UP_S` at the same rate."""

    rate: Annotated[
        float, POSITIVE, Parameter(help="Messages a second, whatever the answers do.")
    ] = 1_000.0
    duration: Duration = 10.0
    size: Size = 256
    queues: Queues = 4
    topic: Topic = "bench-latency"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The intended time of every message, in seconds of trio's clock; answers change none."""

    begin_s: float
    rate_per_s: float
    duration_s: float
    warm_up_s: float = WARM_UP_S

    @property
    def messages(self) -> int:
        """How many there are, those of the warm-up included."""
        return round((self.warm_up_s + self.duration_s) * self.rate_per_s)

    @property
    def measured_from_s(self) -> float:
        """When the warm-up ends."""
        return self.begin_s + self.warm_up_s

    def intended_s(self, number: int) -> float:
        """Return when message *number*, from 0 on, is meant to leave."""
        return self.begin_s + number / self.rate_per_s

    def is_measured(self, number: int) -> bool:
        """Return whether message *number* is none of the warm-up."""
        return number >= round(self.warm_up_s * self.rate_per_s)


@dataclass(slots=True)
class Tally:
    """What became of the measured messages."""

    latencies_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    ended_s: float = 0.0
    """The last acknowledgement, in seconds of the schedule's clock."""


async def bench_latency(target: Target, load: LatencyLoad, tell: Callable[[str], None]) -> Figures:
    """Send at a fixed rate and return the latencies.

    Raises:
        CliError: The cluster cannot be reached, or not one send succeeded.
    """
    async with target.opened(tell) as (namesrvs, _):
        async with open_admin(namesrvs) as admin:
            await admin.create_topic(load.topic, queue_nums=load.queues)
        config = ProducerConfig(send_timeout_s=SEND_TIMEOUT_S)
        async with open_client(namesrvs) as client, Producer(client, "bench", config) as producer:
            body = bytes(load.size)

            async def send() -> None:
                await producer.send(Message(load.topic, body))

            await send()  # the route, the connection: once, before the first intended time
            tell(f"{load.rate:,g} sends/s of {load.size} bytes for {load.duration:g} s")
            schedule = Schedule(trio.current_time(), load.rate, load.duration)
            tally = await send_on_schedule(send, schedule)
    return summary(load, schedule, tally)


async def send_on_schedule(
    send: Callable[[], Awaitable[None]], schedule: Schedule, outstanding: int = MAX_OUTSTANDING
) -> Tally:
    """Begin a send at each intended time, however many are under way; return when all ended.

    Args:
        send: Sends one message and returns when it is acknowledged; raises `MQError` otherwise.
        outstanding: Most sends under way. Beyond it the next one begins late, and as its latency
            counts from its intended time, nothing is left out.
    """
    tally = Tally()
    slots = trio.Semaphore(outstanding)

    async def one(number: int) -> None:
        intended_s = schedule.intended_s(number)
        late_s = trio.current_time() - intended_s
        try:
            await send()
        except MQError as error:
            if schedule.is_measured(number):
                tally.failures[error.outcome] = tally.failures.get(error.outcome, 0) + 1
        else:
            if schedule.is_measured(number):
                tally.ended_s = trio.current_time()
                tally.latencies_s.append(tally.ended_s - intended_s)
                tally.late_s.append(late_s)
        finally:
            slots.release()

    async with trio.open_nursery() as nursery:
        for number in range(schedule.messages):
            if trio.current_time() < schedule.intended_s(number):
                await trio.sleep_until(schedule.intended_s(number))
            await slots.acquire()
            nursery.start_soon(one, number)
    return tally


def summary(load: LatencyLoad, schedule: Schedule, tally: Tally) -> Figures:
    """Return the result.

    Times count from the intended time of a message to its acknowledgement; failed sends are in
    none. *late* is by how much this program began its sends after their time; it is part of the
    latencies. The achieved rate is that of acknowledgements until the last of them.

    Raises:
        CliError: Not one send succeeded.
    """
    if not tally.latencies_s:
        raise CliError(
            f"no send succeeded; failed: {tally.failures}", next_step="see dledger cluster health"
        )
    took_s = max(load.duration, tally.ended_s - schedule.measured_from_s)
    ranks = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p999_ms": 99.9, "max_ms": 100}
    late = {"late_p50_ms": 50, "late_p99_ms": 99, "late_max_ms": 100}
    return {
        "intended": sum(map(schedule.is_measured, range(schedule.messages))),
        "acknowledged": len(tally.latencies_s),
        "not_stored": tally.failures.get("not_stored", 0),
        "unknown": tally.failures.get("unknown", 0),
        "rate_per_s": load.rate,
        "achieved_per_s": round(len(tally.latencies_s) / took_s, 3),
        **dict(zip(ranks, percentiles_ms(tally.latencies_s, *ranks.values()), strict=True)),
        **dict(zip(late, percentiles_ms(tally.late_s, *late.values()), strict=True)),
        "seconds": load.duration,
        "size": load.size,
        "queues": load.queues,
    }
