"""Reads and changes a cluster: topics, routes, offsets, messages and the state of groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dledger.client.admin.access import AccessAdmin
from dledger.client.admin.daemons import LEADER_WAIT_S, DaemonQueries, ask_each, checked
from dledger.client.admin.groups import GroupAdmin
from dledger.client.admin.messages import DeadLetters, MessageQueries
from dledger.client.core.broker_requests import sdk_queue
from dledger.client.core.errors import (
    ClientError,
    ConfirmationNeededError,
    NoNameServerError,
    NoRouteError,
    RequestFailedError,
)
from dledger.client.core.leaders import status_in
from dledger.client.core.route import DEFAULT_TOPIC, MessageQueue
from dledger.remoting.protocol.bodies import TopicConfig as TopicConfig
from dledger.remoting.protocol.bodies import (
    TopicConfigSerializeWrapper,
    TopicStatsTable,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import request
from dledger.remoting.protocol.headers import (
    CreateTopicHeader,
    DeleteTopicInNamesrvHeader,
    TopicHeader,
)
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD, Unreadable

ROUTE_POLL_S: Final = 0.02
CHANGE_TIMEOUT_S: Final = 20.0
"""A change of members waits for the one before it, for an answer of the new one, for its commit."""
STATUS_TIMEOUT_S: Final = 1.0
"""A node that does not answer within this time is shown as unreachable."""


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """How one broker group is.

    Attributes:
        broker_name: The group.
        healthy: One member leads and serves in the newest term, every member answers and has space
            on its disk.
        leader: Address of the leader, or None.
        term: Newest term any member reports; -1 when none answered.
        reasons: Why it is not healthy.
        members: The status each address reported, None for those that did not answer.
    """

    broker_name: str
    healthy: bool
    leader: str | None
    term: int
    reasons: tuple[str, ...]
    members: Mapping[str, Mapping[str, Any] | None]


def judge_group(broker_name: str, members: Mapping[str, Mapping[str, Any] | None]) -> GroupHealth:
    """Return how a group is from what its members say of themselves. Pure."""
    answered = {address: said for address, said in members.items() if said is not None}
    term = max((int(said.get("term", -1)) for said in answered.values()), default=-1)
    leaders = [
        address
        for address, said in answered.items()
        if said.get("serving") and int(said.get("term", -1)) == term
    ]
    reasons = [f"{address} does not answer" for address in members if address not in answered]
    reasons += [
        f"{at}: {said['disk_full']}" for at, said in answered.items() if said.get("disk_full")
    ]
    if not leaders:
        reasons.append("no leader")
    return GroupHealth(
        broker_name,
        not reasons,
        leaders[0] if leaders else None,
        term,
        tuple(reasons),
        dict(members),
    )


async def member_statuses(
    admin: Admin, addresses: Collection[str], *, timeout_s: float = STATUS_TIMEOUT_S
) -> dict[str, dict[str, Any] | None]:
    """Return what each broker reports of its part in its group; None: it does not answer."""

    async def ask(address: str) -> dict[str, Any] | None:
        try:
            return await admin.raft_status(address, timeout_s=timeout_s)
        except ClientError:
            return None

    return await ask_each(ask, addresses)


class Admin(DaemonQueries, GroupAdmin, MessageQueries, DeadLetters, AccessAdmin):
    """Administration through a client instance. Holds nothing open of its own."""

    # ------------------------------------------------------------------------------ cluster

    async def raft_status(
        self, address: str, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> dict[str, Any]:
        """Return what the broker at *address* reports about its part in its group.

        Raises:
            RequestFailedError: It refuses; a real RocketMQ broker answers code 3. Or what it
                answers cannot be read.
            BrokerUnreachableError: It cannot be asked.
        """
        answer = await self._instance.ask(address, RequestCode.RAFT_STATUS, timeout_s=timeout_s)
        return status_in(checked(answer, f"raft status of {address}"), address)

    async def change_members(
        self, broker_name: str, op: str, name: str = "", address: str = ""
    ) -> None:
        """Change the members of a broker group, or its leader; returns when it is committed.

        Args:
            broker_name: The group.
            op: ``add``, ``observe``, ``promote``, ``remove``, ``replace`` or ``transfer``.
            name: Id of the member; may be empty for ``transfer``: the one that has most.
            address: Its peer address ``host:port``, for ``add`` and ``replace``.
        Raises:
            RequestFailedError: The group refused; nothing was changed.
            BrokerUnreachableError: No leader answers.
        """
        await self._learn_leaders()
        answer = await self._instance.ask_leader(
            broker_name,
            RequestCode.RAFT_CHANGE,
            {"op": op, "name": name, "address": address},
            topic=DEFAULT_TOPIC,
            timeout_s=CHANGE_TIMEOUT_S,
            attempt_timeout_s=CHANGE_TIMEOUT_S,
        )
        checked(answer, f"{op} {name} in {broker_name}".replace("  ", " "))

    async def cluster_health(self) -> dict[str, GroupHealth]:
        """Return how each broker group is, by name; all members are asked at the same time.

        Raises:
            NoNameServerError: None answers.
        """
        table = (await self.cluster_info()).broker_addr_table
        statuses = await member_statuses(
            self, [address for group in table.values() for address in group.broker_addrs.values()]
        )
        return {
            name: judge_group(name, {a: statuses[a] for a in group.broker_addrs.values()})
            for name, group in sorted(table.items())
        }

    # ------------------------------------------------------------------------------ topics

    async def create_topic(
        self,
        topic: str,
        *,
        queue_nums: int = 8,
        read_queue_nums: int | None = None,
        perm: int = 6,
        order: bool = False,
        attributes: Mapping[str, str | None] | None = None,
        broker_names: tuple[str, ...] | None = None,
        gives_up_messages: bool = False,
    ) -> list[str]:
        """Create *topic*, or change it where it exists; returns when each leader has stored it.

        `topic_config` shows how it is where it exists.

        Args:
            topic: Name.
            queue_nums: Queues per broker group for writing, and for reading unless given.
            read_queue_nums: Queues for reading.
            perm: 4 read + 2 write + 1 inherit.
            order: Marks the topic as ordered.
            attributes: Set on the topic, e.g. ``message.type``; None as a value removes one.
            broker_names: Which groups; None: all the NameServer knows.
            gives_up_messages: A shorter ``retention.ms`` may take messages that are kept now, and
                fewer queues for reading may leave some that cannot be read.
        Returns:
            The names of the groups that have it now; the NameServer in use lists them, too,
            unless it took longer than `LEADER_WAIT_S`.
        Raises:
            RequestFailedError: A group refused; those before it in order have the topic.
            ConfirmationNeededError: Messages would go, and *gives_up_messages* is false.
            NoRouteError: No group has a leader, nor gets one within `LEADER_WAIT_S`.
        """
        if read_queue_nums is None:
            read_queue_nums = queue_nums
        if not gives_up_messages:
            leading = await self._leading()
            for name in leading if broker_names is None else broker_names:
                await self._keep_readable(topic, name, read_queue_nums)
        header = CreateTopicHeader(
            topic=topic,
            default_topic=DEFAULT_TOPIC,
            read_queue_nums=read_queue_nums,
            write_queue_nums=queue_nums,
            perm=perm,
            topic_filter_type="SINGLE_TAG",
            order=order,
            attributes=(
                ",".join(f"-{k}" if v is None else f"+{k}={v}" for k, v in attributes.items())
                if attributes
                else None
            ),
        )
        names = await self._change_on_every_leader(
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            dict(header.encode()) | ({CONFIRMED_FIELD: "true"} if gives_up_messages else {}),
            broker_names,
            f"create topic {topic}",
        )
        await self._wait_route(topic, set(names))
        return names

    async def update_topic(self, topic: str, **changes: Any) -> list[str]:
        """Change *topic*; RocketMQ has one request for both, so this is `create_topic`."""
        return await self.create_topic(topic, **changes)

    async def delete_topic(
        self, topic: str, *, broker_names: tuple[str, ...] | None = None
    ) -> list[str]:
        """Delete *topic* on every group and in every NameServer; its messages go with it.

        Args:
            broker_names: Which groups; None: all the NameServer knows.
        Returns:
            The names of the groups asked.
        Raises:
            RequestFailedError: A group refused; those before it no longer have the topic.
            NoNameServerError: The groups no longer have it, and some NameServers did not answer:
                they may list it until a broker registers there again.
        """
        names = await self._change_on_every_leader(
            RequestCode.DELETE_TOPIC_IN_BROKER,
            dict(TopicHeader(topic).encode()),
            broker_names,
            f"delete topic {topic}",
        )
        ext = dict(DeleteTopicInNamesrvHeader(topic).encode())
        silent: list[str] = []
        for address in self._instance.name_servers.list.addresses:
            try:
                answer = await self._instance.name_servers.ask_at(
                    address, request(RequestCode.DELETE_TOPIC_IN_NAMESRV, dict(ext))
                )
                if answer.code != ResponseCode.TOPIC_NOT_EXIST:
                    checked(answer, f"delete topic {topic} at {address}")
            except NoNameServerError as error:
                silent.append(str(error))
        self._instance.routes.table.forget(topic)
        if silent:
            raise NoNameServerError(
                f"{topic} is deleted in {', '.join(names)}, and may still be listed:"
                f" {'; '.join(silent)}"
            )
        return names

    async def topic_configs(self, broker_name: str) -> dict[str, TopicConfig]:
        """Return the topic table of one group, as its leader has it.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        await self._learn_leaders()
        answer = await self._ask_leader(broker_name, RequestCode.GET_ALL_TOPIC_CONFIG)
        return dict(TopicConfigSerializeWrapper.decode(answer.body).topic_config_table)

    async def topic_config(self, topic: str, broker_name: str) -> TopicConfig | None:
        """Return how one group has *topic*; None: it does not.

        Raises:
            RequestFailedError: It refuses.
            BrokerUnreachableError: Its leader does not answer.
        """
        # The latter from RocketMQ 4.
        none = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        code = RequestCode.GET_TOPIC_CONFIG
        answer = await self._ask_leader(broker_name, code, {"topic": topic}, also=none)
        return None if answer.code in none else TopicConfig.decode(answer.body)

    async def _keep_readable(self, topic: str, broker_name: str, read_queue_nums: int) -> None:
        """Refuse to take queues for reading away that hold messages."""
        config = await self.topic_config(topic, broker_name)
        if config is None or read_queue_nums >= config.read_queue_nums:
            return
        held = sum(
            end - first
            for queue, (first, end) in (await self.offsets(topic)).items()
            if queue.broker_name == broker_name and queue.queue_id >= read_queue_nums
        )
        if held:
            change = f"{topic}: {read_queue_nums} queues for reading (now {config.read_queue_nums})"
            lost = Unreadable(change=change, messages={topic: held})
            raise ConfirmationNeededError(
                f"{broker_name}: {lost}; nothing was changed",
                code=ResponseCode.NO_PERMISSION,
                remark=str(lost),
                given_up=lost,
            )

    async def change_topic(
        self,
        topic: str,
        broker_name: str,
        changes: Mapping[str, str],
        *,
        gives_up_messages: bool = False,
    ) -> None:
        """Change fields of *topic* in one broker group, and nothing else of it.

        Args:
            changes: Fields of the request that creates a topic, e.g. ``{"perm": "4"}``.
            gives_up_messages: As for `create_topic`.
        Raises:
            ConfirmationNeededError: Messages would go, and *gives_up_messages* is false.
            RequestFailedError: The group has no such topic, or refuses.
            BrokerUnreachableError: Its leader does not answer.
        """
        answer = await self._ask_leader(
            broker_name, RequestCode.GET_TOPIC_CONFIG, {"topic": topic}, topic=topic
        )
        config = TopicConfig.decode(answer.body)
        if "readQueueNums" in changes and not gives_up_messages:
            await self._keep_readable(topic, broker_name, int(changes["readQueueNums"]))
        header = CreateTopicHeader(
            topic=topic,
            default_topic=DEFAULT_TOPIC,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=config.perm,
            topic_filter_type=config.topic_filter_type,
            topic_sys_flag=config.topic_sys_flag,
            order=config.order,
        )
        confirmed = {CONFIRMED_FIELD: "true"} if gives_up_messages else {}
        await self._ask_leader(
            broker_name,
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            {**header.encode(), **changes, **confirmed},
            topic=topic,
        )

    async def set_topic_perm(
        self, topic: str, perm: int, *, broker_names: tuple[str, ...] | None = None
    ) -> list[str]:
        """Change what may be done with *topic*, and nothing else of it.

        Args:
            perm: 4 read, 2 write, 0 neither.
            broker_names: Only these broker groups; all that have the topic otherwise.
        Returns:
            The names of the groups that were asked.
        Raises:
            NoRouteError: The NameServers do not know the topic.
            RequestFailedError: A group has no such topic, or refused; those before it have the
                new permission.
            BrokerUnreachableError: A leader does not answer.
        """
        route = await self.topic_route(topic)
        names = sorted(route.addresses) if broker_names is None else list(broker_names)
        for name in names:
            await self.change_topic(topic, name, {"perm": str(perm)})
        return names

    # ------------------------------------------------------------------------------ messages

    async def offsets(self, topic: str) -> dict[MessageQueue, tuple[int, int]]:
        """Return first and one-past-last offset of each queue of *topic*.

        Raises:
            NoRouteError, NoNameServerError: No NameServer knows the topic, or none answers.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        route = await self.topic_route(topic)
        found: dict[MessageQueue, tuple[int, int]] = {}
        for name in sorted(route.addresses):
            answer = await self._ask_leader(
                name, RequestCode.GET_TOPIC_STATS_INFO, TopicHeader(topic).encode(), topic=topic
            )
            found |= {
                sdk_queue(queue): (bounds.min_offset, bounds.max_offset)
                for queue, bounds in TopicStatsTable.decode(answer.body).offset_table.items()
            }
        return dict(sorted(found.items()))

    # ------------------------------------------------------------------------------ inside

    async def _wait_route(self, topic: str, names: set[str]) -> None:
        """Ask until the route has all *names*: a send before that would guess the queues.

        The topic is stored by then; a NameServer that receives it late is no failure.
        """
        clock = self._instance.clock
        until = clock.monotonic() + LEADER_WAIT_S
        while clock.monotonic() < until:
            try:
                route = await self._instance.routes.refresh(topic)
            except (NoRouteError, NoNameServerError, RequestFailedError):
                pass
            else:
                if names <= set(route.addresses):
                    return
            await clock.sleep(ROUTE_POLL_S)
