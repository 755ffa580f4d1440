"""The SDK's classes under asyncio, over the cluster in memory."""

import asyncio
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, assert_type

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dledger
from dledger import aio
from dledger.aio.guest import Guest, Held
from dledger.client.core.client_instance import ClientInstance as TrioClient
from dledger.errors import ClientClosedError, MessageIllegalError, NoRouteError
from dledger.remoting.machine import ThreadExecutor
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.harness.shipped_files import ROOT
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.client.producer.fake_transactions import FakeTransactions

REQUEST: ContextVar[str] = ContextVar("request", default="none")
FIRST = dledger.PushConfig(consume_from=dledger.FROM_FIRST)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[World, aio.ClientInstance]]:
    """Give a cluster in memory and an open client of it, in one loop."""
    guest = await Guest.enter()
    worlds: list[World] = []

    @asynccontextmanager
    async def cluster() -> AsyncIterator[None]:
        async with open_world() as world:
            worlds.append(world)
            yield

    held = Held(guest, cluster())
    try:
        await held.open()
        inner: TrioClient = worlds[0].client()
        inner.executor = ThreadExecutor()
        async with aio.ClientInstance(inner) as client:
            yield worlds[0], client
    finally:
        if worlds:
            await held.close()
        await guest.leave()


def run(main: Callable[[World, aio.ClientInstance], Coroutine[Any, Any, None]]) -> None:
    async def with_cluster() -> None:
        async with asyncio.timeout(60), opened() as (world, client):
            await main(world, client)

    asyncio.run(with_cluster())


def test_aio_sends_pulls_and_administers() -> None:
    async def main(_: World, client: aio.ClientInstance) -> None:
        admin = aio.Admin(client)
        assert await admin.create_topic("B", queue_nums=1) == ["g"]
        async with aio.Producer(client, "p") as producer, aio.PullConsumer(client, "c") as consumer:
            sent = await producer.send(dledger.Message("B", b"1"))
            assert_type(sent, dledger.SendResult)
            future = await producer.send_async(dledger.Message("B", b"2"))
            assert (await future.result()).queue_offset == 1
            assert future.done
            assert (
                await producer.send_nowait(dledger.Message("B", b"3")).result()
            ).queue_offset == 2
            batch = await producer.send_batch([dledger.Message("B", b"4")] * 2)
            assert [result.queue_offset for result in batch] == [3, 4]
            (queue,) = await consumer.fetch_message_queues("B")
            assert_type(queue, dledger.MessageQueue)
            await producer.send_to(queue, dledger.Message("B", b"5"), timeout_s=5)
            found = await consumer.pull(queue, 0, timeout_s=0)
            assert [m.body_bytes for m in found.messages] == [b"1", b"2", b"3", b"4", b"4", b"5"]
            bodies = [m.body_bytes async for m in consumer.iter_messages(queue, 2, until=4)]
            assert bodies == [b"3", b"4"]
            await consumer.commit_offset(queue, 6)
            assert await consumer.committed_offset(queue) == 6
            assert await admin.offsets("B") == {queue: (0, 6)}
            with pytest.raises(MessageIllegalError):
                await producer.send(dledger.Message("B", b""))
            with pytest.raises(NoRouteError):
                producer.send_nowait(dledger.Message("unknown", b"x"))
            with pytest.raises(NoRouteError):
                [letter async for letter in admin.dead_letters("never")]
            assert producer.counters.stored == 6
        with pytest.raises(ClientClosedError):
            await producer.send(dledger.Message("B", b"x"))

    run(main)


def test_aio_refuses_what_is_not_open() -> None:
    async def main() -> None:
        client = aio.connect("127.0.0.1:1", environment={})
        producer = aio.Producer(client, "p")
        with pytest.raises(ClientClosedError, match="async with"):
            await producer.send(dledger.Message("T", b"x"))
        with pytest.raises(ClientClosedError):
            await producer.__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize("is_async", [True, False])
