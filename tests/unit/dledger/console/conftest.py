"""A console over a cluster in memory, asked through its ASGI application."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.console.app import make_app
from dledger.console.console import Console, ConsoleSettings, Note
from tests.unit.client.fake_cluster import World, open_world

HERE = "http://127.0.0.1:8180"


@dataclass
class Visitor:
    """A browser without a window."""

    console: Console
    http: httpx.AsyncClient

    async def get(self, path: str, **asked: Any) -> httpx.Response:
        return await self.http.get(path, **asked)

    async def post(self, path: str, page: str = "/cluster", **fields: str) -> httpx.Response:
        """Send a form that a page of the console could have sent."""
        await self.http.get(page)
        return await self.http.post(path, data=fields, headers={"origin": HERE})

    @property
    def note(self) -> Note:
        """What came of the newest change; it has not been shown yet."""
        return list(self.console.notes.values())[-1]


@asynccontextmanager
async def visiting(
    client: ClientInstance, settings: ConsoleSettings | None = None
) -> AsyncIterator[Visitor]:
    """Give a visitor of a console that uses *client*."""

    def other(config: ClientConfig) -> ClientInstance:
        return ClientInstance(config, clock=client.clock, network=client.network, rng=client.rng)

    console = Console(client, other, settings or ConsoleSettings(allow_changes=True))
    transport = httpx.ASGITransport(make_app(console))
    async with httpx.AsyncClient(transport=transport, base_url=HERE) as http:
        yield Visitor(console, http)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """One NameServer, and the group "g" of three brokers that know little."""
    async with open_world() as world:
        yield world


@pytest.fixture
async def visitor(world: World) -> AsyncIterator[Visitor]:
    """A visitor of a console of `world` that allows changes."""
    async with world.client() as client, visiting(client) as visitor:
        yield visitor


def visible(response: httpx.Response) -> str:
    """Return the text of a page as a person reads it, spaces made one."""
    return " ".join(re.sub(r"<[^>]+>", " ", response.text).split())
