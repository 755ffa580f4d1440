"""Parts of the work beside the workload: odd messages, an old client, queues, halves, strangers.

A turn returns whether it was done to its end, and lets the errors of a cluster in trouble through.
Strangers are clients that a world with access control has to refuse: unsigned, with a wrong secret,
or as an account that may read one topic. An answer that grants it ends the run with the violation
``access``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError, MessageIllegalError, OffsetIllegalError
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import PROPERTY_UNIQ_KEY
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream
from dledger.jepsen_like.simulation.world_settings import OWNER, READABLE, READER
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import (
    GetMaxOffsetHeader,
    SendMessageHeader,
    SendMessageResponseHeader,
    TopicHeader,
    UpdateConsumerOffsetHeader,
)
from dledger.remoting.protocol.outcome import outcome_of
from dledger.remoting.protocol.signature import Credentials

if TYPE_CHECKING:
    from dledger.jepsen_like.simulation.node import ClientNode
    from dledger.jepsen_like.simulation.world import World

Contradicts = Callable[[str], None]
"""Ends the run: an answer contradicts what is stored."""

BODY_BYTES_MAX: Final = 20_480
"""The largest body that the brokers of a simulated world take."""

# -- odd messages -----------------------------------------------------------------------------

TOPICS: Final = ("%|-_", "|", "-side-", "%side%", "side|" + "z" * 122)
TAGS: Final = ("", "||", "*", "a || b", "\u00e9\u4e16\U0001f600", "\x00", " ", "t" * 500)
KEYS: Final = ("", "k" * 500, "\u4e16 \x7f", "a#b a#b", "../..", "%RETRY%", "\u200b")
PROPERTIES: Final[tuple[dict[str, str], ...]] = (
    {},
    {"": "empty name"},
    {"empty value": ""},
    {"p": "\x00\x03\n"},
    {"\u4e16": "9" * 3_000},
)
BODIES: Final = (b"\x00", b"\x01\x02", b"z" * BODY_BYTES_MAX)

RAW_BODIES: Final = (b"", b"z", b"z" * (BODY_BYTES_MAX + 1))
RAW_PROPERTIES: Final = (
    "",
    "\x01\x02",
    "\x02\x02\x01",
    "KEYS\x01",
    "A\x01b",
    "TAGS\x01a\x02TAGS\x01b\x02",
    "A\x01" + "v" * 40_000,
)
RAW_TOPICS: Final = ("side", "side", "side", "", "a/b", "../side", "n" * 300, "\u4e16")
RAW_QUEUES: Final = (0, 0, 0, -1, 99_999)


class OddMessages:
    """Messages whose names, properties and bodies try what reads them."""

    def __init__(self, world: World, rng: SimRng, contradicts: Contradicts) -> None:
        self._world = world
        self._rng = rng
        self._contradicts = contradicts

    async def turn(
        self, instance: ClientInstance, broker: str, producer: Producer, consumer: PullConsumer
    ) -> bool:
        """Send one odd message through the SDK, and one that no SDK would send."""
        rng = self._rng
        message = Message(
            rng.choice(TOPICS),
            rng.choice(BODIES),
            tags=rng.choice(TAGS),
            keys=rng.choice(KEYS),
            properties=rng.choice(PROPERTIES),
        )
        try:
            result = await producer.send(message)
        except MessageIllegalError:
            self._world.sometimes["hostile_refused"] += 1
        else:
            await self._read(consumer, result.message_queue, result.queue_offset, message)
        return await self._send_raw(instance, broker, consumer)

    async def _send_raw(
        self, instance: ClientInstance, broker: str, consumer: PullConsumer
    ) -> bool:
        rng, leader = self._rng, instance.leaders.address(broker)
        if leader is None:
            return False
        topic, queue_id, body = (
            rng.choice(RAW_TOPICS),
            rng.choice(RAW_QUEUES),
            rng.choice(RAW_BODIES),
        )
        header = SendMessageHeader(
            "odd", topic, "TBW102", 4, queue_id, 0, 0, 0, rng.choice(RAW_PROPERTIES)
        )
        answer = await instance.ask(
            leader, RequestCode.SEND_MESSAGE, dict(header.encode()), body, timeout_s=10.0
        )
        if answer.code != ResponseCode.SUCCESS:
            self._world.sometimes["hostile_refused"] += 1
            return True
        at = SendMessageResponseHeader.decode(answer.ext)
        queue = MessageQueue(topic, broker, at.queue_id)
        await self._read(consumer, queue, at.queue_offset, Message(topic, body))
        return True

    async def _read(
        self, consumer: PullConsumer, queue: MessageQueue, offset: int, sent: Message
    ) -> None:
        found = (await consumer.pull(queue, offset, timeout_s=0.0)).messages
        if not found:
            return  # what a member has applied may be older than the acknowledgement
        message, self_made = found[0], not (sent.tags or sent.keys or sent.properties)
        if bytes(message.body) != bytes(sent.body):
            self._contradicts(f"{queue} {offset} has a body of {len(message.body)} bytes")
        if not self_made and (message.tags, message.keys) != (sent.tags, sent.keys):
            there = (message.tags, message.keys)
            self._contradicts(f"{queue} {offset} has {there!r}, not {(sent.tags, sent.keys)!r}")
        self._world.sometimes["hostile_read"] += 1


# -- a client that never reads a route again -------------------------------------------------------

OLD_TOPIC: Final = "side-old"
BURST_MAX: Final = 120
"""Messages that are on their way together."""

WITHIN_S: Final = 3.0
"""How long RocketMQ's clients wait for an answer."""

