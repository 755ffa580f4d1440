"""Routes of topics as clients of apache.rocketmq.v2 get them. Pure, but for what brokers are asked.

Clients talk to proxies alone, so every broker of a route has the addresses of proxies: those by
which the client came in, as in RocketMQ, and the proxy's own where the client names none.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Final

import trio

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import NoRouteError, refusal
from dledger.client.core.route import LEADER_ID, MessageQueue, TopicRoute
from dledger.commitlog.errors import MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.status import RefusedError
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.own_fields import NOT_MADE_FIELD

CONFIG_LIFETIME_S: Final = 30.0
"""How long the configuration of a topic or a group counts; as long as a route at the clients."""

FAILED_LIFETIME_S: Final = 1.0
"""How long none is asked for after no broker stated it: sends go on meanwhile, and a topic that is
made by the first of them soon has its types."""

CONFIGS_MAX: Final = 10_000
"""Of each kind; all are forgotten when there are more, and asked for again."""

CONFIG_TIMEOUT_S: Final = 1.0
"""For one such question: while a group elects a leader, routes are answered without it."""

TOPIC_TYPE_ATTRIBUTE: Final = "message.type"

ANY_QUEUE: Final = -1
"""Id of the one queue of a broker group that stands for all: POP knows no owner of a queue."""

_HAS_NONE: Final = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
    }
)
"""Answers of a broker that has no such configuration."""

_EVERY_TYPE: Final = (pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION)

_TYPES: Final[Mapping[str, tuple[pb.MessageType, ...]]] = {
    "NORMAL": (pb.NORMAL,),
    "FIFO": (pb.FIFO,),
    "DELAY": (pb.DELAY,),
    "TRANSACTION": (pb.TRANSACTION,),
    "MIXED": _EVERY_TYPE,
}


def accepted_types(attributes: Mapping[str, str]) -> tuple[pb.MessageType, ...]:
    """Return the types of messages a topic takes; one that states none takes all."""
    return _TYPES.get(attributes.get(TOPIC_TYPE_ATTRIBUTE, ""), _EVERY_TYPE)


def endpoints(addresses: Iterable[tuple[str, int]]) -> pb.Endpoints:
    """Return *addresses* with their scheme; they are of one kind."""
    found = list(addresses)
    schemes = {_scheme(host) for host, _ in found}
    scheme = schemes.pop() if len(schemes) == 1 else pb.DOMAIN_NAME
    return pb.Endpoints(
        scheme=scheme, addresses=[pb.Address(host=host, port=port) for host, port in found]
    )


def _scheme(host: str) -> pb.AddressScheme:
    try:
        return pb.IPv6 if ipaddress.ip_address(host).version == 6 else pb.IPv4
    except ValueError:
        return pb.DOMAIN_NAME


def permission(route: TopicRoute, queue: MessageQueue) -> pb.Permission:
    """Return what can be done with *queue*."""
    has_leader = LEADER_ID in route.addresses.get(queue.broker_name, {})
    reads = queue in route.subscribe_queues
    writes = queue in route.publish_queues or (reads and not has_leader)
    if reads and writes:
        return pb.READ_WRITE
    return pb.READ if reads else pb.WRITE


def wire_queues(
    route: TopicRoute, topic: pb.Resource, proxies: pb.Endpoints, types: tuple[pb.MessageType, ...]
) -> list[pb.MessageQueue]:
    """Return every queue of *route*, each led by the proxies."""
    queues = sorted({*route.subscribe_queues, *route.publish_queues})
    return [
        pb.MessageQueue(
            topic=topic,
            id=queue.queue_id,
            permission=permission(route, queue),
            broker=pb.Broker(name=queue.broker_name, id=LEADER_ID, endpoints=proxies),
            accept_message_types=types,
        )
        for queue in queues
    ]


def wire_assignments(
    route: TopicRoute, topic: pb.Resource, proxies: pb.Endpoints, types: tuple[pb.MessageType, ...]
) -> list[pb.Assignment]:
    """Return what one consumer receives from: each broker group, from any of its queues."""
    broker_names = dict.fromkeys(queue.broker_name for queue in route.subscribe_queues)
    return [
        pb.Assignment(
            message_queue=pb.MessageQueue(
                topic=topic,
                id=ANY_QUEUE,
                permission=pb.READ_WRITE,
                broker=pb.Broker(name=name, id=LEADER_ID, endpoints=proxies),
                accept_message_types=types,
            )
        )
        for name in broker_names
    ]


class BrokerConfigs:
    """What brokers know of topics and consumer groups, kept for `CONFIG_LIFETIME_S`."""

    def __init__(self, instance: ClientInstance) -> None:
        """Ask over the connections of *instance*."""
        self._instance = instance
        self._types: dict[str, tuple[float, tuple[pb.MessageType, ...]]] = {}
        self._asking: dict[str, trio.Event] = {}
        self._groups: dict[str, tuple[float, SubscriptionGroupConfig]] = {}

    async def route(self, topic: str) -> TopicRoute:
        """Return the route of *topic*. Raises NoRouteError, NoNameServerError: there is none."""
        route = await self._instance.route(topic)
        if not route.subscribe_queues and not route.publish_queues:
            raise NoRouteError(f"no broker has queues of {topic}")
        return route

    async def find_broker(self, topic: str, broker_name: str, refusal: pb.Code) -> None:
        """Make the brokers of *topic* known; let a broker group pass that has a member known.

        Raises:
            RefusedError: No group has that name; nothing was asked of one.
            NoRouteError, NoNameServerError: There is no route, or none can be asked for.
        """
        routes = self._instance.routes
        await self._instance.route(topic)
        if routes.member_addresses(broker_name):
            return
        await routes.refresh(topic)
        if not routes.member_addresses(broker_name):
            raise RefusedError(refusal, f"there is no broker group {broker_name[:64]!r}")

    async def types(self, topic: str) -> tuple[pb.MessageType, ...]:
        """Return the types of messages *topic* takes; all, where no broker states them in time."""
        while True:
            found = self._types.get(topic)
            if found is not None and self._instance.clock.monotonic() < found[0]:
                return found[1]
            asking = self._asking.get(topic)
            if asking is None:
                break
            # Many senders ask at once; one question answers them all, unless its sender leaves.
            await asking.wait()
        self._asking[topic] = trio.Event()
        try:
            return await self._ask_types(topic)
        finally:
            self._asking.pop(topic).set()

    async def _ask_types(self, topic: str) -> tuple[pb.MessageType, ...]:
        """Ask for the types of *topic*; without an answer those known before count for longer."""
        lifetime_s = CONFIG_LIFETIME_S
        try:
            body = await self._ask(topic, RequestCode.GET_TOPIC_CONFIG, {"topic": topic})
        except MQError:
            body, lifetime_s = None, FAILED_LIFETIME_S
        if body is not None:
            types = accepted_types(_plain(TopicConfig.decode(body).attributes))
        elif topic in self._types:
            types = self._types[topic][1]
        else:
            types = _EVERY_TYPE
            lifetime_s = FAILED_LIFETIME_S
        if len(self._types) >= CONFIGS_MAX:
            self._types.clear()
        self._types[topic] = (self._instance.clock.monotonic() + lifetime_s, types)
        return types

    async def group(self, group: str, topic: str) -> SubscriptionGroupConfig:
        """Return the configuration of a consumer group; the default where no broker has one.

        Raises MQError: no broker states it in time. The default would let a group that consumes in
        order do so in any order.
        """
        now_s = self._instance.clock.monotonic()
        found = self._groups.get(group)
        if found is not None and now_s < found[0]:
            return found[1]
        code, body = RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, None
        try:
            body = await self._ask(topic, code, {"group": group})
        except NoRouteError:
            pass  # nothing can be received from it
        except MQError:
            if found is None:
                raise
        if body is None:
            return found[1] if found is not None else SubscriptionGroupConfig(group_name=group)
        config = SubscriptionGroupConfig.decode(body)
        if len(self._groups) >= CONFIGS_MAX:
            self._groups.clear()
        self._groups[group] = (now_s + CONFIG_LIFETIME_S, config)
        return config

    async def _ask(self, topic: str, code: RequestCode, ext: dict[str, str]) -> bytes | None:
        """Return what a broker group of *topic* states; None: each states that it has none.

        Raises MQError: none states it, and one of them did not answer, or refused.
        """
        failure: MQError | None = None
        for name in (await self._instance.route(topic)).broker_names():
            try:
                answer = await self._instance.ask_leader(
                    name, code, dict(ext), topic=topic, timeout_s=CONFIG_TIMEOUT_S
                )
            except MQError as error:
                failure = error
                continue
            if answer.code == ResponseCode.SUCCESS:
                if NOT_MADE_FIELD in answer.ext:
                    continue
                return bytes(answer.body)
            if answer.code not in _HAS_NONE:
                failure = refusal(name, answer)
        if failure is not None:
            raise failure
        return None


LEADERS_LOOK_S: Final = 1.0
"""How often a NameServer is asked which member leads: it knows another one a second later."""

FORMER_LEADER_S: Final = 1.0
"""A broker that runs answers within that time that it leads no more."""


class FormerLeaders:
    """Ends what is pending at a broker that another one leads in place of, and that is silent.

    A process that stands still, or a host that is cut off, keeps its connections: a receive would
    wait there for as long as its client let it.
    """

    def __init__(self, instance: ClientInstance) -> None:
        """Look at the connections of *instance*."""
        self._instance = instance
        self._led: dict[str, str] = {}

    async def run(self) -> None:
        """Look for leaders that changed, until cancelled."""
        admin = Admin(self._instance)
        async with trio.open_nursery() as nursery:
            while True:
                await self._instance.clock.sleep(LEADERS_LOOK_S)
                try:
                    info = await admin.cluster_info()
                except MQError:
                    continue
                table, before = info.broker_addr_table, self._led
                self._led = {
                    name: group.broker_addrs.get(LEADER_ID) or before.get(name, "")
                    for name, group in table.items()
                }
                for name, leader in self._led.items():
                    if (former := before.get(name)) and leader != former:
                        self._instance.routes.add_members(name, dict(table[name].broker_addrs))
                        nursery.start_soon(self._end_silent, former, name)

    async def _end_silent(self, address: str, broker_name: str) -> None:
        link = self._instance.links.ready(address, broker_name)
        if link is None:
            return
        before = link.connection.waiting
        await self._instance.clock.sleep(FORMER_LEADER_S)
        if before & link.connection.waiting:
            link.connection.close(f"another broker leads {broker_name}, and this one is silent")


def _plain(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return attributes by their names: a change of one is written with a sign before its name."""
    return {name.lstrip("+"): value for name, value in attributes.items()}
