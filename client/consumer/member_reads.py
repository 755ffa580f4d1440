"""Pulls from any member of a broker group that has the messages, with follower reads.

Such a member is asked once and not waited for; only messages count: that there are none is the
leader's to answer, and it is asked next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.route import LEADER_ID, MessageQueue
from dledger.commitlog.errors import MQError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import PullMessageHeader, PullMessageResponseHeader

MEMBER_TIMEOUT_S: Final = 3.0
"""For one member: one that hangs must not keep the caller from the next."""

FLAG_SUSPEND: Final = 2


class MemberReads:
    """Remembers, queue by queue, which member the last answer sent its reader to."""

    def __init__(self, instance: ClientInstance) -> None:
        """Ask over the connections of *instance*."""
        self._instance = instance
        self._suggested: dict[MessageQueue, int] = {}

    async def pull(
        self, queue: MessageQueue, header: PullMessageHeader, *, bulk: bool, more: Mapping[str, str]
    ) -> RemotingCommand | None:
        """Return the answer of the first member that has messages; None when none has any.

        None also when the leader itself has none, without asking the others: they have no more.

        Args:
            bulk: Ask with our larger limits where a member knows them.
        Cancellation: Nothing is lost.
        """
        at_once = replace(
            header, sys_flag=header.sys_flag & ~FLAG_SUSPEND, suspend_timeout_millis=0
        )
        fields = {**at_once.encode(), **more}
        leader = self._instance.leaders.address(queue.broker_name)
        for address in self._in_order(queue, leader):
            answer = await self._ask(queue, address, fields, bulk)
            if answer is not None and answer.code == ResponseCode.SUCCESS:
                self._note(queue, answer)
                return answer
            self._suggested.pop(queue, None)
            if answer is not None and address == leader and _is_from_leader(answer):
                return None
        return None

    def _in_order(self, queue: MessageQueue, leader: str | None) -> list[str]:
        """Return the member that was suggested, the leader, and everybody else."""
        instance = self._instance
        route = instance.routes.table.get(queue.topic)
        order: dict[str, None] = {}
        suggested = self._suggested.get(queue, LEADER_ID)
        if suggested != LEADER_ID and route is not None:
            address = route.addresses.get(queue.broker_name, {}).get(suggested)
            if address is not None:
                order[address] = None
        if leader is not None:
            order[leader] = None
        order.update(dict.fromkeys(instance.routes.member_addresses(queue.broker_name)))
        return list(order)

    async def _ask(
        self, queue: MessageQueue, address: str, fields: Mapping[str, str], bulk: bool
    ) -> RemotingCommand | None:
        instance = self._instance
        try:
            link = await instance.link(address, MEMBER_TIMEOUT_S, group=queue.broker_name)
            code = RequestCode.BULK_PULL if bulk and link.bulk_pull else RequestCode.PULL_MESSAGE
            return await instance.ask(
                address, code, dict(fields), timeout_s=MEMBER_TIMEOUT_S, group=queue.broker_name
            )
        except (ClientError, MQError):
            # The next one may have them; what keeps all of them from answering the leader's
            # ordinary way shows.
            return None

    def _note(self, queue: MessageQueue, answer: RemotingCommand) -> None:
        try:
            suggested = PullMessageResponseHeader.decode(answer.ext).suggest_which_broker_id
        except BadRequestError:
            return
        if suggested == LEADER_ID:
            self._suggested.pop(queue, None)
        else:
            self._suggested[queue] = suggested


def _is_from_leader(answer: RemotingCommand) -> bool:
    """Tell whether this was an answer, and no refusal of one that does not lead any more."""
    return answer.code not in (ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY)
