"""Clients come and go: heartbeat (34), unregister (35), consumer list (38), expression check (46).

Spec: docs/internals/protocol/remoting.md, section 8.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import trio

from dledger.broker_errors import TableFullError
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    RefusedError,
    bad_request,
    check_group_name,
    check_topic_name,
    not_leader,
    refusal,
)
from dledger.processors.client_table import (
    SETTLE_S,
    Client,
    ClientTable,
    ConsumerGroup,
    is_tag_type,
    parse_tags,
)
from dledger.processors.get_message import PropertyFilters
from dledger.processors.handles import HEARTBEAT, SUB, UNREGISTERS, Limit, handles, needs
from dledger.remoting.access.accounts import SIGNED
from dledger.remoting.access.gate import limited_account
from dledger.remoting.addresses import join_address
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RemotingError
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.bodies import CheckClientRequestBody, ConsumerIdList, HeartbeatData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import ConsumerGroupHeader, UnregisterClientHeader
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.seams import Clock
from dledger.services.limits import (
    CLIENT_ID_CHARACTERS,
    GROUPS_PER_HEARTBEAT,
    SUBSCRIPTIONS_PER_GROUP,
)
from dledger.services.pending_configs import KnownGroups, TopicView
from dledger.waiting import CALLS_PER_TURN, Wakeup, call_in_turns

LIST_SOON_S: Final = 2.5
"""How long the list of a group's members may wait. Java waits three seconds; then version 4.9
closes the connection, which takes its subscriptions with it."""

LIST_WITHIN_S: Final = {"GO": SETTLE_S}
"""By language: Go's client takes an error for a list without members, and gives up its queues."""

SILENT_AFTER_S: Final = 120.0
"""A client without a heartbeat for this long is removed (RocketMQ's channel expiry)."""

SCAN_S: Final = 10.0
"""How often silent clients are searched."""

NOTIFIED_AT_ONCE: Final = 32
"""Members of a group that are notified of a change at once. Each change of a larger group would
notify all of them: while a thousand connect that is a million calls."""

NOTIFIED_LATER_S: Final = 0.5
"""Then all changes of this time are notified together; a member would rebalance by itself after
20 s."""

logger = structlog.get_logger(__name__)


class SettlingGroups:
    """Consumer groups whose members a new leader may not all know yet. Pure.

    Consumers send heartbeats to every broker, every 30 seconds: RocketMQ's and ours, but some
    clients only to the leader. A member that has just started, or that knows no client of a group,
    may know half of it, whose members would share out queues that others still have. So such a
    group settles for one period of heartbeats when a leadership begins: a request for its list of
    members waits, and no member is notified of what is no news.
    """

    def __init__(self) -> None:
        self._groups: frozenset[str] = frozenset()
        self._held_back: dict[str, None] = {}
        self.until_s: float | None = None
        """When it is over; None when no group settles."""

    def begin(self, now_s: float, groups: Iterable[str]) -> None:
        """Let these groups settle: a leadership begins, and they were there before."""
        self._groups = frozenset(groups)
        self._held_back.clear()
        self.until_s = now_s + SETTLE_S if self._groups else None

    def end(self) -> None:
        """Let no group settle: the leadership, or the time, is over."""
        self._groups = frozenset()
        self._held_back.clear()
        self.until_s = None

    def holds(self, group: str, now_s: float) -> bool:
        """Return whether *group* settles; if so its members are notified when that is over."""
        if self.until_s is None or now_s >= self.until_s or group not in self._groups:
            return False
        self._held_back[group] = None
        return True

    def pop_settled(self, now_s: float) -> list[str]:
        """Return the groups to notify, once, when all have settled."""
        if self.until_s is None or now_s < self.until_s:
            return []
        groups = list(self._held_back)
        self.end()
        return groups


