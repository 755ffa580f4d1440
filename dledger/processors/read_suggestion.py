"""Which member a consumer is told to read from next.

The leader serves who reads recent messages. Whoever is further behind than what is taken to be in
memory would make the leader read its disk: it is sent to a follower that is alive and has almost
everything, RocketMQ's `whichBrokerWhenConsumeSlowly` first. A follower keeps such a reader and
sends it back to the leader when it has caught up.

Spec: remoting fact sheet, section 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commitlog.entry import parse_header
from commitlog.errors import MQError
from dledger.broker_id import LEADER_ID, follower_id
from dledger.group_api import BrokerGroup
from dledger.state.subscription_group_config import SubscriptionGroupConfig
from remoting.seams import Clock

ALIVE_MS = 2_000
"""A follower that has confirmed nothing for so long is not recommended: longer than an election."""

CAUGHT_UP_BYTES = 16 << 20
"""How far a follower may be behind and still be recommended: more than is on its way under load,
less than a reader gets through in a second."""

LOOK_S = 1.0
"""How old what is known of the followers may be: slow readers pull hundreds of times a second."""


class ReadSuggestion:
    """Answers the `suggestWhichBrokerId` of pulls."""

    def __init__(
        self,
        group: BrokerGroup,
        *,
        own_id: int,
        recent_bytes: int,
        slave_read_enable: bool,
        clock: Clock,
    ) -> None:
        self._group = group
        self._own_id = own_id
        self._recent_bytes = recent_bytes
        self._slave_read_enable = slave_read_enable
        self._clock = clock
        self._looked_at: float | None = None
        self._followers: frozenset[int] = frozenset()

    def broker_id(self, config: SubscriptionGroupConfig, behind_bytes: int) -> int:
        """Return where a group's next pull should go.

        Args:
            config: The consumer group.
            behind_bytes: From the last message it was given to the end of the log.
        """
        if not self._slave_read_enable:
            return LEADER_ID
        slow = behind_bytes > self._recent_bytes
        wanted = config.which_broker_when_consume_slowly if slow else config.broker_id
        if self._group.leadership is None:
            return self._own_id if slow or wanted == self._own_id else LEADER_ID
        if wanted == LEADER_ID:
            return LEADER_ID
        followers = self._followers_now()
        if wanted in followers:
            return wanted
        return min(followers) if slow and followers else LEADER_ID

    def _followers_now(self) -> frozenset[int]:
        now = self._clock.monotonic()
        if self._looked_at is None or now - self._looked_at >= LOOK_S:
            self._looked_at = now
            status = self._group.status()
            self._followers = frozenset(
                follower_id(name)
                for name, row in status.get("peers", {}).items()
                if self._has_almost_everything(row)
            )
        return self._followers

    def _has_almost_everything(self, row: Mapping[str, Any]) -> bool:
        match_index, acked_ms_ago = row["match_index"], row["acked_ms_ago"]
        if not (row["connected"] and row["voter"] and match_index) or acked_ms_ago is None:
            return False
        if acked_ms_ago > ALIVE_MS:
            return False
        log = self._group.log
        try:
            has_up_to = parse_header(log.frame(match_index)).position
        except MQError:
            # Below what is kept here, or damaged: it is far behind, or nobody can say.
            return False
        return log.end_position - has_up_to <= CAUGHT_UP_BYTES