OLD_PAUSES_S: Final = (0.0, 0.01, 0.1)

_BOUNDS: Final = {"stored": (1, 1), "not_stored": (0, 0), "unknown": (0, 1)}
"""Copies of a message, by its outcome."""


class OldRoutes:
    """The messages of a client that sends to one member, in the encoding of RocketMQ's clients.

    It sends each message once. So one that was acknowledged is there once, one that was refused is
    not there, and no outcome makes it two, whatever carried it to the leader and repeated it.
    """

    def __init__(self, world: World, broker: str, rng: SimRng, contradicts: Contradicts) -> None:
        self._world = world
        self._queue = MessageQueue(OLD_TOPIC, broker, 0)
        self._rng = rng
        self._contradicts = contradicts
        self._member = ""
        self._sent = 0
        self._next_offset = 0
        self._copies: Counter[str] = Counter()
        self._outcomes: dict[str, str] = {}

    async def turn(self, instance: ClientInstance, consumer: PullConsumer) -> bool:
        """Send some messages together, and read all that are new.

        Returns whether the member took the connection. Raises ClientError: there is no leader.
        """
        if not self._member:
            await Admin(instance).create_topic(OLD_TOPIC, queue_nums=1)
            self._member = self._rng.choice(sorted(self._world.brokers))
        node = self._world.brokers.get(self._member)
        if node is None or not node.is_up:
            return False
        link = await instance.link(node.endpoint, WITHIN_S)
        async with trio.open_nursery() as nursery:
            for _ in range(self._rng.randint(1, BURST_MAX)):
                self._sent += 1
                key = f"old-{self._sent}"
                self._outcomes[key] = "unknown"
                nursery.start_soon(self._send, link.connection, key)
                await self._world.sleep(self._rng.choice(OLD_PAUSES_S))
        await self._read(consumer)
        return True

    async def _send(self, connection: Connection, key: str) -> None:
        header = SendMessageHeader(
            "old", OLD_TOPIC, "TBW102", 4, 0, 0, 0, 0, f"{PROPERTY_UNIQ_KEY}\x01{key}\x02"
        )
        sent = request(RequestCode.SEND_MESSAGE, header.encode(), key.encode())
        sent.language = "JAVA"
        try:
            answer = await connection.invoke(sent, WITHIN_S)
        except MQError as error:
            self._outcomes[key] = error.outcome
            return
        self._outcomes[key] = outcome_of(answer) if answer.code else "stored"
        if not answer.code and self._world.leader() is not self._world.brokers.get(self._member):
            self._world.sometimes["carried_to_leader"] += 1

    async def _read(self, consumer: PullConsumer) -> None:
        """Count the copies of what is new; compare those whose outcome was known before."""
        known = dict(self._outcomes)
        try:
            while messages := (
                await consumer.pull(self._queue, self._next_offset, timeout_s=0.0)
            ).messages:
                self._copies.update(bytes(message.body).decode() for message in messages)
                self._next_offset = messages[-1].queue_offset + 1
        except OffsetIllegalError as error:
            # Retention came before: what it took was not counted.
            self._next_offset = error.min_offset
            self._outcomes = {}
            return
        for key, outcome in known.items():
            copies = self._copies[key]
            at_least, at_most = _BOUNDS[outcome]
            if not at_least <= copies <= at_most:
                self._contradicts(f"{key}, which is {outcome}, is there {copies} times")


