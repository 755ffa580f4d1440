"""Which clients are connected: consumer groups with their subscriptions, producer groups. Pure.

Not replicated: clients send heartbeats to every broker, every 30 seconds. TAG expressions are
``*``, nothing, or ``a || b``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dledger.commitlog.java_hash import tags_code
from dledger.remoting.protocol.bodies import (
    ClientConnection,
    ConsumeFromWhere,
    ConsumerConnection,
    ConsumerData,
    ConsumeType,
    MessageModel,
    SubscriptionData,
)
from dledger.remoting.protocol.command import OUR_LANGUAGE
from dledger.services.limits import check_limit
from dledger.settings.tables import BrokerTable

SUB_ALL = "*"
TAG_EXPRESSION = "TAG"

SETTLE_S: Final = 30.0
"""RocketMQ's clients and ours send a heartbeat this often."""

TagCodes = npt.NDArray[np.int64]


def is_tag_type(expression_type: str | None) -> bool:
    """Return whether the expression is made of tags; a missing type means tags."""
    return not expression_type or expression_type == TAG_EXPRESSION


def parse_tags(expression: str | None) -> TagCodes | None:
    """Return the hashes of the tags in *expression*, or None when it matches everything.

    Raises ValueError: there is a separator but no tag.
    """
    if expression is None or expression in ("", SUB_ALL):
        return None
    tags = [tag.strip() for tag in expression.split("||")]
    tags = [tag for tag in tags if tag]
    if not tags:
        raise ValueError(f"no tag in subscription expression {expression!r}")
    return codes_array(tags_code(tag) for tag in tags)


