"""Bad input to a real broker over real sockets: a clear error, and it serves on as before.

One broker serves the whole module. After each test the same process must still store and give
back a message, and the queues must hold what was acknowledged and nothing else. What is wrong
with a data folder is in test_bad_folder.py, a full disk in test_full_disk.py.
"""

import itertools
import random
import struct
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, Node, lay_out
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.frame import MAX_FRAME_BYTES, FrameDecoder, encode_command
from dledger.remoting.protocol.headers import SendMessageHeader
from tests.harness.cluster_questions import ask, create_topic
from tests.harness.eventually import WITHIN_S, logged, look_until
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running
from tests.harness.stored_messages import bodies_at

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("bad-input")]

TOPIC = "bad-input"
QUEUE = MessageQueue(TOPIC, "broker-a", 0)
MAX_BODY_BYTES = 4 << 20


class World:
    """The cluster, and what this module has acknowledged."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.acknowledged: list[bytes] = []
        self.numbers = itertools.count()

    @property
    def node(self) -> Node:
        return self.cluster.brokers["n0"]

    @property
    def address(self) -> str:
        return self.node.address

    async def send(self, body: bytes, topic: str = TOPIC, **ext: str) -> RemotingCommand:
        """Send one message with RocketMQ's V2 header and return the answer."""
        answer = await ask(self.address, 310, {**send_ext(topic), **ext}, body, timeout_s=30)
        if answer.code == ResponseCode.SUCCESS and topic == TOPIC:
            self.acknowledged.append(body)
        return answer

    async def end_reasons(self) -> list[str]:
        """Return why connections have ended so far."""
        return [str(x["reason"]) for x in logged(self.node.log_path, "connection_ends")]


def send_ext(topic: str = TOPIC) -> dict[str, str]:
    header = SendMessageHeader("g", topic, "TBW102", 4, 0, 0, 1, 0, "")
    return {name: str(value) for name, value in header.encode_v2().items()}


def send_frame(body: bytes = b"never whole", opaque: int = 7) -> bytes:
    command = request(310, send_ext(), body)
    command.opaque = opaque
    return encode_command(command)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(
        lay_out(tmp_path_factory.mktemp("bad-input"), brokers=1, settings=SMALL_FILES)
    ) as cluster:
        trio.run(partial(create_topic, [cluster.namesrv_address], TOPIC, queues=1))
        yield World(cluster)


@pytest.fixture(autouse=True)
async def still_serves(world: World) -> AsyncIterator[None]:
    """After each test: the same process stores and gives back all that was acknowledged."""
    pid = world.node.pid
    yield
    assert (await world.send(b"after %d" % next(world.numbers))).code == ResponseCode.SUCCESS
    assert world.node.running
    assert world.node.pid == pid
    stored = await bodies_at(world.cluster.namesrv_address, TOPIC)
    assert stored == world.acknowledged
    assert logged(world.node.log_path, "handler_failed") == []


def client_of(world: World) -> ClientInstance:
    return connect([world.cluster.namesrv_address])


async def connected(world: World) -> trio.SocketStream:
    return await connected_to(world.address)


async def connected_to(address: str) -> trio.SocketStream:
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def answer_on(stream: trio.SocketStream) -> RemotingCommand:
    decoder = FrameDecoder()
    with trio.fail_after(WITHIN_S):
        while True:
            commands = decoder.feed(await stream.receive_some(65536))
            if commands:
                return commands[0]


async def closed_by_broker(stream: trio.SocketStream) -> bool:
    """Wait until the broker ends the connection; nothing but the end may come."""
    with trio.fail_after(WITHIN_S):
        try:
            return await stream.receive_some(65536) == b""
        except trio.BrokenResourceError:
            return True


# ------------------------------------------------------------------------------ frames


GARBAGE: dict[str, bytes] = {
    "one byte over 16 MiB": struct.pack(">iI", MAX_FRAME_BYTES - 3, 20),
    "2 GiB": struct.pack(">iI", 0x7FFFFFFF, 20),
    "negative length": struct.pack(">iI", -1, 20),
    "empty frame": struct.pack(">iI", 0, 0),
    "header longer than frame": struct.pack(">iI", 40, 0x00FFFFFF) + bytes(40),
    "unknown header encoding": struct.pack(">iI", 40, 0x09000010) + bytes(40),
    "header is no JSON": struct.pack(">iI", 40, 16) + b"{not json at all" + bytes(20),
    "HTTP": b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
    "TLS without TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "random": random.Random(11).randbytes(4096),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_frame_that_is_none_ends_its_connection_only(world: World, garbage: bytes) -> None:
    before = protocol_errors(await world.end_reasons())
    async with await connected(world) as good, await connected(world) as bad:
        await bad.send_all(garbage)
        assert await closed_by_broker(bad)
        await good.send_all(send_frame(b"good"))
        answer = await answer_on(good)
        assert (answer.code, answer.opaque) == (ResponseCode.SUCCESS, 7)
        world.acknowledged.append(b"good")
    await look_until(world.end_reasons, lambda reasons: protocol_errors(reasons) > before)


def protocol_errors(reasons: list[str]) -> int:
    return sum(reason.startswith("protocol error: ") for reason in reasons)


# ------------------------------------------------------------------------------ requests


async def test_broker_stores_four_mebibytes_and_refuses_more(world: World) -> None:
    answer = await world.send(bytes(MAX_BODY_BYTES + 1))
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert f"{MAX_BODY_BYTES + 1} bytes, at most {MAX_BODY_BYTES}" in (answer.remark or "")
    assert answer.ext["outcome"] == "not_stored"
    assert (await world.send(bytes(MAX_BODY_BYTES))).code == ResponseCode.SUCCESS
    async with client_of(world) as client, Producer(client, "p") as producer:
        with pytest.raises(MessageIllegalError, match="at most 4194304") as refused:
            await producer.send(Message(TOPIC, bytes(MAX_BODY_BYTES + 1)))
        assert refused.value.outcome == "not_stored"
