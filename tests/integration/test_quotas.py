"""Quotas of real processes: an account is slowed down, also behind a killed leader."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import structlog
import trio

from dledger.cli.local_cluster import LocalCluster
from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.remoting.protocol.quota_bodies import QuotaInfo
from dledger.remoting.protocol.signature import Credentials
from dledger.services.quota_buckets import BURST_S
from tests.harness.eventually import wait_logged
from tests.harness.module_cluster import heal
from tests.harness.operator_cluster import OPERATOR, SERVICE, dledger, running_guarded

pytestmark = [pytest.mark.slow, pytest.mark.side_by_side, pytest.mark.xdist_group("quotas")]

RATE = 5
"""Slower than any machine sends by itself."""


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command sends logs to the standard error that it has."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("quotas")
    service = (
        f'[accounts.order-service]\nsecret_key = "{SERVICE.secret_key}"\n'
        'default_topic_perm = "PUB|SUB"\ndefault_group_perm = "SUB"\n'
    )
    with running_guarded(folder, service) as found:
        yield found


def listed(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the only quota as the command shows it."""
    capsys.readouterr()
    assert dledger(cluster, "quota", "ls", "--output", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    return dict(row)


@asynccontextmanager
async def client_of(
    cluster: LocalCluster, credentials: Credentials
) -> AsyncIterator[ClientInstance]:
    config = ClientConfig(credentials=credentials)
    async with connect([cluster.namesrv_address], config) as client:
        yield client


async def seconds_for(cluster: LocalCluster, credentials: Credentials, count: int) -> float:
    """Send one message after the other; return how long that took."""
    async with client_of(cluster, credentials) as client, Producer(client, "p") as producer:
        await producer.send(Message("orders", b"first"))
        began_s = trio.current_time()
        for number in range(count):
            await producer.send(Message("orders", b"%d" % number))
        return trio.current_time() - began_s


def test_an_account_is_slowed_down_and_loses_nothing(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    set_rate = ("--account", SERVICE.access_key, "--send-messages", str(RATE))
    assert dledger(cluster, "quota", "set", *set_rate) == 0
    count = 3 * RATE
    took_s = trio.run(seconds_for, cluster, SERVICE, count)
    assert took_s >= count / RATE - BURST_S - 0.1, "all were acknowledged, at the rate"
    row = listed(cluster, capsys)
    assert (row["kind"], row["name"]) == ("account", SERVICE.access_key)
    assert (row["sent_messages_per_s"], row["refused"]) == (RATE, 0)
    assert row["throttled_ms"] > 500
    assert dledger(cluster, "quota", "set", "--account", SERVICE.access_key, "--connections=9") == 0
    row = listed(cluster, capsys)
    assert (row["sent_messages_per_s"], row["connections"]) == (RATE, 9), "the rate stays"
    assert dledger(cluster, "quota", "rm", "--account", SERVICE.access_key) == 0
    assert dledger(cluster, "quota", "rm", "--account", SERVICE.access_key) != 0
    assert "there is no quota of account" in capsys.readouterr().err


async def test_sends_at_once_are_all_stored_in_time(cluster: LocalCluster) -> None:
    """More than the bound lets wait: what is refused the SDK sends again when it may."""
    async with client_of(cluster, OPERATOR) as operator, client_of(cluster, SERVICE) as client:
        admin = Admin(operator)
        await admin.set_quota(account=SERVICE.access_key, sent_messages_per_s=RATE)
        before = sum(top for _, top in (await admin.offsets("orders")).values())
        began_s = trio.current_time()
        async with Producer(client, "p") as producer, trio.open_nursery() as nursery:
            send = partial(producer.send, timeout_s=30)
            for number in range(4 * RATE):
                nursery.start_soon(send, Message("orders", b"%d" % number))
        took_s = trio.current_time() - began_s
        after = sum(top for _, top in (await admin.offsets("orders")).values())
        assert after - before == 4 * RATE, "each once"
        assert took_s > 1.0
        await admin.delete_quota(account=SERVICE.access_key)
        assert list((await admin.quotas()).values()) == [[]]


async def test_a_connection_too_many_is_closed(cluster: LocalCluster) -> None:
    leader = cluster.brokers[await cluster.wait_healthy()]
    async with (
        client_of(cluster, OPERATOR) as operator,
        client_of(cluster, SERVICE) as first,
        client_of(cluster, SERVICE) as second,
        Producer(first, "p") as producer,
        Producer(second, "p") as refused,
    ):
        admin = Admin(operator)
        await admin.set_quota(account=SERVICE.access_key, connections=1)
        since = leader.log_path.stat().st_size
        await producer.send(Message("orders", b"x"))
        with pytest.raises(ClientError, match="has all its connections, 1") as error:
            await refused.send(Message("orders", b"x"), timeout_s=2)
        assert error.value.outcome == "not_stored"
        line = await wait_logged(leader, "connection_ends", since=since)
        text = "above its quota of connections: account order-service has all its connections, 1"
        assert line["reason"] == text
        await producer.send(Message("orders", b"x"))
        await admin.delete_quota(account=SERVICE.access_key)
        await refused.send(Message("orders", b"x"), timeout_s=20)


def test_a_quota_survives_a_killed_leader(cluster: LocalCluster) -> None:
    name = trio.run(cluster.wait_healthy)
    assert dledger(cluster, "quota", "set", "--default", "account", "--receive-bytes=500") == 0

    async def shown_without_it() -> list[QuotaInfo]:
        await cluster.kill(name)
        await cluster.wait_leader(other_than=name)
        async with client_of(cluster, OPERATOR) as client:
            ((_, quotas),) = (await Admin(client).quotas()).items()
            return quotas

    try:
        assert trio.run(shown_without_it) == [QuotaInfo(kind="account", received_bytes_per_s=500)]
        assert dledger(cluster, "quota", "rm", "--default", "account") == 0
    finally:
        trio.run(heal, cluster)
