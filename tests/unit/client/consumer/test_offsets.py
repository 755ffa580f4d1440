"""Offsets of a consumer group on the brokers, or in a file.

Consumers of which they or their client are closed while something is under way.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import trio

from dledger.client.admin.admin import Admin
from dledger.client.admin.groups import FIRST_MS, OffsetMove
from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import (
    COMMIT_TIMEOUT_S,
    FROM_FIRST,
    LATE_S,
    BrokerOffsets,
    LocalOffsets,
    QueueOffsets,
    UnkeptOffsets,
    offsets_path,
)
from dledger.client.consumer.owned_queues import OwnedQueue
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError, RequestFailedError, RequestTimedOutError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.own_fields import BY_OPERATOR_FIELD
from dledger.testing.doubles import InlineExecutor
from tests.harness.fake_nodes import fixed
from tests.unit.client.consumer.consuming import QUEUE, committed, send
from tests.unit.client.fake_cluster import World

OTHER = MessageQueue("T", "g", 1)


async def test_brokers_keep_offsets_and_say_which_are_stored(
    world: World, client: ClientInstance
) -> None:
    store = BrokerOffsets(client, "c")
    assert await store.load(QUEUE) is None
    assert await store.save({QUEUE: 5, OTHER: 7}) == {QUEUE, OTHER}
    assert (await store.load(QUEUE), await store.load(OTHER)) == (5, 7)
    asked = [s.command for s in world.seen if s.code == RequestCode.UPDATE_CONSUMER_OFFSET]
    assert {command.is_oneway for command in asked} == {False}, "what is answered is stored"
    world.group.on(RequestCode.UPDATE_CONSUMER_OFFSET, fixed(1, "no"))
    assert await store.save({QUEUE: 6}) == set()


async def test_only_commits_of_operators_are_marked(world: World, client: ClientInstance) -> None:
    await BrokerOffsets(client, "c").save({QUEUE: 5})
    moves = {QUEUE: OffsetMove(5, 2, 0, 9)}
    world.group.on(
        RequestCode.GET_CONSUMER_CONNECTION_LIST, fixed(ResponseCode.CONSUMER_NOT_ONLINE, "none")
    )
    done = await Admin(client).reset_offsets("c", QUEUE.topic, FIRST_MS, moves)
    assert done.stored == {QUEUE: 2}
    asked = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_CONSUMER_OFFSET]
    assert [ext.get(BY_OPERATOR_FIELD) for ext in asked] == [None, "true"]


async def test_offsets_keep_the_lock_tokens_of_their_round(
    world: World, client: ClientInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dledger.client.consumer.offsets.MAX_COMMITS_AT_ONCE", 1)
    tokens = {QUEUE: 7, OTHER: 7}

    def lock_again(command: RemotingCommand) -> RemotingCommand:
        tokens.update({QUEUE: 40, OTHER: 40})
        return response_to(command)

    world.group.on(RequestCode.UPDATE_CONSUMER_OFFSET, lock_again)
    store = BrokerOffsets(client, "c", token=tokens.get)
    assert await store.save({QUEUE: 5, OTHER: 7}) == {QUEUE, OTHER}
    asked = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_CONSUMER_OFFSET]
    assert [ext["lockToken"] for ext in asked] == ["7", "7"]


async def test_offset_without_an_answer_is_an_error_not_absent(
    world: World, client: ClientInstance
) -> None:
    await client.route("T")
    world.group.committed["c", "T", 0] = 1
    world.group.on(RequestCode.QUERY_CONSUMER_OFFSET, fixed(1, "no"))
    with pytest.raises(RequestFailedError):
        await BrokerOffsets(client, "c").load(QUEUE)


async def test_a_file_keeps_offsets_in_the_form_of_the_java_client(tmp_path: Path) -> None:
    path = offsets_path(str(tmp_path), "10.0.0.1", "", "c")
    assert path == f"{tmp_path}/10.0.0.1@DEFAULT/c/offsets.json"
    store = LocalOffsets(OsDisk(), InlineExecutor(), path)
    assert await store.load(QUEUE) is None
    assert await store.save({QUEUE: 5}) == {QUEUE}
    assert await store.save({OTHER: 7}) == {OTHER}
    again = LocalOffsets(OsDisk(), InlineExecutor(), path)
    assert (await again.load(QUEUE), await again.load(OTHER)) == (5, 7)
    text = (tmp_path / "10.0.0.1@DEFAULT" / "c" / "offsets.json").read_text()
    assert text == (
        '{"offsetTable":{{"brokerName":"g","queueId":0,"topic":"T"}:5,'
        '{"brokerName":"g","queueId":1,"topic":"T"}:7}}'
    )


async def test_a_file_of_something_else_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.write_text("no offsets")
    store = LocalOffsets(OsDisk(), InlineExecutor(), str(path))
    with pytest.raises(ConfigError, match="holds no offsets"):
        await store.load(QUEUE)
    with pytest.raises(ConfigError):
        await store.save({QUEUE: 1})
    assert path.read_text() == "no offsets"


async def test_unkept_offsets_are_forgotten() -> None:
    store = UnkeptOffsets()
    assert await store.save({QUEUE: 3}) == {QUEUE}
    assert await store.load(QUEUE) is None


class SlowStore:
    """An `OffsetStore` that answers each question after a second, as of when it was asked."""

    def __init__(self) -> None:
        self.offsets: dict[MessageQueue, int] = {}
        self.saved: list[int] = []

    async def load(self, queue: MessageQueue) -> int | None:
        found = self.offsets.get(queue)
        await trio.sleep(1)
        return found

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        await trio.sleep(0.1)
        self.offsets.update(offsets)
        self.saved += offsets.values()
        return set(offsets)


@pytest.fixture
def slow() -> SlowStore:
    return SlowStore()


def offsets_in(store: SlowStore, client: ClientInstance) -> QueueOffsets:
    return QueueOffsets(store, PullConsumer(client, "c"), FROM_FIRST, client.clock)


async def test_older_answer_does_not_undo_a_reset_that_is_stored(
    slow: SlowStore, client: ClientInstance
) -> None:
    slow.offsets[QUEUE] = 50
    offsets, owned = offsets_in(slow, client), OwnedQueue(QUEUE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offsets.begin, owned)
        await trio.sleep(0.5)
        await offsets.reset([(owned, 7)])
    assert owned.messages is not None
    assert (slow.offsets[QUEUE], owned.messages.next_offset) == (7, 7)


async def test_reset_of_a_queue_that_is_given_up_is_forgotten(
    slow: SlowStore, client: ClientInstance
) -> None:
    offsets, owned = offsets_in(slow, client), OwnedQueue(QUEUE)
    await offsets.begin(owned)
    owned.begin(90)
    owned.drop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: offsets.save([owned], is_last=True))
        await trio.sleep(0.05)  # the last offset is on its way
        nursery.start_soon(offsets.reset, [(owned, 7)])
    slow.offsets[QUEUE] = 500  # the next owner went on
    again = OwnedQueue(QUEUE)
    await offsets.begin(again)
    assert again.messages is not None
    assert (slow.saved, again.messages.next_offset) == ([90], 500)


async def test_reset_to_the_offset_stored_earlier_is_stored_again(
    slow: SlowStore, client: ClientInstance
) -> None:
    offsets, owned = offsets_in(slow, client), OwnedQueue(QUEUE)
    slow.offsets[QUEUE] = 90
    await offsets.begin(owned)
    slow.offsets[QUEUE] = 500  # another client had the queue meanwhile
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offsets.begin, owned)
        await trio.sleep(0.5)
        await offsets.reset([(owned, 90)])
    assert slow.offsets[QUEUE] == 90


async def test_reset_is_stored_after_a_commit_without_an_answer(
    slow: SlowStore, client: ClientInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets, owned = offsets_in(slow, client), OwnedQueue(QUEUE)
    slow.offsets[QUEUE] = 7
    await offsets.begin(owned)
    owned.begin(90)

    async def lose_the_answer(asked: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        slow.offsets.update(asked)
        return set()

    with monkeypatch.context() as losing:
        losing.setattr(slow, "save", lose_the_answer)
        await offsets.save([owned])
    await offsets.reset([(owned, 7)])
    assert slow.offsets[QUEUE] == 7


async def test_reset_that_was_never_stored_ends_with_the_queue(
    slow: SlowStore, client: ClientInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets, owned = offsets_in(slow, client), OwnedQueue(QUEUE)
    await offsets.begin(owned)

    async def fail(_: object) -> set[MessageQueue]:
        raise RequestFailedError("no leader")

    with monkeypatch.context() as failing:
        failing.setattr(slow, "save", fail)
        await offsets.reset([(owned, 7)])
        owned.drop()
        await offsets.save([owned], is_last=True)
    slow.offsets[QUEUE] = 500  # the next owner went on
    again = OwnedQueue(QUEUE)
    await offsets.begin(again)
    assert again.messages is not None
    assert again.messages.next_offset == 500


async def test_queues_given_up_at_once_share_a_time_out(
    world: World, client: ClientInstance
) -> None:
    """A broker that is silent holds up neither its own queues for long nor those of others."""
    await world.add_group("h", 1, 11911)
    world.group.on(RequestCode.UPDATE_CONSUMER_OFFSET, lambda _: DEFERRED)
    await client.route("T")
    offsets = QueueOffsets(
        BrokerOffsets(client, "c"), PullConsumer(client, "c"), FROM_FIRST, client.clock
    )
    queues = [OwnedQueue(MessageQueue("T", "g", number)) for number in range(150)]
    queues.append(OwnedQueue(MessageQueue("T", "h", 3)))
    for owned in queues:
        owned.begin(9)
        owned.drop()
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for owned in queues:
            nursery.start_soon(offsets.give_up, owned)
    assert trio.current_time() - began_s < 2 * COMMIT_TIMEOUT_S
    assert all(owned.is_given_up for owned in queues)
    assert world.groups["h"].committed == {("c", "T", 3): 9}


async def test_late_offset_of_the_last_owner_does_not_stand(
    world: World, client: ClientInstance
) -> None:
    """Without another message nothing else corrects it: a lag stays, and a restart repeats."""
    await client.route("T")
    world.group.committed["c", "T", 0] = 5
    offsets = QueueOffsets(
        BrokerOffsets(client, "c"), PullConsumer(client, "c"), FROM_FIRST, client.clock
    )
    owned = OwnedQueue(QUEUE)
    await offsets.begin(owned)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offsets.run, [owned], 5.0)
        await trio.sleep(1)
        assert owned.messages is not None
        owned.messages.put((), 9)
        await trio.sleep(8)
        assert world.group.committed["c", "T", 0] == 9
        world.group.committed["c", "T", 0] = 6  # what the owner before has read
        await trio.sleep(LATE_S)
        assert world.group.committed["c", "T", 0] == 9
        before = world.count(RequestCode.UPDATE_CONSUMER_OFFSET)
        await trio.sleep(60)
        assert world.count(RequestCode.UPDATE_CONSUMER_OFFSET) == before
        nursery.cancel_scope.cancel()


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