# -- ten thousand queues ----------------------------------------------------------------------

FILLED_TOPICS: Final = 40
QUEUES: Final = 256
TOPICS_PER_TURN: Final = 4


class ManyQueues:
    """Ten thousand queues with a message each, and reads of any of them."""

    def __init__(self, world: World, rng: SimRng, contradicts: Contradicts) -> None:
        self._world = world
        self._rng = rng
        self._contradicts = contradicts
        self._stored: dict[MessageQueue, int] = {}
        self._open: dict[MessageQueue, None] = {}
        self._made = 0

    async def turn(
        self, instance: ClientInstance, producer: Producer, consumer: PullConsumer
    ) -> bool:
        """Fill some queues; when all are filled, read one."""
        if not self._open and self._made < FILLED_TOPICS:
            for _ in range(TOPICS_PER_TURN):
                topic = f"side-many-{self._made}"
                await Admin(instance).create_topic(topic, queue_nums=QUEUES)
                self._open.update(dict.fromkeys(await producer.publish_queues(topic)))
                self._made += 1
        async with trio.open_nursery() as nursery:
            for queue in list(self._open):
                nursery.start_soon(self._fill, producer, queue)
        if not self._stored:
            return False
        queue = list(self._stored)[self._rng.randrange(len(self._stored))]
        found = (await consumer.pull(queue, self._stored[queue], timeout_s=0.0)).messages
        if found and bytes(found[0].body) != _body_of(queue):
            self._contradicts(f"{queue} holds {bytes(found[0].body)[:40]!r}")
        return bool(found)

    async def _fill(self, producer: Producer, queue: MessageQueue) -> None:
        try:
            result = await producer.send_to(queue, Message(queue.topic, _body_of(queue)))
        except ClientError:
            return  # the next turn tries it again
        self._stored[queue] = result.queue_offset
        self._open.pop(queue, None)
        self._world.sometimes["queues_filled"] += 1


def _body_of(queue: MessageQueue) -> bytes:
    return f"{queue.topic}/{queue.queue_id}".encode()


# -- open half messages -----------------------------------------------------------------------

HALF_TOPIC: Final = "side-half"
GROUP: Final = "side-half"
FLOOD_BYTES: Final = 16_000
FLOOD_MAX: Final = 40
"""Messages sent at a time to fill the log: together they are few requests and entries."""
FLOODS_MAX: Final = 3
RETENTION_S: Final = 12.0
"""Longer than the pause between two checks of retention."""


