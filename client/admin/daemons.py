"""Administration of daemons one by one: their figures and settings, and what each NameServer has.

`dledger.client.admin.admin.Admin` has these as its own methods.
"""

from __future__ import annotations

import trio

from dledger.client.admin.groups import checked
from dledger.client.admin.leader_asks import LeaderAsks
from dledger.client.core.errors import ClientError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.properties import read_properties
from dledger.remoting.protocol.bodies import ClusterInfo, KVTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request


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

    async def broker_settings(self, address: str) -> dict[str, str]:
        """Return the settings that the broker at *address* has now, under RocketMQ's names.

        Raises:
            RequestFailedError: It refuses; where access control is on only an administrator may.
            BrokerUnreachableError: It cannot be asked.
        """
        answer = await self._instance.ask(address, RequestCode.GET_BROKER_CONFIG)
        checked(answer, f"settings of {address}")
        return read_properties(bytes(answer.body).decode())

    async def name_server_settings(self, address: str) -> dict[str, str]:
        """Return the settings of one of the NameServers in use; errors as `broker_settings`."""
        answer = await self._instance.name_servers.ask_at(
            address, request(RequestCode.GET_NAMESRV_CONFIG)
        )
        checked(answer, f"settings of NameServer {address}")
        return read_properties(bytes(answer.body).decode())

    async def name_server_views(self) -> dict[str, ClusterInfo | None]:
        """Return the brokers that each NameServer knows, by its address; None: no answer.

        NameServers know nothing of each other, so one may know fewer than another.
        """
        found: dict[str, ClusterInfo | None] = dict.fromkeys(
            self._instance.name_servers.list.addresses
        )

        async def ask(address: str) -> None:
            try:
                answer = await self._instance.name_servers.ask_at(
                    address, request(RequestCode.GET_BROKER_CLUSTER_INFO)
                )
                checked(answer, f"brokers of NameServer {address}")
                found[address] = ClusterInfo.decode(answer.body)
            except (ClientError, BadRequestError):
                return

        async with trio.open_nursery() as nursery:
            for address in found:
                nursery.start_soon(ask, address)
        return found
