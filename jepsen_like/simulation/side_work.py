"""Work beside the workload, on topics of its own: what its answers hold is compared at once.

One machine does all of it. The topics are no part of the history; what was acknowledged there is
kept here, and an answer that contradicts it, or the reference replica, ends the run with the
violation ``side_work``. What fails under faults is tried again by the next turn.

`SideCommits`: a commit that was answered is what is read until the next one is called, a larger
offset before it too. A one-way commit that a leader has taken is what that leader reads, may be
lost with it, and ends with its topic. What got no answer may be stored at any time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from dledger.client.admin.admin import Admin
from dledger.client.admin.messages import MessageQueries
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError, OffsetIllegalError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.plans.modes import SIDE_MODES
from dledger.jepsen_like.plans.plan import Plan
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream
from dledger.jepsen_like.simulation.side_services import (
    HalfMessages,
    ManyQueues,
    OddMessages,
    OldRoutes,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import GetMaxOffsetHeader, UpdateConsumerOffsetHeader
from dledger.remoting.protocol.outcome import outcome_of
from dledger.services.retention import RETENTION_ATTRIBUTE
from dledger.testing.admin_registers import AdminRegisters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dledger.jepsen_like.simulation.node import ClientNode
    from dledger.jepsen_like.simulation.world import World


ASK_S: Final = 10.0

COMMITS_PER_TURN: Final = 4
PAUSES_S: Final = (0.0, 0.0, 0.5, 3.0, 12.0)
"""Between two commits: shorter and longer than a flush of offsets takes to come."""

OFFSETS: Final = 1 << 20
"""Offsets are drawn below it, so that each is committed once and some are smaller than before."""

Leadership = tuple[str, int, int]


@dataclass(slots=True)
class _Slot:
    """What may be committed in one queue.

    Attributes:
        may: What a read may give; None: nothing is committed.
        open: Offsets of which it is not known whether a leader has taken them.
        taken: The newest commit, one-way: its offset, and by whom it was taken.
    """

    may: set[int | None] = field(default_factory=lambda: {None})
    open: set[int | None] = field(default_factory=set)
    taken: tuple[int, Leadership] | None = None


class SideCommits:
    """The offsets of one group."""

    def __init__(
        self, world: World, rng: SimRng, group: str, contradicts: Callable[[str], None]
    ) -> None:
        self._world = world
        self._rng = rng
        self._group = group
        self._contradicts = contradicts
        self._slots: dict[MessageQueue, _Slot] = {}

    def forget(self, queue: MessageQueue) -> None:
        """Take note that the topic was deleted since: nothing that was stored is left."""
        slot = self._slots.setdefault(queue, _Slot())
        slot.may, slot.taken = {None}, None

    async def turn(
        self, instance: ClientInstance, consumer: PullConsumer, queue: MessageQueue
    ) -> bool:
        """Read all that was committed of a topic; commit a few offsets of a queue, and read each.

        Returns whether a leader is known.

        Raises ClientError: the cluster is in trouble.
        """
        self._slots.setdefault(queue, _Slot())
        for each in [each for each in self._slots if each.topic == queue.topic]:
            await self.look(consumer, each)
        for _ in range(self._rng.randint(1, COMMITS_PER_TURN)):
            waits = self._rng.random() < 0.5
            if not await self.commit(instance, queue, self._rng.randrange(OFFSETS), waits=waits):
                return False
            await self._world.sleep(self._rng.choice(PAUSES_S))
            # A read stores what was taken: not behind each, so that more than one waits.
            if self._rng.random() < 0.5:
                await self.look(consumer, queue)
        return True

    async def commit(
        self, instance: ClientInstance, queue: MessageQueue, offset: int, *, waits: bool
    ) -> bool:
        """Commit with a request that *waits* for its answer, or one-way; false: no leader.

        Raises ClientError: it is not known whether it is stored.
        """
        address = instance.leaders.address(queue.broker_name)
        if address is None:
            return False
        slot = self._slots.setdefault(queue, _Slot())
        slot.taken = None
        slot.open.add(offset)
        header = UpdateConsumerOffsetHeader(self._group, queue.topic, queue.queue_id, offset)
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        if not waits:
            before = self.leadership(address)
            link = await instance.link(address, ASK_S)
            link.connection.invoke_oneway(request(code, header.encode()))
            # Requests of a connection are handled in their order.
            code, asked = (
                RequestCode.GET_MAX_OFFSET,
                GetMaxOffsetHeader(queue.topic, queue.queue_id),
            )
            answer = await instance.ask(address, code, asked.encode(), timeout_s=ASK_S)
            is_same = link is await instance.link(address, ASK_S)
            is_same = is_same and before == self.leadership(address)
            if not answer.code and before is not None and is_same:
                slot.open.discard(offset)
                slot.may.add(offset)
                slot.taken = offset, before
            return True
        answer = await instance.ask(address, code, header.encode(), timeout_s=ASK_S)
        if answer.code:
            instance.leader_search.note_refusal(queue.broker_name, address, answer)
            if outcome_of(answer) == "not_stored":
                slot.open.discard(offset)
            return False
        slot.open.discard(offset)
        slot.may = {offset}
        return True

    async def look(self, consumer: PullConsumer, queue: MessageQueue) -> None:
        """Read what is stored, and compare. Raises ClientError: there is no answer."""
        slot = self._slots.setdefault(queue, _Slot())
        taken, before = slot.taken, self.leadership()
        stored = await consumer.committed_offset(queue)
        if stored not in slot.may | slot.open:
            self._contradicts(f"{queue} has {stored} committed, may be {slot.may | slot.open}")
        elif taken is None or not taken[1] == before == self.leadership():
            return
        elif stored not in {taken[0], *slot.open}:
            self._contradicts(f"{queue} has {stored} committed, and {taken[0]} was taken last")

    def leadership(self, address: str | None = None) -> Leadership | None:
        """Return which member leads, and its term; None when it is not the one at *address*."""
        node = self._world.leader()
        if node is None or node.group is None or address not in (None, node.endpoint):
            return None
        return node.name, node.incarnation, node.group.term


NAME: Final = "side"
"""Of the machine, its producers and its consumer group."""

TOPIC: Final = "side"
DELETED_TOPIC, POPPERS, KEEPS = "side-deleted", "side-poppers", {RETENTION_ATTRIBUTE: "5000"}
BROKER: Final = "sim"

PAUSE_S: Final = 15.0
"""Mean pause between two turns."""

AGAIN, TOGETHER = 0.5, 0.3
"""Share of failed turns that are done again at once, in the same term where the leader stays; of
deletions with another one, and a creation, on their way at the same time."""

KEPT_MAX: Final = 200
"""Newest acknowledged messages that are asked for."""

COMPRESS_OVER_BYTES: Final = 256
BODY_BYTES: Final = (8, 300, 4_000, 12_000)

BATCH_CHANCE: Final = 0.25
BATCH_MESSAGES: Final = 12
"""More records than an entry has whose keys are derived one by one; their bodies are small."""

KEYS_MAX: Final = 3
"""Of a message."""

TURN_S: Final = 10.0

LIVE_SETTINGS: Final = (
    ("longPollingEnable", ("true", "false")),
    ("shortPollingTimeMills", ("10", "1000", "5000")),
    ("flushConsumerOffsetInterval", ("10", "1000", "5000")),
    ("slaveReadEnable", ("true",)),
    ("transactionCheckInterval", ()),
    ("brokerPermission", ("6",)),
    ("autoCreateTopicEnable", ("true", "false")),
    ("autoCreateSubscriptionGroup", ("true",)),
    ("enablePropertyFilter", ("true",)),
    ("filterSupportRetry", ("true", "false")),
    ("rejectTransactionMessage", ("false",)),
    ("storeReplyMessageEnable", ("true", "false")),
    ("server.shutdown_timeout_ms", ("100", "5000")),
    ("server.drain_timeout_ms", ("0", "30000")),
    ("maxTransferBytesOnMessageInMemory", ("65536", "262144")),
    ("maxTransferBytesOnMessageInDisk", ("4096", "65536")),
    ("cleanResourceInterval", ("1000", "10000")),
    ("deleteWhen", ("04", "16")),
    ("diskMaxUsedSpaceRatio", ("75", "80")),
    ("diskSpaceCleanForciblyRatio", ("85", "89")),
    ("cleanFileForciblyEnable", ("true", "false")),
    ("diskSpaceWarningLevelRatio", ("90", "95")),
    ("fileReservedTime", ("72",)),
    ("raft.max_pending_bytes", ("4194304", "67108864")),
    ("syncFlushTimeout", ("5000", "8000")),
)
"""Keys and values that no law of a workload depends on; without a value the key is only read."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A message of `TOPIC` that is stored."""

    keys: str
    queue: MessageQueue
    offset: int
    body: bytes

    @property
    def key(self) -> str:
        """The first of its keys, which no other message has."""
        return self.keys.split(" ", 1)[0]


