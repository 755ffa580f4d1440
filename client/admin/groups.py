"""Administration of consumer and producer groups: their clients, their offsets, resets.

`dledger.client.admin.admin.Admin` has these as its own methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from dledger.client.consumer.offsets import BrokerOffsets
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientError,
    ConfirmationNeededError,
    RequestFailedError,
)
from dledger.client.core.route import MessageQueue
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import ExtFields, RemotingCommand
from dledger.remoting.protocol.headers import (
    CloneGroupOffsetHeader,
    ConsumerClientHeader,
    ConsumerGroupHeader,
    GetBrokerConsumeStatsHeader,
    GetConsumeStatsHeader,
    GetMaxOffsetHeader,
    OffsetResponseHeader,
    ProducerGroupHeader,
    QueueHeader,
    ResetOffsetHeader,
    SearchOffsetHeader,
    ViewBrokerStatsDataHeader,
)
from dledger.remoting.protocol.own_fields import GIVES_UP_FIELD, decode_given_up

ASK_TIMEOUT_S: Final = 10.0
"""Budget of one administrative request, a fail-over included."""
RUNNING_INFO_S: Final = 12.0
"""A broker waits 10 s for a client it asks for us."""
ASKED_AT_ONCE: Final = 16
"""Requests of one look that are out together: a topic may have a thousand queues."""
FIRST_MS: Final = 0
"""As a time to reset to: the first message that is kept."""
LAST_MS: Final = -1
"""As a time to reset to: the end of each queue, as it is then."""


@dataclass(frozen=True, slots=True)
class OffsetMove:
    """Where a group stands in a queue, and where it is to go on.

    Attributes:
        before: The committed offset; 0 also where there is none.
        after: The one it goes on at.
        min_offset: First offset that is kept.
        max_offset: One past the last.
    """

    before: int
    after: int
    min_offset: int
    max_offset: int


@dataclass(slots=True)
class OffsetsReset:
    """What a reset has done.

    Attributes:
        notified: Offsets that brokers gave to running consumers, which store them; or that are
            stored, where consumers are connected and messages out by POP.
        stored: Offsets that were stored, of brokers no consumer of the group was connected to.
    """

    notified: dict[MessageQueue, int] = field(default_factory=dict)
    stored: dict[MessageQueue, int] = field(default_factory=dict)


class GroupAdmin:
    """Reads and changes groups through a client instance. Holds nothing open of its own."""

    def __init__(self, instance: ClientInstance) -> None:
        """Use *instance*, which must be open."""
        self._instance = instance

    # ------------------------------------------------------------------------------ clients

    async def subscription_groups(
        self, broker_names: list[str]
    ) -> dict[str, bodies.SubscriptionGroupConfig]:
        """Return the consumer groups that brokers know, by name; errors as `Admin.offsets`."""
        found: dict[str, bodies.SubscriptionGroupConfig] = {}
        for name in broker_names:
            answer = await self._ask(name, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
            found |= bodies.SubscriptionGroupWrapper.decode(answer.body).subscription_group_table
        return found

    async def set_enabled(self, group: str, enable: bool, broker_names: list[str]) -> list[str]:
        """Let a group consume or not; return the brokers where that is a change."""
        changed = []
        for name in broker_names:
            answer = await self._ask(
                name,
                RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
                {"group": group},
                also=(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,),
            )
            config = (
                bodies.SubscriptionGroupConfig.decode(answer.body)
                if answer.code == ResponseCode.SUCCESS
                else bodies.SubscriptionGroupConfig(group)
            )
            if config.consume_enable != enable:
                config.consume_enable = enable
                code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
                await self._ask(name, code, body=config.encode())
                changed.append(name)
        return changed

    async def consumer_connection(
        self, group: str, broker_names: list[str]
    ) -> bodies.ConsumerConnection | None:
        """Return the clients of a consumer group and their subscriptions; None without a client."""
        found: bodies.ConsumerConnection | None = None
        ext = dict(ConsumerGroupHeader(group).encode())
        for name in broker_names:
            answer = await self._ask(
                name,
                RequestCode.GET_CONSUMER_CONNECTION_LIST,
                ext,
                also=(ResponseCode.CONSUMER_NOT_ONLINE,),
            )
            if answer.code != ResponseCode.SUCCESS:
                continue
            said = bodies.ConsumerConnection.decode(answer.body)
            if found is None:
                found = said
            else:
                found.connection_set += said.connection_set
                found.subscription_table |= said.subscription_table
        if found is not None:
            found.connection_set = _once_each(found.connection_set)
        return found

    async def producer_connection(
        self, group: str, broker_names: list[str]
    ) -> list[bodies.ClientConnection]:
        """Return the clients of a producer group; empty without a client."""
        found: list[bodies.ClientConnection] = []
        ext = dict(ProducerGroupHeader(group).encode())
        for name in broker_names:
            answer = await self._ask(
                name,
                RequestCode.GET_PRODUCER_CONNECTION_LIST,
                ext,
                also=(ResponseCode.SYSTEM_ERROR,),
            )
            if answer.code == ResponseCode.SUCCESS:
                found += bodies.ProducerConnection.decode(answer.body).connection_set
        return _once_each(found)

    async def producers(self, broker_names: list[str]) -> dict[str, list[bodies.ProducerInfo]]:
        """Return the clients of every producer group, each with its newest heartbeat."""
        found: dict[str, dict[str, bodies.ProducerInfo]] = {}
        for name in broker_names:
            answer = await self._ask(name, RequestCode.GET_ALL_PRODUCER_INFO)
            for group, clients in bodies.ProducerTableInfo.decode(answer.body).data.items():
                known = found.setdefault(group, {})
                for client in clients:
                    before = known.get(client.client_id)
                    if (
                        before is None
                        or before.last_update_timestamp < client.last_update_timestamp
                    ):
                        known[client.client_id] = client
        return {
            group: [clients[client_id] for client_id in sorted(clients)]
            for group, clients in sorted(found.items())
        }

    async def running_info(
        self, group: str, client_id: str, broker_name: str, *, with_stacks: bool = False
    ) -> bodies.ConsumerRunningInfo:
        """Return what a client reports of its consumer of *group*, asked through a broker.

        Raises:
            RequestFailedError: It is not connected there, or does not answer within 10 s.
            BrokerUnreachableError: No leader answers.
        """
        header = ConsumerClientHeader(group, client_id, with_stacks)
        answer = await self._instance.ask_leader(
            broker_name,
            RequestCode.GET_CONSUMER_RUNNING_INFO,
            dict(header.encode()),
            topic="TBW102",
            timeout_s=RUNNING_INFO_S,
            attempt_timeout_s=RUNNING_INFO_S,
        )
        checked(answer, f"running info of {client_id} in {group}")
        return bodies.ConsumerRunningInfo.decode(answer.body)

    async def queue_owners(self, group: str, broker_names: list[str]) -> dict[MessageQueue, str]:
        """Return which client has which queue, as far as the clients say so themselves."""
        connection = await self.consumer_connection(group, broker_names)
        owners: dict[MessageQueue, str] = {}

        async def ask(client_id: str) -> None:
            for name in broker_names:
                try:
                    info = await self.running_info(group, client_id, name)
                except ClientError:
                    continue  # an old client, or connected elsewhere: its queues have no owner
                owners.update((sdk_queue(queue), client_id) for queue in info.mq_table)
                return

        async with trio.open_nursery() as nursery:
            for client in [] if connection is None else connection.connection_set:
                nursery.start_soon(ask, client.client_id)
        return owners

    # ------------------------------------------------------------------------------ how far

    async def progress(
        self, group: str, broker_names: list[str]
    ) -> dict[MessageQueue, bodies.OffsetWrapper]:
        """Return how far a group is in every queue of every topic it has offsets of."""
        found: dict[MessageQueue, bodies.OffsetWrapper] = {}
        for name in broker_names:
            header = GetConsumeStatsHeader(group)
            answer = await self._ask(name, RequestCode.GET_CONSUME_STATS, dict(header.encode()))
            table = bodies.ConsumeStats.decode(answer.body).offset_table
            found |= {sdk_queue(queue): progress for queue, progress in table.items()}
        return found

    async def lags(self, broker_names: list[str]) -> dict[str, dict[str, int]]:
        """Return messages still to come, by group and topic, of all groups that have offsets."""
        found: dict[str, dict[str, int]] = {}
        for name in broker_names:
            for is_order in (False, True):
                header = GetBrokerConsumeStatsHeader(is_order)
                answer = await self._ask(
                    name, RequestCode.GET_BROKER_CONSUME_STATS, dict(header.encode())
                )
                for groups in bodies.ConsumeStatsList.decode(answer.body).consume_stats_list:
                    for group, all_stats in groups.items():
                        _add_lags(found.setdefault(group, {}), all_stats)
        return found

    async def stats_at(self, address: str, name: str, key: str) -> bodies.BrokerStatsData | None:
        """Return what one broker counted; None: nothing, or it cannot be asked."""
        ext = dict(ViewBrokerStatsDataHeader(name, key).encode())
        try:
            answer = await self._instance.ask(address, RequestCode.VIEW_BROKER_STATS_DATA, ext)
        except ClientError:
            return None
        if answer.code != ResponseCode.SUCCESS:
            return None
        return bodies.BrokerStatsData.decode(answer.body)

    # ------------------------------------------------------------------------------ other offsets

    async def plan_reset(
        self, group: str, topic: str, timestamp_ms: int, *, offset: int | None = None
    ) -> dict[MessageQueue, OffsetMove]:
        """Return what `reset` would do now; changes nothing.

        Args:
            timestamp_ms: Go on at the first message stored at or after it, ms since the epoch;
                `FIRST_MS`, `LAST_MS`.
            offset: Go on there in every queue instead, as far as it holds that offset.
        Raises:
            NoRouteError, NoNameServerError: No NameServer knows the topic, or none answers.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        route = await self._instance.routes.refresh(topic)
        committed: dict[MessageQueue, int] = {}
        for name in sorted({queue.broker_name for queue in route.subscribe_queues}):
            header = GetConsumeStatsHeader(group, topic)
            answer = await self._ask(name, RequestCode.GET_CONSUME_STATS, dict(header.encode()))
            table = bodies.ConsumeStats.decode(answer.body).offset_table
            committed |= {sdk_queue(known): said.consumer_offset for known, said in table.items()}
        moves: dict[MessageQueue, OffsetMove] = {}
        limiter = trio.CapacityLimiter(ASKED_AT_ONCE)

        async def read(queue: MessageQueue) -> None:
            async with limiter:
                low = await self._offset(queue, RequestCode.GET_MIN_OFFSET)
                high = await self._offset(queue, RequestCode.GET_MAX_OFFSET)
                after = {FIRST_MS: low, LAST_MS: high}.get(timestamp_ms)
                if offset is not None:
                    after = min(max(offset, low), high)
                if after is None:
                    code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
                    after = await self._offset(queue, code, timestamp_ms)
                moves[queue] = OffsetMove(committed.get(queue, 0), after, low, high)

        async with trio.open_nursery() as nursery:
            for queue in route.subscribe_queues:
                nursery.start_soon(read, queue)
        return {queue: moves[queue] for queue in sorted(moves)}

    async def reset(
        self,
        group: str,
        topic: str,
        timestamp_ms: int,
        moves: Mapping[MessageQueue, OffsetMove],
        *,
        offset: int | None = None,
    ) -> OffsetsReset:
        """Let a group go on elsewhere, whether it runs or not.

        Brokers tell consumers that run (222, 220). Where none is connected, *moves* are stored.

        Args:
            moves: From `plan_reset`, with the same time or offset.
        Returns:
            What consumers got and what was stored; a queue that is missing could not be stored, and
            has its old offset.
        Raises:
            RequestFailedError, BrokerUnreachableError: A broker refused; the brokers before it, in
                order of their names, have done it.
        """
        done = OffsetsReset()
        header = ResetOffsetHeader(topic, group, timestamp_ms, is_force=True, offset=offset)
        for name in sorted({queue.broker_name for queue in moves}):
            notified = await self._reset_through(name, header)
            if notified is not None:
                done.notified |= notified
                continue
            offsets = {q: move.after for q, move in moves.items() if q.broker_name == name}
            stored = await BrokerOffsets(self._instance, group, by_operator=True).save(offsets)
            done.stored |= {q: offset for q, offset in offsets.items() if q in stored}
            if len(stored) < len(offsets):
                done.stored |= await self._reset_popped(name, header)
        return done

    async def _reset_popped(self, name: str, header: ResetOffsetHeader) -> dict[MessageQueue, int]:
        """Let a broker store the offsets of a group that has messages out by POP."""
        try:
            return await self._reset_by_request(name, header) or {}
        except RequestFailedError:
            return {}  # none is out: the offsets were not stored for another reason

    async def _reset_through(
        self, name: str, header: ResetOffsetHeader
    ) -> dict[MessageQueue, int] | None:
        """Let a broker tell the consumers that are connected to it; None: there is none."""
        # Asked first: 222 of a group without an offset is refused, whether it is there or not.
        if await self.consumer_connection(header.group, [name]) is None:
            return None
        return await self._reset_by_request(name, header)

    async def _reset_by_request(
        self, name: str, header: ResetOffsetHeader
    ) -> dict[MessageQueue, int] | None:
        answer = await self._ask(
            name,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
            dict(header.encode()),
            also=(ResponseCode.CONSUMER_NOT_ONLINE,),
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        table = bodies.ResetOffsetBody.decode(answer.body).offset_table
        return {sdk_queue(queue): offset for queue, offset in table.items()}

    async def clone(
        self, source: str, target: str, topic: str | None, broker_names: list[str]
    ) -> None:
        """Let group *target* begin where *source* stands, in one topic or in all it has.

        All offsets of a broker change together.

        Raises:
            RequestFailedError, BrokerUnreachableError: A broker refused; those before it have
                done it.
        """
        header = CloneGroupOffsetHeader(source, target, topic)
        for name in broker_names:
            await self._ask(name, RequestCode.CLONE_GROUP_OFFSET, dict(header.encode()))

    # ------------------------------------------------------------------------------ inside

    async def _offset(
        self, queue: MessageQueue, code: RequestCode, timestamp_ms: int | None = None
    ) -> int:
        if timestamp_ms is not None:
            ext = SearchOffsetHeader(queue.topic, queue.queue_id, timestamp_ms).encode()
        elif code is RequestCode.GET_MAX_OFFSET:
            ext = GetMaxOffsetHeader(queue.topic, queue.queue_id).encode()
        else:
            ext = QueueHeader(queue.topic, queue.queue_id).encode()
        answer = await self._ask(queue.broker_name, code, dict(ext))
        return OffsetResponseHeader.decode(answer.ext).offset

    async def _ask(
        self,
        name: str,
        code: RequestCode,
        ext: ExtFields | None = None,
        body: bytes = b"",
        *,
        also: tuple[ResponseCode, ...] = (),
    ) -> RemotingCommand:
        answer = await self._instance.ask_leader(
            name,
            code,
            None if ext is None else dict(ext),
            body,
            topic="TBW102",
            timeout_s=ASK_TIMEOUT_S,
        )
        if answer.code not in also:
            checked(answer, f"{code.name} on {name}")
        return answer


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


def sdk_queue(queue: bodies.MessageQueue) -> MessageQueue:
    """Return a queue of a body as the SDK knows it."""
    return MessageQueue(queue.topic, queue.broker_name, queue.queue_id)


def _once_each(clients: list[bodies.ClientConnection]) -> list[bodies.ClientConnection]:
    """Return one connection of each client: one per broker is the rule."""
    known = {client.client_id: client for client in reversed(clients)}
    return [known[client_id] for client_id in sorted(known)]


def _add_lags(lags: dict[str, int], all_stats: list[bodies.ConsumeStats]) -> None:
    for stats in all_stats:
        for queue, progress in stats.offset_table.items():
            behind = max(0, progress.broker_offset - progress.consumer_offset)
            lags[queue.topic] = lags.get(queue.topic, 0) + behind
