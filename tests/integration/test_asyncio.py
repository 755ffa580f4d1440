"""The SDK for asyncio with real brokers: a leader is killed under load; a FastAPI application."""

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import trio

import dledger
from dledger import aio
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.errors import ClientError
from dledger.testing import EmbeddedBroker
from tests.harness.shipped_files import ROOT

OUTSTANDING = 64
BEFORE, AFTER = 1_000, 1_000
"""Acknowledged sends before the leader is killed, and after another one leads."""


async def send_through_a_kill(
    address: str, cluster: LocalCluster, host: trio.lowlevel.TrioToken
) -> int:
    """Return how many sends were acknowledged; every one of them is read back."""
    acknowledged: dict[bytes, dledger.SendResult] = {}
    unknown: set[bytes] = set()
    numbers = iter(range(1_000_000))
    is_enough = asyncio.Event()

    def on_host(work: Any, *args: Any) -> Any:
        return trio.from_thread.run(work, *args, trio_token=host)

    async with (
        aio.connect(address) as client,
        aio.Producer(client, "p") as producer,
        aio.PullConsumer(client, "c") as consumer,
    ):
        await aio.Admin(client).create_topic("T", queue_nums=4)

        async def send() -> None:
            while not is_enough.is_set():
                body = b"%d" % next(numbers)
                try:
                    acknowledged[body] = await producer.send(dledger.Message("T", body))
                except ClientError as error:
                    if error.outcome == "unknown":
                        unknown.add(body)

        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            for _ in range(OUTSTANDING):
                tasks.create_task(send())
            while len(acknowledged) < BEFORE:
                await asyncio.sleep(0.01)
            leader = await asyncio.to_thread(on_host, cluster.wait_leader)
            await asyncio.to_thread(on_host, cluster.kill, leader)
            at_kill = len(acknowledged)
            while len(acknowledged) < at_kill + AFTER:
                await asyncio.sleep(0.01)
            is_enough.set()
        stored: dict[bytes, tuple[int, int]] = {}
        for queue in await consumer.fetch_message_queues("T"):
            async for message in consumer.iter_messages(queue, 0):
                assert message.body_bytes not in stored
                stored[message.body_bytes] = (queue.queue_id, message.queue_offset)
    for body, sent in acknowledged.items():
        assert stored[body] == (sent.message_queue.queue_id, sent.queue_offset)
    assert stored.keys() <= acknowledged.keys() | unknown
    return len(acknowledged)


@pytest.mark.slow
async def test_asyncio_loses_nothing_when_the_leader_dies(tmp_path: Path) -> None:
    settings: dict[str, object] = {"store.mapped_file_size_commit_log": 16 << 20}
    async with local_cluster(tmp_path, settings=settings) as cluster:
        count = await trio.to_thread.run_sync(
            asyncio.run,
            send_through_a_kill(
                cluster.namesrv_address, cluster, trio.lowlevel.current_trio_token()
            ),
        )
    assert count >= BEFORE + AFTER


def load_application() -> ModuleType:
    path = ROOT / "examples" / "fastapi" / "orders.py"
    spec = importlib.util.spec_from_file_location("orders_application", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fastapi_application_sends_and_consumes(monkeypatch: pytest.MonkeyPatch) -> None:
    application = load_application()

    async def use() -> dict[str, str]:
        app = application.app
        async with (
            asyncio.timeout(60),
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app), base_url="http://orders"
            ) as browser,
        ):
            answers = await asyncio.gather(
                *(browser.post(f"/orders/{number}", content=b"tea") for number in range(20))
            )
            assert [answer.status_code for answer in answers] == [200] * 20
            places = {(answer.json()["queue"], answer.json()["offset"]) for answer in answers}
            assert len(places) == 20
            refused = await browser.post("/orders/21", content=b"")
            assert refused.status_code == 503
            assert refused.json()["detail"]["outcome"] == "not_stored"
            while len(booked := (await browser.get("/orders")).json()) < 20:
                await asyncio.sleep(0.01)
            found: dict[str, str] = booked
            return found

    with EmbeddedBroker() as cluster:
        cluster.create_topic("orders")
        monkeypatch.setenv("NAMESRV_ADDR", cluster.name_server_addr)
        assert asyncio.run(use()) == {str(number): "tea" for number in range(20)}
