"""Several broker groups behind one name: sends spread, one may go, one may be drained.

Real processes, sockets, files and signals.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dledger.cli.commands import open_admin
from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import eventually
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import heal, running
from tests.harness.stored_messages import messages_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several-groups")]

A, B = "broker-a", "broker-b"


def dledger(*tokens: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "dledger.cli.main", *tokens], check=True, capture_output=True
    )


async def send(producer: Producer, topic: str, count: int) -> dict[bytes, SendResult]:
    """Send messages one after the other; return where each was stored."""
    return {
        body: await producer.send(Message(topic, body))
        for body in (b"%s-%d-%d" % (topic.encode(), id(producer), n) for n in range(count))
    }


def brokers_of(results: dict[bytes, SendResult]) -> Counter[str]:
    return Counter(result.message_queue.broker_name for result in results.values())


async def stored_in(client: ClientInstance, topic: str) -> dict[tuple[str, int, int], bytes]:
    return {
        (message.broker_name, message.queue_id, message.queue_offset): message.body_bytes
        for message in await messages_of(client, topic)
    }


def assert_all_are_there(
    results: dict[bytes, SendResult], stored: dict[tuple[str, int, int], bytes]
) -> None:
    for body, result in results.items():
        queue = result.message_queue
        assert stored[(queue.broker_name, queue.queue_id, result.queue_offset)] == body


async def only_b_is_known(cluster: LocalCluster) -> None:
    async def holds() -> bool:
        async with open_admin(cluster.namesrv_address) as admin:
            return set((await admin.cluster_info()).broker_addr_table) == {B}

    await eventually("the NameServer knows B alone", holds)


async def kill_group(cluster: LocalCluster, group: str) -> None:
    for name in cluster.members(group):
        await cluster.kill(name)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("several-groups")
    with running(lay_out(folder, groups=2, settings=SMALL_FILES)) as cluster:
        yield cluster


@pytest.fixture
async def cluster(shared: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Two groups, all members running and both open for messages, as the next test wants them."""
    yield shared
    await heal(shared)
    dledger("broker", "add-write-perm", A, "--namesrv", shared.namesrv_address)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that only this test has."""
    return str(request.node.name)


async def test_one_group_is_killed_and_the_other_serves(cluster: LocalCluster, topic: str) -> None:
    namesrvs = [cluster.namesrv_address]
    assert cluster.groups == [A, B]
    assert await create_topic(namesrvs, topic, queues=2) == [A, B]
    assert await create_topic(namesrvs, f"{topic}-one", queues=4, brokers=[B]) == [B]
    config = ProducerConfig(send_timeout_s=20, retry_unknown=False)
    async with connect(namesrvs) as client, Producer(client, "p", config) as producer:
        spread = await send(producer, topic, 80)
        assert brokers_of(spread) == {A: 40, B: 40}
        # Every queue in turn: ten in each of the two queues of either group.
        queues = Counter(result.message_queue for result in spread.values())
        assert sorted(queues.values()) == [20, 20, 20, 20]
        assert brokers_of(await send(producer, f"{topic}-one", 8)) == {B: 8}

        await kill_group(cluster, A)
        # A request that is written before the client reads the end of its connection is unknown.
        await wait_all_tasks_blocked()
        began = trio.current_time()
        survived = await send(producer, topic, 100)
        # A send that waited for the dead group would take all of its time.
        assert trio.current_time() - began < config.send_timeout_s
        assert brokers_of(survived)[B] == 100

        await only_b_is_known(cluster)
        for name in cluster.members(A):
            await cluster.start(name)
        await cluster.wait_healthy()
        stored = await stored_in(client, topic)
        assert_all_are_there({**spread, **survived}, stored)
        assert len(stored) == 180


async def test_a_drained_group_gets_no_messages_and_can_be_removed(
    cluster: LocalCluster, topic: str
) -> None:
    namesrv = cluster.namesrv_address
    await create_topic([namesrv], topic, queues=2)
    async with connect([namesrv]) as client, Producer(client, "p") as producer:
        before = await send(producer, topic, 8)
    dledger("broker", "wipe-write-perm", A, "--namesrv", namesrv)
    # Another leader registers with a newer topic table: the group stays drained.
    leader = await cluster.wait_leader(group=A)
    await cluster.kill(leader)
    await cluster.wait_leader(other_than=leader, group=A)
    await cluster.start(leader)
    await cluster.wait_healthy()
    await create_topic([namesrv], f"{topic}-later", queues=2)
    async with connect([namesrv]) as client, Producer(client, "p") as producer:
        drained = await send(producer, topic, 40)
        assert brokers_of(drained) == {B: 40}
        assert brokers_of(await send(producer, f"{topic}-later", 8)) == {B: 8}
        # What is there is read to the end meanwhile.
        assert_all_are_there({**before, **drained}, await stored_in(client, topic))
    dledger("broker", "add-write-perm", A, "--namesrv", namesrv)
    async with connect([namesrv]) as client, Producer(client, "p") as producer:
        assert brokers_of(await send(producer, topic, 8)) == {A: 4, B: 4}
    dledger("broker", "wipe-write-perm", A, "--namesrv", namesrv)
    for name in cluster.members(A):
        assert await cluster.stop(name) == 0
    await only_b_is_known(cluster)
    async with connect([namesrv]) as client, Producer(client, "p") as producer:
        assert brokers_of(await send(producer, topic, 8)) == {B: 8}
        stored = await stored_in(client, topic)
        assert {broker for broker, _, _ in stored} == {B}
