"""Apache's Java client 5.2.0 of the gRPC protocol, through `dledger-proxy`, over three brokers.

The client is not changed in any way; it comes from its registry. Real processes and sockets.
"""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.client.admin.admin import Admin
from dledger.client.admin.groups import running_info
from dledger.client.connect import connect
from dledger.client.core.errors import NoRouteError
from dledger.client.core.message_ext import MessageExt
from dledger.remoting.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    GroupRetryPolicy,
    SubscriptionGroupConfig,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.headers import ConsumeDirectlyHeader
from tests.harness.cluster_questions import create_topic
from tests.harness.foreign_client import GRPC_JAVA, foreign_client, needs_grpc_java
from tests.harness.grpc_clients import (
    CONSUME_S,
    LOOK_S,
    answered,
    cluster_with_proxies,
    cluster_with_tls,
    create_group,
    exchange_every_kind,
    exchange_in_order,
    lose_nothing,
)
from tests.harness.stored_messages import messages_at

pytestmark = [pytest.mark.slow, pytest.mark.hunt, needs_grpc_java]

PARTS = ("receive", "push")
ACCOUNTS = """
[accounts.clerk-key]
secret_key = "clerk-secret"
topics = { "shop%Orders" = "PUB|SUB" }
groups = { "shop%group-receive" = "SUB" }
"""
SOON = GroupRetryPolicy(customized_retry_policy={"next": [1_000]})


def client(folder: Path, part: str, *arguments: str, **settings: Any) -> Any:
    """Start the client in one of its parts."""
    options = ("-Xmx300m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={folder}")
    command = ("java", *options, "-cp", f"{GRPC_JAVA}:{GRPC_JAVA}/*", "GrpcClient")
    return foreign_client(
        folder, "grpc_java", part, json.dumps(settings), *arguments, command=command
    )


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path) as cluster:
        endpoints = cluster.proxies["proxy0"].address
        await exchange_every_kind(tmp_path, client, endpoints, PARTS)


async def test_account_in_a_namespace_exchanges_through_tls(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tls": True, "namespace": "shop"}
    settings |= {"access_key": "clerk-key", "secret_key": "clerk-secret"}
    async with cluster_with_tls(tmp_path, ACCOUNTS) as cluster:
        await create_topic([cluster.namesrv_address], "shop%Orders", queues=4)
        endpoints = cluster.proxies["tls0"].address
        clerk = partial(client, **settings)
        await exchange_every_kind(tmp_path, clerk, endpoints, ("receive",))


async def test_nothing_is_lost_when_leader_and_proxy_die(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path, 2) as cluster:
        endpoints = ";".join(node.address for node in cluster.proxies.values())
        await lose_nothing(tmp_path, client, cluster, endpoints, PARTS, "proxy0", late="proxy1")


async def test_message_groups_are_consumed_in_order(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path) as cluster:
        await exchange_in_order(tmp_path, client, cluster)


async def test_operators_reach_a_push_consumer(tmp_path: Path) -> None:
    """They read its threads, and let it consume a message that it refuses."""
    async with cluster_with_proxies(tmp_path) as cluster:
        endpoints = cluster.proxies["proxy0"].address
        async with (
            client(tmp_path / "producer", "produce", endpoints, "Orders") as producer,
            client(tmp_path / "push", "push", endpoints, "clerks", "Orders", "A") as consumer,
            connect([cluster.namesrv_address]) as sdk,
        ):
            await answered(producer, "never", tags="B")
            (stored,) = await messages_at(cluster.namesrv_address, "Orders")
            with trio.fail_after(CONSUME_S):
                while not (found := await Admin(sdk).consumer_connection("clerks")):
                    await trio.sleep(LOOK_S)
            (member,) = found.connection_set
            info = await running_info(sdk, "clerks", member.client_id, "broker-a", with_stacks=True)
            assert "java.lang.Thread" in (info.jstack or "")
            header = ConsumeDirectlyHeader(
                "clerks", stored.offset_message_id, member.client_id, "broker-a"
            )
            code, ext = RequestCode.CONSUME_MESSAGE_DIRECTLY, dict(header.encode())
            answer = await sdk.ask_leader("broker-a", code, ext, topic="Orders")
            assert ConsumeMessageDirectlyResult.decode(answer.body).consume_result == "CR_LATER"
            assert [line["body"] for line in consumer.messages] == ["never"]


async def dead_letters(namesrv: str, group: str) -> list[MessageExt]:
    """Return the dead letters of *group* as soon as there are some."""
    with trio.fail_after(CONSUME_S):
        while True:
            with suppress(NoRouteError):
                if found := await messages_at(namesrv, f"%DLQ%{group}"):
                    return found
            await trio.sleep(LOOK_S)


async def test_refused_messages_become_dead_letters(tmp_path: Path) -> None:
    """In order the client itself tries again, and asks the proxy to make it a dead letter."""
    async with cluster_with_proxies(tmp_path) as cluster:
        namesrv, endpoints = cluster.namesrv_address, cluster.proxies["proxy0"].address
        for in_order in (False, True):
            config = SubscriptionGroupConfig(
                f"clerks-{in_order}",
                retry_max_times=1,
                group_retry_policy=SOON,
                consume_message_orderly=in_order,
            )
            await create_group(namesrv, "Orders", config)
        async with (
            client(tmp_path / "producer", "produce", endpoints, "Orders") as producer,
            client(tmp_path / "any", "push", endpoints, "clerks-False", "Orders", "*") as any_order,
            client(tmp_path / "fifo", "push", endpoints, "clerks-True", "Orders", "*") as in_order,
        ):
            sent = {
                body: await answered(producer, body, group="one", tags="A")
                for body in ("first", "never", "last")
            }
            for group in ("clerks-False", "clerks-True"):
                (letter,) = await dead_letters(namesrv, group)
                assert (letter.body, letter.tags) == (b"never", "A")
                assert letter.message_id == sent["never"]["message_id"]
                assert letter.properties["DLQ_ORIGIN_TOPIC"] == "Orders"
            await in_order.until(lambda lines: len(lines) >= 5, CONSUME_S)
    came = [(line["body"], line["attempt"]) for line in in_order.messages]
    assert came == [("first", 1), ("never", 1), ("never", 2), ("last", 1)]
    came = [(line["body"], line["attempt"]) for line in any_order.messages]
    assert sorted(came) == [("first", 1), ("last", 1), ("never", 1), ("never", 2)]
