"""A client that never reads a route: it sends to one member, in the encoding of RocketMQ's clients.

It sends each message once. So one that was acknowledged is there once, one that was refused is not
there, and no outcome makes it two, whatever carried it to the leader and repeated it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import OffsetIllegalError
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import PROPERTY_UNIQ_KEY
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.remoting.connection import Connection
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import SendMessageHeader
from dledger.remoting.protocol.outcome import outcome_of

if TYPE_CHECKING:
    from dledger.jepsen_like.simulation.world import World

TOPIC: Final = "side-old"
BURST_MAX: Final = 120
"""Messages that are on their way together."""

WITHIN_S: Final = 3.0
"""How long RocketMQ's clients wait for an answer."""

PAUSES_S: Final = (0.0, 0.01, 0.1)

_BOUNDS: Final = {"stored": (1, 1), "not_stored": (0, 0), "unknown": (0, 1)}
"""Copies of a message, by its outcome."""


class OldRoutes:
    """The messages of that client, and what became of each."""

    def __init__(
        self, world: World, broker: str, rng: SimRng, contradicts: Callable[[str], None]
    ) -> None:
        self._world = world
        self._queue = MessageQueue(TOPIC, broker, 0)
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
            await Admin(instance).create_topic(TOPIC, queue_nums=1)
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
                await self._world.sleep(self._rng.choice(PAUSES_S))
        await self._read(consumer)
        return True

    async def _send(self, connection: Connection, key: str) -> None:
        header = SendMessageHeader(
            "old", TOPIC, "TBW102", 4, 0, 0, 0, 0, f"{PROPERTY_UNIQ_KEY}\x01{key}\x02"
        )
        sent = request(RequestCode.SEND_MESSAGE, header.encode(), key.encode())
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
