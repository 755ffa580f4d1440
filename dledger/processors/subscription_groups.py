"""Administration of subscription groups: 200, 201, 207, 225 and 352.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from commitlog.errors import MQError
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.processors.names_check import check_group_name
from dledger.processors.refusal import RefusedError, failed_proposal, not_leader, refusal
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.state.names import STATE_TOPIC, SUBSCRIPTION_GROUPS_QUEUE
from dledger.state.state_record import SubscriptionGroupsChange, state_batch
from dledger.state.subscription_group_config import SubscriptionGroupConfig
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol import bodies
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import DeleteSubscriptionGroupHeader, GroupHeader
from remoting.protocol.outcome import Condition

MAX_GROUPS_PER_REQUEST: Final = 10_000
"""Groups of one request: they become one record of about 4 MB."""

MAX_RETRY_QUEUES: Final = 65_536
"""As many as a topic may have: they are the queues of the group's retry topic."""

_SAME_NAMES: Final = (
    "group_name",
    "consume_enable",
    "consume_from_min_enable",
    "consume_broadcast_enable",
    "consume_message_orderly",
    "retry_queue_nums",
    "retry_max_times",
    "broker_id",
    "which_broker_when_consume_slowly",
    "notify_consumer_ids_changed_enable",
    "group_sys_flag",
    "consume_timeout_minute",
)


def wire_group(config: SubscriptionGroupConfig) -> bodies.SubscriptionGroupConfig:
    """Return a group as remoting bodies show it."""
    policy = bodies.GroupRetryPolicy()
    if config.retry_policy is not None:
        policy = bodies.GroupRetryPolicy(**config.retry_policy)
    return bodies.SubscriptionGroupConfig(
        **{name: getattr(config, name) for name in _SAME_NAMES},
        attributes=dict(config.attributes),
        group_retry_policy=policy,
    )


def group_of(body: bodies.SubscriptionGroupConfig) -> SubscriptionGroupConfig:
    """Return a group as the state keeps it.

    Raises:
        RefusedError: A name or a number that cannot be.
    """
    check_group_name(body.group_name)
    if body.retry_queue_nums > MAX_RETRY_QUEUES:
        raise RefusedError(
            Condition.BAD_REQUEST,
            f"retryQueueNums {body.retry_queue_nums} is more than {MAX_RETRY_QUEUES}",
        )
    policy: dict[str, Any] | None = None
    if body.group_retry_policy != bodies.GroupRetryPolicy():
        given = body.group_retry_policy
        policy = {
            "type": given.type,
            "exponential_retry_policy": given.exponential_retry_policy,
            "customized_retry_policy": given.customized_retry_policy,
        }
    return SubscriptionGroupConfig(
        **{name: getattr(body, name) for name in _SAME_NAMES},
        attributes=dict(body.attributes),
        retry_policy=policy,
    )


class SubscriptionGroupsProcessor:
    """Answers administration of subscription groups; changes go through the log."""

    def __init__(self, group: BrokerGroup, topics: TopicView, offsets: OffsetCommits) -> None:
        self._group = group
        self._topics = topics
        self._offsets = offsets

    def update_and_create(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 200 when the group is as asked for."""
        return self._put(
            connection,
            command,
            lambda: [bodies.SubscriptionGroupConfig.decode(command.body)],
        )

    def update_and_create_list(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 225 when all the groups are as asked for; they change together."""
        return self._put(
            connection,
            command,
            lambda: bodies.SubscriptionGroupConfigList.decode(command.body).group_config_list,
        )

    def delete(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 207 when the group is gone, with its consumer offsets if that is asked for."""
        try:
            self._require_leader()
            header = DeleteSubscriptionGroupHeader.decode(command.ext)
            name = header.group_name
            forget = bool(header.clean_offset or header.remove_offset)
            state = self._group.state
            is_there = name in state.subscription_groups
            if not is_there and not forget and not len(self._topics.pending_groups):
                return response_to(command)
            change = SubscriptionGroupsChange(delete=(name,), forget=(name,) if forget else ())
            self._propose(
                connection, command, change, lambda: [self._topics.pending_groups.delete(name)]
            )
            if forget:
                self._offsets.drop_group(name)
        except MQError as error:
            return refusal(command, error)
        return DEFERRED

    def all_groups(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 201: every group, whatever part was asked for."""
        state = self._group.state
        configs = {**state.builtin_groups, **state.subscription_groups}
        wrapper = bodies.SubscriptionGroupWrapper(
            subscription_group_table={name: wire_group(c) for name, c in sorted(configs.items())},
            data_version=bodies.DataVersion(
                counter=state.max_offset(STATE_TOPIC, SUBSCRIPTION_GROUPS_QUEUE),
                state_version=self._group.term,
            ),
        )
        return response_to(command, 0, None, {"totalGroupNum": str(len(configs))}, wrapper.encode())

    def group_config(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 352: one group, 26 when there is none."""
        try:
            name = GroupHeader.decode(command.ext).group
            config = self._topics.subscription_group(name)
            if config is None:
                raise RefusedError(
                    Condition.GROUP_NOT_EXIST, f"subscription group [{name}] does not exist"
                )
        except MQError as error:
            return refusal(command, error)
        return response_to(command, 0, None, None, wire_group(config).encode())

    def _put(
        self,
        connection: Connection,
        command: RemotingCommand,
        asked_for: Callable[[], Sequence[bodies.SubscriptionGroupConfig]],
    ) -> Handled:
        try:
            self._require_leader()
            configs = {config.group_name: config for config in map(group_of, asked_for())}
            if len(configs) > MAX_GROUPS_PER_REQUEST:
                raise RefusedError(
                    Condition.BAD_REQUEST,
                    f"{len(configs)} groups in one request; at most {MAX_GROUPS_PER_REQUEST}",
                )
            pending = self._topics.pending_groups
            state = self._group.state
            news = tuple(
                config
                for name, config in configs.items()
                if len(pending) or state.subscription_groups.get(name) != config
            )
            if not news:
                return response_to(command)
            unknown = sum(pending.resolve(config.group_name) is None for config in news)
            self._topics.check_room_for_groups(unknown)
            self._propose(
                connection,
                command,
                SubscriptionGroupsChange(put=news),
                lambda: [pending.put(config.group_name, config) for config in news],
            )
        except MQError as error:
            return refusal(command, error)
        return DEFERRED

    def _require_leader(self) -> None:
        if self._group.leadership is None:
            raise not_leader(self._group)

    def _propose(
        self,
        connection: Connection,
        command: RemotingCommand,
        change: SubscriptionGroupsChange,
        notes: Callable[[], Iterable[OnDone]],
    ) -> None:
        answered: list[OnDone] = []

        def done(proposed: Proposed) -> None:
            for tell in answered:
                tell(proposed)
            if proposed.outcome == "stored":
                response = response_to(command)
            else:
                response = failed_proposal(command, proposed, self._group)
            connection.reply(command, response)

        self._group.propose(state_batch(change), done)
        answered.extend(notes())
