"""Administration of consumer and producer groups: their clients, their offsets, resets.

`dledger.client.admin.admin.Admin` has these as its own methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from dledger.client.admin.daemons import LeaderAsks, ask_each, checked
from dledger.client.consumer.offsets import BrokerOffsets
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.broker_requests import sdk_queue
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError, RequestFailedError
from dledger.client.core.route import DEFAULT_TOPIC, MessageQueue
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import (
    CloneGroupOffsetHeader,
    ConsumerClientHeader,
    ConsumerGroupHeader,
    GetBrokerConsumeStatsHeader,
    GetConsumeStatsHeader,
    ProducerGroupHeader,
    ResetOffsetHeader,
    ViewBrokerStatsDataHeader,
)

RUNNING_INFO_S: Final = 12.0
"""A broker waits 10 s for a client it asks for us."""
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


class GroupAdmin(LeaderAsks):
    """Reads and changes consumer and producer groups."""

    # ------------------------------------------------------------------------------ clients

    async def subscription_groups(self) -> dict[str, bodies.SubscriptionGroupConfig]:
        """Return every consumer group that brokers know, by name.

        Raises:
            NoNameServerError: None answers.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        found: dict[str, bodies.SubscriptionGroupConfig] = {}
        for answer in (await self._answers(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)).values():
            found |= bodies.SubscriptionGroupWrapper.decode(answer.body).subscription_group_table
        return found

    async def set_group_enabled(self, group: str, enable: bool) -> list[str]:
        """Let a consumer group get messages in every broker group, or none; change nothing else.

        Returns:
            The broker groups where that is a change.
        Raises:
            RequestFailedError, BrokerUnreachableError: A leader refuses or does not answer; the
                broker groups before it, in order of their names, are changed.
        """
        changed = []
        for name in await self._leading():
            answer = await self._ask_leader(
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
                await self._ask_leader(name, code, body=config.encode())
                changed.append(name)
        return changed

    async def consumer_connection(self, group: str) -> bodies.ConsumerConnection | None:
        """Return the clients of a consumer group and their subscriptions; None without a client.

        Errors as `subscription_groups`.
        """
        return await self._connection(group, await self._leading())

    async def _connection(
        self, group: str, broker_names: list[str]
    ) -> bodies.ConsumerConnection | None:
        found: bodies.ConsumerConnection | None = None
        ext = ConsumerGroupHeader(group).encode()
        for name in broker_names:
            answer = await self._ask_leader(
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

    async def producer_connection(self, group: str) -> list[bodies.ClientConnection]:
        """Return the clients of a producer group; errors as `subscription_groups`."""
        found: list[bodies.ClientConnection] = []
        answers = await self._answers(
            RequestCode.GET_PRODUCER_CONNECTION_LIST,
            ProducerGroupHeader(group).encode(),
            also=(ResponseCode.SYSTEM_ERROR,),
        )
        for answer in answers.values():
            if answer.code == ResponseCode.SUCCESS:
                found += bodies.ProducerConnection.decode(answer.body).connection_set
        return _once_each(found)

    async def producers(self) -> dict[str, list[bodies.ProducerInfo]]:
        """Return the clients of every producer group; errors as `subscription_groups`."""
        found: dict[str, dict[str, bodies.ProducerInfo]] = {}
        for answer in (await self._answers(RequestCode.GET_ALL_PRODUCER_INFO)).values():
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

    async def queue_owners(self, group: str) -> dict[MessageQueue, str]:
        """Return which client of a consumer group has which queue, as far as clients say so.

        Errors as `subscription_groups`.
        """
        broker_names = await self._leading()
        connection = await self._connection(group, broker_names)

        async def queues_of(client_id: str) -> list[bodies.MessageQueue]:
            for name in broker_names:
                # An old client, or connected elsewhere: its queues have no owner.
                with suppress(ClientError):
                    info = await running_info(self._instance, group, client_id, name)
                    return list(info.mq_table)
            return []

        clients = [] if connection is None else connection.connection_set
        owned = await ask_each(queues_of, [client.client_id for client in clients])
        return {sdk_queue(queue): owner for owner, queues in owned.items() for queue in queues}

    # ------------------------------------------------------------------------------ how far

    async def group_progress(self, group: str) -> dict[MessageQueue, bodies.OffsetWrapper]:
        """Return how far a group is in every queue of every topic it has offsets of.

        Errors as `subscription_groups`.
        """
        return await self._progress(await self._leading(), group)

    async def consume_stats(
        self, group: str, topic: str
    ) -> dict[MessageQueue, bodies.OffsetWrapper]:
        """Return how far a group is in each queue of *topic*.

        Raises:
            NoRouteError, NoNameServerError: No NameServer knows the topic, or none answers.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        queues = (await self.topic_route(topic)).subscribe_queues
        return await self._progress(sorted({queue.broker_name for queue in queues}), group, topic)

    async def _progress(
        self, broker_names: Sequence[str], group: str, topic: str | None = None
    ) -> dict[MessageQueue, bodies.OffsetWrapper]:
        found: dict[MessageQueue, bodies.OffsetWrapper] = {}
        ext = GetConsumeStatsHeader(group, topic).encode()
        for name in broker_names:
            answer = await self._ask_leader(
                name, RequestCode.GET_CONSUME_STATS, ext, topic=topic or DEFAULT_TOPIC
            )
            table = bodies.ConsumeStats.decode(answer.body).offset_table
            found |= {sdk_queue(queue): progress for queue, progress in table.items()}
        return found

    async def lags(self) -> dict[str, dict[str, int]]:
        """Return messages still to come, by group and topic; errors as `subscription_groups`."""
        found: dict[str, dict[str, int]] = {}
        for name in await self._leading():
            for is_order in (False, True):
                ext = GetBrokerConsumeStatsHeader(is_order).encode()
                answer = await self._ask_leader(name, RequestCode.GET_BROKER_CONSUME_STATS, ext)
                for groups in bodies.ConsumeStatsList.decode(answer.body).consume_stats_list:
                    for group, all_stats in groups.items():
                        _add_lags(found.setdefault(group, {}), all_stats)
        return found

    async def broker_stats(self, name: str, key: str) -> dict[str, bodies.BrokerStatsData]:
        """Return what each broker counted of *key*, by address; those that know nothing are not in.

        Args:
            name: ``TOPIC_PUT_NUMS``: of a topic, the same on all members of a group;
                ``GROUP_GET_NUMS``: of ``topic@group``, what that member gave out.
        Raises:
            NoNameServerError: None answers.
        """
        info = await self.cluster_info()
        ext = ViewBrokerStatsDataHeader(name, key).encode()

        async def ask(address: str) -> bodies.BrokerStatsData | None:
            try:
                code = RequestCode.VIEW_BROKER_STATS_DATA
                answer = await self._instance.ask(address, code, dict(ext))
            except ClientError:
                return None
            is_known = answer.code == ResponseCode.SUCCESS
            return bodies.BrokerStatsData.decode(answer.body) if is_known else None

        groups = info.broker_addr_table.values()
        addresses = sorted(a for each in groups for a in each.broker_addrs.values())
        found = await ask_each(ask, addresses)
        return {address: data for address, data in found.items() if data is not None}

    # ------------------------------------------------------------------------------ other offsets

    async def plan_offset_reset(
        self, group: str, topic: str, timestamp_ms: int, *, offset: int | None = None
    ) -> dict[MessageQueue, OffsetMove]:
        """Return what `reset_offsets` would do now; changes nothing.

        Args:
            timestamp_ms: Go on at the first message stored at or after it, ms since the epoch; 0:
                the first that is kept; -1: the end.
            offset: Go on there in every queue instead, as far as it holds that offset.
        Raises:
            NoRouteError, NoNameServerError: No NameServer knows the topic, or none answers.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        await self._learn_leaders()
        route = await self._instance.routes.refresh(topic)
        names = {queue.broker_name for queue in route.subscribe_queues}
        committed = await self._progress(sorted(names), group, topic)
        reader = PullConsumer(self._instance, group)  # not opened: no member of the group

        async def plan(queue: MessageQueue) -> OffsetMove:
            low, high = await reader.min_offset(queue), await reader.max_offset(queue)
            after = {FIRST_MS: low, LAST_MS: high}.get(timestamp_ms)
            if offset is not None:
                after = min(max(offset, low), high)
            if after is None:
                after = await reader.search_offset(queue, timestamp_ms)
            before = committed[queue].consumer_offset if queue in committed else 0
            return OffsetMove(before, after, low, high)

        return await ask_each(plan, sorted(route.subscribe_queues))

    async def reset_offsets(
        self,
        group: str,
        topic: str,
        timestamp_ms: int,
        moves: Mapping[MessageQueue, OffsetMove] | None = None,
        *,
        offset: int | None = None,
    ) -> OffsetsReset:
        """Let a group go on elsewhere, whether it runs or not.

        Brokers tell consumers that run (222, 220). Where none is connected, *moves* are stored.

        Args:
            timestamp_ms: At the first message stored at or after it, ms since the epoch; 0: the
                first that is kept; -1: the end.
            moves: The plan, if it was looked at before, for the same time or offset.
            offset: At this offset of every queue instead, as far as the queue holds it.
        Returns:
            What consumers got and what was stored; a queue that is missing could not be stored, and
            has its old offset.
        Raises:
            RequestFailedError, BrokerUnreachableError: A broker refused; the brokers before it, in
                order of their names, have done it.
        """
        if moves is None:
            moves = await self.plan_offset_reset(group, topic, timestamp_ms, offset=offset)
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
        if await self._connection(header.group, [name]) is None:
            return None
        return await self._reset_by_request(name, header)

    async def _reset_by_request(
        self, name: str, header: ResetOffsetHeader
    ) -> dict[MessageQueue, int] | None:
        answer = await self._ask_leader(
            name,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
            header.encode(),
            also=(ResponseCode.CONSUMER_NOT_ONLINE,),
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        table = bodies.ResetOffsetBody.decode(answer.body).offset_table
        return {sdk_queue(queue): offset for queue, offset in table.items()}

    async def clone_offsets(self, source: str, target: str, *, topic: str | None = None) -> None:
        """Let group *target* begin where *source* stands, in one topic or in all it has.

        All offsets of a broker change together.

        Raises:
            RequestFailedError, BrokerUnreachableError: A broker refused; those before it have
                done it.
        """
        ext = CloneGroupOffsetHeader(source, target, topic).encode()
        await self._answers(RequestCode.CLONE_GROUP_OFFSET, ext)


async def running_info(
    instance: ClientInstance,
    group: str,
    client_id: str,
    broker_name: str,
    *,
    with_stacks: bool = False,
) -> bodies.ConsumerRunningInfo:
    """Return what a client reports of its consumer of *group*, asked through a broker.

    Raises:
        RequestFailedError: It is not connected there, or does not answer within 10 s.
        BrokerUnreachableError: No leader answers.
    """
    header = ConsumerClientHeader(group, client_id, with_stacks)
    answer = await instance.ask_leader(
        broker_name,
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        dict(header.encode()),
        topic=DEFAULT_TOPIC,
        timeout_s=RUNNING_INFO_S,
        attempt_timeout_s=RUNNING_INFO_S,
    )
    checked(answer, f"running info of {client_id} in {group}")
    return bodies.ConsumerRunningInfo.decode(answer.body)


def _once_each(clients: list[bodies.ClientConnection]) -> list[bodies.ClientConnection]:
    """Return one connection of each client: one per broker is the rule."""
    known = {client.client_id: client for client in reversed(clients)}
    return [known[client_id] for client_id in sorted(known)]


def _add_lags(lags: dict[str, int], all_stats: list[bodies.ConsumeStats]) -> None:
    for stats in all_stats:
        for queue, progress in stats.offset_table.items():
            behind = max(0, progress.broker_offset - progress.consumer_offset)
            lags[queue.topic] = lags.get(queue.topic, 0) + behind
