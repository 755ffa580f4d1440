"""Clients with a quota of their own: each sends above it, below it, and changes it meanwhile.

A client has an id, a connection and a quota that no other has. Each row is one request over that
connection: the SDK would wait and send again where it is refused. After a change of unknown outcome
the id is given up, and the client goes on under another one. Some never have a quota: none of their
sends is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.retry import FailureKind, failure_from_error
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.commitlog.message_batch import BatchItem, encode_batch
from dledger.jepsen_like.checkers.quotas import Act, Row
from dledger.jepsen_like.history.operation import NOTHING, QUOTA_EXCEEDED, F, Operation, Outcome
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.jepsen_like.workloads.output_topic import ASK_AGAIN_S, make_topic
from dledger.jepsen_like.workloads.producers import ATTEMPT_TIMEOUT_S
from dledger.jepsen_like.workloads.recorder import VALUE_BYTES, Recorder, value_of
from dledger.jepsen_like.workloads.whole_queue import read_queue
from dledger.remoting.client import RemotingClient, open_client
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.bodies import HeartbeatData, KVTable, ProducerData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.remoting.protocol.outcome import REASON_FIELD, Condition, outcome_of
from dledger.remoting.protocol.quota_bodies import DELETE, PUT, QuotaHeader

OUTPUT_SUFFIX: Final = "-limited"
"""Ends the name of the topic that these clients use."""
QUEUES: Final = 2
CLIENTS_FROM: Final = 800
"""Values are of other clients than those of producers."""
GROUP: Final = "limited"
PAUSE_S: Final = 1.2
"""Mean time between two steps of a client, whatever the rate of others: a quota fills up again."""
CHANGES: Final = 0.15
CHANGES_BESIDE: Final = 0.15
"""Share of the bursts during which the quota is changed."""
DELETES: Final = 0.15
CONNECTS_AGAIN: Final = 0.08
BATCHES: Final = 0.2
WITHOUT: Final = 4
"""One client of this number never has a quota."""
BURSTS: Final = (1, 1, 2, 4, 8, 16)
SPREADS_S: Final = (0.0, 0.0, 0.5, 2.0)
"""Within which the sends of a burst leave."""
MESSAGES_PER_S: Final = (None, 2, 4, 8, 20)
BYTES_PER_S: Final = (None, None, 1_000, 4_000)
BODIES: Final = (VALUE_BYTES, 100, 400)
BATCH_MAX: Final = 4
OPEN_S: Final = 3.0


class _Identity:
    """A client under one id.

    Attributes:
        is_over: A change has an unknown outcome.
    """

    def __init__(self, name: str, index: int, *, is_limited: bool) -> None:
        self.name = name
        self.index = index
        self.is_limited = is_limited
        self.is_over = False
        self.connection: Connection | None = None
        self.address = ""
        self.process = NOTHING


class Quotas:
    """The clients of a run that have quotas."""

    def __init__(self, clients: Recorder) -> None:
        self._clients = clients
        self.topic = clients.topic + OUTPUT_SUFFIX
        self._processes: dict[tuple[str, str], int] = {}
        """Address of a broker, and when it began → its number."""

    async def make_topic(self, instance: ClientInstance) -> None:
        """Make the topic; return when clients know its queues."""
        await make_topic(self._clients, instance, self.topic, QUEUES)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be client *index* until it is over."""
        clients, rng = self._clients, self._clients.rng_of("limited", index)
        while not clients.is_over:
            name = f"{instance.config.client_ip}@limited-{index}-{clients.new_process()}"
            identity = _Identity(name, index, is_limited=index % WITHOUT != WITHOUT - 1)
            async with open_client(instance.network) as remoting:
                while not (clients.is_over or identity.is_over):
                    with clients.acting():
                        if await self._connect(instance, remoting, identity, rng):
                            await self._step(instance, identity, rng)
                    await clients.sleep(rng.expovariate(1 / PAUSE_S))

    # -- connections -----------------------------------------------------------------------

    async def _connect(
        self, instance: ClientInstance, remoting: RemotingClient, identity: _Identity, rng: SimRng
    ) -> bool:
        """Have a connection to the leader, whose broker knows the client by its id; false: none."""
        broker = self._broker
        address = instance.leaders.address(broker)
        if address is None:
            await self._search(instance, None)
            return False
        if rng.random() < CONNECTS_AGAIN:
            remoting.disconnect(address)
        try:
            connection = await remoting.connection(address, OPEN_S)
            if connection is not identity.connection:
                data = HeartbeatData(
                    client_id=identity.name, producer_data_set=[ProducerData(GROUP)]
                )
                heartbeat = await connection.invoke(
                    request(RequestCode.HEART_BEAT, {}, data.encode()), OPEN_S
                )
                info = await connection.invoke(request(RequestCode.GET_BROKER_RUNTIME_INFO), OPEN_S)
                if heartbeat.code or info.code:
                    return False
                began = KVTable.decode(info.body).table["bootTimestamp"]
                key = (address, began)
                identity.process = self._processes.setdefault(key, len(self._processes))
                identity.connection, identity.address = connection, address
        except MQError:
            await self._search(instance, address)
            return False
        return True

    async def _search(self, instance: ClientInstance, failed: str | None) -> None:
        broker = self._broker
        await instance.leader_search.pause(
            broker,
            ASK_AGAIN_S,
            topic=self.topic,
            failed=failed,
            failed_term=instance.leaders.term(broker),
        )

    @property
    def _broker(self) -> str:
        return self._clients.queues[0].broker_name

    # -- steps -----------------------------------------------------------------------------

    async def _step(self, instance: ClientInstance, identity: _Identity, rng: SimRng) -> None:
        if identity.is_limited and rng.random() < CHANGES:
            await self._change(instance, identity, rng)
            return
        spread_s, is_batch = rng.choice(SPREADS_S), rng.random() < BATCHES
        async with trio.open_nursery() as nursery:
            for _ in range(rng.choice(BURSTS)):
                count = rng.randint(2, BATCH_MAX) if is_batch else 1
                send = partial(self._send, instance, identity, count, rng.choice(BODIES))
                nursery.start_soon(self._later, rng.random() * spread_s, send)
            if identity.is_limited and rng.random() < CHANGES_BESIDE:
                change = partial(self._change, instance, identity, rng)
                nursery.start_soon(self._later, rng.random() * spread_s, change)

    async def _later(self, delay_s: float, act: Callable[[], Awaitable[object]]) -> None:
        await self._clients.sleep(delay_s)
        await act()

    async def _change(self, instance: ClientInstance, identity: _Identity, rng: SimRng) -> None:
        """Change the quota of a client."""
        op = self._clients.begin(identity.process, F.QUOTA)
        op.topic, op.group, op.txn, op.status = self.topic, identity.name, identity.process, Act.PUT
        messages, size_bytes = rng.choice(MESSAGES_PER_S), rng.choice(BYTES_PER_S)
        if rng.random() < DELETES:
            op.status = Act.DELETE
            header = QuotaHeader(DELETE, "client", identity.name)
        else:
            op.cnt, op.off = messages or 0, size_bytes or 0
            header = QuotaHeader(PUT, "client", identity.name, messages, size_bytes)
        self._clients.written(op)
        await self._ask(instance, identity, op, request(RequestCode.CHANGE_QUOTA, header.encode()))
        identity.is_over = identity.is_over or op.outcome == Outcome.INFO

    async def _send(
        self, instance: ClientInstance, identity: _Identity, count: int, size: int
    ) -> None:
        clients = self._clients
        client = CLIENTS_FROM + identity.index
        values = [clients.next_value(client) for _ in range(count)]
        queue = MessageQueue(self.topic, self._broker, values[0] % QUEUES)
        bodies = [value.to_bytes(VALUE_BYTES, "big").ljust(size, b".") for value in values]
        is_batch = count > 1
        body = encode_batch(map(BatchItem, bodies)) if is_batch else bodies[0]
        op = clients.begin(identity.process, F.LIMITED, queue)
        op.group, op.value, op.cnt, op.min_off = identity.name, values[0], count, len(body)
        op.txn, op.status = identity.process, Row.SEND
        clients.written(op)
        header = SendMessageHeader(
            GROUP,
            self.topic,
            "TBW102",
            QUEUES,
            queue.queue_id,
            0,
            instance.clock.wall_ms(),
            0,
            properties="",
            batch=is_batch,
        )
        code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
        answer = await self._ask(instance, identity, op, request(code, header.encode_v2(), body))
        if answer is not None:
            op.off = int(answer.ext["queueOffset"])
            clients.written(op)

    async def _ask(
        self, instance: ClientInstance, identity: _Identity, op: Operation, command: RemotingCommand
    ) -> RemotingCommand | None:
        """Ask once and complete the row; return a good answer."""
        clients, connection = self._clients, identity.connection
        assert connection is not None
        try:
            answer = await connection.invoke(command, ATTEMPT_TIMEOUT_S)
        except MQError as error:
            if failure_from_error(error).kind is FailureKind.UNKNOWN:
                clients.unknown(op, type(error).__name__)
            else:
                clients.refused(op, type(error).__name__)
            return None
        if outcome_of(answer) == "stored":
            clients.end(op)
            return answer
        instance.leader_search.note_refusal(self._broker, identity.address, answer)
        reason = str(answer.ext.get(REASON_FIELD) or f"code {answer.code}")
        if outcome_of(answer) == "unknown":
            clients.unknown(op, reason)
        elif reason == Condition.QUOTA_EXCEEDED.value:
            clients.refused(op, QUOTA_EXCEEDED)
        else:
            clients.refused(op, reason)
        return None

    # -- the end ---------------------------------------------------------------------------

    async def drain(self, instance: ClientInstance) -> None:
        """Read which quotas there are, and all that was sent.

        Raises:
            ClientError: A request was refused.
        """
        clients, process = self._clients, self._clients.new_process()
        end = clients.begin(process, F.QUOTA)
        end.topic, end.status = self.topic, Act.LISTED
        infos = (await Admin(instance).quotas())[self._broker]
        clients.end(end)
        for info in infos:
            op = clients.begin(process, F.QUOTA)
            op.topic, op.group, op.status = self.topic, info.name, Act.LISTED
            op.cnt, op.off = info.sent_messages_per_s or 0, info.sent_bytes_per_s or 0
            clients.end(op)
        consumer, is_whole = PullConsumer(instance, GROUP), True
        for number in range(QUEUES):
            queue = MessageQueue(self.topic, self._broker, number)
            note = partial(self._note_found, process, queue)
            is_whole = await read_queue(consumer, queue, note) == 0 and is_whole
        op = clients.begin(process, F.LIMITED)
        op.topic, op.status, op.cnt = self.topic, Row.END, int(is_whole)
        clients.end(op)

    def _note_found(self, process: int, queue: MessageQueue, message: MessageExt) -> None:
        op = self._clients.begin(process, F.LIMITED, queue)
        op.status, op.group = Row.FOUND, GROUP
        op.value, op.off = value_of(message.body), message.queue_offset
        self._clients.end(op)
