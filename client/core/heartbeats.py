"""The groups of this client, and the heartbeats that announce them to brokers.

A broker gets a heartbeat when its connection is new, when its content has changed, when it has
begun to lead, and every period. Looking for a leader sends none: while there is none,
every client searches several times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from dledger.client.core.client_state import Announcements, ClientCounters
from dledger.client.core.links import Link, Links
from dledger.client.core.route import LEADER_ID, LeaderTable
from dledger.client.core.routes import Routes
from dledger.commitlog.errors import ConfigError, MQError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.bodies import (
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    ProducerData,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import UnregisterClientHeader
from dledger.remoting.seams import Clock

AGAIN_S: Final = 3.0
"""After a heartbeat that was not answered, or refused, while consumers here share queues: a broker
that has just started must not take them for ended."""
GAP_S: Final = 0.1
"""Between two rounds, then: connections that break at once must not make a loop."""
INTRODUCTION_S: Final = 1.0
"""How long a request waits for brokers to know this client; replies are tried for as long."""
UNREGISTER_TIMEOUT_S: Final = 1.0
"""Unregistering; brokers also notice by the connection's end."""

_log = get_logger(__name__)


@dataclass(eq=False, repr=False)
class Heartbeats:
    """The groups of one client instance, and what its brokers know of them."""

    _client_id: str
    _clock: Clock
    _links: Links
    _routes: Routes
    _leaders: LeaderTable
    _announcements: Announcements
    _counters: ClientCounters
    _period_s: float
    _rpc_timeout_s: float
    _producers: dict[str, int] = field(default_factory=dict)
    _consumers: dict[str, ConsumerData] = field(default_factory=dict)
    # Leader and term of each broker name, as announced to that leader last.
    _told_as_leader: dict[str, tuple[str, int]] = field(default_factory=dict)
    _introducing: trio.Event | None = None
    # Groups taken back so far: a heartbeat that was under way meanwhile announced them.
    _removals: int = 0

    # -- groups ----------------------------------------------------------------------

    def add_producer(self, group: str) -> None:
        """Announce a producer group to the brokers from now on; counted."""
        self._producers[group] = self._producers.get(group, 0) + 1
        self._announcements.wake()

    def add_consumer(self, group: str) -> None:
        """Announce a consumer group that pulls by itself.

        Raises ConfigError: this instance has the group already.
        """
        self._refuse_second(group)
        self._consumers[group] = ConsumerData(
            group_name=group,
            consume_type=ConsumeType.CONSUME_ACTIVELY,
            message_model=MessageModel.CLUSTERING,
        )
        self._announcements.wake()

    def add_sharing_consumer(self, data: ConsumerData, changed: Callable[[], None]) -> None:
        """Announce a consumer that shares the queues of its topics with others of its group.

        Args:
            data: What heartbeats say of it; `update_consumer` replaces it.
            changed: Called, and must not raise, when members of the group or places of queues may
                have changed.
        Raises:
            ConfigError: This instance has the group already.
        """
        self._refuse_second(data.group_name)
        self._announcements.watchers[data.group_name] = changed
        self.update_consumer(data)

    def _refuse_second(self, group: str) -> None:
        if group in self._consumers:
            raise ConfigError(f"consumer group {group} is in use in this client instance")

    def update_consumer(self, data: ConsumerData) -> None:
        """Put *data* of its group into heartbeats from now on, the next one at once."""
        self._consumers[data.group_name] = data
        self._announcements.wake()

    async def remove_producer(self, group: str) -> None:
        """Take a producer group back; the last one unregisters it at the brokers."""
        if group not in self._producers:
            return  # the instance was closed before, and took all of them back
        self._producers[group] -= 1
        if self._producers[group] == 0:
            del self._producers[group]
            await self._unregister(producer_group=group)

    async def remove_consumer(self, group: str) -> None:
        """Take a consumer group back and tell the brokers."""
        if self._consumers.pop(group, None) is None:
            return  # likewise
        self._announcements.watchers.pop(group, None)
        await self._unregister(consumer_group=group)

    async def remove_all(self) -> None:
        """Take every group back and tell the brokers."""
        for group in list(self._producers):
            await self._unregister(producer_group=group)
        for group in list(self._consumers):
            await self._unregister(consumer_group=group)
        self._producers.clear()
        self._consumers.clear()
        self._announcements.watchers.clear()

    # -- telling ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Send heartbeats until cancelled. Cancellation: A heartbeat may have been sent or not."""
        all_at_s = 0.0
        while True:
            self._announcements.due = trio.Event()
            begin_s = trio.current_time()
            if begin_s >= all_at_s:
                all_at_s = begin_s + self._period_s
                is_complete = await self.send()
            else:
                is_complete = await self._send_due()
            again_at_s = all_at_s
            if self._announcements.is_awaited:
                await self._clock.sleep(GAP_S)
                if not is_complete:
                    again_at_s = min(all_at_s, trio.current_time() + AGAIN_S)
            with trio.move_on_at(again_at_s):
                await self._announcements.due.wait()

    async def send(self) -> bool:
        """Tell all brokers now which groups are here; return whether all of them know it."""
        return await self._announce(self._addresses())

    async def _send_due(self) -> bool:
        body = self.body()
        return await self._announce([x for x in self._addresses() if not self._knows(x, body)])

    def body(self) -> bytes:
        """Return what a heartbeat carries now."""
        return HeartbeatData(
            client_id=self._client_id,
            producer_data_set=[ProducerData(group_name=g) for g in sorted(self._producers)],
            consumer_data_set=[data for _, data in sorted(self._consumers.items())],
        ).encode()

    def _addresses(self) -> list[str]:
        """Return every broker of every route; followers too where they are to know us."""
        found: dict[str, None] = {}
        everybody = bool(self._consumers) or self._announcements.is_asked
        for name, broker_id, address in self._routes.table.brokers():
            leader = self._leaders.address(name)
            if everybody or (address == (leader or address) and broker_id == LEADER_ID):
                found[address] = None
            if leader is not None:
                found[leader] = None
        return list(found)

    def _knows(self, address: str, body: bytes) -> bool:
        link = self._links.opened.get(address)
        if link is None or link.connection.is_closed or link.heard != body:
            return False
        return self._led_by(address).items() <= self._told_as_leader.items()

    def _led_by(self, address: str) -> dict[str, tuple[str, int]]:
        leaders = self._leaders
        names = dict.fromkeys(name for name, _, _ in self._routes.table.brokers())
        return {n: (address, leaders.term(n)) for n in names if leaders.address(n) == address}

    async def _announce(self, addresses: Iterable[str]) -> bool:
        missed: list[str] = []
        if self._producers or self._consumers:
            body = self.body()
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(self._announce_to, address, body, missed)
        return not missed

    async def _announce_to(self, address: str, body: bytes, missed: list[str]) -> None:
        timeout_s, removals = self._rpc_timeout_s, self._removals
        groups, led = frozenset(self._producers), self._led_by(address)
        link: Link | None = None
        try:
            link = await self._links.open(address, timeout_s)
            beat = request(RequestCode.HEART_BEAT, None, body)
            answer = await link.connection.invoke(beat, timeout_s)
        except MQError as error:
            missed.append(address)
            if link is not None:
                link.heard = b""
            _log.debug("heartbeat_failed", address=address, error=str(error))
            return
        self._counters.heartbeats += 1
        if answer.code == ResponseCode.SUCCESS:
            if removals == self._removals:
                link.heard, link.announced = body, groups
            self._told_as_leader.update(led)
        else:
            missed.append(address)
            link.heard = b""
            _log.info(
                "heartbeat_refused", address=address, code=answer.code, remark=answer.remark or ""
            )

    async def introduce(self, group: str, broker_names: Sequence[str]) -> None:
        """Return when the leaders of these brokers know this client as a producer of *group*.

        Later than that after `INTRODUCTION_S`. The first time their followers are waited for, too;
        they get it as long as the instance is open.
        """
        is_first = self._announcements.expect_replies()
        if is_first:
            self._announcements.wake()
        missing = [
            address
            for name in broker_names
            for address in (
                self._routes.member_addresses(name) if is_first else [self._leaders.address(name)]
            )
            if address is not None and not self._is_told(address, group)
        ]
        if not missing:
            return
        with trio.move_on_after(INTRODUCTION_S):
            if self._introducing is not None:
                await self._introducing.wait()
                return
            self._introducing = done = trio.Event()
            try:
                await self._announce(missing)
            finally:
                self._introducing = None
                done.set()

    def _is_told(self, address: str, group: str) -> bool:
        link = self._links.opened.get(address)
        return link is not None and not link.connection.is_closed and group in link.announced

    # -- unregistering --------------------------------------------------------------------------

    async def _unregister(
        self, *, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        # One that comes back has to be announced, though the heartbeat is as the one before.
        self._removals += 1
        for link in self._links.opened.values():
            link.heard = b""
            if producer_group is not None:
                link.announced -= {producer_group}
        header = UnregisterClientHeader(self._client_id, producer_group, consumer_group)
        with trio.move_on_after(UNREGISTER_TIMEOUT_S, shield=True):
            async with trio.open_nursery() as nursery:
                for link in list(self._links.opened.values()):
                    if not link.connection.is_closed:
                        nursery.start_soon(_unregister, link, dict(header.encode()))


async def _unregister(link: Link, ext: dict[str, Any]) -> None:
    try:
        await link.connection.invoke(
            request(RequestCode.UNREGISTER_CLIENT, ext), UNREGISTER_TIMEOUT_S
        )
    except MQError as error:
        _log.debug("unregister_failed", address=link.address, error=str(error))
