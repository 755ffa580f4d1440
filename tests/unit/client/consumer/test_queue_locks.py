"""The locks of an orderly consumer come with the broker's fencing tokens."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from client.consumer.queue_locks import QueueLocks
from client.core.route import MessageQueue
from remoting.processor import Handled
from remoting.protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from remoting.protocol.command import RemotingCommand, response_to
from tests.unit.client.fake_cluster import open_world

QUEUE = MessageQueue("T", "g", 0)


async def test_tokens_follow_the_grants(autojump_clock: MockClock) -> None:
    tokens = iter(["17", "17", "40"])

    def lock(command: RemotingCommand) -> Handled:
        body = LockBatchRequestBody.decode(command.body)
        granted = LockBatchResponseBody(body.mq_set).encode()
        return response_to(command, 0, None, {"lockTokens": next(tokens)}, granted)

    async with open_world() as world, world.client() as client, trio.open_nursery() as nursery:
        for broker in world.groups["g"].brokers:
            broker.lock_hook = lock
        await client.route("T")
        locks = QueueLocks(client, "c", lambda: [QUEUE])
        nursery.start_soon(locks.run)
        await locks.held(QUEUE)
        assert locks.tokens == {QUEUE: 17}
        await trio.sleep(21)
        assert locks.tokens == {QUEUE: 17}, "a renewal keeps it"
        await trio.sleep(21)
        assert locks.tokens == {QUEUE: 40}
        await locks.unlock([QUEUE])
        assert locks.tokens == {}
        nursery.cancel_scope.cancel()
