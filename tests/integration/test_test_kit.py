"""The kit for tests of others: one contract for a cluster in this process and one in several."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio
import trio.testing

from dledger.client.admin.admin import Admin
from dledger.client.blocking import BlockingClient
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.testing import (
    EmbeddedBroker,
    EmbeddedCluster,
    ProcessCluster,
    assert_messages,
    drain,
    embedded_cluster,
    process_cluster,
    wait_for_lag,
)

pytestmark = pytest.mark.slow

Cluster = EmbeddedCluster | ProcessCluster
Make = Callable[..., AbstractAsyncContextManager[Cluster]]
MAKERS: list[Make] = [embedded_cluster, process_cluster]


@pytest.fixture(params=MAKERS, ids=["embedded", "processes"])
def make(request: pytest.FixtureRequest) -> Make:
    maker: Make = request.param
    return maker


async def test_topics_are_there_and_a_leader_leads(make: Make) -> None:
    async with make(topics={"Orders": 3}) as cluster:
        assert await cluster.leader() in cluster.brokers
        async with cluster.client() as client:
            route = await Admin(client).topic_route("Orders")
            assert len(route.subscribe_queues) == 3


async def test_what_was_acknowledged_survives_a_killed_leader(make: Make) -> None:
    async with (
        make(topics={"Orders": 2}) as cluster,
        cluster.client() as client,
        Producer(client, "orders") as producer,
    ):
        await producer.send(Message("Orders", b"before"))
        killed = await cluster.leader()
        await cluster.kill(killed)
        assert await cluster.leader(other_than=killed) != killed
        await producer.send(Message("Orders", b"after"))
        await cluster.start(killed)
        await assert_messages(client, "Orders", [b"after", b"before"])


async def test_data_outlives_the_cluster_in_a_folder_of_ones_own(
    make: Make, tmp_path: Path
) -> None:
    async with make(brokers=1, topics={"Orders": 1}, folder=tmp_path) as cluster:
        async with cluster.client() as client, Producer(client, "orders") as producer:
            await producer.send(Message("Orders", b"kept"))
        await cluster.restart("n0")
        await cluster.leader()
        async with cluster.client() as client:
            assert [message.body for message in await drain(client, "Orders")] == [b"kept"]


async def test_lag_is_what_a_group_has_not_committed(make: Make) -> None:
    async with make(brokers=1, topics={"Orders": 1}) as cluster, cluster.client() as client:
        async with Producer(client, "orders") as producer:
            for number in range(3):
                await producer.send(Message("Orders", b"%d" % number))
        await wait_for_lag(client, "readers", "Orders", 3)
        with pytest.raises(AssertionError, match="3 messages behind in Orders, not 0"):
            await wait_for_lag(client, "readers", "Orders", timeout_s=3)
        async with PullConsumer(client, "readers") as consumer:
            (queue,) = await consumer.fetch_message_queues("Orders")
            await consumer.commit_offset(queue, 3)
        await wait_for_lag(client, "readers", "Orders", 0)


async def test_an_assertion_names_what_is_missing_and_what_is_too_much() -> None:
    async with (
        embedded_cluster(brokers=1, topics={"Orders": 1}) as cluster,
        cluster.client() as client,
    ):
        async with Producer(client, "orders") as producer:
            await producer.send(Message("Orders", b"one"))
        with pytest.raises(AssertionError, match=r"missing \[b'two'\], of 1; .*\[b'one'\], of 1"):
            await assert_messages(client, "Orders", [b"two"])


async def test_a_leader_parted_from_the_others_is_followed_by_another() -> None:
    async with (
        embedded_cluster(topics={"Orders": 1}) as cluster,
        cluster.client() as client,
        Producer(client, "orders") as producer,
    ):
        alone = await cluster.leader()
        others = [name for name in cluster.brokers if name != alone]
        await cluster.partition([[alone], others])
        assert await cluster.leader(other_than=alone) in others
        await producer.send(Message("Orders", b"by the others"), timeout_s=20)
        cluster.heal()
        await assert_messages(client, "Orders", [b"by the others"])


async def test_parted_brokers_without_a_majority_store_nothing() -> None:
    async with (
        embedded_cluster(topics={"Orders": 1}) as cluster,
        cluster.client() as client,
        Producer(client, "orders") as producer,
    ):
        await cluster.partition([[name] for name in cluster.brokers])
        with pytest.raises(MQError) as caught:
            await producer.send(Message("Orders", b"x"), timeout_s=3)
        assert caught.value.outcome in ("unknown", "not_stored")


async def test_time_can_be_the_tests_own(mock_clock: trio.testing.MockClock) -> None:
    mock_clock.rate = 1.0
    async with (
        embedded_cluster(topics={"Later": 1}) as cluster,
        cluster.client() as client,
        Producer(client, "later") as producer,
    ):
        mock_clock.rate = 0.0
        await producer.send(Message("Later", b"in ten seconds", delay_level=3))
        await cluster.advance(9.5)
        assert await drain(client, "Later") == []
        await cluster.advance(1.5)
        # It was due; a disk takes real time to store it, whatever the clock shows.
        until_s = time.monotonic() + 60
        while not (delivered := await drain(client, "Later")) and time.monotonic() < until_s:
            await trio.testing.wait_all_tasks_blocked(0.02)
        assert [message.body for message in delivered] == [b"in ten seconds"]
        mock_clock.rate = 1.0


async def test_time_that_is_not_the_tests_own_cannot_be_moved() -> None:
    async with embedded_cluster(brokers=1) as cluster:
        with pytest.raises(RuntimeError, match="ask for the fixture mock_clock"):
            await cluster.advance(1)


def test_code_without_trio_has_it_in_a_thread() -> None:
    with EmbeddedBroker(topics={"Orders": 1}) as broker:
        with BlockingClient(broker.name_server_addr) as client:
            client.producer("orders").send(Message("Orders", b"one"))
        broker.assert_messages("Orders", [b"one"])
        broker.restart("n0")
        broker.leader()
        assert [message.body for message in broker.drain("Orders")] == [b"one"]


def test_cluster_that_cannot_start_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(MQError, match="no_such_setting"):
        EmbeddedBroker(settings={"broker.no_such_setting": 1}, folder=tmp_path)


PLUGIN_TESTS = textwrap.dedent(
    """
    import pytest
    from dledger.client.core.message import Message


    @pytest.mark.parametrize("turn", [1, 2])
    def test_a_fresh_topic_each(dledger_client, dledger_cluster, dledger_topic, turn):
        dledger_client.producer("g").send(Message(dledger_topic, b"%d" % turn))
        dledger_cluster.assert_messages(dledger_topic, [b"%d" % turn])


    @pytest.mark.dledger_nemesis("kill-leader")
    def test_under_trouble(dledger_raft_cluster):
        from dledger.client.blocking import BlockingClient

        dledger_raft_cluster.create_topic("Orders")
        with BlockingClient(dledger_raft_cluster.name_server_addr) as client:
            producer = client.producer("g")
            for number in range(200):
                producer.send(Message("Orders", b"%d" % number), timeout_s=20)
        bodies = [b"%d" % number for number in range(200)]
        held = {message.body for message in dledger_raft_cluster.drain("Orders")}
        assert held >= set(bodies)
    """
)


FAILING_TEST = textwrap.dedent(
    """
    def test_that_fails(dledger_client, dledger_cluster, dledger_topic):
        dledger_cluster.assert_messages(dledger_topic, [b"missing"])
    """
)


def run_in(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run *tests* with pytest, as a user's."""
    (folder / "test_mine.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_failed_assertion_shows_the_test_and_not_the_kit(tmp_path: Path) -> None:
    ran = run_in(tmp_path, FAILING_TEST)
    assert ran.returncode == 1
    assert "missing" in ran.stdout
    assert "test_mine.py:3" in ran.stdout
    for internal in ("site-packages/trio", "embedded_broker.py", "debug"):
        assert internal not in ran.stdout
    assert len(ran.stdout.splitlines()) < 30


def test_the_plug_in_gives_clusters_topics_and_trouble(tmp_path: Path) -> None:
    ran = run_in(tmp_path, PLUGIN_TESTS)
    assert ran.returncode == 0, ran.stdout
    assert "3 passed" in ran.stdout