def test_aio_listener_runs_with_contextvars(is_async: bool) -> None:
    async def main(_: World, client: aio.ClientInstance) -> None:
        loop = asyncio.get_running_loop()
        heard: dict[bytes, tuple[str, bool]] = {}
        done = asyncio.Event()

        def note(messages: Sequence[dledger.DeliveredMessage]) -> None:
            here = threading.current_thread() is threading.main_thread()
            heard.update({m.body_bytes: (REQUEST.get(), here) for m in messages})
            if len(heard) == 5:
                loop.call_soon_threadsafe(done.set)

        async def listen(
            messages: Sequence[dledger.DeliveredMessage], _: dledger.ConsumeContext
        ) -> None:
            assert asyncio.current_task() is not None
            await asyncio.sleep(0)
            note(messages)

        def listen_plain(
            messages: Sequence[dledger.DeliveredMessage], _: dledger.ConsumeContext
        ) -> None:
            note(messages)

        REQUEST.set("mine")
        listener = listen if is_async else listen_plain
        async with (
            aio.Producer(client, "p") as producer,
            aio.PushConsumer(client, "c", listener, {"T": "*"}, FIRST) as consumer,
        ):
            for number in range(5):
                await producer.send(dledger.Message("T", b"%d" % number))
            await done.wait()
            assert {q.topic for q in consumer.queues} == {"T", "%RETRY%c"}
            consumer.suspend()
            consumer.resume()
        assert heard == {b"%d" % number: ("mine", is_async) for number in range(5)}
        assert consumer.counts["consumed"] == 5

    run(main)


def test_aio_polls_a_member_of_a_group() -> None:
    async def main(_: World, client: aio.ClientInstance) -> None:
        async with (
            aio.Producer(client, "p") as producer,
            aio.LitePullConsumer(client, "c", consume_from=dledger.FROM_FIRST) as consumer,
        ):
            consumer.subscribe("T", "*")
            await producer.send(dledger.Message("T", b"one"))
            found: list[dledger.DeliveredMessage] = []
            while not found:
                found = await consumer.poll(1)
            assert [message.body_bytes for message in found] == [b"one"]
            await consumer.commit()
            assert await consumer.committed(found[0].message_queue) == 1

    run(main)


