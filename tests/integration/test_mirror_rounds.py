"""Rounds of a mirror between two clusters of one broker each, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dledger.cli.mirror_command import pairs_of, queue_rows
from dledger.client.admin.admin import Admin
from dledger.client.admin.copies import ClusterCopies
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.mirror.metrics import MirrorMetrics
from dledger.mirror.mirror import Mirror
from dledger.mirror.plan import Selection
from dledger.mirror.verify import compare
from dledger.output import CliError
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig
from dledger.testing import embedded_cluster

pytestmark = pytest.mark.side_by_side

BROKER = "broker-a"


@asynccontextmanager
async def two_clusters() -> AsyncIterator[tuple[ClientInstance, ClientInstance]]:
    async with (
        embedded_cluster(brokers=1) as source,
        embedded_cluster(brokers=1) as target,
        source.client() as here,
        target.client() as there,
    ):
        yield here, there


def mirror_of(here: ClientInstance, there: ClientInstance, selection: Selection) -> Mirror:
    return Mirror(ClusterCopies(here), ClusterCopies(there), here.clock, selection)


async def send(client: ClientInstance, topic: str, queue_id: int, count: int) -> None:
    queue = MessageQueue(topic, BROKER, queue_id)
    async with Producer(client, "p") as producer:
        for number in range(count):
            await producer.send_to(queue, Message(topic, b"%d" % number))


async def test_round_copies_tables_messages_and_offsets() -> None:
    async with two_clusters() as (here, there):
        attributes = {"retention.ms": "3600000"}
        await Admin(here).create_topic("T", queue_nums=2, order=True, attributes=attributes)
        await Admin(here).create_topic("Other", queue_nums=1)
        source, target = ClusterCopies(here), ClusterCopies(there)
        group = SubscriptionGroupConfig(group_name="billing", retry_max_times=3)
        await source.put_groups(BROKER, [group])
        await send(here, "T", 1, 5)
        queue = MessageQueue("T", BROKER, 1)
        await PullConsumer(here, "billing").commit_offset(queue, 4)
        mirror = mirror_of(here, there, Selection(topics="T"))

        first = await mirror.round()
        assert (first.copied_messages, first.commits, first.errors) == (5, 1, {})
        assert (await target.topics(BROKER))["T"] == (await source.topics(BROKER))["T"]
        assert "Other" not in await target.topics(BROKER)
        assert (await target.groups(BROKER))["billing"].retry_max_times == 3
        assert (await target.committed(BROKER))["billing", "T"] == {1: 4}
        assert (await mirror.round()).is_quiet

        await PullConsumer(there, "billing").commit_offset(queue, 5)
        await PullConsumer(here, "billing").commit_offset(queue, 2)
        await Admin(here).update_topic("T", queue_nums=3, order=True)
        third = await mirror.round()
        assert (third.put_topics, third.commits) == (1, 0), "an offset moves forward only"
        assert (await target.committed(BROKER))["billing", "T"] == {1: 5}
        assert (await target.topics(BROKER))["T"].write_queue_nums == 3
        assert (await compare(source, target, Selection(topics="T"))).is_same
        rows = [(row["queue"], row["end"], row["copied"]) for row in queue_rows(mirror)]
        assert rows == [(0, 0, 0), (1, 5, 5), (2, 0, 0)]


async def test_refused_table_keeps_nothing_else_back() -> None:
    async with two_clusters() as (here, there):
        for name in ("T", "U"):
            await Admin(here).create_topic(name, queue_nums=1)
        await send(here, "T", 0, 1)
        mirror = mirror_of(here, there, Selection())
        await mirror.round()
        shorter = {"retention.ms": "3600000"}
        await Admin(here).create_topic(
            "T", queue_nums=1, attributes=shorter, gives_up_messages=True
        )
        await Admin(here).create_topic("U", queue_nums=2)
        await send(here, "T", 0, 2)
        done = await mirror.round()
        assert list(done.errors) == ["topic T"]
        assert "dledger topic retention T" in done.errors["topic T"]
        assert (done.put_topics, done.copied_messages) == (1, 2)
        await Admin(there).create_topic(
            "T", queue_nums=1, attributes=shorter, gives_up_messages=True
        )
        assert (await mirror.round()).errors == {}


async def test_queue_begins_where_the_sources_does() -> None:
    async with two_clusters() as (here, there):
        await Admin(here).create_topic("T", queue_nums=2)
        source, target = ClusterCopies(here), ClusterCopies(there)
        late = MessageQueue("T", BROKER, 1)
        await source.begin(late, 500)
        await send(here, "T", 1, 3)
        mirror = mirror_of(here, there, Selection())
        done = await mirror.run_once()
        assert (done.errors, mirror.lag, mirror.stopped) == ({}, 0, {})
        assert await target.bounds(late) == (500, 503)
        assert await target.bounds(MessageQueue("T", BROKER, 0)) == (0, 0)
        assert (await compare(source, target, Selection())).is_same


async def test_stopped_queue_leaves_the_others() -> None:
    async with two_clusters() as (here, there):
        await Admin(here).create_topic("T", queue_nums=2)
        await send(here, "T", 0, 2)
        await send(here, "T", 1, 2)
        mirror = mirror_of(here, there, Selection())
        await mirror.round()
        await send(there, "T", 0, 1)
        await send(here, "T", 0, 3)
        await send(here, "T", 1, 3)
        await mirror.round()
        (stopped,) = mirror.stopped.items()
        assert stopped[0] == MessageQueue("T", BROKER, 0)
        assert "at offset 2 is another one at the target" in stopped[1]
        found = await compare(ClusterCopies(here), ClusterCopies(there), Selection())
        verdicts = [(one.queue.queue_id, one.verdict, one.differs_at) for one in found.queues]
        assert verdicts == [(0, "differs", 2), (1, "same", None)]
        page = "".join(MirrorMetrics(mirror).pieces())
        assert "dledger_mirror_queues_stopped 1.0" in page
        assert 'dledger_mirror_lag_messages{topic="T"} 2.0' in page


@pytest.mark.parametrize("text", ["a", "a=", "=b", ""])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(CliError, match="give SOURCE=TARGET"):
        pairs_of([text])
    assert pairs_of(["a=b", "c=d"]) == {"a": "b", "c": "d"}


async def test_commit_of_a_mirror_moves_no_offset_back() -> None:
    """Consumers at the target may have committed after the offsets there were read."""
    async with embedded_cluster(brokers=1) as cluster, cluster.client() as client:
        await Admin(client).create_topic("T", queue_nums=1)
        await send(client, "T", 0, 5)
        queue = MessageQueue("T", BROKER, 0)
        target = ClusterCopies(client)
        async with PullConsumer(client, "g") as consumer:
            await consumer.commit_offset(queue, 3)
            await target.commit("g", queue, 2)
            assert await consumer.committed_offset(queue) == 3
            await target.commit("g", queue, 4)
            assert await consumer.committed_offset(queue) == 4
