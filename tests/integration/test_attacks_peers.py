"""What a process that is no member does at the peer ports of three brokers under a light load.

Real processes, default settings; once as ``dledger up`` makes them, with a secret, and once
without.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.entry import seal_entry
from dledger.raft.wire import FRAME_BYTES_MAX, Kind
from dledger.remoting.tcp import TcpNetwork
from tests.harness import stranger as a_stranger
from tests.harness.attacked import FORGED, attacked
from tests.harness.eventually import all_statuses
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running
from tests.harness.raft_cluster import batch
from tests.harness.stored_messages import bodies_at
from tests.harness.stranger import Stranger, frame

pytestmark = pytest.mark.slow

BODIES = 20


KEPT = sorted(b"kept %d" % number for number in range(BODIES))


def hello(name: str = "evil", **changes: Any) -> bytes:
    return a_stranger.hello(name, **{"cluster": "DefaultCluster", "group": "broker-a", **changes})


@pytest.fixture(scope="module", params=[{}, {"raft.secret_file": ""}], ids=["secret", "no secret"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("attacks-peers")
    cluster = lay_out(folder, settings={**SMALL_FILES, **request.param})

    async def fill() -> None:
        async with connect([cluster.namesrv_address]) as client, Producer(client, "p") as producer:
            for body in KEPT:
                await producer.send(Message("t", body))

    with running(cluster):
        trio.run(fill)
        yield cluster


def stranger() -> Stranger:
    return Stranger(TcpNetwork())


def peer_address(cluster: LocalCluster, name: str) -> tuple[str, int]:
    path = cluster.brokers[name].config_path
    assert path is not None
    peers = tomllib.loads(path.read_text())["raft"]["peers"].split(";")
    host, _, port = next(p for p in peers if p.startswith(name)).partition("-")[2].rpartition(":")
    return host, int(port)


async def test_the_log_goes_to_no_stranger_and_nothing_forged_comes_in(
    cluster: LocalCluster,
) -> None:
    (port,) = free_ports(1)
    listening = stranger()

    async with attacked(cluster), trio.open_nursery() as nursery:
        nursery.start_soon(listening.listen, "127.0.0.1", port)
        said = hello(peer=f"127.0.0.1:{port}")
        for name, status in (await all_statuses(cluster)).items():
            address, term, last = (
                peer_address(cluster, name),
                status["term"],
                status["last_index"],
            )
            await stranger().say(address, said, frame(Kind.FETCH, 0, 1, 10**6), seconds=0.3)
            forged = seal_entry(
                [batch(FORGED, topic="t")],
                [BODIES],
                index=last + 1,
                term=term + 5,
                position=status["end_position"],
                prev_chain=0,
                store_time_ms=0,
                store_host=bytes(8),
            )
            append = frame(
                Kind.APPEND, term + 5, last, term, last + 1, sequence=2, payload=bytes(forged)
            )
            await stranger().say(
                address, said, frame(Kind.HEARTBEAT, term + 5, 1, 0), append, seconds=0.3
            )
        nursery.cancel_scope.cancel()
    assert sorted(await bodies_at(cluster.namesrv_address, "t")) == KEPT
    assert listening.callers == 0
    assert listening.heard == []


async def test_names_and_unfinished_frames_of_strangers_take_no_memory(
    cluster: LocalCluster,
) -> None:
    part = (FRAME_BYTES_MAX - 1).to_bytes(4, "big") + bytes(1 << 20)

    async def hold(address: tuple[str, int]) -> None:
        await stranger().say(address, hello(), *([part] + [bytes(1 << 20)] * 30), seconds=2)

    async with attacked(cluster) as load:
        for name in cluster.brokers:
            address = peer_address(cluster, name)
            for number in range(80):
                await stranger().say(address, hello(f"s{number}"), seconds=0.01)
            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(hold, address)
                await load.p99_s(100)
                nursery.cancel_scope.cancel()
        # A member that starts again gets in at once.
        statuses = await all_statuses(cluster)
        follower = next(name for name, row in statuses.items() if row["role"] == "follower")
        await cluster.stop(follower)
        await cluster.start(follower)
        await cluster.wait_healthy()