@dataclass(eq=False, repr=False)
class ClientsProcessor:
    """Keeps the client table, and notifies consumers when their group changed."""

    _group: BrokerGroup
    _topics: TopicView
    _clients: ClientTable[Connection]
    _filters: PropertyFilters
    _clock: Clock

    def __post_init__(self) -> None:
        self._known_groups = KnownGroups(self._group, self._topics)
        self._watched: set[Connection] = set()
        self._settling = SettlingGroups()
        self._settling_moved = Wakeup()
        self._settled = trio.Event()
        self._began_s = self._clock.monotonic()
        self._term = 0
        # Groups that have changed, large or being notified, and when the first of them did.
        self._notified_later: dict[str, None] = {}
        self._being_notified: set[str] = set()
        self._changed_s = 0.0

    async def run(self) -> None:
        """Take silent clients out and notify groups that have settled, without end.

        Cancellation: The table stays as it is.
        """
        next_scan = self._clock.monotonic() + SCAN_S
        while True:
            settled = self._settling.until_s
            until = next_scan if settled is None else min(next_scan, settled)
            if self._notified_later:
                until = min(until, self._changed_s + NOTIFIED_LATER_S)
            await self._settling_moved.wait_or(
                self._clock, max(0.0, until - self._clock.monotonic())
            )
            now = self._clock.monotonic()
            settled_groups = map(self._clients.consumer_group, self._settling.pop_settled(now))
            if self._settling.until_s is None:
                self._settled.set()
            self._group.turns.call_each(
                lambda group: self._notify([group]),
                [group for group in settled_groups if group is not None],
            )
            if self._notified_later and now >= self._changed_s + NOTIFIED_LATER_S:
                self._notify_members(self._notified_later)
            if now >= next_scan:
                next_scan = now + SCAN_S
                await call_in_turns(self._take_out_silent, self._clients.channels, CALLS_PER_TURN)

    def _take_out_silent(self, connection: Connection) -> None:
        if not self._clients.is_silent(connection, self._clock.monotonic() - SILENT_AFTER_S):
            return
        logger.info("client_silent", peer=connection.peer_address)
        self._closed(connection)
        connection.close("no heartbeat")

    def role_changed(self) -> None:
        """Let groups settle when a leadership begins; for the group's `on_role_change`."""
        self._leads()

    def _leads(self) -> bool:
        leadership = self._group.leadership
        term = 0 if leadership is None else leadership.term
        if term != self._term:
            self._term = term
            self._settling.end()
            if leadership is not None:
                now = self._clock.monotonic()
                is_young = now - self._began_s < SETTLE_S
                groups, knows = self._group.state.subscription_groups, self._clients.consumer_group
                self._settling.begin(now, [x for x in groups if is_young or knows(x) is None])
            self._settled.set()
            self._settled = trio.Event()
            self._settling_moved.set()
        return leadership is not None

    @handles(RequestCode.HEART_BEAT, limit=Limit.CLIENT, rule=HEARTBEAT)
    def heartbeat(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 34 at once. An unknown group is not made: its first pull makes it."""
        self._leads()
        data = HeartbeatData.decode(command.body)
        now = self._clock.monotonic()
        client = Client(
            connection,
            data.client_id,
            join_address(*connection.peer_address),
            command.language,
            command.version,
            now,
            limited_account(connection),
        )
        try:
            _check_names(data)
            changed = self._register(data, client)
        except (RefusedError, TableFullError) as error:
            return refusal(command, error)
        connection.note_heartbeat()
        self._notify(changed)
        return response_to(command, ext={"IS_SUPPORT_HEART_BEAT_V2": "false"})

    def _register(
        self, data: HeartbeatData, client: Client[Connection]
    ) -> list[ConsumerGroup[Connection]]:
        """Put a client into its groups; return the consumer groups that changed.

        Raises TableFullError: one group more than there may be; it is in those before.
        """
        if client.channel not in self._watched:
            self._watched.add(client.channel)
            client.channel.on_close.append(self._closed)
        for producer in data.producer_data_set:
            self._clients.register_producer(producer.group_name, client)
        changed = []
        for consumer in data.consumer_data_set:
            name = consumer.group_name
            if self._topics.subscription_group(name) is not None:
                self._known_groups.make_known(name)  # its retry topic may be missing
            if self._clients.register_consumer(consumer, client):
                group = self._clients.consumer_group(name)
                if group is not None:
                    changed.append(group)
        return changed

    @handles(RequestCode.UNREGISTER_CLIENT, limit=Limit.CLIENT, rule=UNREGISTERS)
    def unregister(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 35."""
        header = UnregisterClientHeader.decode(command.ext)
        if header.producer_group:
            self._clients.unregister_producer(header.producer_group, connection)
        if header.consumer_group:
            group = self._clients.consumer_group(header.consumer_group)
            if self._clients.unregister_consumer(header.consumer_group, connection) and group:
                self._notify([group])
        return response_to(command)

    @handles(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
        limit=Limit.CLIENT,
        rule=needs(SUB, group="consumerGroup"),
    )
    async def consumer_list(
        self, _connection: Connection, command: RemotingCommand
    ) -> RemotingCommand:
        """Answer 38, with the whole list: later where a new leader may not know all of it.

        A client keeps the queues that it has when it gets an error, or when it waits in vain.
        """
        name = ConsumerGroupHeader.decode(command.ext).consumer_group
        until_s = self._clock.monotonic() + LIST_WITHIN_S.get(command.language, LIST_SOON_S)
        while self._leads() and self._settling.holds(name, now := self._clock.monotonic()):
            if now >= until_s:
                raise RefusedError(
                    Condition.BUSY, f"members of {name} are not all known yet, ask again later"
                )
            with self._clock.time_out(min(self._settling.until_s or now, until_s) - now):
                await self._settled.wait()
        if not self._leads():
            raise not_leader(self._group)
        group = self._clients.consumer_group(name)
        if group is None:
            raise bad_request(f"no consumer for this group, {name}")
        body = ConsumerIdList([*group.client_ids])
        return response_to(command, ext={}, body=body.encode())

    @handles(RequestCode.CHECK_CLIENT_CONFIG, limit=Limit.CLIENT, rule=SIGNED)
    def check_config(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 46: whether this broker can filter with that expression."""
        body = CheckClientRequestBody.decode(command.body)
        data = body.subscription_data
        if data is None or data.class_filter_mode:
            return response_to(command)
        try:
            if is_tag_type(data.expression_type):
                parse_tags(data.sub_string)
            else:
                self._filters.expression(data.expression_type, data.sub_string)
        except ValueError as error:
            return response_to(command, int(ResponseCode.SUBSCRIPTION_PARSE_FAILED), str(error))
        except RefusedError as error:
            return refusal(command, error)
        return response_to(command)

    def _closed(self, connection: Connection) -> None:
        self._watched.discard(connection)
        self._notify(self._clients.close_channel(connection))

    def _notify(self, groups: Iterable[ConsumerGroup[Connection]]) -> None:
        if not self._leads():
            return
        now = self._clock.monotonic()
        for group in groups:
            if self._settling.holds(group.name, now):
                continue
            config = self._topics.subscription_group_or_default(group.name)
            if group.is_broadcasting or (
                config is not None and not config.notify_consumer_ids_changed_enable
            ):
                continue
            if len(group.clients) <= NOTIFIED_AT_ONCE and group.name not in self._being_notified:
                self._notify_members([group.name])
                continue
            if not self._notified_later:
                self._changed_s = now
                self._settling_moved.set()
            self._notified_later[group.name] = None

    def _notify_members(self, names: Iterable[str]) -> None:
        """Notify the members that each group has now, in their turn."""
        for name in list(names):
            self._notified_later.pop(name, None)
            group = self._clients.consumer_group(name)
            members = [] if group is None else list(group.clients)
            self._being_notified.add(name)
            turns = self._group.turns
            turns.call_each(partial(self._send_notification, name), members)
            turns.call_each(self._being_notified.discard, [name])

    def _send_notification(self, group_name: str, connection: Connection) -> None:
        if not self._leads():
            return
        ext = {"consumerGroup": group_name}
        try:
            connection.invoke_oneway(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext))
        except RemotingError as error:
            # It rebalances by itself within 20 s; a dead connection is taken out anyway.
            logger.debug("notify_failed", group=group_name, reason=str(error))


def _check_names(data: HeartbeatData) -> None:
    """Check the names of a heartbeat.

    Raises RefusedError: one of them cannot be one, or there are too many; nothing was noted.
    """
    if len(data.client_id) > CLIENT_ID_CHARACTERS:
        raise bad_request(f"the client id is longer than {CLIENT_ID_CHARACTERS} characters")
    groups = len(data.producer_data_set) + len(data.consumer_data_set)
    if groups > GROUPS_PER_HEARTBEAT:
        raise bad_request(
            f"the heartbeat names {groups} groups; {GROUPS_PER_HEARTBEAT} are allowed: let more"
            " clients have them"
        )
    for producer in data.producer_data_set:
        check_group_name(producer.group_name)
    for consumer in data.consumer_data_set:
        check_group_name(consumer.group_name)
        if len(consumer.subscription_data_set) > SUBSCRIPTIONS_PER_GROUP:
            raise bad_request(
                f"{consumer.group_name} subscribes to more than {SUBSCRIPTIONS_PER_GROUP} topics"
            )
        for subscription in consumer.subscription_data_set:
            check_topic_name(subscription.topic)
