"""Makes a consumer group known, with its retry topic, when it is first used in earnest.

A heartbeat alone makes nothing: it names whatever its sender likes. The first pull of a topic that
exists does, and so does sending a message back.
"""

from __future__ import annotations

import structlog

from commitlog.errors import MQError
from dledger.broker_errors import ReplicationError
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.services.pending_configs import TopicView
from dledger.state.state_record import StateChange, state_batch

logger = structlog.get_logger(__name__)


class KnownGroups:
    """Proposes consumer groups and their retry topics where they are missing."""

    def __init__(self, group: BrokerGroup, topics: TopicView) -> None:
        self._group = group
        self._topics = topics

    def make_known(self, name: str, account: str = "") -> None:
        """Propose what is missing of a consumer group; does nothing where this node is no leader.

        What cannot be proposed now is tried again with the next use; until then the group works
        with defaults.

        Args:
            account: The group counts as this one's; empty: as no account's.
        """
        if self._group.leadership is None:
            return
        changes: list[StateChange] = []
        notes: list[OnDone] = []
        try:
            group_change = self._topics.group_to_create(name, account)
            if group_change is not None:
                changes.append(group_change)
            topic_change = self._topics.retry_topic_to_create(name)
            if topic_change is not None:
                changes.append(topic_change)
            if not changes:
                return

            def done(proposed: Proposed) -> None:
                for answered in notes:
                    answered(proposed)

            self._group.propose(state_batch(*changes), done)
        except ReplicationError as error:
            logger.info("consumer_group_not_made", group=name, reason=str(error))
            return
        except MQError as error:
            logger.warning("consumer_group_not_made", group=name, reason=str(error))
            return
        if group_change is not None:
            notes.append(self._topics.pending_groups.put(name, group_change.put[0]))
        if topic_change is not None:
            retry = topic_change.put[0]
            notes.append(self._topics.pending.put(retry.topic, retry))
