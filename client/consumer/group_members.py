"""Who is in a consumer group, as the brokers of a topic know it.

Consumers tell every broker of themselves, and brokers do not tell each other. One that has just
started has not heard of everybody yet; one that was cut off from a consumer may not have noticed
its end. So all are asked, and a consumer counts when half of those that answer know it: neither
makes queues change hands for nothing.

Spec: remoting fact sheet, sections 8.5 and 8.6; semantics, section 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import trio

from client.core.client_instance import ClientInstance
from client.core.route import TopicRoute
from commitlog.errors import MQError
from remoting.log import get_logger
from remoting.protocol.bodies import ConsumerIdList
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.headers import ConsumerGroupHeader

ASK_TIMEOUT_S: Final = 1.0
"""For all brokers together: one that is silent must not hold up a rebalance."""

_log = get_logger(__name__)


def known_members(answers: Sequence[Iterable[str]]) -> list[str]:
    """Return the client ids that at least half of *answers* hold, sorted."""
    counts = Counter(client_id for answer in answers for client_id in set(answer))
    return sorted(client_id for client_id, count in counts.items() if 2 * count >= len(answers))


async def ask_members(instance: ClientInstance, group: str, route: TopicRoute) -> list[str] | None:
    """Return who is in *group*, sorted, by the brokers of *route*; None when none of them says.

    Cancellation: Nothing was changed anywhere.
    """
    header = dict(ConsumerGroupHeader(group).encode())
    answers: list[list[str]] = []

    async def ask(address: str) -> None:
        try:
            answer = await instance.ask(
                address,
                RequestCode.GET_CONSUMER_LIST_BY_GROUP,
                dict(header),
                timeout_s=ASK_TIMEOUT_S,
            )
            if answer.code == ResponseCode.SUCCESS:
                answers.append(ConsumerIdList.decode(answer.body).consumer_id_list)
            elif answer.code == ResponseCode.SYSTEM_ERROR:
                answers.append([])  # it knows nobody of this group
        except MQError as error:
            _log.debug("members_not_told", group=group, address=address, error=str(error))

    addresses = {a for brokers in route.addresses.values() for a in brokers.values()}
    with trio.move_on_after(ASK_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for address in sorted(addresses):
                nursery.start_soon(ask, address)
    return known_members(answers) if answers else None
