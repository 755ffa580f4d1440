"""The blocking façade: a client in a thread of its own, over a network in memory."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from client.blocking import BlockingClient
from client.client_instance import ClientInstance
from client.connect import connect
from client.errors import ClientClosedError, MessageIllegalError
from client.message import Message
from commitlog.errors import ConfigError
from tests.unit.client.fake_cluster import open_world


@asynccontextmanager
async def _client_with_world() -> AsyncIterator[ClientInstance]:
    """Give a client that brings its cluster along, so that both live in the façade's thread."""
    async with open_world() as world, world.client() as client:
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


def test_after_close_calls_are_refused_and_the_thread_is_gone() -> None:
    client = _client()
    producer = client.producer("p")
    client.close()
    client.close()
    with pytest.raises(ClientClosedError):
        producer.send(Message("T", b"x"))
    with pytest.raises(ClientClosedError):
        client.admin()
    assert not client._thread.is_alive()


def test_a_client_that_cannot_open_says_why() -> None:
    with pytest.raises(ConfigError, match="no NameServer"):
        BlockingClient(make_instance=lambda: connect(environment={}))


def test_name_servers_come_from_argument_then_environment() -> None:
    environment = {"NAMESRV_ADDR": "e:1;f:1"}
    assert connect("a:1,b:1", environment=environment).config.name_servers == ("a:1", "b:1")
    assert connect(environment=environment).config.name_servers == ("e:1", "f:1")
    assert connect(environment=environment).config.pid > 0
