"""Asks the leaders of broker groups, one or all of them, for what administers a cluster."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ConfirmationNeededError, NoRouteError, RequestFailedError
from dledger.client.core.route import LEADER_ID, TopicRoute
from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.bodies import ClusterInfo, TopicList, TopicRouteData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand, request
from dledger.remoting.protocol.own_fields import GIVES_UP_FIELD, decode_given_up

ADMIN_TIMEOUT_S: Final = 10.0
"""Budget of one administrative request, a fail-over included."""
LEADER_WAIT_S: Final = 5.0
"""For a first leader; an election takes less than a second."""
LEADER_POLL_S: Final = 0.1


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
        self, name: str, code: RequestCode, ext: ExtFields, topic: str
    ) -> RemotingCommand:
        answer = await self._instance.ask_leader(
            name, code, ext, topic=topic, timeout_s=ADMIN_TIMEOUT_S
        )
        checked(answer, f"{code.name} of {topic} on {name}")
        return answer

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
            answer = await self._instance.ask_leader(
                name, code, dict(ext), body, topic="TBW102", timeout_s=ADMIN_TIMEOUT_S, changes=True
            )
            checked(answer, f"{what} on {name}")
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
