"""The blocking façade: a client in a thread of its own, over a network in memory."""

import queue
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from structlog.testing import capture_logs

from dledger.client.blocking import BlockingClient
from dledger.client.connect import connect
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientClosedError,
    MessageIllegalError,
    SubscriptionIllegalError,
)
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.request_reply import reply_message
from dledger.client.producer.transaction import HalfMessage
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.handling import Handled
from dledger.remoting.machine import ThreadExecutor
from dledger.remoting.protocol.command import RemotingCommand
from tests.unit.client.fake_cluster import open_world
from tests.unit.client.producer.fake_replies import FakeReplies
from tests.unit.client.producer.fake_transactions import FakeTransactions


@asynccontextmanager
async def _client_with_world() -> AsyncIterator[ClientInstance]:
    """Give a client that brings its cluster along, so that both live in the façade's thread."""
    async with open_world() as world:
        instance = world.client()
        instance.executor = ThreadExecutor()
        async with instance as client:
            yield client


def _client() -> BlockingClient:
    return BlockingClient(make_instance=_client_with_world)


def test_a_thread_sends_pulls_and_administers() -> None:
    with _client() as client:
        admin = client.admin()
        assert admin.create_topic("B", queue_nums=1) == ["g"]
        producer = client.producer("p")
        first = producer.send(Message("B", b"1"))
        future = producer.send_async(Message("B", b"2"))
        assert future.result().queue_offset == 1
        assert future.done
        batch = producer.send_batch([Message("B", b"3"), Message("B", b"4")])
        assert [r.queue_offset for r in batch] == [2, 3]
        producer.send(Message("B", b"5"), queue=first.message_queue)
        consumer = client.pull_consumer("c")
        (queue,) = consumer.fetch_message_queues("B")
        result = consumer.pull(queue, 0, timeout_s=0)
        assert [m.body_bytes for m in result.messages] == [b"1", b"2", b"3", b"4", b"5"]
        consumer.commit_offset(queue, 5)
        assert consumer.committed_offset(queue) == 5
        assert (consumer.min_offset(queue), consumer.max_offset(queue)) == (0, 5)
        assert admin.offsets("B") == {queue: (0, 5)}
        assert admin.view_message(first.offset_message_id).body_bytes == b"1"
        producer.send_oneway(Message("B", b"6"))


@asynccontextmanager
async def _client_with_dead_letters() -> AsyncIterator[ClientInstance]:
    async with open_world() as world:
        world.group.topics["%RETRY%billing"] = 1
        for body in (b"1", b"2", b"3"):
            record = encode_record(topic="%DLQ%billing", queue_id=0, body=body, properties=b"")
            world.group.store("%DLQ%billing", 0, decode_record(record))
        async with world.client() as client:
            yield client


def test_blocking_reads_dead_letters_and_gives_them_back() -> None:
    with BlockingClient(make_instance=_client_with_dead_letters) as client:
        admin = client.admin()
        letters = admin.dead_letters("billing", first_offset=1)
        assert [letter.body_bytes for _, letter in letters] == [b"2", b"3"]
        assert len(admin.dead_letters("billing", limit=1)) == 1
        assert admin.resend_dead_letters("billing", limit=2) == 2
        (found,) = admin.dead_letter_groups()
        assert (found.group, found.messages, found.resent) == ("billing", 3, 2)


def test_many_threads_may_call_at_the_same_time() -> None:
    with _client() as client:
        producer = client.producer("p")
        ids: list[str] = []

        def send() -> None:
            ids.extend(producer.send(Message("T", b"x")).message_id for _ in range(20))

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(ids)) == 80


def test_errors_reach_the_calling_thread() -> None:
    with _client() as client:
        producer = client.producer("p")
        with pytest.raises(MessageIllegalError):
            producer.send(Message("T", b""))
        assert producer.send(Message("T", b"x")).queue_offset == 0


def test_blocking_close_refuses_calls_and_ends_the_thread() -> None:
    client = _client()
    producer = client.producer("p")
    client.close()
    client.close()
    with pytest.raises(ClientClosedError):
        producer.send(Message("T", b"x"))
    with pytest.raises(ClientClosedError):
        client.admin()
    assert not client._loop.thread.is_alive()


def test_blocking_client_that_breaks_names_the_cause() -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[ClientInstance]:
        async with _client_with_world() as instance:
            instance.nursery.start_soon(break_it)
            yield instance

    breaking = threading.Event()

    async def break_it() -> None:
        await trio.to_thread.run_sync(breaking.wait)
        raise PermissionError("offsets.json")

    client = BlockingClient(make_instance=make)
    producer = client.producer("p")
    with capture_logs() as logs:
        breaking.set()
        client._loop.thread.join()
    for call in (lambda: producer.send(Message("T", b"x")), lambda: client.producer("q")):
        with pytest.raises(ClientClosedError, match=r"ended by .*; nothing was sent") as caught:
            call()
        assert isinstance(caught.value.__cause__, BaseExceptionGroup)
        assert caught.value.__cause__.subgroup(PermissionError) is not None
    assert [line["event"] for line in logs] == ["client_broken"]
    client.close()


def test_blocking_client_that_cannot_open_names_the_cause() -> None:
    with pytest.raises(ConfigError, match="no NameServer"):
        BlockingClient(make_instance=lambda: connect(environment={}))


def test_name_servers_come_from_argument_then_environment() -> None:
    environment = {"NAMESRV_ADDR": "e:1;f:1"}
    assert connect("a:1,b:1", environment=environment).config.name_servers == ("a:1", "b:1")
    assert connect(environment=environment).config.name_servers == ("e:1", "f:1")
    assert connect(environment=environment).config.pid > 0


