"""Fixtures: a fake cluster, and the service of a proxy before it."""

from collections.abc import AsyncIterator

import pytest

from dledger.proxy.service import MessagingService
from tests.unit.client.fake_cluster import World, open_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as world:
        yield world


@pytest.fixture
async def service(world: World) -> AsyncIterator[MessagingService]:
    service = MessagingService(world.client(), ("127.0.0.1", 8081))
    async with service.open():
        yield service
