"""Apache's Go client 2.1.2 of the remoting protocol, against three real brokers.

The client is not changed in any way; it comes from its registry. Real processes and sockets.
"""

from pathlib import Path
from typing import Any

import pytest

from dledger.cli.local_cluster import local_cluster
from tests.harness.cluster_questions import create_topic
from tests.harness.foreign_client import REMOTING_GO, foreign_client, needs_remoting_go
from tests.harness.grpc_clients import lose_nothing
from tests.harness.local_settings import SMALL_FILES
from tests.harness.remoting_clients import QUICK_CHECKS, TOPIC, exchange_every_kind, one_at_a_time

pytestmark = [pytest.mark.slow, pytest.mark.hunt, needs_remoting_go]


def client(folder: Path, *arguments: str) -> Any:
    """Start the client in one of its parts."""
    return foreign_client(folder, "remoting_go", *arguments, command=(REMOTING_GO,))


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=QUICK_CHECKS) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], TOPIC, queues=4)
        # It gives a message up in order when it was refused once more than it may be.
        await exchange_every_kind(tmp_path, client, namesrv, namesrv, never_in_order=4)


async def test_nothing_is_lost_when_the_leader_dies(tmp_path: Path) -> None:
    async with local_cluster(tmp_path / "cluster", settings=SMALL_FILES) as cluster:
        namesrv = cluster.namesrv_address
        await create_topic([namesrv], TOPIC, queues=4)
        started = one_at_a_time(client)
        await lose_nothing(tmp_path, started, cluster, namesrv, ("push", "lite"))