def test_blocking_push_consumer_calls_a_function_that_sends() -> None:
    heard: dict[bytes, str] = {}
    all_heard = threading.Event()
    with _client() as client:
        producer = client.producer("p")

        def listener(messages: Sequence[DeliveredMessage], context: ConsumeContext) -> None:
            for message in messages:
                if message.body_bytes.startswith(b"again"):
                    heard[message.body_bytes] = threading.current_thread().name
                else:
                    producer.send(Message("T", b"again " + message.body_bytes))
            if len(heard) == 5:
                all_heard.set()

        config = PushConfig(consume_from=FROM_FIRST)
        with client.push_consumer("c", listener, {"T": "*"}, config) as consumer:
            for number in range(5):
                producer.send(Message("T", b"%d" % number))
            assert all_heard.wait(10)
            assert len([q for q in consumer.queues if q.topic == "T"]) == 4
        assert sorted(heard) == [b"again %d" % number for number in range(5)]
        assert not {"mq-client", threading.current_thread().name} & set(heard.values())
        consumer.close()  # again: nothing happens
        with pytest.raises(SubscriptionIllegalError, match="no tag"):
            client.push_consumer("c", listener, {"T": "||"})


def test_blocking_push_consumer_suspends_resumes_and_closes() -> None:
    heard = threading.Event()

    def listener(messages: Sequence[DeliveredMessage], context: ConsumeContext) -> None:
        heard.set()

    with _client() as client:
        config = PushConfig(consume_from=FROM_FIRST)
        consumer = client.push_consumer("c", listener, None, config)
        consumer.suspend()
        consumer.subscribe("T", "*")
        client.producer("p").send(Message("T", b"x"))
        assert not heard.wait(0.2)
        consumer.resume()
        assert heard.wait(10)
        consumer.unsubscribe("T")
        other = client.push_consumer("other", listener, {"T": "*"})
        consumer.close()  # what runs is finished
        assert consumer.counts["consumed"] == 1
    with pytest.raises(ClientClosedError):
        other.resume()
    other.close()


def test_a_thread_does_its_local_part_itself() -> None:
    ended: list[FakeTransactions] = []
    here = threading.get_ident()

    @asynccontextmanager
    async def with_transactions() -> AsyncIterator[ClientInstance]:
        async with open_world() as world, world.client() as client:
            ended.append(FakeTransactions(world.group))
            yield client

    def local(half: HalfMessage) -> LocalTransactionState:
        assert threading.get_ident() == here
        return LocalTransactionState.COMMIT if half.half_offset else LocalTransactionState.ROLLBACK

    def broken(_: HalfMessage) -> LocalTransactionState:
        raise ZeroDivisionError

    with BlockingClient(make_instance=with_transactions) as client:
        producer = client.transaction_producer("pg", lambda _: LocalTransactionState.UNKNOWN)
        first = producer.send_in_transaction(Message("T", b"1"), local)
        second = producer.send_in_transaction(Message("T", b"2"), local)
        with pytest.raises(ZeroDivisionError):
            producer.send_in_transaction(Message("T", b"3"), broken)
    assert (first.is_confirmed, second.is_confirmed) == (True, True)
    assert ended[0].decisions == {0: 12, 1: 8}
    assert len(ended[0].halves) == 3


def test_a_thread_of_its_own_answers_questions() -> None:
    ended: list[FakeTransactions] = []
    asked: list[int] = []
    answered = threading.Event()

    @asynccontextmanager
    async def with_transactions() -> AsyncIterator[ClientInstance]:
        async with open_world() as world, world.client() as client:
            ended.append(FakeTransactions(world.group))
            yield client

    def check(_: MessageExt) -> LocalTransactionState:
        asked.append(threading.get_ident())
        answered.set()
        return LocalTransactionState.COMMIT

    def unknown(_: HalfMessage) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN

    with BlockingClient(make_instance=with_transactions) as client:
        producer = client.transaction_producer("pg", check)
        producer.send_in_transaction(Message("T", b"1"), unknown)

        async def ask() -> None:
            with trio.fail_after(10):
                while not ended[0].known.get("10.0.0.1:10911"):
                    await trio.sleep(0.01)
                ended[0].ask(0)
                while not ended[0].decisions:
                    await trio.sleep(0.01)

        client._call(ask)
        assert answered.is_set()
    assert ended[0].decisions == {0: 8}
    assert asked[0] != threading.get_ident()


def test_a_thread_asks_and_another_one_replies() -> None:
    asked: queue.SimpleQueue[MessageExt] = queue.SimpleQueue()

    @asynccontextmanager
    async def make() -> AsyncIterator[ClientInstance]:
        async with open_world() as world, world.client() as instance:
            replies = FakeReplies(world.group)

            def sent(command: RemotingCommand) -> Handled:
                replies._sent(command)
                if len(replies.requests) == 1:
                    asked.put(replies.requests.pop())
                return None

            world.group.brokers[0].intercept = sent
            yield instance

    with BlockingClient(make_instance=make) as client:
        asker, replier = client.producer("askers"), client.producer("repliers")

        def answer() -> None:
            request = asked.get(timeout=10)
            replier.send(reply_message(request, b"re " + request.body_bytes))

        thread = threading.Thread(target=answer)
        thread.start()
        assert asker.request(Message("T", b"what?"), 10.0).body_bytes == b"re what?"
        thread.join(10)
        assert not thread.is_alive()
