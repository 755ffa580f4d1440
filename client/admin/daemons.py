"""Administration asks leaders of broker groups, and single daemons: figures, settings, views.

`dledger.client.admin.admin.Admin` has these as its own methods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientError,
    ConfirmationNeededError,
    NoRouteError,
    RequestFailedError,
)
from dledger.client.core.route import DEFAULT_TOPIC, LEADER_ID, MessageQueue, TopicRoute
from dledger.commitlog.errors import ConfigError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.properties import format_properties, read_properties
from dledger.remoting.protocol.bodies import ClusterInfo, KVTable, TopicList, TopicRouteData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand, request
from dledger.remoting.protocol.headers import (
    REFUSED_BROKERS_FIELD,
    AddWritePermResponseHeader,
    GetMaxOffsetHeader,
    OffsetResponseHeader,
    WipeWritePermResponseHeader,
)
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD, GIVES_UP_FIELD, decode_given_up

ADMIN_TIMEOUT_S: Final = 10.0
"""Budget of one administrative request, a fail-over included."""
LEADER_WAIT_S: Final = 5.0
"""For a first leader; an election takes less than a second."""
LEADER_POLL_S: Final = 0.1
ASKED_AT_ONCE: Final = 16
"""Requests of one look that are out together: a topic may have a thousand queues."""


K = TypeVar("K")
T = TypeVar("T")


async def ask_each(
    question: Callable[[K], Awaitable[T]], keys: Collection[K], at_once: int = ASKED_AT_ONCE
) -> dict[K, T]:
    """Return the answer to *question* about each key, in their order; asked side by side."""
    found: dict[K, T] = {}
    limiter = trio.CapacityLimiter(at_once)

    async def ask(key: K) -> None:
        async with limiter:
            found[key] = await question(key)

    async with trio.open_nursery() as nursery:
        for key in keys:
            nursery.start_soon(ask, key)
    return {key: found[key] for key in keys}


class LeaderAsks:
    """What each part of administration asks by; holds nothing open of its own."""

    def __init__(self, instance: ClientInstance) -> None:
        """Use *instance*, which must be open."""
        self._instance = instance

    @property
    def name_servers(self) -> tuple[str, ...]:
        """The addresses of the NameServers that are known."""
        return tuple(self._instance.name_servers.list.addresses)

    async def cluster_info(self) -> ClusterInfo:
        """Return every broker group the NameServer in use knows.

        Raises:
            NoNameServerError: None answers.
            ConfigError: What answers is a broker.
        """
        answer = await self._ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        return ClusterInfo.decode(answer.body)

    async def topic_list(self) -> list[str]:
        """Return every topic the NameServer in use knows, sorted.

        Raises:
            NoNameServerError: None answers.
        """
        answer = await self._ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        return sorted(TopicList.decode(answer.body).topic_list)

    async def topic_route(self, topic: str) -> TopicRoute:
        """Return where *topic* is now.

        Raises:
            NoRouteError: The NameServers do not know it.
            NoNameServerError: None answers.
        """
        return await self._instance.routes.refresh(topic)

    async def topic_route_data(self, topic: str) -> TopicRouteData:
        """Return what the NameServer in use has of *topic*, as it is on the wire.

        Raises:
            NoRouteError: It does not know the topic.
            NoNameServerError: None answers.
        """
        code = RequestCode.GET_ROUTEINFO_BY_TOPIC
        servers = self._instance.name_servers
        answer = await servers.invoke(request(code, {"topic": topic}))
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRouteError(answer.remark or f"no NameServer knows topic {topic}")
        answer = _of_name_server(answer, ", ".join(servers.list.addresses), code)
        return TopicRouteData.decode(answer.body)

    async def _ask_name_server(self, code: RequestCode) -> RemotingCommand:
        servers = self._instance.name_servers
        answer = await servers.invoke(request(code))
        return _of_name_server(answer, ", ".join(servers.list.addresses), code)

    async def _ask_name_server_at(
        self, address: str, code: RequestCode, ext: ExtFields | None = None, body: bytes = b""
    ) -> RemotingCommand:
        answer = await self._instance.name_servers.ask_at(address, request(code, ext, body))
        return _of_name_server(answer, address, code)

    async def _ask_leader(
        self,
        name: str,
        code: RequestCode,
        ext: ExtFields | None = None,
        body: bytes = b"",
        *,
        topic: str = DEFAULT_TOPIC,
        also: tuple[ResponseCode, ...] = (),
        what: str | None = None,
        changes: bool = False,
    ) -> RemotingCommand:
        """Return what the leader of a group answers, a success or one of the codes *also*.

        *what* is asked for, as an error names it; None: the request of *topic*.

        Raises RequestFailedError, BrokerUnreachableError: it refuses, or none answers.
        """
        answer = await self._instance.ask_leader(
            name, code, ext, body, topic=topic, timeout_s=ADMIN_TIMEOUT_S, changes=changes
        )
        if answer.code not in also:
            asked = code.name if topic == DEFAULT_TOPIC else f"{code.name} of {topic}"
            checked(answer, f"{what or asked} on {name}")
        return answer

    async def _answers(
        self,
        code: RequestCode,
        ext: ExtFields | None = None,
        *,
        also: tuple[ResponseCode, ...] = (),
    ) -> dict[str, RemotingCommand]:
        """Return what the leader of each broker group answers, by its name."""
        return {
            name: await self._ask_leader(name, code, ext, also=also)
            for name in await self._leading()
        }

    async def _learn_leaders(self) -> dict[str, str]:
        """Return address of the leader of every group that has one, and remember them."""
        info = await self.cluster_info()
        leaders: dict[str, str] = {}
        for name, group in sorted(info.broker_addr_table.items()):
            self._instance.routes.add_members(name, dict(group.broker_addrs))
            address = group.broker_addrs.get(LEADER_ID)
            if address is not None:
                leaders[name] = address
        return leaders

    async def _leading(self) -> list[str]:
        return sorted(await self._learn_leaders())

    async def _wait_leaders(self) -> dict[str, str]:
        """Ask until a group has a leader: one was killed, or has not registered yet."""
        clock = self._instance.clock
        until = clock.monotonic() + LEADER_WAIT_S
        while clock.monotonic() < until:
            await clock.sleep(LEADER_POLL_S)
            if leaders := await self._learn_leaders():
                return leaders
        raise NoRouteError(f"no broker group had a leader for {LEADER_WAIT_S:g} s")

    async def _change_on_every_leader(
        self,
        code: RequestCode,
        ext: ExtFields,
        names: tuple[str, ...] | None,
        what: str,
        body: bytes = b"",
    ) -> list[str]:
        known = await self._learn_leaders()
        chosen = list(names if names is not None else known or await self._wait_leaders())
        for name in chosen:
            await self._ask_leader(name, code, ext, body, what=what, changes=True)
        return chosen


def _of_name_server(answer: RemotingCommand, address: str, code: RequestCode) -> RemotingCommand:
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise ConfigError(
            f"{address} is no NameServer: the server there does not support the request;"
            " NameServers have port 9876 by default"
        )
    return checked(answer, f"{code.name} at {address}")


def checked(answer: RemotingCommand, what: str) -> RemotingCommand:
    """Return *answer* if it is a success.

    Raises:
        RequestFailedError: It is none; its code and remark are carried.
        ConfirmationNeededError: It lists messages that the change would give up.
    """
    if answer.code == ResponseCode.SUCCESS:
        return answer
    remark = answer.remark or ""
    message = f"{what}: refused with code {answer.code}: {remark}"
    text = answer.ext.get(GIVES_UP_FIELD)
    if text is not None:
        with suppress(msgspec.MsgspecError):
            raise ConfirmationNeededError(
                message, code=answer.code, remark=remark, given_up=decode_given_up(str(text))
            )
    raise RequestFailedError(message, code=answer.code, remark=remark)


class DaemonQueries(LeaderAsks):
    """Asks single brokers and NameServers through a client instance."""

    async def runtime_info(self, address: str) -> dict[str, str]:
        """Return the figures of the broker at *address*, under RocketMQ's names.

        Raises:
            RequestFailedError: It refuses.
            BrokerUnreachableError: It cannot be asked.
        """
        answer = await self._instance.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO)
        checked(answer, f"figures of {address}")
        return dict(KVTable.decode(answer.body).table)

    async def max_offset_at(self, address: str, queue: MessageQueue) -> int:
        """Return one past the last offset of a queue, of the broker at *address*, which must lead.

        Raises:
            RequestFailedError: It does not lead, or refuses.
            BrokerUnreachableError: It cannot be asked.
        """
        header = GetMaxOffsetHeader(queue.topic, queue.queue_id)
        answer = await self._instance.ask(
            address, RequestCode.GET_MAX_OFFSET, dict(header.encode())
        )
        return OffsetResponseHeader.decode(checked(answer, f"end of {queue}").ext).offset

    async def broker_settings(self, address: str) -> dict[str, str]:
        """Return the settings that the broker at *address* has now, under RocketMQ's names.

        Raises:
            RequestFailedError: It refuses; where access control is on only an administrator may.
            BrokerUnreachableError: It cannot be asked.
        """
        answer = await self._instance.ask(address, RequestCode.GET_BROKER_CONFIG)
        checked(answer, f"settings of {address}")
        return read_properties(bytes(answer.body).decode())

    async def change_broker_settings(
        self, address: str, changes: Mapping[str, str], *, gives_up_messages: bool = False
    ) -> str:
        """Change settings of the broker at *address* until it stops: all of them or none.

        Args:
            gives_up_messages: Less may be kept afterwards.
        Returns:
            What the broker remarks, mostly nothing.
        Raises:
            ConfirmationNeededError: Messages would go, and *gives_up_messages* is false.
            RequestFailedError, BrokerUnreachableError: As `broker_settings`.
        """
        answer = await self._instance.ask(
            address,
            RequestCode.UPDATE_BROKER_CONFIG,
            {CONFIRMED_FIELD: "true"} if gives_up_messages else None,
            format_properties(changes).encode(),
        )
        return checked(answer, address).remark or ""

    async def name_server_settings(self, address: str) -> dict[str, str]:
        """Return the settings of one of the NameServers in use; errors as `broker_settings`."""
        answer = await self._ask_name_server_at(address, RequestCode.GET_NAMESRV_CONFIG)
        return read_properties(bytes(answer.body).decode())

    async def change_name_server_settings(self, address: str, changes: Mapping[str, str]) -> str:
        """Change settings of one of the NameServers in use; as `change_broker_settings`."""
        answer = await self._ask_name_server_at(
            address, RequestCode.UPDATE_NAMESRV_CONFIG, body=format_properties(changes).encode()
        )
        return answer.remark or ""

    async def name_server_view(self, address: str) -> tuple[ClusterInfo, list[str]]:
        """Return the brokers that one NameServer knows, and a sentence for each it refuses.

        Raises:
            NoNameServerError: It does not answer.
            RequestFailedError: It refuses.
        """
        answer = await self._ask_name_server_at(address, RequestCode.GET_BROKER_CLUSTER_INFO)
        try:
            refused = msgspec.json.decode(
                answer.ext.get(REFUSED_BROKERS_FIELD, "[]"), type=list[str]
            )
        except (msgspec.DecodeError, TypeError):
            refused = []
        return ClusterInfo.decode(answer.body), refused

    async def name_server_views(self) -> dict[str, ClusterInfo | None]:
        """Return the brokers that each NameServer knows, by its address; None: no answer.

        NameServers know nothing of each other, so one may know fewer than another.
        """

        async def ask(address: str) -> ClusterInfo | None:
            try:
                return (await self.name_server_view(address))[0]
            except (ClientError, BadRequestError):
                return None

        return await ask_each(ask, self.name_servers)

    async def set_write_perm(self, broker_name: str, is_writable: bool) -> dict[str, int]:
        """Let producers send to a broker group, or keep them away, in every NameServer.

        Returns:
            The topics that it changed, by address of the NameServer.
        Raises:
            NoNameServerError: One does not answer; those before it have the change.
            RequestFailedError: One refuses.
        """
        counts: dict[str, int] = {}
        ext = {"brokerName": broker_name}
        add, wipe = RequestCode.ADD_WRITE_PERM_OF_BROKER, RequestCode.WIPE_WRITE_PERM_OF_BROKER
        code = add if is_writable else wipe
        for address in self._instance.name_servers.list.addresses:
            said = (await self._ask_name_server_at(address, code, ext)).ext
            if is_writable:
                counts[address] = AddWritePermResponseHeader.decode(said).add_topic_count
            else:
                counts[address] = WipeWritePermResponseHeader.decode(said).wipe_topic_count
        return counts
