"""Strangers on the port where members talk: refused and logged, and the group goes on.

Real processes.
"""

from __future__ import annotations

import random
import struct
import tomllib
import zlib

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster
from dledger.client.connect import connect
from dledger.client.core.errors import NoNameServerError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.raft.identity import Hello
from dledger.raft.wire import (
    FRAME_BYTES_MAX,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_frame,
    encode_head,
)
from dledger.remoting.protocol.codes import RequestCode
from tests.harness.cluster_questions import ask
from tests.harness.eventually import all_statuses, wait_logged

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("three-brokers")]


def hello(**changes: object) -> bytes:
    fields = {
        **Hello("DefaultCluster", "broker-a", "n1", "ab" * 16, {}, False, "h:1", "data").encode(),
        **changes,
    }
    return encode_frame(encode_head(Kind.HELLO, 1, 1, 0, (fields,)))


def sealed(content: bytes) -> bytes:
    return struct.pack(">II", len(content) + 4, zlib.crc32(content)) + content


STRANGERS: dict[str, bytes] = {
    "garbage": random.Random(3).randbytes(4096),
    "oversized": struct.pack(">II", FRAME_BYTES_MAX + 1, 0),
    "empty": struct.pack(">II", 4, 0),
    "a wrong CRC": hello()[:4] + b"\0\0\0\0" + hello()[8:],
    "no CBOR": sealed(b"\x00\x04\xff\xff\xff\xff"),
    "a pickle": sealed(b"\x00\x08\x80\x04\x95\x00\x00\x00\x00."),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "another cluster": hello(cluster="Other"),
    "another group": hello(group="broker-b"),
    "founded elsewhere": hello(name="n9", voters={"n9": "cd" * 16}),
    "our own name from elsewhere": hello(voters={"n0": "cd" * 16, "n1": "ab" * 16}),
    "a newer version": hello(v="99"),
    "no hello first": encode_frame(encode_head(Kind.VOTE, 9, 1, 1, (9, 9, False))),
}


def peer_address(cluster: LocalCluster, name: str) -> tuple[str, int]:
    path = cluster.brokers[name].config_path
    assert path is not None
    peers = tomllib.loads(path.read_text())["raft"]["peers"].split(";")
    host, _, port = next(p for p in peers if p.startswith(name)).partition("-")[2].rpartition(":")
    return host, int(port)


async def said_until_closed(cluster: LocalCluster, name: str, data: bytes) -> list[PeerFrame]:
    """Send *data* to a member's peer port; return the frames that come before it closes."""
    decoder = PeerFrameDecoder()
    frames: list[PeerFrame] = []
    with trio.fail_after(60):
        async with await trio.open_tcp_stream(*peer_address(cluster, name)) as stream:
            await stream.send_all(data)
            try:
                while received := await stream.receive_some(65536):
                    frames += decoder.feed(received)
            except trio.BrokenResourceError:
                pass  # it hung up with some of our bytes unread
    return frames


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_is_refused_and_the_group_goes_on(
    three_brokers: LocalCluster, data: bytes
) -> None:
    for name in three_brokers.brokers:
        assert await said_until_closed(three_brokers, name, data) == []
    async with (
        connect([three_brokers.namesrv_address]) as client,
        Producer(client, "p") as producer,
    ):
        await producer.send(Message("peer-port", b"x"))
    for node in three_brokers.brokers.values():
        assert node.running, node.last_log_lines()
        await wait_logged(node, "peer_refused")


async def test_ports_refuse_the_wrong_protocol(three_brokers: LocalCluster) -> None:
    host, port = peer_address(three_brokers, "n0")
    with pytest.raises(NoNameServerError):
        await ask(f"{host}:{port}", RequestCode.RAFT_STATUS)
    client_host, _, client_port = three_brokers.brokers["n0"].address.rpartition(":")
    with trio.fail_after(60):
        async with await trio.open_tcp_stream(client_host, int(client_port)) as stream:
            await stream.send_all(hello())
            try:
                assert await stream.receive_some(100) == b""
            except trio.BrokenResourceError:
                pass  # hung up with bytes unread
    assert len(await all_statuses(three_brokers)) == 3
