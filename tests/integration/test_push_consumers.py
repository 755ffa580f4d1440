"""A push group of real processes: one member is killed, then the leader; everything is received."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import local_cluster
from dledger.cli.topic_command import create_topic
from dledger.client.connect import connect
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from tests.harness.eventually import WITHIN_S
from tests.harness.local_settings import SMALL_FILES
from tests.harness.shipped_files import ROOT

pytestmark = pytest.mark.slow

QUEUES = 8

MEMBER = """\
import sys, threading
from dledger.client.blocking import BlockingClient
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.config import PushConfig
from tests.harness.local_settings import SMALL_FILES

def listener(messages, context):
    for message in messages:
        sys.stdout.write("received %s\\n" % message.body_bytes.decode())
        sys.stdout.flush()

with BlockingClient(sys.argv[1]) as client:
    client.push_consumer("group", listener, {"push": "*"}, PushConfig(consume_from=FROM_FIRST))
    threading.Event().wait()
"""


def heard_by(said: Path) -> list[str]:
    """Return what a member has printed; the SDK's log stands between."""
    # The last line may be on its way.
    *lines, _ = said.read_text().split("\n")
    return [line.split()[1] for line in lines if line.startswith("received ")]


def own(consumer: PushConsumer) -> int:
    return sum(queue.topic == "push" for queue in consumer.queues)


async def owns(consumer: PushConsumer, count: int) -> None:
    """Wait until *consumer* owns *count* queues."""
    with trio.fail_after(WITHIN_S):
        while own(consumer) != count:
            await trio.sleep(0.02)


async def test_push_group_consumes_all_while_members_are_killed(tmp_path: Path) -> None:
    heard: list[str] = []
    refused: set[str] = set()

    async def listener(
        messages: Sequence[DeliveredMessage], context: ConsumeContext
    ) -> ConsumeStatus | None:
        (message,) = messages
        body = message.body_bytes.decode()
        if body == "7" and not message.reconsume_times:
            refused.add(body)
            return ConsumeStatus.RECONSUME_LATER
        heard.append(body)
        return None

    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], "push", queues=QUEUES)
        async with (
            connect([namesrv]) as client,
            Producer(client, "senders", ProducerConfig(send_timeout_s=60)) as producer,
            PushConsumer(
                client, "group", listener, {"push": "*"}, PushConfig(consume_from=FROM_FIRST)
            ) as consumer,
        ):
            await owns(consumer, QUEUES)
            for number in range(100):
                await producer.send(Message("push", str(number).encode()))
            with trio.fail_after(WITHIN_S):
                while len(set(heard) | refused) < 100:
                    await trio.sleep(0.05)
            said, sent = tmp_path / "said", 100
            with said.open("a") as output:
                member = subprocess.Popen(
                    [sys.executable, "-c", MEMBER, namesrv], cwd=ROOT, stdout=output
                )
            try:
                await owns(consumer, QUEUES // 2)
                for number in range(sent, sent + 100):
                    await producer.send(Message("push", str(number).encode()))
                sent += 100
                with trio.fail_after(WITHIN_S):
                    while len({*heard, *heard_by(said)} | refused) < sent:
                        await trio.sleep(0.05)
            finally:
                member.kill()
                member.wait()
            await owns(consumer, QUEUES)
            leader = await cluster.wait_leader()
            await cluster.kill(leader)
            for number in range(sent, sent + 100):
                await producer.send(Message("push", str(number).encode()))
            wanted = {str(number) for number in range(sent + 100)}
            with trio.fail_after(WITHIN_S):
                while {*heard, *heard_by(said)} != wanted:
                    await trio.sleep(0.05)
            # The new leader learns of the group's members from their heartbeats.
            await owns(consumer, QUEUES)
    by_the_other = heard_by(said)
    assert len(by_the_other) > 20
    assert refused == {"7"}
