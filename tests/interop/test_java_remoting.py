"""RocketMQ's Java client of the remoting protocol, 4.9.7 and 5.5.0, against three real brokers.

The client is not changed in any way; it comes from its registry. Real processes and sockets.
"""

from pathlib import Path

import pytest

from dledger.cli.local_cluster import local_cluster
from tests.harness.cluster_questions import create_topic
from tests.harness.fast_part import gate_part
from tests.harness.foreign_client import JAVA_VERSIONS, needs_java
from tests.harness.grpc_clients import lose_nothing
from tests.harness.java_remoting import java_client
from tests.harness.local_settings import SMALL_FILES
from tests.harness.remoting_clients import (
    QUICK_CHECKS,
    TOPIC,
    Parts,
    exchange_every_kind,
    one_at_a_time,
)

pytestmark = [pytest.mark.slow, needs_java]


@pytest.fixture(scope="module", params=gate_part(reversed(JAVA_VERSIONS), 1))
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """Return what starts the client in one of its parts."""
    return java_client(request.param, tmp_path_factory.mktemp(f"classes-{request.param}"))


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path, client: Parts) -> None:
    async with local_cluster(tmp_path / "cluster", settings=QUICK_CHECKS) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], TOPIC, queues=4)
        await exchange_every_kind(tmp_path, client, namesrv, namesrv)


@pytest.mark.hunt
async def test_nothing_is_lost_when_the_leader_dies(tmp_path: Path, client: Parts) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], TOPIC, queues=4)
        started = one_at_a_time(client)
        await lose_nothing(tmp_path, started, cluster, namesrv, ("push", "lite"))
