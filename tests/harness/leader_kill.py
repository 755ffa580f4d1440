"""Leaders are killed while producers send without a pause; what they were answered is kept."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from dledger.cli.local_cluster import LocalCluster
from dledger.client.core.message_ext import MessageExt
from tests.harness.foreign_client import ForeignClient
from tests.harness.stored_messages import place

SENDS_BEFORE = 300
SENDS_AFTER = 300

RESUME_TIMEOUT_S = 100.0
"""RocketMQ's own clients look at the route every 30 s, and some do so twice."""


@dataclass
class SendRecord:
    """What producers were answered in one run."""

    acknowledged: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Body to the answer."""
    failed: list[str] = field(default_factory=list)
    killed_at: float = 0.0
    resumed_at: float = 0.0
    stop: trio.Event = field(default_factory=trio.Event)

    @property
    def gap_s(self) -> float:
        """From the kill to the first acknowledgement of a send begun after it."""
        return self.resumed_at - self.killed_at


async def send_over_a_kill(
    cluster: LocalCluster, producers: Sequence[ForeignClient], topic: str
) -> SendRecord:
    """Send until each producer has had many acknowledgements before and after the leader died."""
    reported = SendRecord()
    after = [0] * len(producers)

    async def send(number: int, producer: ForeignClient) -> None:
        count = 0
        while not reported.stop.is_set():
            body = f"{number}-{count}"
            count += 1
            began = time.monotonic()
            answer = await producer.ask({"kind": "sync", "topic": topic, "body": body, "tags": "F"})
            if "error" in answer:
                reported.failed.append(body)
                continue
            reported.acknowledged[body] = answer
            if reported.killed_at and began > reported.killed_at:
                reported.resumed_at = reported.resumed_at or time.monotonic()
                after[number] += 1

    async with trio.open_nursery() as nursery:
        for number, producer in enumerate(producers):
            nursery.start_soon(send, number, producer)
        with trio.fail_after(RESUME_TIMEOUT_S):
            while len(reported.acknowledged) < SENDS_BEFORE * len(producers):
                await trio.sleep(0.05)
            leader = await cluster.wait_leader()
            reported.killed_at = time.monotonic()
            await cluster.kill(leader)
            while min(after) < SENDS_AFTER:
                await trio.sleep(0.05)
        reported.stop.set()
    return reported


def judge_a_kill(
    reported: SendRecord, stored: Sequence[MessageExt], consumer: ForeignClient
) -> None:
    """Assert that nothing acknowledged is lost, and that the consumer got all of it."""
    print(f"{len(reported.failed)} sends failed, none acknowledged for {reported.gap_s:.1f} s")
    places: dict[str, set[tuple[int, int]]] = {}
    for message in stored:
        places.setdefault(bytes(message.body).decode(), set()).add(place(message))
    for body, answer in reported.acknowledged.items():
        offsets = {offset for _, offset in places[body]}
        assert answer["offset"] in offsets, f"{body} is not at {answer['offset']} but at {offsets}"
    assert reported.acknowledged.keys() <= {line["body"] for line in consumer.messages}
    for line in consumer.messages:
        assert (line["queue_id"], line["queue_offset"]) in places[line["body"]]
