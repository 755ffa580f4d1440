"""Administration of daemons one by one: their figures and settings, and what each NameServer has.

`dledger.client.admin.admin.Admin` has these as its own methods.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import trio

from dledger.client.admin.leader_asks import LeaderAsks, checked
from dledger.client.core.errors import ClientError
from dledger.client.core.route import MessageQueue
from dledger.remoting.errors import BadRequestError
from dledger.remoting.properties import format_properties, read_properties
from dledger.remoting.protocol.bodies import ClusterInfo, KVTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.headers import (
    REFUSED_BROKERS_FIELD,
    AddWritePermResponseHeader,
    GetMaxOffsetHeader,
    OffsetResponseHeader,
    WipeWritePermResponseHeader,
)
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD


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
        found: dict[str, ClusterInfo | None] = dict.fromkeys(
            self._instance.name_servers.list.addresses
        )

        async def ask(address: str) -> None:
            try:
                found[address], _ = await self.name_server_view(address)
            except (ClientError, BadRequestError):
                return

        async with trio.open_nursery() as nursery:
            for address in found:
                nursery.start_soon(ask, address)
        return found

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
        for address in self._instance.name_servers.list.addresses:
            if is_writable:
                answer = await self._ask_name_server_at(
                    address, RequestCode.ADD_WRITE_PERM_OF_BROKER, ext
                )
                counts[address] = AddWritePermResponseHeader.decode(answer.ext).add_topic_count
            else:
                answer = await self._ask_name_server_at(
                    address, RequestCode.WIPE_WRITE_PERM_OF_BROKER, ext
                )
                counts[address] = WipeWritePermResponseHeader.decode(answer.ext).wipe_topic_count
        return counts
