"""Topics and subscription groups as the leader sees them: applied, plus what it has in flight.

A configuration change is decided before it is applied, and sends to a topic that is just being
made follow its entry in the log. So the leader checks here instead of at the tables alone.

A consumer group becomes known, with its retry topic, by the first pull of a topic that exists or by
a message that is sent back. A heartbeat alone makes nothing: it names any group its sender likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

import structlog

from dledger.broker_errors import ReplicationError, UnprocessableMessageError
from dledger.commitlog.errors import MQError
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.remoting.protocol.topic_names import (
    RETRY_PREFIX,
    TRACE_TOPIC,
    is_of_copies,
    is_reserved,
)
from dledger.services.limits import AccountShares, Made, check_limit
from dledger.settings.tables import BrokerTable
from dledger.state.accounts import AccountConfig
from dledger.state.state_record import SubscriptionGroupsChange, TopicsChange, state_batch
from dledger.state.table import StateChange
from dledger.state.topics import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    SubscriptionGroupConfig,
    TopicConfig,
)

ConfigT = TypeVar("ConfigT", TopicConfig, SubscriptionGroupConfig, AccountConfig)


@dataclass(slots=True, eq=False)
class _Pending(Generic[ConfigT]):
    config: ConfigT | None
    """None: the name is removed."""


class PendingConfigs(Generic[ConfigT]):
    """Changes that were proposed and are not applied yet; the newest of a name wins.

    Every `put` returns what to call when the proposal is settled: those before it stay.
    Only a leader has any: what is left is settled before it leads again.
    """

    def __init__(
        self,
        group: BrokerGroup,
        applied: Callable[[str], ConfigT | None],
        name_of: Callable[[ConfigT], str],
    ) -> None:
        self._group = group
        self._applied: Callable[[str], ConfigT | None] = applied
        self._name_of: Callable[[ConfigT], str] = name_of
        # Of each name in the order of the log; a name without one is not there.
        self._pending: dict[str, list[_Pending[ConfigT]]] = {}

    def __len__(self) -> int:
        """Return how many names have a change in flight."""
        return len(self._pending)

    def note(self, change: Any) -> list[OnDone]:
        """Note all that *change* puts and deletes."""
        puts = [self.put(self._name_of(config), config) for config in change.put]
        return puts + [self.put(name, None) for name in change.delete]

    def removes(self, name: str) -> bool:
        """Tell whether any change in flight removes *name*, though it may be made again after."""
        return any(each.config is None for each in self._changes(name))

    def resolve(self, name: str) -> ConfigT | None:
        """Return what *name* will be when everything in flight is applied."""
        changes = self._changes(name)
        return changes[-1].config if changes else self._applied(name)

    def _changes(self, name: str) -> Sequence[_Pending[ConfigT]]:
        """Return the changes of *name* in flight, in the order of the log."""
        if not self._pending or self._group.leadership is None:
            return ()
        return self._pending.get(name, ())

    def put(self, name: str, config: ConfigT | None) -> OnDone:
        """Note that *config* was proposed; None: the removal of *name*."""
        mine = _Pending(config)
        self._pending.setdefault(name, []).append(mine)

        def settled(_proposed: Proposed) -> None:
            changes = self._pending[name]
            changes.remove(mine)
            if not changes:
                del self._pending[name]

        return settled


@contextmanager
def noting(*noted: tuple[PendingConfigs[Any], StateChange | None]) -> Iterator[list[OnDone]]:
    """Note changes, if there are any, as in flight once the block has proposed them.

    Yields what the proposal is to call when it is settled; it is filled behind the block.
    """
    settled: list[OnDone] = []
    yield settled
    for pending, change in noted:
        if change is not None:
            settled += pending.note(change)


class TopicView:
    """Which topics there are and which may be made, for the processors of one broker."""

    def __init__(self, group: BrokerGroup, settings: BrokerTable) -> None:
        self._group = group
        self._settings = settings
        self.shares = AccountShares(group, settings)
        self.pending: PendingConfigs[TopicConfig] = PendingConfigs(
            group, self._applied_topic, attrgetter("topic")
        )
        self.pending_groups: PendingConfigs[SubscriptionGroupConfig] = PendingConfigs(
            group, self._applied_group, attrgetter("group_name")
        )
        self.when_known: Callable[[Callable[[], None]], None] = lambda then: then()
        """Calls its argument once the NameServers have the topics of now; without any, at once."""

    def _applied_topic(self, topic: str) -> TopicConfig | None:
        return self._group.state.topic_config(topic)

    def _applied_group(self, group: str) -> SubscriptionGroupConfig | None:
        return self._group.state.subscription_group(group)

    def config(self, topic: str) -> TopicConfig | None:
        """Return the topic, or None when it does not exist or is being removed."""
        return None if self.is_deleting(topic) else self.pending.resolve(topic)

    def real_queue(self, topic: str, queue_id: int, position: int) -> int:
        """Return the queue that a message goes to that waits at *position*, for *queue_id*.

        Raises UnprocessableMessageError: the topic, or the group that retries it, was deleted.
        """
        if self._group.state.was_deleted_since(position, topic):
            raise UnprocessableMessageError(f"{topic}, which it waited for, was deleted")
        config = self.config(topic)
        if config is None or queue_id < config.queue_nums:
            return queue_id
        return queue_id % max(1, config.read_queue_nums)

    def check_room(self, more: int = 1) -> None:
        """Let *more* topics be made.

        Raises TableFullError: there are as many as may be; nothing was stored.
        """
        present = len(self._group.state.topics) + len(self.pending)
        check_limit(self._settings, "max_topics", present, more)

    def check_room_for_groups(self, more: int = 1) -> None:
        """Let *more* consumer groups be made; as `check_room`."""
        present = len(self._group.state.subscription_groups) + len(self.pending_groups)
        check_limit(self._settings, "max_groups", present, more)

    def is_deleting(self, topic: str) -> bool:
        """Tell whether the removal of *topic* is in flight: nothing may be appended to it then.

        Its queue offsets begin at 0 again once the removal is applied, and an offset assigned
        before that would be wrong after it. So it is no matter if it is to be made again after.
        """
        return self.pending.removes(topic)

    def is_ending(self, topic: str) -> bool:
        """Tell whether the removal of *topic*, or of the group that it retries for, is in flight.

        What waits for it goes on waiting until that is decided.
        """
        group = topic.removeprefix(RETRY_PREFIX)
        return self.is_deleting(topic) or (group != topic and self.pending_groups.removes(group))

    def to_create(
        self, topic: str, default_topic: str, default_topic_queue_nums: int, account: str = ""
    ) -> TopicConfig | None:
        """Return the configuration a missing topic gets at its first send, or None for refusal.

        ``%RETRY%`` and ``%DLQ%`` topics get one queue. Others inherit from *default_topic* when
        that exists with the inherit permission; of reserved names only the trace topic is made.

        Raises TableFullError: there are as many topics as may be, or as the account may make.
        """
        if self.is_deleting(topic) or (is_reserved(topic) and topic != TRACE_TOPIC):
            return None
        if is_of_copies(topic):
            self.check_room()
            self.shares.make(Made.TOPIC, account, topic)
            return TopicConfig(topic, 1, 1, PERM_READ | PERM_WRITE)
        if not self._settings.auto_create_topic_enable:
            return None
        default = self.config(default_topic)
        if default is None or not default.inherited:
            return None
        self.check_room()
        self.shares.make(Made.TOPIC, account, topic)
        queues = max(1, min(default_topic_queue_nums, default.write_queue_nums))
        return TopicConfig(
            topic,
            queues,
            queues,
            default.perm & ~PERM_INHERIT,
            topic_filter_type=default.topic_filter_type,
        )

    def subscription_group(self, group: str) -> SubscriptionGroupConfig | None:
        """Return the consumer group, or None when it is unknown."""
        return self.pending_groups.resolve(group)

    def subscription_group_or_default(self, group: str) -> SubscriptionGroupConfig | None:
        """Return the consumer group; an unknown one as it would be made, None if it may not be."""
        known = self.subscription_group(group)
        if known is None and self._settings.auto_create_subscription_group:
            return SubscriptionGroupConfig(group)
        return known

    def group_to_create(self, group: str, account: str = "") -> SubscriptionGroupsChange | None:
        """Return the change that makes a consumer group known; None if it is, or may not be.

        Raises TableFullError: there are as many groups as may be, or as the account may make.
        """
        if (
            not self._settings.auto_create_subscription_group
            or self.subscription_group(group) is not None
        ):
            return None
        self.check_room_for_groups()
        self.shares.make(Made.GROUP, account, group)
        return SubscriptionGroupsChange(put=(SubscriptionGroupConfig(group),))

    def retry_topic_to_create(self, group: str) -> TopicsChange | None:
        """Return the change that makes a consumer group's retry topic, None if not needed.

        Raises TableFullError: there are as many topics as may be, and the group is not known
        either; of a known group messages can be retried in any case.
        """
        config = self.subscription_group_or_default(group)
        retry = RETRY_PREFIX + group
        if (
            config is None
            or config.retry_queue_nums <= 0
            or self.config(retry) is not None
            or self.is_deleting(retry)
        ):
            return None
        if self.subscription_group(group) is None:
            self.check_room()
        queues = config.retry_queue_nums
        return TopicsChange(put=(TopicConfig(retry, queues, queues, PERM_READ | PERM_WRITE),))


logger = structlog.get_logger(__name__)


class KnownGroups:
    """Proposes consumer groups and their retry topics where they are missing."""

    def __init__(self, group: BrokerGroup, topics: TopicView) -> None:
        self._group = group
        self._topics = topics

    def make_known(self, name: str, account: str = "") -> None:
        """Propose what is missing of a consumer group; do nothing where this node is no leader."""
        if self._group.leadership is None:
            return
        try:
            noted = (
                (self._topics.pending_groups, self._topics.group_to_create(name, account)),
                (self._topics.pending, self._topics.retry_topic_to_create(name)),
            )
            changes = [change for _, change in noted if change is not None]
            if changes:
                with noting(*noted) as settled:
                    self._group.propose(state_batch(*changes), lambda _: None, settled=settled)
        except ReplicationError as error:
            logger.info("consumer_group_not_made", group=name, reason=str(error))
        except MQError as error:
            logger.warning("consumer_group_not_made", group=name, reason=str(error))
