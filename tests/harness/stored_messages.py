"""What a topic holds, read with our own consumer, to judge other clients by."""

from collections.abc import Iterable

from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message_ext import MessageExt
from tests.harness.eventually import eventually


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


async def bodies_at(namesrv: str, topic: str) -> list[bytes]:
    """Return the bodies alone."""
    return [bytes(message.body) for message in await messages_at(namesrv, topic)]


async def bodies_by_place(namesrv: str, topic: str) -> dict[tuple[int, int], bytes]:
    """Return the bodies by queue and offset."""
    return {place(message): bytes(message.body) for message in await messages_at(namesrv, topic)}


async def stored_in(client: ClientInstance, topic: str) -> dict[str, MessageExt]:
    """Return every message of *topic* by its body, none of which may be there twice."""
    found = {}
    for message in await messages_of(client, topic):
        body = bytes(message.body).decode()
        assert body not in found, f"{body!r} is stored twice"
        found[body] = message
    return found


async def committed_behind(
    client: ClientInstance, group: str, topic: str, messages: Iterable[MessageExt]
) -> None:
    """Wait until *group* has committed offsets behind all of *messages*: clients do so in turns."""
    behind: dict[int, int] = {}
    for message in messages:
        queue_id, offset = place(message)
        behind[queue_id] = max(behind.get(queue_id, 0), offset)

    # Not opened: as a member of the group it would get queues of it.
    consumer = PullConsumer(client, group)

    async def is_behind() -> bool:
        queues = {queue.queue_id: queue for queue in await consumer.fetch_message_queues(topic)}
        for queue_id, offset in behind.items():
            if (await consumer.committed_offset(queues[queue_id]) or 0) <= offset:
                return False
        return True

    await eventually(f"{group} has committed offsets behind {behind}", is_behind)


def place(message: MessageExt) -> tuple[int, int]:
    """Return its queue and its offset there."""
    return message.record.queue_id, message.queue_offset


def tag_and_keys(message: MessageExt) -> tuple[str | None, str | None]:
    """Return the two properties most clients have a name for."""
    return message.properties.get("TAGS"), message.properties.get("KEYS")