@given(st.integers(0, 12))
@settings(max_examples=13, deadline=None)
def test_aio_poll_that_is_cancelled_takes_nothing(moment: int) -> None:
    """Also one that has ended in trio when the cancellation comes."""

    async def main(world: World, client: aio.ClientInstance) -> None:
        queue = dledger.MessageQueue("T", "g", 0)
        async with (
            aio.Producer(client, "p") as producer,
            aio.LitePullConsumer(client, "c", consume_from=dledger.FROM_FIRST) as consumer,
        ):
            await consumer.assign([queue])
            found = await consumer.poll(0)
            for number in range(3):
                await producer.send_to(queue, dledger.Message("T", b"%d" % number))
                await asyncio.sleep(0.002)  # until it is read ahead
                task = asyncio.create_task(consumer.poll(0.1))
                for _ in range(moment):
                    await asyncio.sleep(0)
                task.cancel()
                (ended,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(ended, list):
                    found += ended
            for _ in range(3 - len(found)):
                found += await consumer.poll(0.5)
            assert [message.body_bytes for message in found] == [b"0", b"1", b"2"]

    run(main)


def test_aio_transaction_runs_its_local_part_in_the_loop() -> None:
    async def main(world: World, client: aio.ClientInstance) -> None:
        fake = FakeTransactions(world.group)
        asked: list[str] = []

        async def check(message: dledger.MessageExt) -> dledger.LocalTransactionState:
            asked.append(message.message_id)
            return dledger.LocalTransactionState.ROLLBACK

        async def local(half: dledger.HalfMessage) -> dledger.LocalTransactionState:
            assert asyncio.current_task() is not None
            assert REQUEST.get() == "order"
            await asyncio.sleep(0)
            return dledger.LocalTransactionState.COMMIT

        async def broken(_: dledger.HalfMessage) -> dledger.LocalTransactionState:
            raise ZeroDivisionError

        REQUEST.set("order")
        async with aio.TransactionProducer(client, "pg", check) as producer:
            sent = await producer.send_in_transaction(dledger.Message("T", b"1"), local)
            assert sent.is_confirmed
            with pytest.raises(ZeroDivisionError):
                await producer.send_in_transaction(dledger.Message("T", b"2"), broken)
            fake.ask(1)
            while len(fake.decisions) < 2:
                await asyncio.sleep(0.001)
        assert fake.decisions == {0: 8, 1: 12}
        assert len(asked) == 1

    run(main)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_aio_sends_are_cancelled_at_any_moment(moments: list[int]) -> None:
    """What was acknowledged is stored once, what was cancelled at most once, and the rest go on."""

    async def main(world: World, client: aio.ClientInstance) -> None:
        bodies = [b"%d" % number for number in range(len(moments))]
        async with aio.Producer(client, "p") as producer:
            sends = [
                asyncio.create_task(producer.send(dledger.Message("T", body))) for body in bodies
            ]

            async def cancel(task: asyncio.Task[Any], moment: int) -> None:
                for _ in range(moment):
                    await asyncio.sleep(0.0001)
                if moment % 3:
                    task.cancel()

            await asyncio.gather(*map(cancel, sends, moments))
            ended = await asyncio.gather(*sends, return_exceptions=True)
            await producer.send(dledger.Message("T", b"last"))
        stored = world.group.bodies()
        assert stored.count(b"last") == 1
        for body, end in zip(bodies, ended, strict=True):
            is_cancelled = isinstance(end, asyncio.CancelledError)
            assert is_cancelled or isinstance(end, dledger.SendResult)
            assert stored.count(body) in ((0, 1) if is_cancelled else (1,))

    run(main)


@given(st.integers(0, 120))
@settings(max_examples=15, deadline=None)
def test_aio_client_that_is_cancelled_while_it_opens(moment: int) -> None:
    async def use() -> None:
        async with opened() as (_, client), aio.Producer(client, "p") as producer:
            await producer.send(dledger.Message("T", b"x"))
            await asyncio.sleep(1000)

    async def main() -> None:
        task = asyncio.create_task(use())
        for _ in range(moment):
            await asyncio.sleep(0.0001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        async with opened() as (_, client), aio.Producer(client, "p") as producer:
            assert (await producer.send(dledger.Message("T", b"x"))).queue_offset == 0

    asyncio.run(main())


def test_aio_body_error_comes_out_as_it_is() -> None:
    async def main(_: World, client: aio.ClientInstance) -> None:
        async def use() -> None:
            async with aio.Producer(client, "p") as producer:
                await producer.publish_queues("T")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await use()
        assert not client.is_closed

    run(main)


# ---------------------------------------------------------------------------------- completeness


INNER = {
    dledger.Producer: {"trace", "config"},
    dledger.TransactionProducer: {"config", "end"},
    dledger.PushConsumer: {"trace", "config"},
    dledger.PullConsumer: set[str](),
    dledger.LitePullConsumer: {"trace"},
    dledger.SimpleConsumer: set[str](),
    dledger.LockClient: {"client_id", "group"},
    dledger.Admin: set[str](),
    dledger.ClientInstance: {"link", "name_servers", "nursery"},
    dledger.SendFuture: set[str](),
}
"""Public names that are not for asyncio: they are of trio, or of other parts of the client."""


def test_aio_step_is_stored_when_its_block_ends() -> None:
    async def main(world: World, client: aio.ClientInstance) -> None:
        seen: list[dict[str, Any]] = []

        def answer(asked: RemotingCommand) -> RemotingCommand:
            seen.append(dict(asked.ext))
            return response_to(asked, 0, None, {"results": [[0, 7]]})

        world.group.on(RequestCode.CONSUME_STEP, answer)
        queue = dledger.MessageQueue("T", "g", 0)
        async with aio.PullConsumer(client, "c") as consumer:
            assert await consumer.committed_offset(queue) is None
            async with consumer.transaction() as step:
                step.send(dledger.Message("T", b"a"), queue)
                step.commit(queue, 3)
                assert not seen
        assert [ext["commits"] for ext in seen] == [[["T", 0, -1, 3]]]
        assert [each.queue_offset for each in step.stored] == [7]

    run(main)


@pytest.mark.parametrize("original", INNER, ids=lambda cls: cls.__name__)
def test_aio_class_has_every_method(original: type) -> None:
    face = getattr(aio, original.__name__)
    names = {name for name in dir(original) if not name.startswith("_")} - INNER[original]
    assert {name for name in names if not hasattr(face, name)} == set()
    for name in names:
        there, here = getattr(original, name), getattr(face, name)
        if inspect.isfunction(there):
            parameters = list(inspect.signature(there).parameters.values())
            ours = list(inspect.signature(here).parameters.values())
            assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in parameters]
            assert here.__doc__
            assert inspect.iscoroutinefunction(here) == inspect.iscoroutinefunction(there)
    inits = [list(inspect.signature(cls).parameters) for cls in (original, face)]
    if original not in (dledger.ClientInstance, dledger.SendFuture):
        assert inits[0] == inits[1]


@pytest.mark.parametrize("original", INNER, ids=lambda cls: cls.__name__)
def test_aio_page_names_every_method(original: type) -> None:
    page = (ROOT / "docs" / "reference" / "api" / "aio.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [`{original.__name__}`]"))
    face = getattr(aio, original.__name__)
    named = re.findall(r"`(\w+)`", row.split("|")[2])
    assert sorted(named) == [name for name in dir(face) if not name.startswith("_")]