class SideWork:
    """The work of the side modes of one plan."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._modes = [name for name in SIDE_MODES if name in plan.modes]
        self._rng = rng_stream(plan.seed, "side work")
        self._kept: list[Acknowledged] = []
        self._sent = 0
        self._generation = 0
        self._commits = SideCommits(world, self._rng, NAME, self._contradicts)
        self._odd = OddMessages(world, self._rng, self._contradicts)
        self._many = ManyQueues(world, self._rng, self._contradicts)
        self._registers = AdminRegisters(
            BROKER, self._rng, self._commits.leadership, self._contradicts
        )
        self._old_routes = OldRoutes(world, BROKER, self._rng, self._contradicts)
        settings = plan.settings
        self._request_bytes = settings.segment_bytes // 4
        kept_bytes = (settings.keep_segments + 2) * settings.segment_bytes
        self._halves = HalfMessages(world, kept_bytes, self._contradicts)

    @property
    def is_needed(self) -> bool:
        """Whether the plan has a mode of this kind."""
        return bool(self._modes)

    async def run(self, node: ClientNode) -> None:
        """Work until the machine ends; the program of a client machine."""
        instance = node.instance
        assert instance is not None
        compress = COMPRESS_OVER_BYTES if "compression" in self._modes else None
        config = ProducerConfig(
            send_timeout_s=TURN_S,
            compress_over_bytes=compress,
            max_request_bytes=self._request_bytes,
        )
        members = "follower_reads" in self._modes
        async with (
            Producer(instance, NAME, config) as producer,
            PullConsumer(instance, NAME, follower_reads=members) as consumer,
        ):
            again = ""
            while True:
                if not again:
                    await self._world.sleep(self._rng.expovariate(1.0 / PAUSE_S))
                mode, again = again or self._rng.choice(self._modes), ""
                try:
                    await self._send(producer)
                    if await self._turn(mode, instance, producer, consumer):
                        self._world.sometimes[f"mode_{mode}"] += 1
                except (ClientError, MQError):
                    self._world.sometimes["side_work_failed"] += 1
                    again = mode if self._rng.random() < AGAIN else ""

    async def _turn(
        self, mode: str, instance: ClientInstance, producer: Producer, consumer: PullConsumer
    ) -> bool:
        """Do one turn of a mode; return whether it was done to its end."""
        if mode == "live_settings":
            return await self._change_settings(instance)
        if mode == "topic_deletion":
            return await self._delete_topic(instance, producer, consumer)
        if mode == "hostile_contents":
            return await self._odd.turn(instance, BROKER, producer, consumer)
        if mode == "administration":
            return await self._registers.turn(instance)
        if mode == "old_routes":
            return await self._old_routes.turn(instance, consumer)
        if mode == "many_queues":
            return await self._many.turn(instance, producer, consumer)
        if mode == "half_messages":
            return await self._halves.turn(instance, producer, consumer)
        if not self._kept:
            return False
        wanted = self._kept[self._rng.randrange(len(self._kept))]
        if mode == "key_queries":
            return await self._query(instance, wanted)
        if mode == "old_commits":
            return await self._commits.turn(instance, consumer, wanted.queue)
        if mode == "searches":
            return await self._search(consumer, wanted)
        return await self._read(consumer, wanted)

    async def _send(self, producer: Producer) -> None:
        """Send one message, or several as a batch."""
        if self._rng.random() < BATCH_CHANCE:
            messages = [self._message(BODY_BYTES[0]) for _ in range(BATCH_MESSAGES)]
            results = list(await producer.send_batch(messages))
        else:
            messages = [self._message(self._rng.choice(BODY_BYTES))]
            results = [await producer.send(messages[0])]
        for message, result in zip(messages, results, strict=True):
            keys, body = str(message.keys), bytes(message.body)
            self._kept.append(Acknowledged(keys, result.message_queue, result.queue_offset, body))
        del self._kept[:-KEPT_MAX]

    def _message(self, body_bytes: int) -> Message:
        self._sent += 1
        key = f"side-{self._sent}"
        more = [f"{key}-{number}" for number in range(1, self._rng.randint(1, KEYS_MAX))]
        return Message(TOPIC, key.encode().ljust(body_bytes, b"z"), keys=" ".join([key, *more]))

    def _is_kept(self, wanted: Acknowledged) -> bool:
        """Whether retention has left a message, in the newest tables there are."""
        tables = self._world.reference.tables
        bounds = None if tables is None else tables.queues.get((TOPIC, wanted.queue.queue_id))
        return bounds is not None and bounds.min_offset <= wanted.offset

    async def _read(self, consumer: PullConsumer, wanted: Acknowledged) -> bool:
        try:
            result = await consumer.pull(wanted.queue, wanted.offset, timeout_s=0.0)
        except OffsetIllegalError:
            if self._is_kept(wanted):
                self._contradicts(f"{wanted.key} is acknowledged, and its offset is refused")
            return False
        if not result.messages:
            if self._is_kept(wanted):
                self._contradicts(f"{wanted.key} is acknowledged, and nothing is there")
            return False
        self._compare(wanted, result.messages[0])
        units = self._world.reference.units(TOPIC, wanted.queue.queue_id)
        for message in result.messages:
            if message.phy_offset != int(units[message.queue_offset]["phy_offset"]):
                self._contradicts(f"{message.queue_offset} of {wanted.queue} is another message")
        return True

    async def _query(self, instance: ClientInstance, wanted: Acknowledged) -> bool:
        key, queries = self._rng.choice(wanted.keys.split(" ")), MessageQueries(instance)
        found = await queries.query_messages(TOPIC, key)
        place = wanted.queue.queue_id, wanted.offset
        at = [each for each in found if (each.queue_id, each.queue_offset) == place]
        behind = any(
            node.group is None or node.group.key_index.is_behind or node.has_rotten_keys
            for node in self._world.brokers.values()
        )
        if not at and self._is_kept(wanted) and not behind:
            self._contradicts(f"{wanted.key} is acknowledged, and its key {key} is not found")
        if len(at) > 1:
            self._contradicts(f"{wanted.key} is found {len(at)} times by its key {key}")
        leader = instance.leaders.address(BROKER)
        for message in at:
            self._compare(wanted, message)
            if leader is not None:
                seen = await queries.view_message_at(leader, message.phy_offset)
                self._compare(wanted, seen)
        return bool(at)

    async def _search(self, consumer: PullConsumer, wanted: Acknowledged) -> bool:
        result = await consumer.pull(wanted.queue, wanted.offset, timeout_s=0.0)
        if not result.messages:
            return False
        at_ms = result.messages[0].store_timestamp_ms
        first = await consumer.search_offset(wanted.queue, at_ms)
        last = await consumer.search_offset(wanted.queue, at_ms, upper=True)
        if self._is_kept(wanted) and not first <= wanted.offset <= last:
            self._contradicts(f"{wanted.key} at {at_ms} is searched between {first} and {last}")
        return True

    async def _change_settings(self, instance: ClientInstance) -> bool:
        key, values = self._rng.choice(LIVE_SETTINGS)
        addresses = [node.endpoint for node in self._world.brokers.values() if node.is_up]
        address = self._rng.choice(addresses) if addresses else None
        if address is None:
            return False
        if values:
            body = f"{key}={self._rng.choice(values)}\n".encode()
            await instance.ask(address, RequestCode.UPDATE_BROKER_CONFIG, body=body)
        answer = await instance.ask(address, RequestCode.GET_BROKER_CONFIG)
        if answer.code == 0 and key not in bytes(answer.body).decode():
            self._contradicts(f"{address} has no {key}")
        return answer.code == 0

    async def _delete_topic(
        self, instance: ClientInstance, producer: Producer, consumer: PullConsumer
    ) -> bool:
        """Delete a topic with messages out, create it again, and read what is sent to it."""
        admin = Admin(instance)
        queue = MessageQueue(DELETED_TOPIC, BROKER, 0)
        if self._generation:
            await self._commits.commit(instance, queue, self._generation, waits=False)
            if self._rng.random() < TOGETHER:
                async with trio.open_nursery() as nursery:
                    for act in (admin.delete_topic, admin.create_topic, admin.delete_topic):
                        nursery.start_soon(_try, act, DELETED_TOPIC)
            await admin.delete_topic(DELETED_TOPIC)
        await admin.create_topic(DELETED_TOPIC, queue_nums=2, attributes=KEEPS)
        self._generation += 1
        self._commits.forget(queue)
        await self._commits.look(consumer, queue)
        if self._generation % 2:  # with a commit there is no time without an offset to speak of
            await self._commits.commit(instance, queue, self._generation, waits=True)
        body = f"generation {self._generation}".encode()
        result = await producer.send(Message(DELETED_TOPIC, body))
        read = await consumer.pull(result.message_queue, result.queue_offset, timeout_s=0.0)
        await SimpleConsumer(instance, POPPERS, {DELETED_TOPIC: "*"}).receive(1, TURN_S * 6)
        if read.messages and read.messages[0].body != body:
            self._contradicts(f"{result} holds {read.messages[0].body[:40]!r}, not {body!r}")
        return bool(read.messages)

    def _compare(self, wanted: Acknowledged, message: MessageExt) -> None:
        if message.body != wanted.body or message.keys != wanted.keys:
            self._contradicts(f"{wanted.key} has {len(wanted.body)} bytes; read was {message}")

    def _contradicts(self, text: str) -> None:
        self._world.violate("side_work", text)


async def _try(act: Callable[[str], Awaitable[object]], topic: str) -> None:
    with suppress(ClientError, MQError):
        await act(topic)
