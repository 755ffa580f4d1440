"""Messages of one message group stay in one queue."""

from __future__ import annotations

from dledger.commitlog.record import decode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.service import MessagingService
from tests.unit.client.fake_cluster import World
from tests.unit.dledger.proxy.test_refusals import code_of

GROUPS = [f"order-{number}" for number in range(12)]


async def send(service: MessagingService, group: str, step: int) -> int:
    message = pb.Message(topic=pb.Resource(name="T"), body=f"{group} {step}".encode())
    system = message.system_properties
    system.message_id, system.message_type = f"{step:032X}", pb.FIFO
    system.message_group = group
    return await code_of(service, "SendMessage", pb.SendMessageRequest(messages=[message]))


def places(world: World) -> dict[str, set[tuple[str, int]]]:
    """Return the queues that each message group has messages in."""
    found: dict[str, set[tuple[str, int]]] = {}
    for name, group in world.groups.items():
        for (_, queue_id), records in group.queues.items():
            for record in records:
                message_group, _ = bytes(decode_record(record).body).decode().split()
                found.setdefault(message_group, set()).add((name, queue_id))
    return found


async def test_election_moves_no_message_group(world: World, service: MessagingService) -> None:
    other = await world.add_group("h", 3, 11_000)
    for group in GROUPS:
        assert await send(service, group, 0) == pb.OK
    other.leader = None
    other.register()
    await service.query_route(pb.QueryRouteRequest(topic=pb.Resource(name="T")), Caller("c"))
    await service._instance.route("T", fresh=True)
    codes = [await send(service, group, 1) for group in GROUPS]
    assert pb.OK in codes
    assert len(set(codes)) == 2, "those of the group without a leader are refused"
    other.elect(1)
    for group in GROUPS:
        assert await send(service, group, 2) == pb.OK
    found = places(world)
    assert [len(found[group]) for group in GROUPS] == [1] * len(GROUPS)
    assert {name for each in found.values() for name, _ in each} == {"g", "h"}
