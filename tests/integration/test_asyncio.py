"""The SDK for asyncio with real brokers: a leader is killed under load; a FastAPI application."""

import asyncio
import importlib.util
from types import ModuleType

import httpx
import pytest

from dledger.testing import EmbeddedBroker
from tests.harness.shipped_files import ROOT


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
