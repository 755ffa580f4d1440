"""Requests and replies against three brokers whose leader is killed while they go on.

Real processes, sockets, files and signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.topic_command import create_topic
from dledger.client.connect import connect
from dledger.client.consumer.listener import ConsumeContext
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.producer import Producer
from dledger.client.producer.request_reply import reply_message
from tests.harness.eventually import all_statuses
from tests.harness.local_settings import SMALL_FILES

pytestmark = pytest.mark.slow

TOPIC = "questions"
REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
TIMEOUT_S = 60.0
ASKERS = 5
BEFORE = 40
AFTER = 20
"""Requests of each asker that begin when the leader is dead."""


async def newest_term(cluster: LocalCluster) -> int:
    return max(int(status["term"]) for status in (await all_statuses(cluster)).values())


async def test_every_request_gets_its_reply_while_the_leader_is_killed(tmp_path: Path) -> None:
    replies: dict[bytes, bytes] = {}
    killed = trio.Event()

    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        namesrvs = [cluster.namesrv_address]
        await create_topic(namesrvs, TOPIC, queues=4)
        first_term = await newest_term(cluster)
        async with (
            connect(namesrvs) as asking,
            connect(namesrvs) as replying,
            Producer(asking, "askers") as asker,
            Producer(replying, "repliers") as replier,
        ):

            async def listener(messages: Sequence[MessageExt], _: ConsumeContext) -> None:
                for message in messages:
                    # What this raises lets the message come again.
                    await replier.send(reply_message(message, b"re " + message.body_bytes))

            async def ask(name: int) -> None:
                number = after = 0
                while after < AFTER:
                    after += killed.is_set()
                    body = b"%d/%d" % (name, number)
                    number += 1
                    reply = await asker.request(Message(TOPIC, body), TIMEOUT_S)
                    replies[body] = reply.body_bytes

            async with PushConsumer(replying, "desk", listener, {TOPIC: "*"}):
                with trio.fail_after(180):
                    async with trio.open_nursery() as nursery:
                        for name in range(ASKERS):
                            nursery.start_soon(ask, name)
                        while len(replies) < BEFORE:
                            await trio.sleep(0.01)
                        leader = await cluster.wait_healthy()
                        await cluster.kill(leader)
                        killed.set()
            assert len(replies) >= BEFORE + ASKERS * AFTER
            assert replies == {body: b"re " + body for body in replies}
            terms = await newest_term(cluster) - first_term

            async with PullConsumer(asking, "reader") as reader:
                (queue,) = await reader.fetch_message_queues(REPLY_TOPIC)
                end = await reader.max_offset(queue)
                kept: set[bytes] = set()
                offset = 0
                while offset < end:
                    pulled = await reader.pull(queue, offset, timeout_s=0)
                    kept |= {message.body_bytes for message in pulled.messages}
                    offset = pulled.next_begin_offset
            # Those confirmed to a leader that ended at once may be missing, and no others.
            assert kept <= set(replies.values())
            assert len(kept) >= len(replies) - ASKERS * terms