class HalfMessages:
    """Half messages that stay open until retention would take them, and then are committed.

    *kept_bytes*: more of the log behind a half message than retention keeps.
    """

    def __init__(self, world: World, kept_bytes: int, contradicts: Contradicts) -> None:
        self._world = world
        self._kept_bytes = kept_bytes
        self._contradicts = contradicts
        self._turns = 0

    async def turn(
        self, instance: ClientInstance, producer: Producer, consumer: PullConsumer
    ) -> bool:
        """Open one, fill the log behind it, commit it, and read it."""
        self._turns += 1
        body = f"half {self._turns}".encode()
        config = TransactionProducerConfig(producer=ProducerConfig(compress_over_bytes=None))
        async with TransactionProducer(instance, GROUP, _not_yet, config) as halves:
            half = await halves.begin(Message(HALF_TOPIC, body))
            await self._flood(producer, half.position)
            await self._world.sleep(RETENTION_S)
            self._look(half.half_offset, half.position)
            queue = half.send_result.message_queue
            begin = await consumer.max_offset(queue)
            done = await halves.finish(half, LocalTransactionState.COMMIT)
        if not done.is_confirmed:
            return False
        while begin < (end := await consumer.max_offset(queue)):
            found = await consumer.pull(queue, begin, timeout_s=0.0)
            if any(bytes(message.body) == body for message in found.messages):
                return True
            if not found.messages:
                return False
            begin = min(end, found.next_begin_offset)
        self._contradicts(f"{body.decode()} is committed, and is not in {queue}")
        return False

    async def _flood(self, producer: Producer, position: int) -> None:
        """Fill the log behind a position with more than retention keeps, if that is possible."""
        for _ in range(FLOODS_MAX):
            missing = self._kept_bytes - self._behind(position)
            if missing < 0:
                return
            async with trio.open_nursery() as nursery:
                for _ in range(min(FLOOD_MAX, missing // FLOOD_BYTES + 1)):
                    nursery.start_soon(_fill, producer)

    def _behind(self, position: int) -> int:
        """Return how many bytes the leader's log has behind a position."""
        leader = self._world.leader()
        if leader is None or leader.group is None:
            return 0
        return leader.group.store.log.end_position - position

    def _look(self, half_offset: int, position: int) -> None:
        """Count a half message that retention has come to; it may not be removed."""
        leader = self._world.leader()
        if leader is None or leader.group is None:
            return
        state = leader.group.state
        is_open = half_offset in state.transactions.open
        if not is_open or state.floor.position > position:
            self._contradicts(f"the half message at {position} is removed, and nothing decided it")
        self._world.sometimes["retention_met_half_message"] += (
            self._behind(position) > self._kept_bytes
        )


async def _fill(producer: Producer) -> None:
    with suppress(ClientError):  # one that is missing makes the next flood larger
        await producer.send(Message(HALF_TOPIC, b"f" * FLOOD_BYTES))


async def _not_yet(_: MessageExt) -> LocalTransactionState:
    await trio.lowlevel.checkpoint()
    return LocalTransactionState.UNKNOWN


STRANGERS: Final[dict[str, Credentials | None]] = {
    "unsigned": None,
    "wrong-secret": Credentials(OWNER.access_key, "secret-of-a-stranger"),
    "reader": READER,
}
"""Machines that are to be refused, and what they sign with."""

PAUSE_S: Final = 10.0
"""Mean pause of a stranger between two requests."""

ASK_S: Final = 5.0

REFUSAL: Final = "AclException"
"""In the remark of a request that an account has no right to."""


class Strangers:
    """The clients of one run that are to be refused."""

    def __init__(self, world: World, topic: str) -> None:
        self._world = world
        self._topic = topic

    async def start(self) -> None:
        """Start their machines; they ask until the world ends."""
        for name, credentials in STRANGERS.items():
            node = self._world.client(name)
            node.credentials = credentials
            await node.run(self._ask_on)

    async def _ask_on(self, node: ClientNode) -> None:
        rng = rng_stream(self._world.seed, node.name, "stranger", node.incarnation)
        while True:
            await self._world.sleep(rng.expovariate(1.0 / PAUSE_S))
            try:
                await self._ask(node, rng)
            except (ClientError, MQError):
                pass  # the cluster is in trouble: that is the point

    async def _ask(self, node: ClientNode, rng: SimRng) -> None:
        assert node.instance is not None
        members = [member.endpoint for member in self._world.brokers.values()]
        code, ext, body = self._request(rng)
        answer = await node.instance.ask(
            members[rng.randrange(len(members))], code, ext, body, timeout_s=ASK_S
        )
        if REFUSAL in (answer.remark or ""):
            self._world.sometimes["stranger_refused"] += 1
        elif answer.code == ResponseCode.SUCCESS:
            self._world.violate("access", f"{node.name} was granted a request of code {code}")

    def _request(self, rng: SimRng) -> tuple[int, dict[str, str], bytes]:
        topic = self._topic
        send = SendMessageHeader("strangers", topic, "TBW102", 4, 0, 0, 0, 0, "")
        commit = UpdateConsumerOffsetHeader("strangers", READABLE, 0, 0)
        requests: tuple[tuple[RequestCode, dict[str, str], bytes], ...] = (
            (RequestCode.SEND_MESSAGE, dict(send.encode()), b"of a stranger"),
            (RequestCode.GET_MAX_OFFSET, dict(GetMaxOffsetHeader(topic, 0).encode()), b""),
            (RequestCode.DELETE_TOPIC_IN_BROKER, dict(TopicHeader(topic).encode()), b""),
            (RequestCode.UPDATE_BROKER_CONFIG, {}, b"longPollingEnable=false\n"),
            # Of two rights that this needs the reader has the first one.
            (RequestCode.UPDATE_CONSUMER_OFFSET, dict(commit.encode()), b""),
            (RequestCode.RAFT_CHANGE, {"op": "transfer", "name": "n0", "address": ""}, b""),
        )
        code, ext, body = requests[rng.randrange(len(requests))]
        return int(code), ext, body
