"""What one client can do to all others, on three brokers and a proxy with default settings.

Each attack goes on under a light load: `attacked` has what must hold then.
"""

import zlib
from collections.abc import Iterator

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.client.core.errors import NoRouteError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.nemesis.strangers import NameThief, Wanted
from dledger.proxy import messaging_pb2 as pb
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.topic_names import INNER_TOPICS
from dledger.remoting.tcp import TcpNetwork
from tests.harness.attacked import FORGED, HUNG_S, attacked
from tests.harness.cluster_questions import ask as ask_once
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import eventually
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running
from tests.harness.operator_cluster import SERVICE, running_guarded
from tests.harness.stored_messages import bodies_at
from tests.integration.test_attacks_messages import ask
from tests.integration.test_proxy import called, message

pytestmark = [pytest.mark.slow, pytest.mark.hunt]

HALVES = 20_000
HALVES_AT_A_TIME = 1_000
GHOST = "TRAN_MSG\x01true\x02PGROUP\x01ghost\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x011\x02"
LARGE_BODIES, CONNECTIONS = 160, 8
LARGE_BYTES = 4 << 20
GOOD = [b"good %d" % number for number in range(6)]
COMPRESSED = 0x1
HALF = 0x4
READS_AND_WRITES = (
    RequestCode.PULL_MESSAGE,
    RequestCode.LITE_PULL_MESSAGE,
    RequestCode.POP_MESSAGE,
    RequestCode.QUERY_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
)
ANY_FIELDS = {
    "consumerGroup": "billing", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32",
    "sysFlag": "0", "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": "*",
    "subVersion": "0", "key": "k", "maxNum": "32", "beginTimestamp": "0", "endTimestamp": "9" * 15,
    "invisibleTime": "30000", "pollTime": "0", "bornTime": "0", "initMode": "0",
    "a": "p", "c": "TBW102", "d": "1", "e": "0", "f": "0", "g": "1", "h": "0", "i": "", "j": "0",
}  # fmt: skip
"""Of each of these requests."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("attacks-services")
    with running(lay_out(folder, settings=SMALL_FILES, proxies=free_ports(1))) as cluster:
        trio.run(create, cluster, "Orders")
        yield cluster


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three brokers with accounts; that of the service names no topic and no group."""
    account = f'[accounts.order-service]\nsecret_key = "{SERVICE.secret_key}"\n'
    with running_guarded(tmp_path_factory.mktemp("guarded"), account) as cluster:
        yield cluster


async def create(cluster: LocalCluster, topic: str) -> None:
    await create_topic([cluster.namesrv_address], topic, queues=1)


async def test_attack_with_halves_of_no_producer_ends_no_term(cluster: LocalCluster) -> None:
    leader = cluster.brokers[await cluster.wait_leader()]
    ext = {
        "a": "ghost", "b": "Orders", "c": "TBW102", "d": "1", "e": "0", "f": str(HALF), "g": "1",
        "h": "0", "i": GHOST, "j": "0", "k": "false",
    }  # fmt: skip
    with trio.fail_after(HUNG_S):
        async with attacked(cluster) as load:
            for _ in range(HALVES // HALVES_AT_A_TIME):
                halves = [
                    request(RequestCode.SEND_MESSAGE_V2, ext, b"half")
                    for _ in range(HALVES_AT_A_TIME)
                ]
                assert {answer.code for answer in await ask(leader.address, *halves)} == {0}
            await load.p99_s(1_000)  # all of them are due meanwhile, more than once


async def test_attack_of_a_group_that_claims_a_topic_takes_no_send(cluster: LocalCluster) -> None:
    (port,) = free_ports(1)
    wanted = Wanted("DefaultCluster", "thief", f"127.0.0.1:{port}", ("load",), "e1" * 16)
    thief = NameThief(TcpNetwork(), TrioClock(), wanted, [cluster.namesrv_address])

    async def has_tried() -> bool:
        return sum(thief.seen[each] for each in ("registered", "register_refused")) >= 4

    with trio.fail_after(HUNG_S):
        async with attacked(cluster), trio.open_nursery() as nursery:
            await nursery.start(thief.run)
            await eventually("the thief tries", has_tried)
            async with (
                connect([cluster.namesrv_address]) as client,
                Producer(client, "p") as producer,
            ):
                queues = await producer.publish_queues("load")
                for _ in range(4 * len(queues)):
                    await producer.send(Message("load", b"whose?"))
            nursery.cancel_scope.cancel()
    assert {queue.broker_name for queue in queues} == {"broker-a"}
    assert not thief.seen["taken"], thief.seen


async def test_attack_with_an_uncarriable_body_costs_no_neighbour(cluster: LocalCluster) -> None:
    leader = cluster.brokers[await cluster.wait_leader()]
    await create(cluster, "Mixed")
    commands = [
        request(
            RequestCode.SEND_MESSAGE_V2,
            {"a": "p", "b": "Mixed", "c": "TBW102", "d": "1", "e": "0", "f": str(flag), "g": "1",
             "h": "0", "i": "", "j": "0", "k": "false"},
            body,
        )
        for flag, body in [
            *((0, body) for body in GOOD[:3]),
            (COMPRESSED, zlib.compress(bytes(20 << 20), 9)),
            *((0, body) for body in GOOD[3:]),
        ]
    ]  # fmt: skip
    received: set[bytes] = set()
    with trio.fail_after(HUNG_S), called(cluster.proxies["proxy0"].address) as client:
        async with attacked(cluster):
            assert {answer.code for answer in await ask(leader.address, *commands)} == {0}
            while not received >= set(GOOD):
                got = await client.receive(pb.Resource(name="Mixed"))
                received |= {bytes(each.body) for each in got}
    with pytest.raises(NoRouteError):  # no dead letter was ever written
        await bodies_at(cluster.namesrv_address, "%DLQ%clerks")


async def test_attack_with_large_requests_takes_no_memory(cluster: LocalCluster) -> None:
    stored: list[str] = []

    async def send(address: str, number: int) -> None:
        with called(address) as client:
            answer = await client.send(message("x" * LARGE_BYTES, message_id=f"{number:034}"))
            stored.append(pb.Code.Name(answer.status.code))

    with trio.fail_after(HUNG_S):
        async with attacked(cluster), trio.open_nursery() as nursery:
            for number in range(LARGE_BODIES):
                nursery.start_soon(send, cluster.proxies["proxy0"].address, number)
    assert set(stored) <= {"OK", "TOO_MANY_REQUESTS"}


async def test_attack_on_topics_of_the_broker_reads_and_writes_nothing(
    guarded: LocalCluster,
) -> None:
    leader = guarded.brokers[await guarded.wait_leader()]
    topics = [*sorted(INNER_TOPICS), "%DLQ%billing", "%RETRY%billing", "orders"]
    with trio.fail_after(HUNG_S):
        async with attacked(guarded, "orders"), connect([guarded.namesrv_address]) as client:
            async with Producer(client, "p") as producer:
                await producer.send(Message("orders", FORGED[::-1], delay_level=18, keys=("k",)))
            for topic in topics:
                asked = {**ANY_FIELDS, "topic": topic, "b": topic}
                for code in READS_AND_WRITES:
                    answer = await ask_once(leader.address, code, asked, credentials=SERVICE)
                    assert "No default permission for" in (answer.remark or ""), (topic, answer)
                    assert FORGED[::-1] not in bytes(answer.body)
