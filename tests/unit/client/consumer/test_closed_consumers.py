"""Consumers of which they or their client are closed while something is under way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError, RequestTimedOutError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from tests.unit.client.consumer.consuming import QUEUE, committed, send
from tests.unit.client.fake_cluster import World


async def commit(consumer: PullConsumer) -> None:
    await consumer.commit_offset(QUEUE, 1)


async def take_step(consumer: PullConsumer) -> None:
    await consumer.committed_offset(QUEUE)
    async with consumer.transaction() as step:
        step.send(Message("T", b"a"), QUEUE)
        step.commit(QUEUE, 1)


@pytest.mark.parametrize("is_abandoned", [True, False])
@pytest.mark.parametrize("change", [commit, take_step])
async def test_change_cut_off_by_closing_is_unknown(
    world: World, change: Callable[[PullConsumer], Awaitable[None]], is_abandoned: bool
) -> None:
    """It was sent before: its broker may store it."""
    for code in (RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.CONSUME_STEP):
        world.group.on(code, lambda _: DEFERRED)
    outcomes: list[str] = []

    async def run(consumer: PullConsumer) -> None:
        with pytest.raises(RequestTimedOutError) as caught:
            await change(consumer)
        outcomes.append(caught.value.outcome)

    async with trio.open_nursery() as nursery, world.client() as client:
        nursery.start_soon(run, PullConsumer(client, "c"))
        await trio.sleep(1)
        if is_abandoned:
            client.abandon()
            await trio.sleep(1)
    assert outcomes == ["unknown"]


async def test_change_of_a_closed_client_is_not_sent(client: ClientInstance) -> None:
    consumer = PullConsumer(client, "c")
    await consumer.committed_offset(QUEUE)
    client.abandon()
    for change in (commit, take_step):
        with pytest.raises(ClientClosedError):
            await change(consumer)


async def test_groups_closed_after_their_client_end_quietly(world: World) -> None:
    closed = trio.Event()

    async def use(user: PullConsumer | LitePullConsumer | Producer, opened: trio.Event) -> None:
        async with user:
            opened.set()
            await closed.wait()

    async with trio.open_nursery() as nursery:
        async with world.client() as client:
            for user in (PullConsumer(client, "c"), LitePullConsumer(client, "d")):
                nursery.start_soon(use, user, opened := trio.Event())
                await opened.wait()
            nursery.start_soon(use, Producer(client, "p"), opened := trio.Event())
            await opened.wait()
        closed.set()


async def test_poll_under_way_ends_when_its_consumer_closes(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await send(producer, 1, queues=1)
    ended_s: list[float] = []

    async def poll(consumer: LitePullConsumer) -> None:
        assert [message.body_bytes for message in await consumer.poll()] == [b"0"]
        with pytest.raises(ClientClosedError):
            await consumer.poll(3600)
        ended_s.append(trio.current_time())

    async with (
        trio.open_nursery() as nursery,
        LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer,
    ):
        await consumer.assign([QUEUE])
        nursery.start_soon(poll, consumer)
        await trio.sleep(2)
        closed_s = trio.current_time()
    assert committed(world.group) == {0: 1}
    assert ended_s[0] - closed_s < 0.1


async def test_poll_of_what_is_not_open_raises(client: ClientInstance) -> None:
    consumer = LitePullConsumer(client, "c")
    with pytest.raises(ClientClosedError, match="async with"):
        await consumer.poll()
    async with consumer:
        assert await consumer.poll(0) == []
        client.abandon()
        with pytest.raises(ClientClosedError):
            await consumer.poll()
    with pytest.raises(ClientClosedError):
        await consumer.poll()