def codes_array(codes: Iterable[int]) -> TagCodes:
    """Return tag hashes as a pull compares them with consume queue units."""
    signed = {((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for code in codes}
    return np.array(sorted(signed), dtype=np.int64)


ChannelT = TypeVar("ChannelT")


@dataclass(slots=True)
class Client(Generic[ChannelT]):
    """One client of a group."""

    channel: ChannelT
    client_id: str
    address: str
    language: str
    version: int
    last_update: float = 0.0
    account: str = ""
    """The account whose share of the clients it counts in; empty: none."""


@dataclass(slots=True)
class Subscription:
    """What a group wants of one topic; with tags ready to filter with."""

    data: SubscriptionData
    codes: TagCodes | None

    @property
    def is_tag_type(self) -> bool:
        """Whether consume queue units alone decide what matches."""
        return is_tag_type(self.data.expression_type) or self.data.class_filter_mode

    @classmethod
    def of(cls, data: SubscriptionData) -> Subscription:
        """Return the filter of a heartbeat's subscription; a bad expression matches nothing."""
        if data.class_filter_mode or data.sub_string in ("", SUB_ALL):
            return cls(data, None)
        if not is_tag_type(data.expression_type):
            return cls(data, None)
        # The C++ client leaves the codes out.
        if data.code_set:
            return cls(data, codes_array(data.code_set))
        try:
            return cls(data, parse_tags(data.sub_string))
        except ValueError:
            return cls(data, codes_array(()))


@dataclass(slots=True)
class ConsumerGroup(Generic[ChannelT]):
    """A consumer group with at least one client."""

    name: str
    consume_type: ConsumeType
    message_model: MessageModel
    consume_from_where: ConsumeFromWhere
    clients: dict[ChannelT, Client[ChannelT]] = field(default_factory=dict)
    client_ids: Counter[str] = field(default_factory=Counter)
    """Of `clients`, each with the number of its connections; no zeros."""
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    @property
    def is_broadcasting(self) -> bool:
        """Whether every consumer sees every message."""
        return self.message_model is MessageModel.BROADCASTING

    def put(self, client: Client[ChannelT]) -> bool:
        """Put a client in, or in place of what its channel had; return whether ids changed."""
        before = self.clients.get(client.channel)
        if before is None:
            changed = client.client_id not in self.client_ids
        else:
            changed = client.client_id != before.client_id
            client = _counted_as(client, before)
        self.client_ids[client.client_id] += 1
        self._drop_id(before)
        self.clients[client.channel] = client
        return changed

    def take_out(self, channel: ChannelT) -> Client[ChannelT] | None:
        """Take out and return the client of a channel, if there is one."""
        client = self.clients.pop(channel, None)
        self._drop_id(client)
        return client

    def _drop_id(self, client: Client[ChannelT] | None) -> None:
        if client is not None:
            self.client_ids[client.client_id] -= 1
            if not self.client_ids[client.client_id]:
                del self.client_ids[client.client_id]

    def connection(self, clients: list[ClientConnection]) -> ConsumerConnection:
        """Return what GET_CONSUMER_CONNECTION_LIST answers with these clients."""
        return ConsumerConnection(
            connection_set=clients,
            subscription_table={name: item.data for name, item in self.subscriptions.items()},
            consume_type=self.consume_type,
            message_model=self.message_model,
            consume_from_where=self.consume_from_where,
        )


class ClientTable(Generic[ChannelT]):
    """All groups of one broker. A channel is whatever stands for a connection."""

    def __init__(self, settings: BrokerTable | None = None) -> None:
        """Make an empty table; *settings*: limits of clients in all groups and in one."""
        self._settings = settings or BrokerTable()
        # Clients, once for each group they are in.
        self._count = 0
        # Of these, by account; no zeros.
        self._of_account: Counter[str] = Counter()
        self._consumers: dict[str, ConsumerGroup[ChannelT]] = {}
        self._producers: dict[str, dict[ChannelT, Client[ChannelT]]] = {}
        # Client id → what it is, over each connection that has a producer group.
        self._by_id: dict[str, dict[ChannelT, Client[ChannelT]]] = {}
        # Which groups a channel is in, so that its end does not search all groups.
        self._consumers_of: dict[ChannelT, dict[str, None]] = {}
        self._producers_of: dict[ChannelT, dict[str, None]] = {}

    @property
    def consumer_groups(self) -> Iterable[ConsumerGroup[ChannelT]]:
        """Every consumer group that has clients."""
        return self._consumers.values()

    def consumer_group(self, name: str) -> ConsumerGroup[ChannelT] | None:
        """Return a consumer group that has clients, or None."""
        return self._consumers.get(name)

    def producers(self, group: str) -> list[Client[ChannelT]]:
        """Return the clients of a producer group."""
        return list(self._producers.get(group, {}).values())

    def producer(self, client_id: str) -> Client[ChannelT] | None:
        """Return a client that has a producer, over the connection of its newest heartbeat."""
        clients = self._by_id.get(client_id)
        return None if clients is None else max(clients.values(), key=lambda c: c.last_update)

    def producer_groups(self) -> list[str]:
        """Return the producer groups that have clients, sorted."""
        return sorted(self._producers)

    def register_consumer(self, data: ConsumerData, client: Client[ChannelT]) -> bool:
        """Register a consumer; return whether the group changed: its clients must rebalance then.

        A client that is known over another connection is no change. A heartbeat with another
        model or type overwrites silently, as in RocketMQ.

        Raises TableFullError: the group, or the broker, has as many clients as may be.
        """
        group = self._consumers.get(data.group_name)
        if group is None or client.channel not in group.clients:
            self._count_in(client, 0 if group is None else len(group.clients))
        if group is None:
            group = self._consumers[data.group_name] = ConsumerGroup(
                data.group_name, data.consume_type, data.message_model, data.consume_from_where
            )
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        changed = group.put(client)
        self._consumers_of.setdefault(client.channel, {})[data.group_name] = None
        return _update_subscriptions(group, data.subscription_data_set) or changed

    def register_producer(self, group: str, client: Client[ChannelT]) -> None:
        """Register a producer.

        Raises TableFullError: the group, or the broker, has as many clients as may be.
        """
        known = self._producers.get(group, {})
        if client.channel not in known:
            self._count_in(client, len(known))
            self._producers[group] = known
        before = known.get(client.channel)
        known[client.channel] = client if before is None else _counted_as(client, before)
        self._producers_of.setdefault(client.channel, {})[group] = None
        if before is not None and before.client_id != client.client_id:
            self._forget(before)
        self._by_id.setdefault(client.client_id, {})[client.channel] = client

    def _count_in(self, client: Client[ChannelT], in_group: int) -> None:
        check_limit(self._settings, "max_clients", self._count)
        check_limit(self._settings, "max_clients_per_group", in_group)
        if client.account:
            of_account = self._of_account[client.account]
            check_limit(self._settings, "max_clients_per_account", of_account)
            self._of_account[client.account] += 1
        self._count += 1

    def _uncount(self, client: Client[ChannelT]) -> None:
        self._count -= 1
        if client.account:
            self._of_account[client.account] -= 1
            self._of_account += Counter()  # drops zeros

    def unregister_consumer(self, group_name: str, channel: ChannelT) -> bool:
        """Remove a client from a consumer group; return whether others are left to rebalance."""
        group = self._consumers.get(group_name)
        removed = None if group is None else group.take_out(channel)
        if group is None or removed is None:
            return False
        _drop_group(self._consumers_of, channel, group_name)
        self._uncount(removed)
        if not group.clients:
            del self._consumers[group_name]
            return False
        return removed.client_id not in group.client_ids

    def unregister_producer(self, group_name: str, channel: ChannelT) -> None:
        """Remove a client from a producer group."""
        clients = self._producers.get(group_name)
        removed = None if clients is None else clients.pop(channel, None)
        if clients is None or removed is None:
            return
        _drop_group(self._producers_of, channel, group_name)
        self._uncount(removed)
        if not clients:
            del self._producers[group_name]
        if channel not in self._producers_of:
            self._forget(removed)

    def _forget(self, removed: Client[ChannelT]) -> None:
        clients = self._by_id.get(removed.client_id)
        if clients is not None:
            clients.pop(removed.channel, None)
            if not clients:
                del self._by_id[removed.client_id]

    def close_channel(self, channel: ChannelT) -> list[ConsumerGroup[ChannelT]]:
        """Remove a connection from everything; return the consumer groups that must rebalance."""
        changed = []
        for name in list(self._consumers_of.get(channel, ())):
            if self.unregister_consumer(name, channel):
                changed.append(self._consumers[name])
        for name in list(self._producers_of.get(channel, ())):
            self.unregister_producer(name, channel)
        return changed

    @property
    def channels(self) -> list[ChannelT]:
        """The connections that have clients."""
        return list({**self._consumers_of, **self._producers_of})

    @property
    def has_others(self) -> bool:
        """Whether clients of RocketMQ are here, which find another leader by their route alone."""
        tables = (*(group.clients for group in self._consumers.values()), *self._producers.values())
        return any(one.language != OUR_LANGUAGE for clients in tables for one in clients.values())

    def is_silent(self, channel: ChannelT, before: float) -> bool:
        """Tell whether a connection has clients, and their newest heartbeat is before *before*."""
        consumers = (self._consumers[name].clients for name in self._consumers_of.get(channel, ()))
        producers = (self._producers[name] for name in self._producers_of.get(channel, ()))
        seen = [each[channel].last_update for each in (*consumers, *producers)]
        return bool(seen) and max(seen) < before


def _counted_as(client: Client[ChannelT], before: Client[ChannelT]) -> Client[ChannelT]:
    """Return a client that goes on counting as the account it came as."""
    return client if client.account == before.account else replace(client, account=before.account)


def _drop_group(groups_of: dict[ChannelT, dict[str, None]], channel: ChannelT, name: str) -> None:
    groups = groups_of[channel]
    del groups[name]
    if not groups:
        del groups_of[channel]


def _update_subscriptions(
    group: ConsumerGroup[ChannelT], subscriptions: Iterable[SubscriptionData]
) -> bool:
    changed = False
    names = set()
    for data in subscriptions:
        names.add(data.topic)
        known = group.subscriptions.get(data.topic)
        if known is None:
            changed = True
        elif known.data.sub_version >= data.sub_version:
            continue
        group.subscriptions[data.topic] = Subscription.of(data)
    for topic in [topic for topic in group.subscriptions if topic not in names]:
        del group.subscriptions[topic]
        changed = True
    return changed


def connection_of(client: Client[ChannelT]) -> ClientConnection:
    """Return a client as lists of connections show it."""
    return ClientConnection(
        client_id=client.client_id,
        client_addr=client.address,
        language=client.language,
        version=client.version,
    )
