"""The clients that a proxy knows: streams, settings, groups. Synchronous, without a clock.

It is what the proxy would not miss after a start: a client without a stream sends, receives and
acknowledges all the same. It serves check-backs and commands of operators, and names the groups
that brokers have to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.messages import full_name, resource_of
from dledger.proxy.settings import group_of, namespace_of, topics_of

CLIENTS_MAX: Final = 100_000
"""Clients that are known at a time, about 2 KiB each; more are served and not known."""

TOPICS_MAX: Final = 256
"""Topics of one producer that brokers have to know."""

EXPIRY_S: Final = 60.0
"""A client without a stream that is silent for this long is forgotten; it sends a heartbeat every
10 s."""

SILENCE_S_MAX: Final = 25.0
"""Without a stream it is taken for ended after it has missed two heartbeats; with one after
`EXPIRY_S`: the end of a host that lost power, or its network, ends no stream."""

Push = Callable[[pb.TelemetryCommand], None]
"""Puts a command on the way to a client; returns at once and never raises."""


@dataclass(slots=True, eq=False)
class Stream:
    """A telemetry stream that is open.

    Attributes:
        order: Newer streams have greater numbers.
        asked: The number of the last question that went to it; 0: none did.
    """

    push: Push
    order: int
    client: Client
    asked: int = 0

    def resource_of(self, topic: str) -> pb.Resource:
        """Return *topic* as the client names it."""
        return resource_of(topic, self.client.namespace)


@dataclass(slots=True, eq=False)
class Client:
    """One client.

    Attributes:
        decided: Those of them that it had transactions of.
        group: It consumes for it; empty: it does not.
        namespace: Of its topics and its group; empty: none.
        streams: Its open streams, newest last.
    """

    client_id: str
    heard_s: float
    topics: frozenset[str] = frozenset()
    decided: set[str] = field(default_factory=set)
    group: str = ""
    namespace: str = ""
    streams: list[Stream] = field(default_factory=list)


class ClientTable:
    """All clients of one proxy.

    *changed*: called when a topic or a group is new, or not there any more.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        """Begin without clients."""
        self.changed = changed
        self._clients: dict[str, Client] = {}
        self._producers: dict[str, dict[Client, None]] = {}
        self._consumers: dict[str, dict[Client, None]] = {}
        self._streams = self._questions = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def topics(self) -> dict[str, int]:
        """Topics that producers send to, and how many do, those that came first in front."""
        return {topic: len(clients) for topic, clients in self._producers.items()}

    @property
    def groups(self) -> dict[str, int]:
        """Groups of consumers, and how many there are, those that came first in front."""
        return {group: len(clients) for group, clients in self._consumers.items()}

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return sum(len(client.streams) for client in self._clients.values())

    def get(self, client_id: str) -> Client | None:
        """Return a client; None: unknown."""
        return self._clients.get(client_id)

    def open_stream(self, client_id: str, push: Push, now_s: float) -> Stream | None:
        """Take a stream of a client; None when no more clients fit."""
        client = self._known(client_id, now_s)
        if client is None:
            return None
        self._streams += 1
        stream = Stream(push, self._streams, client)
        client.streams.append(stream)
        return stream

    def close_stream(self, client_id: str, stream: Stream, now_s: float) -> None:
        """Forget a stream; its client stays known for `EXPIRY_S`."""
        client = self._clients.get(client_id)
        if client is not None and stream in client.streams:
            client.streams.remove(stream)
            client.heard_s = now_s

    def take_settings(self, client_id: str, settings: pb.Settings, now_s: float) -> None:
        """Take the settings that a client has sent."""
        client = self._known(client_id, now_s)
        if client is None:
            return
        client.namespace = namespace_of(settings) or client.namespace
        if settings.HasField("publishing"):
            self._regroup(client, client.topics | topics_of(settings), client.group)
        elif settings.HasField("subscription"):
            self._regroup(client, client.topics, group_of(settings))

    def heard(self, client_id: str, now_s: float, *, group: str = "") -> None:
        """Take that a client has called, and the group it consumes for."""
        client = self._known(client_id, now_s)
        if client is not None and group:
            self._regroup(client, client.topics, group)

    def produces(self, client_id: str, topic: pb.Resource, now_s: float) -> None:
        """Take that a client sends transactions of *topic*, or decides them."""
        client = self._known(client_id, now_s)
        if client is None:
            return
        client.namespace = topic.resource_namespace or client.namespace
        name = full_name(topic)
        if name not in client.topics:
            self._regroup(client, client.topics | {name}, client.group)
        if name in client.topics:
            client.decided.add(name)

    def end(self, client_id: str) -> None:
        """Forget a client that ends."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            self._regroup(client, frozenset(), "")

    def expire(self, now_s: float) -> list[str]:
        """Forget clients that are silent, and return their ids."""
        silent = [
            client.client_id
            for client in self._clients.values()
            if not client.streams and now_s - client.heard_s >= EXPIRY_S
        ]
        for client_id in silent:
            self.end(client_id)
        return silent

    def is_alive(self, client_id: str, now_s: float) -> bool:
        """Return whether a client is there: it has called a moment ago.

        One that has a stream may be silent for longer.
        """
        client = self._clients.get(client_id)
        if client is None:
            return False
        return now_s - client.heard_s < (EXPIRY_S if client.streams else SILENCE_S_MAX)

    def producer_stream(self, topic: str, *, of_any: bool = False) -> Stream | None:
        """Return a stream of a producer of *topic*, each in turn; None: no such client is here.

        *of_any*: also of a producer that had no transactions of it, which may have no checker.
        Without one that had some it is any all the same.
        """
        found = [client.streams[-1] for client in self._producers.get(topic, ()) if client.streams]
        if not of_any:
            found = [each for each in found if topic in each.client.decided] or found
        stream = min(found, key=lambda each: (each.asked, -each.order), default=None)
        if stream is not None:
            self._questions += 1
            stream.asked = self._questions
        return stream

    def consumer_streams(self, group: str) -> dict[str, Stream]:
        """Return the newest stream of each consumer of *group*, by client id."""
        return {
            client.client_id: client.streams[-1]
            for client in self._consumers.get(group, ())
            if client.streams
        }

    def _known(self, client_id: str, now_s: float) -> Client | None:
        client = self._clients.get(client_id)
        if client is None:
            if not client_id or len(self._clients) >= CLIENTS_MAX:
                return None
            client = self._clients[client_id] = Client(client_id, now_s)
        client.heard_s = now_s
        return client

    def _regroup(self, client: Client, topics: frozenset[str], group: str) -> None:
        if len(topics) > TOPICS_MAX:
            topics = client.topics
        if topics == client.topics and group == client.group:
            return
        is_changed = False
        for topic in client.topics - topics:
            is_changed |= _leave(self._producers, topic, client)
        for topic in topics - client.topics:
            is_changed |= _join(self._producers, topic, client)
        if group != client.group:
            if client.group:
                is_changed |= _leave(self._consumers, client.group, client)
            if group:
                is_changed |= _join(self._consumers, group, client)
        client.topics, client.group = topics, group
        if is_changed:
            self.changed()


def _join(table: dict[str, dict[Client, None]], name: str, client: Client) -> bool:
    """Enter a client; return whether the name is new."""
    clients = table.setdefault(name, {})
    clients[client] = None
    return len(clients) == 1


def _leave(table: dict[str, dict[Client, None]], name: str, client: Client) -> bool:
    """Take a client out; return whether the name is not there any more."""
    clients = table[name]
    del clients[client]
    if not clients:
        del table[name]
    return not clients
