"""Fixtures of the client: a fake cluster on virtual time, and clients of it."""

from collections.abc import AsyncIterator

import pytest

from dledger.client.core.client_instance import ClientInstance
from dledger.client.producer.producer import Producer
from tests.unit.client.consumer.consuming import Heard
from tests.unit.client.fake_cluster import World, open_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """One NameServer, and the group "g" of three brokers."""
    async with open_world() as world:
        yield world


@pytest.fixture
async def client(world: World) -> AsyncIterator[ClientInstance]:
    """An open client of `world`."""
    async with world.client() as client:
        yield client


@pytest.fixture
async def producer(client: ClientInstance) -> AsyncIterator[Producer]:
    """An open producer of `client`, of the producer group "p"."""
    async with Producer(client, "p") as producer:
        yield producer


@pytest.fixture
def heard() -> Heard:
    """A listener of push consumers."""
    return Heard()
