"""Receives and acknowledgements that share requests, in arbitrary schedules: as if alone.

What a caller gets is what it would get alone: messages that no other has under that receipt, no
more than it asked for, nothing before its time is over, and the result of its own acknowledgement.
What a cancelled call would have got is out for no longer than it takes to give it back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from dledger.client.consumer.pop_calls import ReceivedMessage
from dledger.client.consumer.receive_rounds import GRACE_S
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.errors import ReceiptStaleError, RequestTimedOutError
from dledger.commitlog.errors import MQError
from tests.unit.client.consumer.popping import PopBroker

LONG_S = 1_000.0
"""Invisible time: what is out stays so until the end."""


@dataclass(frozen=True)
class Receiver:
    """One task: it comes, receives, may be cancelled, and acknowledges what it got, or not."""

    comes_s: float
    wanted: int
    wait_s: float
    cancelled_s: float | None
    acks: tuple[int, ...]
    """How often each message is acknowledged, in turn."""
    ack_cancelled_s: float | None


times = st.sampled_from([0.0, 0.001, 0.004, 0.01, 0.011, 0.02, 0.1, 0.5])
receivers = st.builds(
    Receiver,
    comes_s=times,
    wanted=st.sampled_from([1, 1, 1, 2, 5, 40]),
    wait_s=st.sampled_from([0.0, 0.01, 0.2, 1.0, 1.03]),
    cancelled_s=st.none() | times,
    acks=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
    ack_cancelled_s=st.none() | times,
)


@dataclass
class Seen:
    """What all callers saw."""

    given: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Offset and grant of each message that a caller got."""
    results: dict[tuple[int, int], list[str]] = field(default_factory=dict)


async def receive(broker: PopBroker, consumer: SimpleConsumer, it: Receiver, seen: Seen) -> None:
    await trio.sleep(it.comes_s)
    began_s, messages = trio.current_time(), list[ReceivedMessage]()
    with trio.move_on_after(float("inf") if it.cancelled_s is None else it.cancelled_s) as scope:
        try:
            messages = await consumer.receive(it.wanted, LONG_S, it.wait_s)
        except RequestTimedOutError:
            return
        assert len(messages) <= it.wanted
        if not messages:
            assert trio.current_time() >= began_s + it.wait_s - GRACE_S
    if scope.cancelled_caught:
        return
    for message in messages:
        seen.given[message.queue_offset, message.receipt.revive_queue_id] += 1
    async with trio.open_nursery() as nursery:
        for place, message in enumerate(messages):
            for _ in range(it.acks[place % len(it.acks)]):
                nursery.start_soon(acknowledge, consumer, message, it.ack_cancelled_s, seen)


async def acknowledge(
    consumer: SimpleConsumer, message: ReceivedMessage, cancelled_s: float | None, seen: Seen
) -> None:
    key = (message.queue_offset, message.receipt.revive_queue_id)
    result = "cancelled"
    with trio.move_on_after(float("inf") if cancelled_s is None else cancelled_s):
        try:
            await consumer.ack(message)
            result = "acknowledged"
        except ReceiptStaleError:
            result = "stale"
        except MQError as error:
            result = error.outcome
    seen.results.setdefault(key, []).append(result)


@settings(deadline=None)
@given(
    st.lists(receivers, min_size=1, max_size=12),
    st.lists(st.tuples(times, st.integers(1, 20)), max_size=6),
    st.sampled_from([0.0, 0.003, 0.01]),
    st.booleans(),
    st.lists(st.booleans(), max_size=8),
)
def test_shared_requests_act_like_single_ones(
    tasks: list[Receiver],
    sends: list[tuple[float, int]],
    delay_s: float,
    names_stale: bool,
    fails: list[bool],
) -> None:
    async def main() -> None:
        seen = Seen()
        async with trio.open_nursery() as nursery:
            broker = PopBroker(nursery, delay_s=delay_s, names_stale=names_stale)
            broker.failures = [RequestTimedOutError("lost") if fail else None for fail in fails]
            consumer = SimpleConsumer(broker.instance, "g", {"T": "*"})

            async def send(at_s: float, count: int) -> None:
                await trio.sleep(at_s)
                broker.send(count)

            async with trio.open_nursery() as callers:
                for at_s, count in sends:
                    callers.start_soon(send, at_s, count)
                for task in tasks:
                    callers.start_soon(receive, broker, consumer, task, seen)
            await trio.sleep(LONG_S / 10)  # rounds of cancelled calls are over
            judge(broker, seen, lost=any(fails))
            assert consumer._receives._lines == {}
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def judge(broker: PopBroker, seen: Seen, *, lost: bool) -> None:
    assert set(seen.given.values()) <= {1}, "two callers have one receipt"
    for (offset, _), results in seen.results.items():
        assert results.count("acknowledged") <= 1
        if "acknowledged" in results:
            assert offset in broker.acked
        if "stale" in results:
            assert len(results) > 1, "the only acknowledgement of a message that is out"
    acknowledged = {offset for (offset, _), results in seen.results.items() if results}
    assert broker.acked <= acknowledged, "acknowledged by no caller"
    if not lost:
        now_s = trio.current_time()
        kept = {offset for offset, out in broker.out.items() if out.ends_s > now_s}
        assert kept <= {offset for offset, _ in seen.given}, "out, and in no hands"
