"""Rows about consumers: members, queues, order, locks, tries, reads from followers."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import trio

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import (
    ConsumeContext,
    ConsumeStatus,
    DeliveredMessage,
    Listener,
)
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.consumer.queue_locks import LockClient
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import LockLostError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.chaos.cluster import GROUP
from dledger.jepsen_like.checkers.retries import DEAD_PREFIX
from dledger.remoting.protocol.bodies import ConsumerIdList
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import ConsumerGroupHeader
from dledger.testing import wait_for_lag
from tests.matrix.ground import LOOK_S, Ground, Tail, retried
from tests.matrix.row import Round, row

CONFIG = PushConfig(consume_from=FROM_FIRST)


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # what it waits for happens in other processes
        await trio.sleep(LOOK_S)


def _hearing(heard: list[bytes]) -> Listener:
    async def listener(
        messages: Sequence[DeliveredMessage], context: ConsumeContext
    ) -> ConsumeStatus | None:
        heard.extend(message.body_bytes for message in messages)
        return None

    return listener


@row("client manager")
async def client_manager(ground: Ground) -> AsyncIterator[Round]:
    """A leader that comes knows the members already: no queue moves."""
    await ground.topic("managed", 4)
    heard: list[bytes] = []
    async with ground.connect() as one, ground.connect() as two:
        clients = (one, two)
        async with (
            PushConsumer(one, "managed-group", _hearing(heard), {"managed": "*"}, CONFIG) as first,
            PushConsumer(two, "managed-group", _hearing(heard), {"managed": "*"}, CONFIG) as other,
        ):
            await _until(lambda: _share(first, other, "managed"))
            owned = (_own(first, "managed"), _own(other, "managed"))

            async def play(number: int) -> None:
                members = await _members(ground.client, "managed-group")
                assert members == {client.client_id for client in clients}
                assert (_own(first, "managed"), _own(other, "managed")) == owned

            yield play


def _own(consumer: PushConsumer, topic: str) -> set[int]:
    return {queue.queue_id for queue in consumer.queues if queue.topic == topic}


def _share(first: PushConsumer, other: PushConsumer, topic: str) -> bool:
    """Tell whether two consumers have two queues each, and none both."""
    mine, theirs = _own(first, topic), _own(other, topic)
    return len(mine) == len(theirs) == 2 and not mine & theirs


async def _members(client: ClientInstance, group: str) -> set[str]:
    """Return the clients of a group as the leader knows them."""
    header = ConsumerGroupHeader(group).encode()
    while True:
        answer = await retried(
            lambda: client.ask_leader(
                GROUP, RequestCode.GET_CONSUMER_LIST_BY_GROUP, dict(header), topic="managed"
            )
        )
        if answer.code == ResponseCode.SUCCESS:
            return set(ConsumerIdList.decode(answer.body).consumer_id_list)
        # A new leader reports that for as long as it may not know all of them.
        assert answer.code == ResponseCode.SYSTEM_ERROR, answer
        await trio.sleep(LOOK_S)


@row("push consumption")
async def push_consumption(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("pushed")
    heard: list[bytes] = []
    async with (
        ground.connect() as client,
        PushConsumer(client, "pushed-group", _hearing(heard), {"pushed": "*"}, CONFIG),
    ):

        async def play(number: int) -> None:
            bodies = {b"pushed %d-%d" % (number, each) for each in range(5)}
            for body in bodies:
                await ground.producer.send(Message("pushed", body))
            await _until(lambda: bodies <= set(heard))
            heard.clear()
            await retried(
                lambda: wait_for_lag(ground.client, "pushed-group", "pushed", timeout_s=120)
            )

        yield play


@row("groups and rebalance")
async def groups_and_rebalance(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("shared", 4)
    heard: list[bytes] = []
    async with (
        ground.connect() as one,
        PushConsumer(one, "sharing", _hearing(heard), {"shared": "*"}, CONFIG) as first,
    ):

        async def play(number: int) -> None:
            async with (
                ground.connect() as two,
                PushConsumer(two, "sharing", _hearing(heard), {"shared": "*"}, CONFIG) as other,
            ):
                await _until(lambda: _share(first, other, "shared"))
                bodies = {b"shared %d-%d" % (number, each) for each in range(4)}
                for body in bodies:
                    await ground.producer.send(Message("shared", body))
                await _until(lambda: bodies <= set(heard))
                heard.clear()
            await _until(lambda: _own(first, "shared") == {0, 1, 2, 3})

        yield play


@row("orderly consumption")
async def orderly_consumption(ground: Ground) -> AsyncIterator[Round]:
    queues = await ground.topic("ordered")
    heard: list[tuple[int, bytes]] = []

    async def listener(
        messages: Sequence[DeliveredMessage], context: ConsumeContext
    ) -> ConsumeStatus | None:
        heard.extend((message.message_queue.queue_id, message.body_bytes) for message in messages)
        return None

    async with (
        ground.connect() as client,
        PushConsumer(client, "in-order", listener, {"ordered": "*"}, CONFIG, orderly=True),
        PullConsumer(ground.client, "lockers") as consumer,
    ):
        holder, rival = (LockClient(ground.client, "lockers", client_id=name) for name in "hr")
        sent: list[bytes] = []

        async def play(number: int) -> None:
            for body in (b"ordered %d-%d" % (number, each) for each in range(4)):
                for queue in queues:
                    await ground.producer.send_to(queue, Message("ordered", body))
                sent.append(body)
            # All rounds together: what was received may come again rounds later.
            await _until(lambda: len(set(heard)) == len(sent) * len(queues))
            for queue in queues:
                reported = [body for queue_id, body in heard if queue_id == queue.queue_id]
                # One that came again begins again where it was: nothing is passed over.
                firsts = list(dict.fromkeys(reported))
                assert firsts == sent
            await _fenced(consumer, holder, rival, queues[0], number)

        yield play


async def _fenced(
    consumer: PullConsumer, holder: LockClient, rival: LockClient, queue: MessageQueue, number: int
) -> None:
    """The holder of the lock keeps it; its token does not count once another client has it."""
    token = (await holder.lock([queue], timeout_s=40))[queue]
    assert await rival.lock([queue], timeout_s=40) == {}
    await retried(lambda: consumer.commit_offset(queue, number, lock_token=token))
    await holder.unlock({queue: token}, timeout_s=40)
    newer = (await rival.lock([queue], timeout_s=40))[queue]
    assert newer is not None
    assert token is not None
    assert newer > token
    try:
        await retried(lambda: consumer.commit_offset(queue, number + 1, lock_token=token))
    except LockLostError:
        pass
    else:
        raise AssertionError(f"{queue}: a commit under the old token {token} was taken")
    assert await retried(lambda: consumer.committed_offset(queue)) == number
    await rival.unlock({queue: newer}, timeout_s=40)


@row("retry and dead letter")
async def retry_and_dead_letter(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("tried")
    tries: Counter[tuple[bytes, int]] = Counter()

    async def listener(
        messages: Sequence[DeliveredMessage], context: ConsumeContext
    ) -> ConsumeStatus | None:
        (message,) = messages
        tries[message.body_bytes, message.reconsume_times] += 1
        is_bad = message.body_bytes.startswith(b"bad") or not message.reconsume_times
        return ConsumeStatus.RECONSUME_LATER if is_bad else None

    config = PushConfig(consume_from=FROM_FIRST, max_reconsume_times=1)
    async with (
        ground.connect() as client,
        PushConsumer(client, "trying", listener, {"tried": "*"}, config),
    ):
        dead: list[Tail] = []

        async def play(number: int) -> None:
            bad, good = b"bad %d" % number, b"good %d" % number
            for body in (bad, good):
                await ground.producer.send(Message("tried", body))
            await _until(lambda: tries[good, 1] > 0 and tries[bad, 1] > 0)
            while not dead:
                dead.append(await retried(lambda: ground.tail(DEAD_PREFIX + "trying")))
            # At least once: a send-back whose answer was lost may be there twice.
            there: set[bytes] = set()
            while bad not in there:
                there |= {message.body_bytes for message in await dead[0].more()}
                await trio.sleep(LOOK_S)
            assert not {body for body in there if body.startswith(b"good")}

        yield play


@row("follower reads")
async def follower_reads(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("followed")
    async with (
        ground.connect() as client,
        PullConsumer(client, "auditors", follower_reads=True) as consumer,
    ):
        tail = Tail(consumer, await consumer.fetch_message_queues("followed"))

        async def play(number: int) -> None:
            bodies = [b"followed %d-%d" % (number, each) for each in range(3)]
            for body in bodies:
                await ground.producer.send(Message("followed", body))
            await tail.until(bodies)

        yield play
