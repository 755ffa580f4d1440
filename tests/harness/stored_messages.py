"""What a topic holds, read with our own consumer, to judge other clients by."""

from __future__ import annotations

from client.client_instance import ClientInstance
from client.connect import connect
from client.message import MessageExt
from client.pull_consumer import PullConsumer


async def messages_of(client: ClientInstance, topic: str) -> list[MessageExt]:
    """Return every message of *topic*, each queue in its order."""
    async with PullConsumer(client, "judges") as consumer:
        found: list[MessageExt] = []
        async for _, result in consumer.drain(await consumer.fetch_message_queues(topic)):
            found += result.messages
        return found


async def messages_at(namesrv: str, topic: str) -> list[MessageExt]:
    """Do so with a client of its own."""
    async with connect([namesrv]) as client:
        return await messages_of(client, topic)


async def stored_in(client: ClientInstance, topic: str) -> dict[str, MessageExt]:
    """Return every message of *topic* by its body, none of which may be there twice."""
    found = {}
    for message in await messages_of(client, topic):
        body = bytes(message.body).decode()
        assert body not in found, f"{body!r} is stored twice"
        found[body] = message
    return found


def place(message: MessageExt) -> tuple[int, int]:
    """Return its queue and its offset there."""
    return message.record.queue_id, message.queue_offset


def tag_and_keys(message: MessageExt) -> tuple[str | None, str | None]:
    """Return the two properties most clients have a name for."""
    return message.properties.get("TAGS"), message.properties.get("KEYS")
